"""States of constant size, beside paged keys and values: for models with state layers, alone or among attention.

    a state layer      [cells, …] for each name of its state     a step reads a sequence's cell and writes the next one
    an attention layer blocks, as in `kv.paged`                   (a pure state model has blocks of 0 bytes, as books)

A state is a sum over the whole text: it cannot be cut. So states are kept at some lengths (`kv.state_cells` says at
which), and a sequence can be cut to these: back through its newest `rewind` tokens, where they came in batches of at
most `rewind + 1`, to its length before its last batch, to block edges, and to 0. A batch never writes to a cell that
somebody reads, so an interrupted one is undone by forgetting its cells, and a fork copies nothing.

How a batch goes through a state layer, in rounds: what comes in one token at a time goes through `mixer.step`, all
sequences together; the rest, sequence by sequence, through `mixer.chunk`, cut where a state is to be kept.

    A  one token        ┐                          round 1   step(A, B₁)   chunk(C up to its block edge)
    B  two drafted ones ┤  of one batch             round 2   step(B₂)      chunk(rest of C)
    C  a prompt         ┘

Prefix cache: a block of keys is of use only with the state after it. So `open` finds a prefix up to the last block that
has one. Marconi (Pan et al., arXiv 2411.19379) looks at what such checkpoints cost and which ones are worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from workbench.errors import WorkbenchError
from workbench.instruments.memory import require_bytes
from workbench.kv.blocks import BlockTables
from workbench.kv.contract import PrefixIndex
from workbench.kv.paged import Paged
from workbench.kv.paged_static import StaticPaged
from workbench.kv.prefix import prefix_index
from workbench.kv.slots import Places, check_size, stored_dtype
from workbench.kv.state_cells import EMPTY, Piece, StateCells
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.mixers.contract import State as OneState
from workbench.models.mixers.contract import StateMixer, state_dtype
from workbench.models.transfers import sent

REWIND = 16  # tokens that can be cut again, unless asked otherwise
CHECKPOINTS = 16  # of the prefix cache, a sequence of room
EDGE_BLOCKS = 8  # a prompt's state is kept after every so many blocks


class _WithStates:
    """A prefix index; a block that it forgets takes its state along."""

    def __init__(self, index: PrefixIndex, cells: StateCells) -> None:
        self._index, self._cells = index, cells
        self.match, self.insert = index.match, index.insert

    def forget(self, block: int) -> list[int]:
        lost = self._index.forget(block)
        for one in (block, *lost):
            self._cells.forget(one)
        return lost

    def __contains__(self, block: int) -> bool:
        return block in self._index

    def __len__(self) -> int:
        return len(self._index)


class StateTables(BlockTables):
    """Block tables whose prefix cache goes as far as there is a state to start from."""

    def __init__(self, cells: StateCells, num_blocks: int, block_size: int, prefix: str | None) -> None:
        index = prefix_index(prefix, block_size)
        super().__init__(num_blocks, block_size, None if index is None else _WithStates(index, cells))
        self.cells = cells

    def find(self, token_ids: Sequence[int], tenant: str | bytes = "") -> list[int]:
        blocks = super().find(token_ids, tenant)
        while blocks and self.cells.of_block(blocks[-1]) is None:
            blocks.pop()
        return blocks


class State(Paged):
    """`Paged` for models with state layers; see the module.

    rewind: how many of the newest tokens can be truncated. max_checkpoints: states kept at block edges, for the prefix
    cache; default 16 a sequence, 0 without a prefix cache. edge_blocks: the last block edge of every batch is kept, and
    every so many blocks.
    The states are float32 (float64 for a float64 model), whatever dtype keys and values are stored in.
    Takes no trees. Raises WorkbenchError for a model without state layers, and as `Paged`.
    """

    holds_trees, holds_states = False, True

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_sequences: int = 1,
        max_tokens: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        prefix: str | None = None,
        format: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str = "auto",
        rewind: int = REWIND,
        max_checkpoints: int | None = None,
        edge_blocks: int = EDGE_BLOCKS,
    ) -> None:
        _require_states(config)
        check_size("rewind", rewind, None, minimum=0)
        check_size("edge_blocks", edge_blocks, None)
        check_size("max_sequences", max_sequences, None)
        if max_checkpoints is None:
            max_checkpoints = 0 if prefix is None else CHECKPOINTS * max_sequences
        elif prefix is None:
            raise WorkbenchError(
                f"max_checkpoints={max_checkpoints!r:.80} are states for the prefix cache, and there is none; give"
                ' prefix="hash" or "radix", or leave it out'
            )
        check_size("max_checkpoints", max_checkpoints, None, minimum=0)
        if not config.kv_layers and format is not None:
            raise WorkbenchError(f"format={format!r:.80} is for keys and values, and this model has none; leave it out")
        if not config.kv_layers and attention == "auto":
            attention = "sdpa"  # of no layer
        cells = StateCells(max_sequences, rewind, max_checkpoints)
        wide = state_dtype(stored_dtype(dtype, device))
        self.bytes_per_state = config.state_values() * wide.itemsize
        what = f"{cells.num_cells:,} states of {self.bytes_per_state:,} bytes"
        require_bytes(cells.num_cells * self.bytes_per_state, str(device), what)
        super().__init__(
            config,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix=prefix,
            format=format,
            dtype=dtype,
            device=device,
            attention=attention,
        )
        self.cells, self.edge_blocks = cells, edge_blocks
        self.tables: StateTables = StateTables(cells, self.num_blocks, block_size, prefix)
        self.rewind = rewind
        self.states: dict[int, OneState] = {
            layer: {
                name: torch.zeros((cells.num_cells, *shape), dtype=wide, device=device)
                for name, shape in config.state_shapes(layer).items()
            }
            for layer in config.state_layers
        }
        self._without_empty = set(self.states)  # layers whose cell 0 is not written yet
        self._pieces: dict[Hashable, list[Piece]] = {}  # of the batch that `begin` accepted
        self._rounds: list[_Round] = []
        self._swapped_states: dict[Hashable, dict[int, OneState]] = {}  # on the host

    @staticmethod
    def reserved_bytes_for(
        config: ModelConfig,
        *,
        max_sequences: int,
        max_tokens: int,
        dtype: torch.dtype,
        block_size: int = 16,
        format: str | None = None,
        rewind: int = REWIND,
        max_checkpoints: int = 0,
    ) -> int:
        """As `Paged`, and for each sequence rewind + 2 states, for each checkpoint 1, and the empty one."""
        _require_states(config)
        blocks = Paged.reserved_bytes_for(
            config,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            dtype=dtype,
            block_size=block_size,
            format=format,
        )
        cells = StateCells(max_sequences, rewind, max_checkpoints).num_cells
        return blocks + cells * config.state_values() * state_dtype(dtype).itemsize

    @property
    def bytes_in_use(self) -> int:
        """Bytes of places that hold a token, and of the states that live sequences hold; what is shared counts
        once."""
        return super().bytes_in_use + self.cells.num_held_by_sequences() * self.bytes_per_state

    @property
    def bytes_reserved(self) -> int:
        return super().bytes_reserved + sum(t.nbytes for states in self.states.values() for t in states.values())

    def draft_room(self, sequence: Hashable) -> int:
        """Also bounded by `rewind`."""
        return min(super().draft_room(sequence), self.rewind)

    # -- sequences -------------------------------------------------------------------------------------------------

    def open(self, sequence: Hashable, token_ids: Sequence[int], tenant: str | bytes = "") -> int:
        """As `Paged`, up to the last block edge with a state."""
        hit = super().open(sequence, token_ids, tenant)
        self.cells.open(sequence, hit, self.tables.tables[sequence][-1] if hit else None)
        return hit

    def remember(self, sequence: Hashable, token_ids: Sequence[int], tenant: str | bytes = "") -> None:
        """As `Paged`; the states at the edges of these blocks go to the prefix cache."""
        super().remember(sequence, token_ids, tenant)
        index, table, size = self.tables.prefix, self.tables.tables[sequence], self.block_size
        if index is None:
            return
        full = min(self._lengths[sequence], len(token_ids)) // size
        ends = [end for end in self.cells.lengths_kept(sequence) if end and end % size == 0 and end // size <= full]
        if not ends:
            return
        blocks: Sequence[int] = table
        if any(table[end // size - 1] not in index for end in ends):  # another sequence's blocks hold the same
            blocks = index.match(token_ids[: full * size], tenant)
        known = {end: blocks[end // size - 1] for end in ends if end // size <= len(blocks)}
        self.cells.remember(sequence, known)

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        """As `Paged`; states are shared too. Refuses while a step is under way, and then changes nothing."""
        if self._batch is not None and self._layers_done < self.config.num_layers:
            self._length_of(sequence)
            raise WorkbenchError(
                f"sequence {sequence!r} cannot be forked while a step is under way, which has been through"
                f" {self._layers_done} of {self.config.num_layers} layers; fork it after the step. If the step was"
                " interrupted, the next `begin` or `truncate` undoes it"
            )
        super().fork(sequence, new_sequence)
        self.cells.fork(sequence, new_sequence)

    def release(self, sequence: Hashable) -> None:
        super().release(sequence)
        self.cells.release(sequence)
        self._swapped_states.pop(sequence, None)

    def swap_out(self, sequence: Hashable) -> int:
        """As `Paged`; the newest state goes along, older ones are given up."""
        self._drop_unfinished()
        cell = self.cells.cell_at(sequence, self._length_of(sequence))
        assert cell is not None, "the newest state is kept"
        contents: dict[int, OneState] = {}
        if cell != EMPTY:
            contents = {
                layer: {name: stored[cell].to("cpu", copy=True) for name, stored in states.items()}
                for layer, states in self.states.items()
            }
        moved = super().swap_out(sequence)
        self.cells.release(sequence)
        self._swapped_states[sequence] = contents
        return moved + (self.bytes_per_state if contents else 0)

    def swap_in(self, sequence: Hashable) -> int:
        moved = super().swap_in(sequence)
        length, contents = self._lengths[sequence], self._swapped_states.pop(sequence)
        cell = self.cells.adopt(sequence, length)
        for layer, states in contents.items():
            for name, kept in states.items():
                self.states[layer][name][cell] = kept.to(self.states[layer][name].device)
        return moved + (self.bytes_per_state if contents else 0)

    # -- what Slots asks for ---------------------------------------------------------------------------------------

    def _take_room(self, batch: Batch, slots: list[int], after: tuple[int, ...]) -> None:
        super()._take_room(batch, slots, after)
        spans = dict(zip(batch.sequences, zip(batch.first_positions, after)))
        self._pieces = self.cells.grow(spans, {name: self._edges(*span) for name, span in spans.items()})

    def _edges(self, first: int, after: int) -> list[int]:
        """Block edges in a batch from one length to another whose states are checkpoints, ascending."""
        last = after // self.block_size * self.block_size
        if last <= first or not self.cells.max_checkpoints:
            return []
        apart = self.edge_blocks * self.block_size
        return sorted({*range((first // apart + 1) * apart, last, apart), last})

    def _open(self, batch: Batch, places: Places) -> None:
        if self.config.kv_layers:
            super()._open(batch, places)
        starts = zip(batch.sequences, batch.first_positions)
        sources = {name: cell for name, first in starts if (cell := self.cells.cell_at(name, first)) is not None}
        self._rounds = _rounds(batch, self._pieces, sources, self.store.tensors[0].device)

    def _forget(self, slot: int, start: int, end: int) -> None:
        super()._forget(slot, start, end)
        self.cells.cut(self._owner[slot], start)

    def _why_not_cut(self, sequence: Hashable, length: int) -> str:
        if self.cells.cell_at(sequence, length) is not None:
            return ""
        return (
            f"sequence {sequence!r} has {self._lengths[sequence]:,} tokens, and a state cannot be cut: it can go back"
            f" to lengths whose state was kept, {_listed(self.cells.lengths_kept(sequence))}, got {length:,}. Cut it to"
            f" one of these and send the tokens after it again, or make the cache with a larger rewind (now"
            f" {self.rewind})"
        )

    def _why_no_tree(self, slot: int | None, length: int, count: int) -> str:
        return (
            "kv 'state' keeps one state after each token of a text, and a tree would need one for each branch; send a"
            " chain"
        )

    # -- state layers --------------------------------------------------------------------------------------------------

    def advance(self, layer: int, mixer: StateMixer, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [N, d] through the mixer of a state layer, each sequence from its own state -> [N, d]."""
        self._enter(layer, batch, self._why_no_state(layer, mixer))
        self._layers_done = layer  # not through this one yet, should the mixer raise
        states, wide = self.states[layer], state_dtype(x.dtype)
        if layer in self._without_empty:
            for name, value in mixer.initial_state(x).items():
                states[name][EMPTY] = value
            self._without_empty.remove(layer)
        parts: list[tuple[slice | torch.Tensor, torch.Tensor]] = []  # rows of the batch, and what came of them
        for one in self._rounds:
            if one.single is not None:
                rows, sources, targets = one.single
                before = {name: stored.index_select(0, sources).to(wide) for name, stored in states.items()}
                y, after = mixer.step(x if one.is_batch else x[rows], before)
                for name, stored in states.items():
                    stored.index_copy_(0, targets, after[name].to(stored.dtype))
                parts.append((rows, y))
            for cut, source, target in one.chunks:
                y, after = mixer.chunk(x[cut], {name: stored[source].to(wide) for name, stored in states.items()})
                for name, stored in states.items():
                    stored[target] = after[name]
                parts.append((cut, y))
        self._layers_done = layer + 1
        if len(parts) == 1:  # in the batch's order
            return parts[0][1]
        out = parts[0][1].new_empty(x.shape)
        for where, y in parts:
            out[where] = y
        return out

    def _why_no_state(self, layer: int, mixer: StateMixer) -> str:
        """Why the state of this mixer does not belong here, or ""."""
        if layer not in self.states:
            kind = "no layer of this model" if layer >= self.config.num_layers else "an attention layer"
            return f"layer {layer} came with a state, and here it is {kind}; was the cache made with another config?"
        kept = {name: tuple(stored.shape[1:]) for name, stored in self.states[layer].items()}
        came = {name: tuple(shape) for name, shape in mixer.state_shapes().items()}
        if came != kept:
            return f"layer {layer} keeps a state of {kept}, got {came}; was the cache made with another model's config?"
        return ""


