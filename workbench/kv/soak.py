"""A soak of the block pool: random histories of everything that can happen to it, each held to the ledger.

    admit     a prompt: most begin as another did, some come twice at once
    write     a step of an engine for one to three sequences; one is preempted for want of room
    fork, truncate, remember, finish, abort, preempt and resume by recompute, swap_out and swap_in
    forget    what a sequence computed is not to be trusted, and ends it or is found no more: NaN, an error
    flood     a text that takes much of what is free or idle: what was remembered is evicted
    refuse    a call that makes no sense

Small pools of small blocks and a vocabulary of three tokens, so that everything meets. What must be so after every call
is said and held by `workbench.kv.ledger`. `workbench soak blocks` walks as long as one likes; the tests walk a little,
and let hypothesis choose the calls too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from workbench.errors import check_whole
from workbench.kv.blocks import BlockTables
from workbench.kv.ledger import Ledger
from workbench.kv.prefix import prefix_index

KINDS = ("hash", "radix", None)
VOCABULARY = 3
LARGEST_POOL, LARGEST_BLOCK = 16, 4

OPERATIONS = (  # as often as they are named
    *("admit",) * 6,
    *("write",) * 8,
    *("fork",) * 4,
    *("truncate",) * 2,
    "remember",
    "forget",
    *("finish",) * 2,
    "abort",
    *("preempt",) * 2,
    *("resume",) * 2,
    *("swap_out",) * 2,
    *("swap_in",) * 2,
    "flood",
    "refuse",
)


def make_pool(num_blocks: int, block_size: int, kind: str | None) -> BlockTables:
    return BlockTables(num_blocks, block_size, prefix_index(kind, block_size))


@dataclass(frozen=True)
class Failure:
    """A random history that failed. `seed` reproduces it; `calls` are the calls of a `Ledger`, of which the last
    failed."""

    kind: str | None
    num_blocks: int
    block_size: int
    seed: int
    step: int
    message: str
    calls: tuple[tuple[str, tuple[Any, ...]], ...]

    def __str__(self) -> str:
        head = f"index {self.kind or 'none'}, seed {self.seed}, step {self.step}: {self.message}"
        pool = f"{self.num_blocks} blocks of {self.block_size}"
        lines = [f"    {method}({', '.join(map(repr, arguments))})" for method, arguments in self.calls]
        return "\n".join([head, f"the calls, on {pool}:", *lines])


class Walk:
    """One random history of a pool of random size. The same seed, the same history, as long as the pool is right."""

    operations: tuple[str, ...] = OPERATIONS

    def __init__(self, seed: int, kind: str | None, make: Callable[..., BlockTables] = make_pool) -> None:
        self.seed, self.random = seed, random.Random(seed)
        size = (self.random.randint(1, LARGEST_POOL), self.random.randint(1, LARGEST_BLOCK))
        self.ledger = self._ledger(make(*size, kind), kind)
        self.counts: Counter[str] = Counter()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._names = count()
        self._seen: list[list[int]] = []  # texts that others may begin with
        self._preempted: list[tuple[Hashable, list[int], str]] = []

    def _ledger(self, pool: BlockTables, kind: str | None) -> Ledger:
        return Ledger(pool, kind)

    def run(self, steps: int) -> Failure | None:
        """Run so many steps, then release everything and check that no block is held."""
        for step in range(1, steps + 2):
            try:
                if step <= steps:
                    self.counts["steps"] += 1
                    self.step()
                else:
                    for name in [*self.ledger.tables, *self.ledger.saved]:
                        self._do("release", name)
            except Exception as error:  # whatever the code under test raises is what we look for
                message, pool = f"{type(error).__name__}: {error}", self.ledger.pool
                where = (self.ledger.kind, pool.num_blocks, pool.block_size, self.seed, step)
                return Failure(*where, message, tuple(self.calls))
        ledger = self.ledger
        self.counts.update(hit_tokens=ledger.hit_tokens, evictions=ledger.evictions, copies=ledger.copies)
        return None

    def step(self) -> None:
        """One random operation of those that are possible now."""
        operation = self.random.choice(self.operations)
        if not self._needs().get(operation, self.ledger.tables):
            operation = "admit"
        self.counts[operation] += 1
        getattr(self, "_" + operation)()

    def _needs(self) -> dict[str, Any]:
        """What must not be empty for an operation; for those that are not here, the sequences."""
        ledger = self.ledger
        needs: dict[str, Any] = {
            "resume": self._preempted,
            "swap_in": ledger.saved,
            "abort": ledger.tables or ledger.saved,
        }
        return needs | dict.fromkeys(("admit", "flood", "refuse"), True)

    def _do(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, arguments))
        return getattr(self.ledger, method)(*arguments)

    def _live(self) -> Hashable:
        return self.random.choice(list(self.ledger.tables))

    def _tokens(self, most: int, least: int = 0) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(least, most))]

    def _admit(self) -> None:
        """A new text, or the same twice at once. Most begin as one before did: where it ends, or in the middle."""
        pool, tenant = self.ledger.pool, self.random.choice("aab")
        if self._seen and self.random.random() < 0.7:
            text = self.random.choice(self._seen)
            text = text[: self.random.choice((len(text), self.random.randint(0, len(text))))]
            text = text + self._tokens(pool.block_size + 1)
        else:
            text = self._tokens(pool.num_blocks * pool.block_size // 3 + 1)
        names = [next(self._names) for _ in range(self.random.choice((1, 1, 2)))]
        for name in [name for name in names if self._begin(name, text, tenant)]:
            self._settle(name)

    def _begin(self, name: Hashable, text: list[int], tenant: str) -> bool:
        hit = self._do("open", name, text, tenant)
        self.counts.update(opened=1, hits=hit > 0)
        hit += self._load(name, text)
        if self._do("write", {name: text[hit:]}):
            self._seen = [*self._seen[-7:], text]
            return True
        self.counts["no_room"] += 1
        self._do("release", name)
        return False

    def _load(self, name: Hashable, text: list[int]) -> int:
        """Tokens that come from elsewhere: with tiers below the pool."""
        return 0

    def _settle(self, name: Hashable) -> None:
        """What was computed is remembered, now and then not at once."""
        if self.random.random() < 0.6:
            self._do("remember", name, len(self.ledger.marks[name]))

    def _write(self) -> None:
        """A step of an engine, for a few of the sequences; where there is no room, one of them has to go."""
        live = list(self.ledger.tables)
        self._step_of(self.random.sample(live, min(len(live), self.random.randint(1, 3))))

    def _step_of(self, names: Sequence[Hashable]) -> None:
        if self._do("write", {name: self._tokens(self.ledger.pool.block_size + 1, 1) for name in names}):
            for name in names:
                self._settle(name)
        else:
            self.counts.update(no_room=1, preempt=1)
            self._preempt()

    def _fork(self) -> None:
        """Samples of one text, which go on together or apart."""
        name, new = self._live(), next(self._names)
        self._do("fork", name, new)
        if self.random.random() < 0.5:
            self._step_of([name, new])

    def _truncate(self) -> None:
        name = self._live()
        self._do("truncate", name, self.random.randint(0, len(self.ledger.marks[name])))

    def _remember(self) -> None:
        name = self._live()
        length = len(self.ledger.marks[name])
        self._do("remember", name, self.random.choice((length, self.random.randint(0, length))))

    def _forget(self) -> None:
        """Of a sequence that goes on, or, as in an engine, that an error ends."""
        name = self._live()
        length = len(self.ledger.marks[name])
        self._do("forget_prefix", name, self.random.choice((length, self.random.randint(0, length))))
        if self.random.random() < 0.5:
            self._do("release", name)

    def _finish(self) -> None:
        name = self._live()
        self._seen = [*self._seen[-7:], self.ledger.text(name)]
        self._do("remember", name, len(self.ledger.marks[name]))
        self._do("release", name)

    def _abort(self) -> None:
        """Whatever it is doing, also when it is swapped out."""
        self._do("release", self.random.choice([*self.ledger.tables, *self.ledger.saved]))

    def _preempt(self) -> None:
        """By recompute: everything is given back, and the whole text is a prompt again."""
        name = self._live()
        self._preempted.append((name, self.ledger.text(name), self.ledger.tenants[name]))
        self._do("release", name)

    def _resume(self) -> None:
        if self._begin(*self._preempted[0]):
            self._settle(self._preempted.pop(0)[0])

    def _swap_out(self) -> None:
        self._do("swap_out", self._live())

    def _swap_in(self) -> None:
        if not self._do("swap_in", self.random.choice(list(self.ledger.saved))):
            self.counts["no_room"] += 1

    def _flood(self) -> None:
        """A text that takes much of what is free or idle, and is soon gone."""
        name, pool = next(self._names), self.ledger.pool
        self._do("write", {name: self._tokens(pool.num_available * pool.block_size)})
        self._do("release", name)

    def _refuse(self) -> None:
        """Calls that make no sense, with whatever there is now."""
        nobody = next(self._names)
        wrong: list[tuple[Any, ...]] = []
        wrong += [(method, nobody) for method in ("release", "swap_out", "swap_in")]
        wrong += [("truncate", nobody, 0), ("fork", nobody, next(self._names)), ("remember", nobody, [0] * 9)]
        wrong += [("grow", {nobody: length}) for length in (-1, True, 1.0, None)]
        for name, table in self.ledger.tables.items():
            length = len(self.ledger.marks[name])
            wrong += [("truncate", name, bad) for bad in (length + 1, -1, False, None)]
            wrong += [("open", name, [0]), ("fork", name, name), ("swap_in", name), ("fork", nobody, name)]
            wrong += [("grow", {nobody: len(table), name: length - 1}), ("grow", {name: str(length)})]
        for name in self.ledger.saved:
            wrong += [("open", name, [0]), ("swap_out", name), ("truncate", name, 0), ("remember", name, [0])]
            wrong += [("grow", {nobody: 1, name: 99}), ("fork", name, nobody), ("fork", nobody, name)]
        self._do("refuse", *self.random.choice(wrong))


@dataclass(frozen=True)
class Soaked:
    """What a soak did, by kind of index, and the shortest history that failed, if one did."""

    counts: dict[str | None, Counter[str]]
    failure: Failure | None


def soak(
    runs: int,
    steps: int,
    seed: int = 0,
    kinds: Sequence[str | None] = KINDS,
    make: Callable[..., BlockTables] = make_pool,
    report: Callable[[int], None] | None = None,
    walk: type[Walk] = Walk,
) -> Soaked:
    """So many random histories for each kind of index, with seeds from `seed` on.

    After a failure, later histories are cut where they would be longer than the failing one. make(num_blocks,
    block_size, kind): a fresh pool. report: told how many runs are done, after each. walk: what a history is.
    Raises WorkbenchError for counts that make no sense.
    """
    check_whole("runs", runs, 1)
    check_whole("seed", seed, 0)
    most = check_whole("steps", steps, 1)
    counts: dict[str | None, Counter[str]] = {kind: Counter() for kind in kinds}
    failure = None
    for run in range(runs):
        for kind in kinds:
            one = walk(seed + run, kind, make)
            failed = one.run(most)
            counts[kind].update(one.counts, runs=1)
            if failed and (failure is None or failed.step < failure.step):
                failure, most = failed, failed.step - 1
        if report:
            report(run + 1)
        if not most:
            break
    return Soaked(counts, failure)
