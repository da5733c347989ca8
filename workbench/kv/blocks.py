"""The block manager of a paged KV cache: which sequence holds which block. No torch, no tensors: a block is a number.

    block size 4                      A: 10 tokens, table [0 1 2]        B was forked from A: [0 1 2]
                                         0 | 1 | 2 · ·   the last block is half full, and has two holders
    B writes its token 10:            A: [0 1 2]      B: [0 1 3]         block 2 is shared, so it is copied first (to 3)

The rules, which `check` holds after every step:

    references    the reference count of a block is the number of block tables that contain it
    writes        only the single holder of a block writes to it; a shared block is copied first (copy-on-write)
    idle          a block in no table is free, or idle if the prefix index knows its tokens: a prompt with the same
                  prefix reuses it, and it is evicted, least recently used first, when no free block is left
    atomic        a call that fails has changed nothing

A sequence frees its blocks from the last to the first, and whoever holds a block also holds all blocks before it. So of
two idle blocks of one sequence the later one became idle first and is evicted first. (Two sequences that were computed
at the same time may hold the same prefix twice. Only one of the two copies is in the index. Blocks that follow the
other copy can be idle longer than it; they are forgotten together with it, or evicted in their turn.)

PagedAttention: Kwon et al., arXiv 2309.06180 §4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError, check_whole, is_whole

if TYPE_CHECKING:
    from workbench.kv.contract import PrefixIndex


class NoRoom(WorkbenchError):
    """More blocks are needed than are free or idle. Nothing was changed."""

    def __init__(self, needed: int, available: int, what: str) -> None:
        super().__init__(
            f"{what} needs {needed:,} more block{'s' * (needed != 1)}, and {available:,}"
            f" {'is' if available == 1 else 'are'} free or idle; release or preempt a sequence, or make the pool with"
            " more blocks"
        )
        self.needed, self.available = needed, available


def check_full(token_ids: Sequence[int], blocks: Sequence[int], block_size: int) -> None:
    if len(token_ids) != len(blocks) * block_size:
        raise WorkbenchError(
            f"{len(blocks)} full blocks of {block_size} hold {len(blocks) * block_size} tokens, got {len(token_ids)}"
        )


class BlockTables:
    """The block manager: a pool of `num_blocks` blocks of `block_size` tokens, and the block table of every sequence.

    prefix: the prefix cache's index of the blocks, or None for no prefix cache.
    `lengths` and `tables` are read-only for callers; only the methods change them.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix: PrefixIndex | None = None) -> None:
        self.num_blocks = check_whole("num_blocks", num_blocks, 1)
        self.block_size = check_whole("block_size", block_size, 1)
        assert getattr(prefix, "block_size", block_size) == block_size, "an index of blocks of another size"
        self.prefix = prefix
        self.references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the last is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._tables: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}
        self._swapped: dict[Hashable, int] = {}  # lengths of sequences that are swapped out
        # last blocks of truncated sequences: the index may know them as full
        self._cut: set[int] = set()
        self.prompt_tokens = self.hit_tokens = self.evictions = self.copies = 0  # in total

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def tables(self) -> Mapping[Hashable, Sequence[int]]:
        """The blocks of each sequence, in the order of its tokens."""
        return MappingProxyType(self._tables)

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        """Tokens of each sequence."""
        return MappingProxyType(self._lengths)

    @property
    def swapped(self) -> Mapping[Hashable, int]:
        """Tokens of each sequence that was swapped out."""
        return MappingProxyType(self._swapped)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, length: int) -> int:
        """Blocks needed by a sequence of this many tokens."""
        return -(-length // self.block_size)

    def missing(self, lengths: Mapping[Any, int]) -> int:
        """Blocks that must be allocated for the sequences to grow to these lengths, copy-on-write copies included."""
        size, tables, references = self.block_size, self._tables, self.references
        more = 0
        shared: dict[int, int] = {}
        for sequence, length in lengths.items():
            table = tables.get(sequence, ())
            needed = -(-length // size) - len(table)
            if needed > 0:
                more += needed
            if table and references[table[-1]] > 1 and self._writes_last(sequence, length):
                shared[table[-1]] = shared.get(table[-1], 0) + 1
        if not shared:
            return more
        # if all holders of a block write, the last one keeps the original
        return more + sum(min(writers, references[block] - 1) for block, writers in shared.items())

    def _writes_last(self, sequence: Hashable, length: int) -> bool:
        """Growing to this length writes into the last block that the sequence holds already."""
        before = self._lengths[sequence]
        return length > before and before % self.block_size != 0

    # -- a sequence's life -----------------------------------------------------------------------------------------

    def find(self, token_ids: Sequence[int], tenant: str | bytes = "") -> list[int]:
        """The blocks of the prefix cache that a sequence of these tokens would start with now, never with the last
        token, because its logits are needed. tenant: only blocks that were remembered under the same name match."""
        if self.prefix is None or not len(token_ids):
            return []
        return self.prefix.match(token_ids[: (len(token_ids) - 1) // self.block_size * self.block_size], tenant)

    def open(self, sequence: Hashable, token_ids: Sequence[int] = (), tenant: str | bytes = "") -> int:
        """Start a sequence with the blocks of `find`; returns the number of its tokens that they hold."""
        self._check_new(sequence)
        cached = self.find(token_ids, tenant)
        for block in cached:
            self._hold(block)
        self._tables[sequence], self._lengths[sequence] = cached, len(cached) * self.block_size
        self.prompt_tokens += len(token_ids)
        self.hit_tokens += self._lengths[sequence]
        return self._lengths[sequence]

    def grow(self, lengths: Mapping[Hashable, int]) -> list[tuple[int, int]]:
        """Make room for each sequence to have this many tokens, writable from its present length on. An unknown
        name starts a sequence.

        Returns the (from, to) pairs of blocks that the caller must copy before it writes (copy-on-write). Raises NoRoom
        when the blocks for all of them together are not available.
        """
        size, tables, known, references = self.block_size, self._tables, self._lengths, self.references
        changing = {}  # sequences whose table changes, too: in a decode step, a few
        for sequence, length in lengths.items():
            before = known.get(sequence, 0)
            if length.__class__ is not int or length < before or sequence in self._swapped:
                self._check_growth(sequence, before, length)
            table = tables.get(sequence)
            if (
                table is None
                or len(table) * size < length
                or (before % size and (references[table[-1]] > 1 or table[-1] in self._cut))
            ):
                changing[sequence] = length
        needed = self.missing(changing)
        if needed > self.num_available:
            raise NoRoom(needed, self.num_available, f"growing {len(lengths)} sequence{'s' * (len(lengths) > 1)}")
        copies = []
        for sequence, length in changing.items():
            table = tables.setdefault(sequence, [])
            if table and self._writes_last(sequence, length):
                last = table[-1]
                if references[last] > 1:
                    table[-1] = self._take()
                    copies.append((last, table[-1]))
                    self._drop(last)
                elif last in self._cut:
                    self._cut.discard(last)
                    if self.prefix is not None and last in self.prefix:
                        self._forget(last)  # it was full once, and is written again
            while len(table) * size < length:
                table.append(self._take())
        known.update(lengths)
        self.copies += len(copies)
        return copies

    def _check_growth(self, sequence: Hashable, before: int, length: int) -> None:
        if not is_whole(length) or length < before:
            raise WorkbenchError(
                f"sequence {sequence!r} has {before} tokens and can grow to as many or more, got {length!r}; "
                "truncate makes it shorter"
            )
        if sequence in self._swapped:
            raise WorkbenchError(f"sequence {sequence!r} is swapped out; swap it in before it grows")

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Remove the tokens from position `length` on."""
        before = self._length_of(sequence)
        if not is_whole(length) or not 0 <= length <= before:
            raise WorkbenchError(
                f"sequence {sequence!r} has {before} tokens; it can be cut to 0 … {before} of them, got {length!r}"
            )
        table = self._tables[sequence]
        keep = self.blocks_for(length)
        while len(table) > keep:
            self._drop(table.pop())
        if length % self.block_size and self.prefix is not None:
            self._cut.add(table[-1])
        self._lengths[sequence] = length

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        """A new sequence holds all blocks of another. Nothing is copied until one of them writes."""
        length = self._length_of(sequence)
        self._check_new(new_sequence)
        table = list(self._tables[sequence])
        for block in table:
            self._hold(block)
        self._tables[new_sequence], self._lengths[new_sequence] = table, length

    def remember(self, sequence: Hashable, token_ids: Sequence[int], tenant: str | bytes = "") -> None:
        """Add the full blocks of a sequence to the prefix index. token_ids: the tokens of the sequence from its
        start."""
        full = min(self._length_of(sequence), len(token_ids)) // self.block_size
        if full and self.prefix is not None:
            self.prefix.insert(token_ids[: full * self.block_size], self._tables[sequence][:full], tenant)

    def forget_prefix(self, token_ids: Sequence[int], tenant: str | bytes = "") -> None:
        """Remove the blocks of this prefix from the prefix index. Sequences that hold them keep them."""
        for block in () if self.prefix is None else self.prefix.match(token_ids, tenant):
            self._forget(block)

    def release(self, sequence: Hashable) -> None:
        """End a sequence and free its blocks; also one that is swapped out."""
        if self._swapped.pop(sequence, None) is not None:
            return
        self._length_of(sequence)
        self.truncate(sequence, 0)
        del self._tables[sequence], self._lengths[sequence]

    def swap_out(self, sequence: Hashable) -> list[int]:
        """Free the blocks of a sequence after the caller has saved their content; returns them, in order."""
        length = self._length_of(sequence)
        blocks = list(self._tables[sequence])
        self.release(sequence)
        self._swapped[sequence] = length
        return blocks

    def swap_in(self, sequence: Hashable) -> list[int]:
        """New blocks for a sequence that was swapped out, to be filled by the caller. Raises NoRoom."""
        if sequence not in self._swapped:
            raise WorkbenchError(
                f"sequence {sequence!r} is not swapped out; those are {sorted(map(repr, self._swapped))}"
            )
        length = self._swapped[sequence]
        needed = self.blocks_for(length)
        if needed > self.num_available:
            raise NoRoom(needed, self.num_available, f"sequence {sequence!r}, to come back with {length:,} tokens,")
        del self._swapped[sequence]
        self.grow({sequence: length})
        return list(self._tables[sequence])

    # -- the rules -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the rules of the module's docstring. For tests: it looks at every block."""
        holders = [0] * self.num_blocks
        for sequence, table in self._tables.items():
            assert len(set(table)) == len(table), f"{sequence!r} names a block twice: {table}"
            assert len(table) == self.blocks_for(self._lengths[sequence]), f"{sequence!r}: {table}"
            for block in table:
                holders[block] += 1
        assert holders == self.references, f"references {self.references}, tables name {holders}"
        unheld = [block for block, count in enumerate(holders) if not count]
        assert sorted([*self._free, *self._idle]) == unheld, "a block is lost, or is free and held"
        known = () if self.prefix is None else [b for b in range(self.num_blocks) if b in self.prefix]
        assert all(block in known for block in self._idle), "an idle block that nobody can find"
        assert not any(block in known for block in self._free), "a free block is known to hold something"
        assert not set(self._swapped) & set(self._tables)

    # -- one block -----------------------------------------------------------------------------------------------

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._evict(block)
            self.evictions += 1
        self.references[block] = 1
        return block

    def _evict(self, block: int) -> None:
        """The block that was idle longest is about to be written."""
        self._forget(block)

    def _hold(self, block: int) -> None:
        self.references[block] += 1
        self._idle.pop(block, None)

    def _drop(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block]:
            return
        if self.prefix is not None and block in self.prefix:
            self._idle[block] = None
        else:
            self._free.append(block)

    def _forget(self, block: int) -> None:
        for lost in () if self.prefix is None else (block, *self.prefix.forget(block)):
            if lost in self._idle:
                del self._idle[lost]
                self._free.append(lost)

    def _check_new(self, sequence: Hashable) -> None:
        if sequence in self._tables or sequence in self._swapped:
            raise WorkbenchError(f"sequence {sequence!r} already exists; release it first or choose another name")

    def _length_of(self, sequence: Hashable) -> int:
        if sequence not in self._lengths:
            raise WorkbenchError(f"sequence {sequence!r} is not live here; live: {sorted(map(repr, self._lengths))}")
        return self._lengths[sequence]