@dataclass(frozen=True)
class _Round:
    """What goes through a mixer at once: one token each of some sequences, then chunks of others."""

    single: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # [b] rows of the batch, cells to read, to write
    is_batch: bool  # these rows are the whole batch, in order
    chunks: list[tuple[slice, int, int]]  # rows, cell to read, cell to write


def _rounds(
    batch: Batch, pieces: Mapping[Hashable, list[Piece]], sources: Mapping[Hashable, int], device: torch.device
) -> list[_Round]:
    """Piece n of each sequence in round n. sources: the cell that each sequence starts from."""
    count = max(map(len, pieces.values()))
    singles: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    chunks: list[list[tuple[slice, int, int]]] = [[] for _ in range(count)]
    for name, length, row in zip(batch.sequences, batch.first_positions, batch.query_starts):
        source = sources[name]
        for at, (end, cell) in enumerate(pieces[name]):
            if end == length + 1:
                singles[at].append((row, source, cell))
            else:
                chunks[at].append((slice(row, row + end - length), source, cell))
            row, length, source = row + end - length, end, cell
    found = []
    for some, longer in zip(singles, chunks):
        single = None
        if some:
            rows, read, written = sent([[*column] for column in zip(*some)], dtype=torch.int64, device=device)
            single = rows, read, written
        found.append(_Round(single, len(some) == batch.num_tokens, longer))
    return found


def paged_kind(config: ModelConfig, *, recorded: bool, rewind: int) -> Callable[..., Paged]:
    """The paged cache of an engine: with states where the model has some, and then with so many tokens of rewind; else
    one whose steps can be recorded, or a plain one."""
    if config.state_layers:
        return partial(State, rewind=rewind)
    return StaticPaged if recorded else Paged


def _require_states(config: ModelConfig) -> None:
    if not config.state_layers:
        raise WorkbenchError(
            f"kv 'state' is for models with state layers, and this model ({config.family}) has attention in every"
            " layer; use kv 'paged' or 'contiguous'"
        )


def _listed(lengths: list[int]) -> str:
    """0, 5 … 9 and 12"""
    runs: list[list[int]] = []
    for length in lengths:
        if runs and length == runs[-1][-1] + 1:
            runs[-1].append(length)
        else:
            runs.append([length])
    words = [f"{run[0]:,} … {run[-1]:,}" if len(run) > 2 else ", ".join(f"{n:,}" for n in run) for run in runs]
    return ", ".join(words)
