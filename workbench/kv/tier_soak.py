"""A soak of three tiers: random histories of a pool with tiers below it, held to a second bookkeeping in lists.

Beside all that `workbench.kv.soak` does:

    load        what was found in the pool is followed by what the tiers have, mostly all of it, before a text goes on
    prefetch    a block goes from a slower tier to the fastest
    pin, unpin  a block is being read for a while, and may not be evicted
    spoil       a block on disk is not any more what was written

After every call, beside what `workbench.kv.ledger` holds:

    order       each tier has exactly the blocks that it must have, least recently used first
    content     what lies in a tier under a key is the text of that key, its own tenant's
    counts      written, evicted, loaded, corrupt …: each as often as it happened
    hits        what the tiers are said to have is all that they could give, and is loaded up to the first corrupt block
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.kv.blocks import BlockTables, NoRoom
from workbench.kv.ledger import Ledger, Mark, agree, marks_of
from workbench.kv.offload import POOL, Key, OffloadedBlocks, Place, TieredTables
from workbench.kv.prefix import HashChain, prefix_index
from workbench.kv.soak import OPERATIONS, Soaked, Walk, soak

TIER_KINDS = ("hash", "radix")
LARGEST_TIER = 8
TIER_OPERATIONS = (*OPERATIONS, *("flood",) * 3, *("prefetch",) * 3, "pin", *("unpin",) * 2, *("spoil",) * 4)
TIERS = (("host", "disk"), ("host", "disk"), ("host",), ("disk",))  # below the pool, as often as they are named

Block = list[Mark | None]


class PlainCopies:
    """Contents of slots, in dictionaries. memory: of the pool."""

    def __init__(self) -> None:
        self.memory: list[Block] = []
        self.slots: dict[Place, Block] = {}
        self.spoiled: set[Place] = set()

    def move(self, key: Key, source: Place, target: Place) -> bool:
        if source in self.spoiled:
            return False
        content = list(self.memory[source.slot] if source.tier == POOL else self.slots[source])
        self.spoiled.discard(target)
        if target.tier == POOL:
            self.memory[target.slot] = content
        else:
            self.slots[target] = content
        return True

    def discard(self, key: Key, place: Place) -> None:
        del self.slots[place]
        self.spoiled.discard(place)


def make_tiered_pool(num_blocks: int, block_size: int, kind: str | None, capacities: Mapping[str, int]) -> TieredTables:
    index = prefix_index(kind, block_size)
    assert index is not None
    return TieredTables(num_blocks, block_size, index, OffloadedBlocks(capacities, PlainCopies()))


@dataclass
class PlainTier:
    """What one tier must have. blocks: named by their last mark, least recently used first."""

    name: str
    capacity: int
    blocks: list[Mark] = field(default_factory=list)
    spoiled: set[Mark] = field(default_factory=set)

    def use(self, block: Mark) -> None:
        self.blocks.remove(block)
        self.blocks.append(block)

    def remove(self, block: Mark) -> None:
        self.blocks.remove(block)
        self.spoiled.discard(block)


class TierLedger(Ledger):
    """A `Ledger` of a `TieredTables`: also of what must be in which tier."""

    def __init__(self, pool: TieredTables, kind: str | None) -> None:
        super().__init__(pool, kind)
        self.tiered, self.below = pool, pool.below
        copies = pool.below._copies
        assert isinstance(copies, PlainCopies)
        self.copies_there, copies.memory = copies, self.memory
        self.tiers = [PlainTier(tier.name, tier.capacity) for tier in pool.below.tiers]
        self.pins: Counter[Mark] = Counter()
        self.counted: Counter[tuple[str, str]] = Counter()
        self._keys: dict[Mark, Key] = {}

    def key_of(self, block: Mark) -> Key:
        if block not in self._keys:
            *_, self._keys[block] = HashChain(self.pool.block_size).keys_of(block[1:], block[0])
        return self._keys[block]

    def blocks_below(self, tier: str | None = None) -> list[Mark]:
        """All that any tier has, or one of that name."""
        return [block for one in self.tiers if tier in (None, one.name) for block in one.blocks]

    # -- calls -----------------------------------------------------------------------------------------------------

    def load(self, name: Hashable, token_ids: list[int], limit: int) -> int:
        """Load what the tiers have behind the blocks of a sequence that was just opened, so many blocks at most.

        Returns the tokens loaded; 0 where there is no room.
        """
        size, tenant, table = self.pool.block_size, self.tenants[name], self.tables[name]
        marks = marks_of(tenant, token_ids)
        known = []
        for end in range(len(self.marks[name]) + size, len(marks), size):
            if (tier := next((one for one in self.tiers if marks[end - 1] in one.blocks), None)) is None:
                break
            known.append((marks[end - 1], tier.name))
        said = self.tiered.following(self.pool.tables[name], token_ids, tenant)
        agree("what the tiers have", said, [(self.key_of(block), tier) for block, tier in known])
        blocks = [block for block, _ in known[:limit]]
        available = self.pool.num_blocks - len(self.held())
        try:
            loaded = self.tiered.load(name, token_ids, [self.key_of(block) for block in blocks], tenant)
        except NoRoom as refusal:
            self._refusal(refusal, len(blocks), available)
            return 0
        agree("whether there is room to load", True, len(blocks) <= available)
        self.pins.update(blocks)
        self._take_any(len(blocks))
        whole = 0
        while whole < len(blocks) and self._fetch(blocks[whole]):
            whole += 1
        self.pins = +(self.pins - Counter(blocks))
        agree("blocks loaded", loaded, whole)
        held, new = self.held(), list(self.pool.tables[name][len(table) :])
        for block in new:
            agree(f"whether block {block}, which was loaded, is free", False, block in held or block in self.known)
        self.tables[name] = table + new
        self.marks[name] = marks[: len(self.tables[name]) * size]
        self._know(name, len(self.marks[name]))
        self.compare()
        return loaded * size

    def forget_prefix(self, name: Hashable, length: int) -> None:
        size = self.pool.block_size
        for block in self.marks[name][:length][size - 1 :: size]:
            for tier in self.tiers:
                if block in tier.blocks:
                    tier.remove(block)
        super().forget_prefix(name, length)

    def prefetch(self, block: Mark) -> None:
        copied = self.below.prefetch(self.key_of(block))
        fastest = self.tiers[0]
        source = next((tier for tier in self.tiers if block in tier.blocks), fastest)
        expected = False
        if source is not fastest:
            self.pins[block] += 1
            room = self._make_room(0)
            self.pins = +(self.pins - Counter([block]))
            if not room:
                self.counted[fastest.name, "refused"] += 1
            elif self._is_whole(source, block):
                fastest.blocks.append(block)
                source.use(block)
                self.counted[fastest.name, "prefetched"] += 1
                expected = True
        agree("whether a block was prefetched", copied, expected)
        self.compare()

    def pin(self, block: Mark) -> None:
        self.below.pin(self.key_of(block))
        self.pins[block] += 1
        self.compare()

    def unpin(self, block: Mark) -> None:
        self.below.unpin(self.key_of(block))
        self.pins = +(self.pins - Counter([block]))
        self.compare()

    def spoil(self, block: Mark) -> None:
        """What the disk tier has of it is not any more what was written."""
        books = next(tier for tier in self.below.tiers if tier.name == "disk")
        place = Place("disk", books.slots[self.key_of(block)])
        self.copies_there.spoiled.add(place)
        self.copies_there.slots[place] = [None] * self.pool.block_size
        next(tier for tier in self.tiers if tier.name == "disk").spoiled.add(block)

    # -- what must become of the tiers -----------------------------------------------------------------------------

    def _evict(self, block: int) -> None:
        self._store(0, self.known[block][-1])
        super()._evict(block)

    def _take_any(self, count: int) -> None:
        """So many blocks are taken, free ones first; it does not matter which."""
        free = self.pool.num_blocks - len(self.held()) - len(self.idle)
        for _ in range(count):
            if not free:
                idle = len(self.idle)
                self._evict(next(iter(self.idle)))
                free += idle - len(self.idle)
            free -= 1

    def _store(self, level: int, block: Mark) -> None:
        if level == len(self.tiers):
            return
        tier = self.tiers[level]
        if block in tier.blocks:
            tier.use(block)
            self.counted[tier.name, "clean"] += 1
        elif self._make_room(level):
            tier.blocks.append(block)
            self.counted[tier.name, "written"] += 1
        else:
            self.counted[tier.name, "refused"] += 1
            self._store(level + 1, block)

    def _make_room(self, level: int) -> bool:
        tier = self.tiers[level]
        if len(tier.blocks) < tier.capacity:
            return True
        unpinned = [block for block in tier.blocks if not self.pins[block]]
        if not unpinned:
            return False
        self._store(level + 1, unpinned[0])
        tier.remove(unpinned[0])
        self.counted[tier.name, "evicted"] += 1
        return True

    def _fetch(self, block: Mark) -> bool:
        for tier in self.tiers:
            if block in tier.blocks and self._is_whole(tier, block):
                tier.use(block)
                self.counted[tier.name, "loaded"] += 1
                return True
        return False

    def _is_whole(self, tier: PlainTier, block: Mark) -> bool:
        """False: it was spoiled, is dropped, and counted."""
        if block not in tier.spoiled:
            return True
        tier.remove(block)
        self.counted[tier.name, "corrupt"] += 1
        return False

    def compare(self) -> None:
        super().compare()
        self.below.check()
        for block, content in self.known.items():
            agree(f"key of block {block}", self.tiered.keyed.key_of(block), self.key_of(content[-1]))
        for books, tier in zip(self.below.tiers, self.tiers, strict=True):
            agree(f"blocks of the {tier.name} tier", [*books.slots], [self.key_of(block) for block in tier.blocks])
            agree(
                f"pins of the {tier.name} tier", books.pins, Counter({self.key_of(b): n for b, n in self.pins.items()})
            )
            for last in tier.blocks:
                size, lying = self.pool.block_size, Place(tier.name, books.slots[self.key_of(last)])
                whole: Block = [last[: len(last) - size + 1 + at] for at in range(size)]
                expected = [None] * size if last in tier.spoiled else whole
                agree(f"content of {last} in the {tier.name} tier", self.copies_there.slots[lying], expected)
        agree("counts of the tiers", +self.below.counts, self.counted)


class TierWalk(Walk):
    """One random history of a pool with tiers of random sizes."""

    operations = TIER_OPERATIONS

    def __init__(self, seed: int, kind: str | None, make: Callable[..., BlockTables] = make_tiered_pool) -> None:
        super().__init__(seed, kind, lambda *size: make(*size, self._capacities()))

    def _capacities(self) -> dict[str, int]:
        return {name: self.random.randint(1, LARGEST_TIER) for name in self.random.choice(TIERS)}

    def _ledger(self, pool: BlockTables, kind: str | None) -> Ledger:
        assert isinstance(pool, TieredTables)
        self.tiered = TierLedger(pool, kind)
        return self.tiered

    def run(self, steps: int) -> Any:
        failure = super().run(steps)
        for (_, what), count in self.tiered.counted.items():
            self.counts[what] += count
        return failure

    def _needs(self) -> dict[str, Any]:
        below = self.tiered.blocks_below()
        disk = [*{*self.tiered.blocks_below("disk")}]
        return super()._needs() | {"prefetch": below, "pin": below, "unpin": self.tiered.pins, "spoil": disk}

    def _load(self, name: Hashable, text: list[int]) -> int:
        if self.random.random() < 0.1:  # the rule says that it is not worth it
            return 0
        limit = self.random.choice((99, 99, self.random.randint(0, 3)))
        return int(self._do("load", name, text, limit))

    def _prefetch(self) -> None:
        self._do("prefetch", self.random.choice(self.tiered.blocks_below()))

    def _pin(self) -> None:
        self._do("pin", self.random.choice(self.tiered.blocks_below()))

    def _unpin(self) -> None:
        self._do("unpin", self.random.choice(list(self.tiered.pins)))

    def _spoil(self) -> None:
        self._do("spoil", self.random.choice(self.tiered.blocks_below("disk")))


def soak_tiers(
    runs: int, steps: int, seed: int = 0, report: Callable[[int], None] | None = None, walk: type[Walk] = TierWalk
) -> Soaked:
    """So many random histories of each kind of index, with tiers below the pool; as `kv.soak.soak`."""
    return soak(runs, steps, seed, TIER_KINDS, make_tiered_pool, report, walk)
