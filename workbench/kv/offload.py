"""KV offload: which block of the prefix cache lies in which tier below the pool. No torch, no tensors.

    pool ──evicted──▶ host memory ──evicted──▶ disk ──evicted──▶ gone
      ▲ ▲                │  ▲                  │  │
      │ └─── load on hit ┘  └─── prefetch ─────┘  │
      └───────────────── load on hit ─────────────┘

A block is named by its key: the hash of all tokens up to its end and of its tenant (`workbench.kv.prefix`). What lies
under a key never changes, so a tier keeps its copy when the block is loaded, and a block that is evicted again is
written only where the copy is gone. The rules:

    order      each tier evicts what was used least recently; a text's last block goes first, as in the pool
    pins       what is being loaded or read is not evicted meanwhile
    listed     a slot is written whole before its key is listed; what could not be written is not listed
    failures   a block that cannot be read as it was written is dropped and counted; the prompt is computed instead

`OffloadedBlocks` decides and counts; `Copies` have the contents (`workbench.kv.tiers`, or lists in the soak).
vLLM does the same with one class a tier (vllm/v1/kv_offload). Its blocks are stored when they are full, these when
they are evicted. Left out: what a radix tree forgets together with an evicted block is not written back.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from workbench.errors import check_whole
from workbench.kv.blocks import BlockTables
from workbench.kv.prefix import HashChain

if TYPE_CHECKING:
    from workbench.kv.contract import PrefixIndex

Key = bytes
POOL = "pool"


class Place(NamedTuple):
    """A block of the pool, or a slot of a tier."""

    tier: str
    slot: int


class Copies(Protocol):
    """Who has the contents."""

    def move(self, key: Key, source: Place, target: Place) -> bool:
        """Copy a block, whole; False where what lies at `source` is not what was written under this key."""
        ...

    def discard(self, key: Key, place: Place) -> None:
        """A slot is given up with what is in it, which must not be found again, by a later run either."""
        ...


class TierBooks:
    """The slots of one tier. `slots`: key -> slot, least recently used first; to be read."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, check_whole(f"blocks of the {name} tier", capacity, 1)
        self.slots: OrderedDict[Key, int] = OrderedDict()
        self.pins: Counter[Key] = Counter()
        self._free = list(range(capacity - 1, -1, -1))  # the last is taken first

    def __contains__(self, key: Key) -> bool:
        return key in self.slots

    def __len__(self) -> int:
        return len(self.slots)

    def use(self, key: Key) -> None:
        self.slots.move_to_end(key)

    def victim(self) -> Key | None:
        """The key that was used least recently of those that are not pinned."""
        return next((key for key in self.slots if not self.pins[key]), None)

    def take(self) -> int | None:
        """A slot that no key has; None when the tier is full."""
        return self._free.pop() if self._free else None

    def put(self, key: Key, slot: int) -> None:
        self.slots[key] = slot

    def put_back(self, slot: int) -> None:
        self._free.append(slot)

    def remove(self, key: Key) -> None:
        self._free.append(self.slots.pop(key))

    def adopt(self, listed: Mapping[Key, int]) -> None:
        """Keys that the tier has from an earlier run, least recently used first."""
        self.slots.update(listed)
        taken = set(listed.values())
        self._free = [slot for slot in self._free if slot not in taken]


