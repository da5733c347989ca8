"""The block pool and its prefix indexes: any history agrees with a plain second bookkeeping, and what that is worth is
shown on planted bugs, each of which is found."""

from __future__ import annotations

import struct
from array import array
from hashlib import sha256
from itertools import count

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from workbench.errors import WorkbenchError
from workbench.kv.blocks import BlockTables, NoRoom
from workbench.kv.ledger import Ledger
from workbench.kv.prefix import HashChain, RadixTree, prefix_index
from workbench.kv.soak import KINDS, LARGEST_BLOCK, LARGEST_POOL, VOCABULARY, Walk, make_pool, soak

INDEXES = ["hash", "radix"]


def pool_of(num_blocks: int, block_size: int = 2, kind: str | None = "hash") -> BlockTables:
    return make_pool(num_blocks, block_size, kind)


def compute(pool: BlockTables, name, token_ids, tenant: str = "", remember: bool = True) -> int:
    """What an engine does with a prompt; returns the tokens that were found."""
    hit = pool.open(name, token_ids, tenant)
    pool.grow({name: len(token_ids)})
    if remember:
        pool.remember(name, token_ids, tenant)
    return hit


def found(pool: BlockTables, token_ids, tenant: str = "") -> int:
    """Tokens of a beginning that are known, the last one too; nothing is held afterwards, or moved."""
    return len(pool.prefix.match(token_ids, tenant)) * pool.block_size


