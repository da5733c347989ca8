"""Which cell of a state cache holds which state, and who needs it. No torch, no tensors: a cell is a number.

A cell holds the states of all layers after so many tokens of a sequence. It is written once and then only read, so it
can be shared; a step reads one cell and writes the next. Three hold cells:

    tail      of a sequence: its newest state, those of up to `rewind` tokens before, and the one before its last batch
    edges     of a sequence: states at block edges, until their block is in the prefix index
    blocks    in the prefix index: the state after the block, as long as the index knows the block

    rewind = 2, block size 4      tokens  1 2 3 4 5 6 7 8 9        tail 7 8 9      edges 4 8
    then 3 drafted tokens come    tokens  1 2 3 4 5 6 7 8 9 a b c  tail 9 a b c    a cut to 9, a or b is a lookup

Cell 0 is the empty state, and is never written. `rewind + 2` cells are there for every sequence, so a batch never lacks
one; edges and blocks have `max_checkpoints` cells beside them, and the longest unused of these is given up for a new
one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

EMPTY = 0


class Piece(NamedTuple):
    """Tokens of a batch up to a length, and the cell for the state after them."""

    end: int
    cell: int


class StateCells:
    """Cells for up to `max_sequences` sequences; see the module. Lengths are numbers of tokens."""

    def __init__(self, max_sequences: int, rewind: int, max_checkpoints: int) -> None:
        self.rewind, self.max_checkpoints = rewind, max_checkpoints
        self.num_cells = 1 + max_sequences * (rewind + 2) + max_checkpoints
        self.references = [1] + [0] * (self.num_cells - 1)
        self._free = list(range(self.num_cells - 1, 0, -1))
        self._tails: dict[Hashable, dict[int, int]] = {}  # length -> cell, ascending; none at length 0
        self._edges: dict[Hashable, dict[int, int]] = {}  # the same
        self._blocks: dict[int, int] = {}  # block -> cell
        # edges as (sequence, length) and blocks as (block,): longest unused first
        self._unused: OrderedDict[tuple[Hashable, ...], None] = OrderedDict()

    # -- reading -------------------------------------------------------------------------------------------------

    def cell_at(self, sequence: Hashable, length: int) -> int | None:
        """The cell of a sequence's state after so many tokens; None where it is not kept."""
        if length == 0:
            return EMPTY
        return self._tails.get(sequence, {}).get(length, self._edges.get(sequence, {}).get(length))

    def lengths_kept(self, sequence: Hashable) -> list[int]:
        """Lengths that a sequence can be cut to, ascending."""
        return sorted({0, *self._tails.get(sequence, ()), *self._edges.get(sequence, ())})

    def of_block(self, block: int) -> int | None:
        """The cell of the state after a block of the prefix index."""
        return self._blocks.get(block)

    @property
    def num_checkpoints(self) -> int:
        """Edges and blocks that hold a cell."""
        return len(self._unused)

    def num_held_by_sequences(self) -> int:
        """Cells that a sequence holds, a shared one once."""
        return len({cell for held in (self._tails, self._edges) for cells in held.values() for cell in cells.values()})

    def num_held(self) -> int:
        """Cells that are held at all."""
        return self.num_cells - 1 - len(self._free)

    # -- a sequence's life -----------------------------------------------------------------------------------------

    def open(self, sequence: Hashable, length: int, block: int | None) -> None:
        """A sequence starts with the state after this block, of so many tokens; None: with the empty one."""
        self._tails[sequence], self._edges[sequence] = {}, {}
        if block is not None:
            self._tails[sequence][length] = self._hold(self._blocks[block])
            self._unused.move_to_end((block,))

    def grow(
        self, spans: Mapping[Hashable, tuple[int, int]], edges: Mapping[Hashable, Sequence[int]]
    ) -> dict[Hashable, list[Piece]]:
        """Cells for a batch that takes each sequence from one length to another: the pieces that its tokens are cut
        into, in order.

        edges: lengths of each between these that are to be kept as checkpoints, as many as there is room for.
        """
        wanted = self._edges_to_keep(edges)
        while wanted and len(self._unused) + len(wanted) > self.max_checkpoints:
            self._give_up(next(iter(self._unused)))
        for sequence, (first, after) in spans.items():
            tail = self._tails.setdefault(sequence, {})
            self._edges.setdefault(sequence, {})
            for length in [one for one in tail if one < after - self.rewind and one != first]:
                self._drop(tail.pop(length))
        plan = {}
        for sequence, (first, after) in spans.items():
            ends = range(first + 1, after + 1) if after - first <= self.rewind + 1 else (after,)
            tail, own_edges = self._tails[sequence], self._edges[sequence]
            at_edges = {length for name, length in wanted if name == sequence}
            pieces = []
            for end in sorted({*ends, *at_edges}):
                cell = self._take()
                if end in ends:
                    tail[end] = self._hold(cell)
                if end in at_edges:
                    own_edges[end] = self._hold(cell)
                    self._unused[sequence, end] = None
                pieces.append(Piece(end, cell))
            plan[sequence] = pieces
        return plan

    def cut(self, sequence: Hashable, length: int) -> None:
        """Forget the states after more tokens. The caller has seen that this length has one."""
        tail, edges = self._tails[sequence], self._edges[sequence]
        if length and length not in tail:  # it goes on from a checkpoint
            tail[length] = self._hold(edges[length])
            self._tails[sequence] = tail = dict(sorted(tail.items()))
        for longer in [one for one in tail if one > length]:
            self._drop(tail.pop(longer))
        for longer in [one for one in edges if one > length]:
            self._give_up((sequence, longer))

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        """A new sequence with the same tail; a shared cell is never written."""
        self._tails[new_sequence] = {length: self._hold(cell) for length, cell in self._tails[sequence].items()}
        self._edges[new_sequence] = {}

    def adopt(self, sequence: Hashable, length: int) -> int:
        """A new sequence of so many tokens; returns the cell for its state, which the caller writes."""
        self.open(sequence, 0, None)
        if not length:
            return EMPTY
        self._tails[sequence][length] = self._hold(cell := self._take())
        return cell

    def release(self, sequence: Hashable) -> None:
        """End a sequence; does nothing for an unknown one."""
        if sequence in self._tails:
            self.cut(sequence, 0)
            del self._tails[sequence], self._edges[sequence]

    # -- blocks ------------------------------------------------------------------------------------------------------

    def remember(self, sequence: Hashable, blocks: Mapping[int, int]) -> None:
        """The states at these lengths, where the sequence has them, are those after these blocks of the index."""
        edges = self._edges[sequence]
        for length in [one for one in edges if one in blocks]:
            block, cell = blocks[length], self._hold(edges[length])
            self._give_up((sequence, length))
            if block in self._blocks:
                self._drop(cell)
            else:
                self._blocks[block] = cell
            self._unused[block,] = None
            self._unused.move_to_end((block,))

    def forget(self, block: int) -> None:
        """The index does not know this block any more."""
        if block in self._blocks:
            self._give_up((block,))

    def check(self, lengths: Mapping[Hashable, int]) -> None:
        """Assert that every cell is held as often as it is named, and that each sequence of so many tokens has its
        newest state. For tests."""
        held = [0] * self.num_cells
        held[EMPTY] = 1
        for cells in (*self._tails.values(), *self._edges.values(), self._blocks):
            for cell in cells.values():
                held[cell] += 1
        assert held == self.references, f"references {self.references}, named {held}"
        assert sorted(self._free) == [cell for cell, count in enumerate(held) if not count], "a cell is lost"
        named = {(name, length) for name, edges in self._edges.items() for length in edges}
        assert set(self._unused) == named | {(block,) for block in self._blocks}
        assert len(self._unused) <= self.max_checkpoints
        assert set(self._tails) == set(lengths) == set(self._edges), f"{set(self._tails)}, live {set(lengths)}"
        for sequence, tail in self._tails.items():
            assert max(tail, default=0) == lengths[sequence], f"{sequence!r}: {tail}, {lengths[sequence]} tokens"
            assert len(tail) <= self.rewind + 2

    # -- one cell ------------------------------------------------------------------------------------------------------

    def _edges_to_keep(self, edges: Mapping[Hashable, Sequence[int]]) -> list[tuple[Hashable, int]]:
        """As many edges as may be kept: the last of each sequence, then those before."""
        by_depth = [(depth, name, length) for name, of in edges.items() for depth, length in enumerate(reversed(of))]
        by_depth.sort(key=lambda one: one[0])
        return [(name, length) for _, name, length in by_depth[: self.max_checkpoints]]

    def _give_up(self, holder: tuple[Hashable, ...]) -> None:
        """An edge (sequence, length) or a block (block,) holds no cell any more."""
        del self._unused[holder]
        if len(holder) == 1:
            [block] = holder
            self._drop(self._blocks.pop(block))  # type: ignore[call-overload]
        else:
            sequence, length = holder
            self._drop(self._edges[sequence].pop(length))  # type: ignore[call-overload]

    def _take(self) -> int:
        return self._free.pop()  # never empty, see the module

    def _hold(self, cell: int) -> int:
        self.references[cell] += 1
        return cell

    def _drop(self, cell: int) -> None:
        self.references[cell] -= 1
        if not self.references[cell]:
            self._free.append(cell)