class OffloadedBlocks:
    """The tiers below the pool, the fastest first. capacities: blocks of each, by name.

    `counts` has, by (tier, what), how often blocks were "written", "clean" (evicted with a copy there already),
    "evicted", "refused" (all slots pinned), "loaded", "prefetched", "corrupt" and "failed" (reads ahead that ended in
    an error).
    """

    def __init__(self, capacities: Mapping[str, int], copies: Copies) -> None:
        self.tiers = [TierBooks(name, capacity) for name, capacity in capacities.items()]
        self._copies = copies
        self.counts: Counter[tuple[str, str]] = Counter()

    def where(self, key: Key) -> TierBooks | None:
        """The fastest tier that has the block."""
        return next((tier for tier in self.tiers if key in tier), None)

    def leading(self, keys: Iterable[Key]) -> list[tuple[Key, str]]:
        """The keys up to the first that no tier has, each with the fastest tier that has it."""
        known = []
        for key in keys:
            if (tier := self.where(key)) is None:
                break
            known.append((key, tier.name))
        return known

    # -- down ------------------------------------------------------------------------------------------------------

    def store(self, key: Key, block: int) -> bool:
        """Write back a block that the pool evicts; True where a tier has it now."""
        return self._store(0, key, Place(POOL, block))

    def _store(self, level: int, key: Key, source: Place) -> bool:
        if level == len(self.tiers):
            return False
        tier = self.tiers[level]
        if key in tier:
            tier.use(key)
            self.counts[tier.name, "clean"] += 1
            return True
        slot = self._make_room(level)
        if slot is None:
            self.counts[tier.name, "refused"] += 1
            return self._store(level + 1, key, source)
        if not self._write(tier, key, source, slot):
            return False
        self.counts[tier.name, "written"] += 1
        return True

    def _write(self, tier: TierBooks, key: Key, source: Place, slot: int) -> bool:
        """Copy, then list. A slot that was not written is free again, also after an error or an interrupt."""
        whole = False
        try:
            whole = self._copies.move(key, source, Place(tier.name, slot))
        finally:
            if whole:
                tier.put(key, slot)
            else:
                tier.put_back(slot)
        return whole

    def _make_room(self, level: int) -> int | None:
        """A slot; what is evicted for it goes one tier down. None where every slot is pinned."""
        tier = self.tiers[level]
        if (slot := tier.take()) is not None:
            return slot
        if (victim := tier.victim()) is None:
            return None
        self._store(level + 1, victim, Place(tier.name, tier.slots[victim]))
        tier.remove(victim)
        self.counts[tier.name, "evicted"] += 1
        return tier.take()

    # -- up --------------------------------------------------------------------------------------------------------

    def fetch(self, key: Key, block: int) -> bool:
        """Copy a block into the pool from the fastest tier that has it whole. False: none has, and what was there is
        dropped."""
        for tier in self.tiers:
            if key not in tier:
                continue
            if self._copies.move(key, Place(tier.name, tier.slots[key]), Place(POOL, block)):
                tier.use(key)
                self.counts[tier.name, "loaded"] += 1
                return True
            self._report_corrupt(tier, key)
        return False

    def prefetch(self, key: Key) -> bool:
        """Copy a block from a slower tier into the fastest, if it is not there; True where it was copied."""
        fastest = self.tiers[0]
        source = self.where(key)
        if source is None or source is fastest:
            return False
        with self.pinned([key]):
            slot = self._make_room(0)
            if slot is None:
                self.counts[fastest.name, "refused"] += 1
                return False
            if self._write(fastest, key, Place(source.name, source.slots[key]), slot):
                source.use(key)
                self.counts[fastest.name, "prefetched"] += 1
                return True
        self._report_corrupt(source, key)
        return False

    @contextlib.contextmanager
    def pinned(self, keys: Sequence[Key]) -> Iterator[None]:
        """Within the block no tier evicts these."""
        for key in keys:
            self.pin(key)
        try:
            yield
        finally:
            for key in keys:
                self.unpin(key)

    def pin(self, key: Key) -> None:
        for tier in self.tiers:
            tier.pins[key] += 1

    def unpin(self, key: Key) -> None:
        for tier in self.tiers:
            tier.pins[key] -= 1
            if not tier.pins[key]:
                del tier.pins[key]

    # -- away ------------------------------------------------------------------------------------------------------

    def drop(self, key: Key) -> None:
        """Its content is not to be trusted: no tier has it any more."""
        for tier in self.tiers:
            if key in tier:
                self._discard(tier, key)

    def _report_corrupt(self, tier: TierBooks, key: Key) -> None:
        self._discard(tier, key)
        self.counts[tier.name, "corrupt"] += 1

    def _discard(self, tier: TierBooks, key: Key) -> None:
        self._copies.discard(key, Place(tier.name, tier.slots[key]))
        tier.remove(key)

    def check(self) -> None:
        """Assert that every slot is free or has one key. For tests."""
        for tier in self.tiers:
            assert sorted([*tier._free, *tier.slots.values()]) == list(range(tier.capacity)), f"{tier.name}: slots"
            assert all(count > 0 for count in tier.pins.values()), f"{tier.name}: pins {tier.pins}"