def picture(thing):
    """All there is inside, as plain data: equal pictures, equal states."""
    if isinstance(thing, dict):
        return [(key, picture(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple):
        return [picture(value) for value in thing]
    if hasattr(thing, "__dict__"):
        return picture({key: value for key, value in vars(thing).items() if key != "parent"})
    return thing


# -- any history -----------------------------------------------------------------------------------------------

WHICH = st.integers(0, 7)
TENANT = st.sampled_from(["a", "b"])
KNOWN = st.booleans()
TEXT = st.lists(st.integers(0, VOCABULARY - 1), max_size=10)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5)


def some_live(machine) -> bool:
    return bool(machine.ledger.tables)


class AnyHistory(RuleBasedStateMachine):
    """Every call goes to a pool and to the ledger, which compares everything after each."""

    def __init__(self, kind: str | None, make=make_pool) -> None:
        super().__init__()
        self.kind, self.make, self.names = kind, make, count()
        self.ledger = Ledger(make(4, 2, kind), kind)
        self.waiting: list[tuple[int, list[int], str]] = []

    @initialize(num_blocks=st.integers(1, LARGEST_POOL), block_size=st.integers(1, LARGEST_BLOCK))
    def begin(self, num_blocks, block_size):
        self.ledger = Ledger(self.make(num_blocks, block_size, self.kind), self.kind)

    def one(self, which: int, names=None) -> int:
        names = list(self.ledger.tables if names is None else names)
        return names[which % len(names)]

    def admit(self, name: int, text: list[int], tenant: str) -> bool:
        hit = self.ledger.open(name, text, tenant)
        if not self.ledger.write({name: text[hit:]}):
            self.ledger.release(name)
        return name in self.ledger.tables

    def write(self, more: dict[int, list[int]], known: bool) -> bool:
        """One step of an engine. known: what it computed is remembered at once."""
        if not self.ledger.write(more):
            return False
        for name in more if known else ():
            self.ledger.remember(name, len(self.ledger.marks[name]))
        return True

    def add_all(self, copies: int, text: list[int], tenant: str, known: bool) -> None:
        """The same prompt so many times at once: none of them finds what the others compute."""
        names = [next(self.names) for _ in range(copies)]
        for name in [name for name in names if self.admit(name, text, tenant)]:
            if known:
                self.ledger.remember(name, len(text))

    @rule(copies=st.integers(1, 2), text=TEXT, tenant=TENANT, known=KNOWN)
    def add(self, copies, text, tenant, known):
        self.add_all(copies, text, tenant, known)

    @precondition(some_live)
    @rule(copies=st.integers(1, 2), which=WHICH, cut=st.integers(0, 3), text=TEXT, known=KNOWN)
    def share(self, copies, which, cut, text, known):
        name = self.one(which)
        begin = self.ledger.text(name)
        self.add_all(copies, begin[: len(begin) - cut] + text, self.ledger.tenants[name], known)

    @precondition(some_live)
    @rule(which=WHICH, more=TOKENS, known=KNOWN)
    def append(self, which, more, known):
        self.write({self.one(which): more}, known)

    @precondition(some_live)
    @rule(more=st.lists(TOKENS, min_size=2, max_size=4), known=KNOWN)
    def append_to_several(self, more, known):
        self.write(dict(zip(list(self.ledger.tables), more)), known)

    @precondition(some_live)
    @rule(which=WHICH, cut=st.integers(1, 5), more=TOKENS, known=KNOWN)
    def rewrite(self, which, cut, more, known):
        name = self.one(which)
        self.ledger.truncate(name, max(0, len(self.ledger.marks[name]) - cut))
        self.write({name: more}, known)

    @precondition(some_live)
    @rule(which=WHICH)
    def fork(self, which):
        self.ledger.fork(self.one(which), next(self.names))

    @precondition(some_live)
    @rule(which=WHICH, length=st.integers(0, 63))
    def truncate(self, which, length):
        name = self.one(which)
        self.ledger.truncate(name, length % (len(self.ledger.marks[name]) + 1))

    @precondition(some_live)
    @rule(which=WHICH, length=st.integers(0, 99))
    def remember(self, which, length):
        self.ledger.remember(self.one(which), length)

    @precondition(some_live)
    @rule(which=WHICH, length=st.integers(0, 99))
    def forget(self, which, length):
        self.ledger.forget_prefix(self.one(which), length)

    @precondition(some_live)
    @rule(which=WHICH)
    def preempt(self, which):
        name = self.one(which)
        self.waiting.append((name, self.ledger.text(name), self.ledger.tenants[name]))
        self.ledger.release(name)

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self):
        if self.admit(*self.waiting[0]):
            del self.waiting[0]

    @precondition(some_live)
    @rule(which=WHICH)
    def swap_out(self, which):
        self.ledger.swap_out(self.one(which))

    @precondition(lambda self: self.ledger.saved)
    @rule(which=WHICH)
    def swap_in(self, which):
        self.ledger.swap_in(self.one(which, self.ledger.saved))

    @precondition(lambda self: self.ledger.tables or self.ledger.saved)
    @rule(which=WHICH)
    def abort(self, which):
        self.ledger.release(self.one(which, [*self.ledger.tables, *self.ledger.saved]))

    @precondition(some_live)
    @rule(which=WHICH)
    def finish(self, which):
        name = self.one(which)
        self.ledger.remember(name, len(self.ledger.marks[name]))
        self.ledger.release(name)

    @precondition(lambda self: self.ledger.idle)
    @rule(blocks=st.integers(1, LARGEST_POOL))
    def evict(self, blocks):
        name, pool = next(self.names), self.ledger.pool
        self.ledger.write({name: [0] * (min(blocks, pool.num_available) * pool.block_size)})
        self.ledger.release(name)

    def teardown(self):
        for name in [*self.ledger.tables, *self.ledger.saved]:
            self.ledger.release(name)
        assert self.ledger.pool.num_available == self.ledger.pool.num_blocks


ANY = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # on a busy machine
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "examples"), [("hash", 80), ("radix", 80), (None, 30)])
def test_any_history_agrees_with_the_ledger(kind, examples):
    run_state_machine_as_test(lambda: AnyHistory(kind), settings=settings(ANY, max_examples=examples))


RUNS, STEPS = 40, 60


def test_random_walks_do_everything_and_agree_with_the_ledger():
    soaked = soak(RUNS, STEPS)
    assert soaked.failure is None, str(soaked.failure)
    assert {counts["steps"] for counts in soaked.counts.values()} == {RUNS * STEPS}
    happened = "admit write fork truncate remember forget finish abort preempt resume swap_out swap_in flood refuse"
    for kind, counts in soaked.counts.items():
        assert all(counts[one] >= 20 for one in (*happened.split(), "copies", "no_room")), (kind, counts)
        assert (counts["hits"] > 100 and counts["evictions"] > 50) == (kind is not None), (kind, counts)


# -- planted bugs --------------------------------------------------------------------------------------------------


class ForgetsNothing(BlockTables):
    def forget_prefix(self, token_ids, tenant=""):
        return None


class ForgetsTheFirstBlock(BlockTables):
    """A chain would find what follows again, under a first block that is computed anew."""

    def forget_prefix(self, token_ids, tenant=""):
        super().forget_prefix(token_ids[: self.block_size], tenant)


class ForgetsItsOwnBlocks(BlockTables):
    """And leaves those of others, which are the same text and may be the ones that are found."""

    def forget_prefix(self, token_ids, tenant=""):
        known = self.prefix.match(token_ids, tenant) if self.prefix else []
        for table in self._tables.values():
            if known[: len(table)] == table[: len(known)] and len(table) > len(known):
                return super().forget_prefix(token_ids, tenant)
        return None


class ForgottenIsStillIdle(BlockTables):
    def forget_prefix(self, token_ids, tenant=""):
        for block in () if self.prefix is None else self.prefix.match(token_ids, tenant):
            self.prefix.forget(block)


class SharedIsWritten(BlockTables):
    def grow(self, lengths):
        for source, target in super().grow(lengths):
            table = next(t for t in self._tables.values() if target in t)
            table[table.index(target)] = source
            self._hold(source)
            self._drop(target)
        return []


class CopyIsNotSaid(BlockTables):
    def grow(self, lengths):
        super().grow(lengths)
        return []


class HalfGrown(BlockTables):
    """Looks for room for one after the other, not for all of them together."""

    def grow(self, lengths):
        return [copy for name, length in lengths.items() for copy in super(HalfGrown, self).grow({name: length})]


class ForkLeaks(BlockTables):
    def fork(self, sequence, new_sequence):
        super().fork(sequence, new_sequence)
        for block in self._tables[sequence][:1]:
            self.references[block] += 1


class ForkHoldsNothing(BlockTables):
    def fork(self, sequence, new_sequence):
        super().fork(sequence, new_sequence)
        for block in self._tables[sequence]:
            self._drop(block)


class TruncateKeepsOneTooFew(BlockTables):
    def truncate(self, sequence, length):
        super().truncate(sequence, length)
        if length % self.block_size:
            self._drop(self._tables[sequence].pop())


class TruncateKeepsOneTooMany(BlockTables):
    def truncate(self, sequence, length):
        keep, table = self.blocks_for(length), self._tables.get(sequence, [])
        extra = table[keep : keep + 1] if length else []
        for block in extra:
            self._hold(block)
        super().truncate(sequence, length)
        table += extra


class GivesBackTheFirstFirst(BlockTables):
    def truncate(self, sequence, length):
        if sequence in self._tables:
            keep, table = self.blocks_for(length) if isinstance(length, int) else 0, self._tables[sequence]
            table[keep:] = table[keep:][::-1]
        super().truncate(sequence, length)


class FreedTwice(BlockTables):
    def release(self, sequence):
        table = list(self._tables.get(sequence, ()))
        super().release(sequence)
        self._free += [block for block in table[:1] if block in self._free]


class SwappedIsNeverForgotten(BlockTables):
    def release(self, sequence):
        length = self._swapped.get(sequence)
        super().release(sequence)
        if length:
            self._swapped[sequence] = length


class SwapsInBackwards(BlockTables):
    def swap_in(self, sequence):
        return super().swap_in(sequence)[::-1]


class OverwrittenIsFound(BlockTables):
    def _forget(self, block):
        if not self.references[block]:
            super()._forget(block)


class EvictedIsFound(BlockTables):
    def _forget(self, block):
        if self.references[block]:
            super()._forget(block)


class HeldIsEvicted(BlockTables):
    def _hold(self, block):
        self.references[block] += 1


class NewestIsEvicted(BlockTables):
    def _take(self):
        if self._idle:
            self._idle.move_to_end(next(reversed(self._idle)), last=False)
        return super()._take()


class IdleBeforeFree(BlockTables):
    def _take(self):
        free, self._free = self._free, [] if self._idle else self._free
        try:
            return super()._take()
        finally:
            self._free = self._free + free if self._free is not free else free