class KeyedIndex:
    """A prefix index, hash chain or radix tree, and the key of every block that it knows."""

    def __init__(self, index: PrefixIndex, block_size: int) -> None:
        self.block_size, self._index = block_size, index
        self._keys: dict[int, Key] = {}
        self.keys_of = HashChain(block_size).keys_of
        self.match = index.match

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int], tenant: str | bytes) -> None:
        self._index.insert(token_ids, blocks, tenant)
        known = next((at for at, block in enumerate(blocks) if block not in self._keys), len(blocks))
        before = self._keys[blocks[known - 1]] if known else None
        new = self.keys_of(token_ids[known * self.block_size :], tenant, before)
        for key, block in zip(new, blocks[known:]):
            if block in self._index and block not in self._keys:
                self._keys[block] = key

    def forget(self, block: int) -> list[int]:
        lost = self._index.forget(block)
        for one in (block, *lost):
            self._keys.pop(one, None)
        return lost

    def key_of(self, block: int) -> Key:
        return self._keys[block]

    def __contains__(self, block: int) -> bool:
        return block in self._index

    def __len__(self) -> int:
        return len(self._index)


class TieredTables(BlockTables):
    """Block tables whose evicted blocks are written back to tiers, and loaded from there. index: of the prefix cache,
    empty."""

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex, below: OffloadedBlocks) -> None:
        assert not len(index), "blocks that are known already have no key"
        self.keyed = KeyedIndex(index, block_size)
        super().__init__(num_blocks, block_size, self.keyed)
        self.below = below

    def _evict(self, block: int) -> None:
        self.below.store(self.keyed.key_of(block), block)
        super()._evict(block)

    def forget_prefix(self, token_ids: Sequence[int], tenant: str | bytes = "") -> None:
        """Also from the tiers, each whole block of these tokens."""
        super().forget_prefix(token_ids, tenant)
        for key in self.keyed.keys_of(token_ids, tenant):
            self.below.drop(key)

    def following(
        self, blocks: Sequence[int], token_ids: Sequence[int], tenant: str | bytes = ""
    ) -> list[tuple[Key, str]]:
        """What the tiers have of these tokens after their first blocks, which are known: keys, and the fastest tier of
        each. Never with the last token, because its logits are needed."""
        size = self.block_size
        before = self.keyed.key_of(blocks[-1]) if blocks else None
        whole = token_ids[len(blocks) * size : max(0, len(token_ids) - 1) // size * size]
        return self.below.leading(self.keyed.keys_of(whole, tenant, before))

    def load(self, sequence: Hashable, token_ids: Sequence[int], keys: Sequence[Key], tenant: str | bytes = "") -> int:
        """Put the blocks of these keys, the first ones of `following`, behind those of a sequence that was opened.

        Returns how many blocks were loaded: fewer where one is corrupt. They are in the prefix index then. Raises
        NoRoom, and then nothing has changed.
        """
        size, start = self.block_size, self._length_of(sequence)
        loaded = 0
        with self.below.pinned(keys):
            self.grow({sequence: start + len(keys) * size})
            for key, block in zip(keys, self._tables[sequence][start // size :]):
                if not self.below.fetch(key, block):
                    break
                loaded += 1
        length = start + loaded * size
        self.truncate(sequence, length)
        self.remember(sequence, token_ids[:length], tenant)
        return loaded