class HalfFullIsRemembered(BlockTables):
    def remember(self, sequence, token_ids, tenant=""):
        super().remember(sequence, token_ids, tenant)
        full = self.blocks_for(min(self._lengths[sequence], len(token_ids)))
        padded = [*token_ids, *[0] * self.block_size][: full * self.block_size]
        if self.prefix is not None and full:
            self.prefix.insert(padded, self._tables[sequence][:full], tenant)


class LastTokenIsFound(BlockTables):
    def open(self, sequence, token_ids=(), tenant=""):
        hit = super().open(sequence, [*token_ids, 0], tenant)
        self.prompt_tokens -= 1
        return hit


class AnyTenant:
    def match(self, token_ids, tenant):
        return super().match(token_ids, "")

    def insert(self, token_ids, blocks, tenant):
        super().insert(token_ids, blocks, "")


class FindsNothing:
    def match(self, token_ids, tenant):
        return []


class FindsOneTooFew:
    def match(self, token_ids, tenant):
        return super().match(token_ids, tenant)[:2]


class KeyWithoutParent(HashChain):
    def keys_of(self, token_ids, tenant, key=None):
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            own = array("q", token_ids[start : start + self.block_size]).tobytes()
            yield sha256(tenant.encode() + own).digest()


class TheDuplicateTakesOver(HashChain):
    def insert(self, token_ids, blocks, tenant):
        for key, block in zip(self.keys_of(token_ids, tenant), blocks):
            self._blocks[key], self._keys[block] = block, key


class OnlyWhatFollowsIsNew(HashChain):
    """Takes for granted that all before a known block is known: its known twin may have been evicted since."""

    def insert(self, token_ids, blocks, tenant):
        held = [at for at, block in enumerate(blocks) if block in self._keys]
        for at, key in enumerate(self.keys_of(token_ids, tenant)):
            if at > max(held, default=-1) and key not in self._blocks:
                self._blocks[key], self._keys[blocks[at]] = blocks[at], key


class EdgeIsFoundWhole(RadixTree):
    """A text that leaves an edge in its middle is taken to go on to its end."""

    def match(self, token_ids, tenant):
        nodes = self._walk(self._chunks(token_ids), self._roots.get(tenant))
        return [block for node, _ in nodes for block in node.blocks][: len(token_ids) // self.block_size]


class SplitKeepsOldHomes(RadixTree):
    def _split(self, node, count):
        homes = dict(self._home)
        super()._split(node, count)
        self._home = homes


class FollowersAreLeftBehind(RadixTree):
    """Forgets what hangs on a block, and does not say so: those blocks wait to be evicted, known to nobody."""

    def forget(self, block):
        super().forget(block)
        return []


FORGETTING = (ForgetsNothing, ForgetsItsOwnBlocks, ForgottenIsStillIdle)
POOLS = (
    SharedIsWritten,
    CopyIsNotSaid,
    HalfGrown,
    ForkLeaks,
    ForkHoldsNothing,
    TruncateKeepsOneTooFew,
    TruncateKeepsOneTooMany,
    GivesBackTheFirstFirst,
    FreedTwice,
    SwappedIsNeverForgotten,
    SwapsInBackwards,
    OverwrittenIsFound,
    EvictedIsFound,
    HeldIsEvicted,
    NewestIsEvicted,
    IdleBeforeFree,
    HalfFullIsRemembered,
    LastTokenIsFound,
)
PLANTED = [
    *(pytest.param(bug, kind, id=f"{bug.__name__}-{kind}") for bug in FORGETTING for kind in ("hash", "radix")),
    pytest.param(ForgetsTheFirstBlock, "hash", id="ForgetsTheFirstBlock"),
    *(pytest.param(bug, kind, id=f"{bug.__name__}-{kind}") for bug in POOLS for kind in INDEXES),
    *(
        pytest.param(bug, kind, id=f"{bug.__name__}-{kind}")
        for bug in (AnyTenant, FindsNothing, FindsOneTooFew)
        for kind in INDEXES
    ),
    *(
        pytest.param(bug, "hash", id=bug.__name__)
        for bug in (KeyWithoutParent, TheDuplicateTakesOver, OnlyWhatFollowsIsNew)
    ),
    *(
        pytest.param(bug, "radix", id=bug.__name__)
        for bug in (EdgeIsFoundWhole, SplitKeepsOldHomes, FollowersAreLeftBehind)
    ),
]


def planted(bug: type):
    """How a pool with this bug is made."""

    def make(num_blocks, block_size, kind):
        if issubclass(bug, BlockTables):
            return bug(num_blocks, block_size, prefix_index(kind, block_size))
        if issubclass(bug, HashChain | RadixTree):
            return BlockTables(num_blocks, block_size, bug(block_size))
        base = {"hash": HashChain, "radix": RadixTree}[kind]
        return BlockTables(num_blocks, block_size, type(bug.__name__, (bug, base), {})(block_size))

    return make


@pytest.mark.parametrize(("bug", "kind"), PLANTED)
def test_a_planted_bug_is_found_within_as_many_walks_as_the_right_pool_survives(bug, kind):
    failure = soak(RUNS, STEPS, kinds=(kind,), make=planted(bug)).failure
    assert failure is not None
    ledger = Ledger(planted(bug)(failure.num_blocks, failure.block_size, kind), kind)
    *before, (method, arguments) = failure.calls
    for earlier, given in before:
        getattr(ledger, earlier)(*given)
    with pytest.raises(Exception) as error:
        getattr(ledger, method)(*arguments)
    assert failure.message == f"{type(error.value).__name__}: {error.value}"
    right = Walk(failure.seed, kind)
    assert right.run(failure.step) is None


@pytest.mark.parametrize("bug", [SharedIsWritten, OverwrittenIsFound, GivesBackTheFirstFirst])
def test_the_state_machine_finds_planted_bugs_too(bug):
    quick = settings(ANY, phases=[Phase.generate], max_examples=100)
    with pytest.raises(AssertionError, match=r"\w"):
        run_state_machine_as_test(lambda: AnyHistory("hash", planted(bug)), settings=quick)


# -- sharing and writing -------------------------------------------------------------------------------------------


def test_a_shared_block_is_never_written_the_writer_gets_a_copy_and_the_last_holder_keeps_it():
    pool = pool_of(6)
    compute(pool, "a", [0, 1, 2])
    pool.fork("a", "b")
    pool.fork("a", "c")
    first, half = pool.tables["a"]
    assert (pool.references[first], pool.references[half]) == (3, 3) and pool.copies == 0
    ((source, copy),) = pool.grow({"b": 4})
    assert source == half and pool.tables["b"] == [first, copy] and pool.tables["a"] == [first, half]
    assert len(pool.grow({"c": 4})) == 1 and pool.grow({"a": 4}) == []  # a is alone by now
    assert pool.copies == 2 and pool.references[first] == 3


def test_where_all_holders_write_at_once_one_copy_fewer_is_made_than_there_are_holders():
    pool = pool_of(4)
    compute(pool, "a", [0, 1, 2])
    pool.fork("a", "b")
    pool.fork("a", "c")
    assert pool.num_available == 2 == pool.missing({"a": 4, "b": 4, "c": 4})
    assert len(pool.grow({"a": 4, "b": 4, "c": 4})) == 2 and pool.num_available == 0
    assert len({pool.tables[name][1] for name in "abc"}) == 3


def test_a_full_shared_block_needs_no_copy_because_nobody_writes_it_again():
    pool = pool_of(6)
    compute(pool, "a", [0, 1, 2, 2])
    pool.fork("a", "b")
    assert pool.grow({"a": 5, "b": 5}) == [] and pool.tables["a"][:2] == pool.tables["b"][:2]


@pytest.mark.parametrize("kind", INDEXES)
def test_a_known_block_that_is_cut_and_written_again_is_not_found_any_more(kind):
    pool = pool_of(4, 2, kind)
    compute(pool, "a", [0, 1, 2, 2])
    pool.truncate("a", 3)
    assert found(pool, [0, 1, 2, 2]) == 4  # cut, but nothing else is in it yet
    pool.grow({"a": 4})
    assert found(pool, [0, 1, 2, 2]) == 2


@pytest.mark.parametrize("kind", INDEXES)
def test_a_block_that_is_not_full_is_not_known(kind):
    pool = pool_of(4, 2, kind)
    compute(pool, "a", [0, 1, 2])
    assert len(pool.prefix) == 1 and found(pool, [0, 1, 2, 0]) == 2
    pool.remember("a", [0])
    assert len(pool.prefix) == 1


def test_who_comes_back_from_the_host_has_blocks_of_his_own_in_the_order_of_his_text():
    pool = pool_of(6)
    compute(pool, "a", [0, 1, 2, 0, 1])
    pool.fork("a", "b")
    assert pool.swap_out("a") == pool.tables["b"] and pool.swapped == {"a": 5}
    back = pool.swap_in("a")
    assert back == pool.tables["a"] and set(back).isdisjoint(pool.tables["b"]) and pool.lengths["a"] == 5


def test_who_is_swapped_out_can_be_ended_and_his_name_is_free():
    pool = pool_of(4)
    compute(pool, "a", [0, 1, 2])
    pool.swap_out("a")
    pool.release("a")
    assert pool.swapped == {} and pool.num_available == 4 and compute(pool, "a", [0, 1, 2]) == 2


# -- whole or not at all -----------------------------------------------------------------------------------------


def busy_pool(kind: str | None) -> BlockTables:
    """Live, shared, half full, idle and swapped out: something of everything. One block of eight is free."""
    pool = pool_of(8, 2, kind)
    compute(pool, "old", [2, 2, 1, 1])
    pool.release("old")
    compute(pool, "a", [0, 1, 2])
    pool.fork("a", "b")
    compute(pool, "c", [0, 1, 1, 0, 1])
    compute(pool, "gone", [1, 1, 1])
    pool.swap_out("gone")
    pool.check()
    return pool


WRONG = {
    "a name that is there": ("open", "a", [0, 1]),
    "a name that is swapped out": ("open", "gone", [0, 1]),
    "growing shorter": ("grow", {"c": 6, "a": 2}),
    "growing to a length that is no number": ("grow", {"c": 6, "a": "4"}),
    "growing to True": ("grow", {"new": True}),
    "growing to less than nothing": ("grow", {"new": -1}),
    "growing what is swapped out": ("grow", {"c": 6, "gone": 5}),
    "more than there is": ("grow", {"a": 99}),
    "more together than there is": ("grow", {"c": 6, "b": 4, "a": 13}),
    "cutting to more than there is": ("truncate", "a", 4),
    "cutting to less than nothing": ("truncate", "a", -1),
    "cutting to half a token": ("truncate", "a", 1.5),
    "cutting nobody": ("truncate", "nobody", 0),
    "cutting what is swapped out": ("truncate", "gone", 0),
    "forking nobody": ("fork", "nobody", "new"),
    "forking to a name that is there": ("fork", "a", "c"),
    "forking to a name that is swapped out": ("fork", "a", "gone"),
    "forking to itself": ("fork", "a", "a"),
    "remembering nobody": ("remember", "nobody", [0, 1]),
    "remembering what is swapped out": ("remember", "gone", [1, 1]),
    "releasing nobody": ("release", "nobody"),
    "swapping out nobody": ("swap_out", "nobody"),
    "swapping out twice": ("swap_out", "gone"),
    "swapping in what is here": ("swap_in", "a"),
    "swapping in nobody": ("swap_in", "nobody"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_refused_call_leaves_everything_as_it_was(wrong, kind):
    pool = busy_pool(kind)
    before = picture(pool)
    method, *arguments = WRONG[wrong]
    with pytest.raises(WorkbenchError):
        getattr(pool, method)(*arguments)
    assert picture(pool) == before


@pytest.mark.parametrize("kind", KINDS)
def test_no_room_to_come_back_leaves_everything_as_it_was_and_says_the_numbers(kind):
    pool = busy_pool(kind)
    pool.grow({"full": (pool.num_available - 1) * 2})
    before = picture(pool)
    with pytest.raises(NoRoom, match="needs 2 more blocks, and 1 is free or idle") as refusal:
        pool.swap_in("gone")
    assert (refusal.value.needed, refusal.value.available) == (2, 1) and picture(pool) == before
    pool.release("full")
    assert len(pool.swap_in("gone")) == 2 and pool.lengths["gone"] == 3


def test_two_that_fit_alone_and_not_together_are_refused_together():
    pool = pool_of(3)
    before = picture(pool)
    with pytest.raises(NoRoom):
        pool.grow({"a": 4, "b": 4})
    assert picture(pool) == before
    pool.grow({"a": 4})
    assert pool.num_available == 1


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 1), (1, 0), (-1, 2), (2.0, 2), (True, 2), (2, "2")])
def test_a_pool_that_makes_no_sense_is_refused(num_blocks, block_size):
    with pytest.raises(WorkbenchError, match="must be a whole number of at least 1"):
        BlockTables(num_blocks, block_size)


# -- finding and evicting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INDEXES)
@pytest.mark.parametrize(("length", "hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_whole_blocks_are_found_and_never_the_last_token_of_a_prompt(kind, length, hit):
    pool, text = pool_of(8, 4, kind), [0, 1, 2, 0, 1, 1, 2, 2, 0]
    compute(pool, "a", text)
    assert pool.open("b", text[:length]) == hit
    assert pool.tables["b"] == pool.tables["a"][: hit // 4]
    assert (pool.prompt_tokens, pool.hit_tokens) == (9 + length, hit)


@pytest.mark.parametrize("kind", INDEXES)
def test_the_one_longest_idle_is_evicted_first_and_to_be_found_again_is_to_be_used(kind):
    pool, texts = pool_of(3, 2, kind), {"a": [0, 0], "b": [1, 1], "c": [2, 2]}
    for name, text in texts.items():
        compute(pool, name, text)
    for name in texts:
        pool.release(name)
    pool.open("again", [0, 0, 1])
    pool.release("again")
    left = []
    for taken in range(1, 4):
        pool.grow({"new": 2 * taken})
        left.append([name for name, text in texts.items() if found(pool, text)])
    assert left == [["a", "c"], ["a"], []] and pool.evictions == 3


@pytest.mark.parametrize("kind", INDEXES)
def test_of_one_text_the_end_is_evicted_before_the_beginning(kind):
    pool, text = pool_of(3, 2, kind), [0, 1, 2, 0, 1, 2]
    compute(pool, "a", text)
    pool.release("a")
    left = []
    for taken in range(1, 4):
        pool.grow({"new": 2 * taken})
        left.append(found(pool, text))
    assert left == [4, 2, 0]


@pytest.mark.parametrize("kind", INDEXES)
def test_free_blocks_are_taken_before_anything_is_evicted_and_what_is_held_never_is(kind):
    pool = pool_of(4, 2, kind)
    compute(pool, "held", [1, 1])
    compute(pool, "a", [0, 0])
    pool.release("a")
    pool.grow({"new": 4})
    assert (pool.num_free, pool.num_available, pool.evictions) == (0, 1, 0) and found(pool, [0, 0]) == 2
    pool.grow({"new": 6})
    assert pool.evictions == 1 and found(pool, [0, 0]) == 0 and found(pool, [1, 1]) == 2
    with pytest.raises(NoRoom):
        pool.grow({"new": 8})


@pytest.mark.parametrize("kind", INDEXES)
def test_a_tenant_finds_nothing_of_anothers(kind):
    pool, text = pool_of(12, 2, kind), [0, 1, 2, 0, 1]
    assert compute(pool, "a", text, "ann") == 0
    assert compute(pool, "b", text, "bob") == 0 and compute(pool, "none", text) == 0
    assert compute(pool, "a2", text, "ann") == 4
    assert set(pool.tables["a"][:2]).isdisjoint(pool.tables["b"]) and pool.tables["a2"][:2] == pool.tables["a"][:2]


@pytest.mark.parametrize("kind", INDEXES)
def test_of_a_beginning_that_was_computed_twice_one_is_known_and_the_other_is_free_when_it_is_released(kind):
    pool, text = pool_of(6, 2, kind), [0, 1, 2, 2]
    compute(pool, "a", text, remember=False)
    compute(pool, "b", text, remember=False)  # at the same time, so nothing was found
    pool.remember("a", text)
    pool.remember("b", text)
    assert pool.prefix.match(text, "") == pool.tables["a"] and len(pool.prefix) == 2
    pool.release("b")
    assert pool.num_free == 4
    pool.release("a")
    assert pool.num_free == 4 and pool.num_available == 6 and found(pool, text) == 4


@pytest.mark.parametrize("kind", INDEXES)
def test_a_beginning_that_is_held_is_known_again_when_the_block_that_was_known_for_it_is_gone(kind):
    pool = pool_of(3, 1, kind)
    compute(pool, "a", [0], remember=False)
    compute(pool, "b", [0])  # at the same time; this one is known
    pool.grow({"a": 2})
    pool.remember("a", [0, 1])
    pool.release("b")
    pool.grow({"new": 1})  # evicts the beginning that was known
    assert found(pool, [0, 1]) == 0
    pool.remember("a", [0, 1])
    assert pool.prefix.match([0, 1], "") == pool.tables["a"]


# -- the two indexes ---------------------------------------------------------------------------------------------


class TellsLosses(RadixTree):
    """A radix tree that says whether blocks were ever forgotten because of another."""

    lost = False

    def forget(self, block):
        followers = super().forget(block)
        self.lost = self.lost or bool(followers)
        return followers


def test_both_indexes_answer_the_same_until_a_block_is_forgotten_that_others_follow():
    compared = apart = 0
    for seed in range(RUNS):
        chain = Walk(seed, "hash")
        tree = Walk(seed, "radix", lambda n, size, kind: BlockTables(n, size, TellsLosses(size)))
        for _ in range(STEPS):
            chain.step()
            tree.step()
            if tree.ledger.pool.prefix.lost:
                apart += 1
                break
            compared += 1
            assert tree.calls == chain.calls
            one, other = chain.ledger.pool, tree.ledger.pool
            for name in ("references", "_tables", "_lengths", "_free", "hit_tokens", "evictions", "copies"):
                assert getattr(one, name) == getattr(other, name), name
            assert list(one._idle) == list(other._idle)
    assert compared > RUNS * STEPS / 2 and apart > 0


@pytest.mark.parametrize(("kind", "free", "found_again"), [("hash", 0, 4), ("radix", 1, 2)])
def test_when_a_beginning_goes_the_tree_forgets_what_follows_and_the_chain_keeps_it_for_later(kind, free, found_again):
    pool = pool_of(4, 2, kind)
    # the beginning is computed twice, and the end of b outlives it
    texts = {"a": [0, 0, 1, 1], "b": [0, 0, 2, 2]}
    for name, text in texts.items():
        compute(pool, name, text, remember=False)
    for name, text in texts.items():
        pool.remember(name, text)
    for name in texts:
        pool.release(name)
    pool.grow({"new": 6})
    assert found(pool, texts["b"]) == 0 and (pool.num_free, pool.num_available) == (free, 1)
    pool.release("new")
    compute(pool, "c", [0, 0])
    assert pool.open("d", [*texts["b"], 0]) == found_again


def test_the_key_of_a_block_is_a_sha_256_chain_over_the_tenant_and_all_before_it():
    index, text = HashChain(2), [7, 8, 9, 10, 11, 12]
    keys = list(index.keys_of(text, "ann"))
    by_hand = sha256(b"ann").digest()
    for at, key in zip(range(0, 6, 2), keys, strict=True):
        by_hand = sha256(by_hand + struct.pack("=2q", *text[at : at + 2])).digest()
        assert key == by_hand
    for at in range(6):  # whatever changes, changes its own block's key and all later ones
        other = list(index.keys_of([*text[:at], 99, *text[at + 1 :]], "ann"))
        assert [a == b for a, b in zip(keys, other)] == [block < at // 2 for block in range(3)]
    assert not set(keys) & set(index.keys_of(text, "bob"))


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_is_told_of_whole_blocks_alone(kind):
    index = prefix_index(kind, 2)
    with pytest.raises(WorkbenchError, match="2 full blocks of 2 hold 4 tokens, got 3"):
        index.insert([0, 1, 2], [0, 1], "")
    assert len(index) == 0


def test_an_index_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(WorkbenchError, match="did you mean 'radix'"):
        prefix_index("radx", 2)


@pytest.mark.parametrize(("given", "words"), [((0, 1), "runs"), ((1, 0), "steps"), ((1, 1, -1), "seed")])
def test_a_soak_that_makes_no_sense_is_refused(given, words):
    with pytest.raises(WorkbenchError, match=words):
        soak(*given)
