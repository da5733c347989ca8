"""The plumbing of lab 09's exercises: the state that answers change, and a kv made of the parts a learner wrote."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from workbench.errors import WorkbenchError, check_whole
from workbench.kv.blocks import NoRoom
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig


class Blocks:
    """`num_blocks` blocks, and how many hold each. A subclass writes `take`, `share` and `give_back`.

    references: a list, how many hold block i. free: a list of the blocks that nobody holds, in any order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = check_whole("num_blocks", num_blocks, 1)
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self.free)


class Pool(Blocks):
    """A right one, for the exercises that need one. Its callers make no mistakes, so it looks for none."""

    def take(self, count: int) -> list[int]:
        """So many blocks, held once each. Raises NoRoom."""
        if count > len(self.free):
            raise NoRoom(count, len(self.free), "this call")
        taken, self.free = self.free[len(self.free) - count :], self.free[: len(self.free) - count]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Each has one holder more."""
        for block in blocks:
            assert self.references[block] > 0, f"block {block} is free"
            self.references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Each has one holder fewer, and is free when that was the last."""
        for block in blocks:
            assert self.references[block] > 0, f"block {block} is free"
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)


class Tables:
    """The tables of several texts over one pool. A subclass writes `grow`, `fork` and `release`.

    tables: sequence -> list of its blocks, in the order of the text. lengths: sequence -> tokens.
    pool: who hands out the blocks, `take`, `share`, `give_back`.
    """

    def __init__(self, num_blocks: int, block_size: int, pool: Blocks | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = check_whole("block_size", block_size, 1)
        self.pool = Pool(num_blocks) if pool is None else pool
        self.tables: dict[Hashable, list[int]] = {}
        self.lengths: dict[Hashable, int] = {}

    @property
    def references(self) -> list[int]:
        return self.pool.references

    @property
    def num_free(self) -> int:
        return self.pool.num_free


@dataclass(frozen=True)
class Request:
    """One request at some moment, in tokens.

    prompt: of its prompt. written: of its answer so far. output: of its answer in the end, which nobody knows before.
    maximum: prompt and answer together can have no more.
    """

    prompt: int
    written: int
    output: int
    maximum: int


class PagedOf:
    """A kv of your tables and your attention; the contract of every kv (`workbench.kv.contract.KV`), without windows.

    tables: an empty one, like `Tables`. attend(q, keys, values, tables, lengths): attention of one query a row. A token
    of a prompt is a query that sees the text up to itself, so a prompt of n tokens is n rows over one table.
    Every place begins as NaN, so what is read before it was written shows. `most_blocks`: the most that were in use.
    """

    def __init__(self, config: ModelConfig, tables: Any, attend: Callable[..., torch.Tensor]) -> None:
        if config.sliding_window or config.latent_attention or config.kv_sources:
            raise WorkbenchError("this kv knows plain keys and values only; choose another model")
        self.config, self.books, self._attend = config, tables, attend
        self._keys: torch.Tensor | None = None  # [L, num_blocks, block_size, H_kv, D]
        self._values: torch.Tensor | None = None
        self._copies: list[tuple[int, int]] = []
        self.most_blocks = 0

    @property
    def lengths(self) -> dict[Hashable, int]:
        return self.books.lengths

    @property
    def blocks_in_use(self) -> int:
        return self.books.num_blocks - self.books.num_free

    def begin(self, batch: Batch) -> None:
        after = dict(zip(batch.sequences, batch.lengths_after()))
        for name, first in zip(batch.sequences, batch.first_positions):
            known = self.lengths.get(name, 0)
            if first != known:
                raise WorkbenchError(
                    f"{known} tokens of sequence {name!r} are remembered, so its next one stands at position {known}; "
                    f"this batch starts it at position {first}"
                )
        self._copies = self.books.grow(after)
        self.most_blocks = max(self.most_blocks, self.blocks_in_use)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self._keys is None:
            room = (self.config.num_layers, self.books.num_blocks, self.books.block_size, *k.shape[1:])
            self._keys, self._values = k.new_full(room, torch.nan), v.new_full(room, torch.nan)
        assert self._keys is not None and self._values is not None
        keys, values, size = self._keys[layer], self._values[layer], self.books.block_size
        for source, target in self._copies:
            keys[target], values[target] = keys[source], values[source]
        tables, lengths = [], []
        for name, first, (a, b) in zip(batch.sequences, batch.first_positions, pairwise(batch.query_starts)):
            table = self.books.tables[name]
            for row, place in zip(range(a, b), range(first, first + b - a)):
                keys[table[place // size], place % size] = k[row]
                values[table[place // size], place % size] = v[row]
                tables.append(table)
                lengths.append(place + 1)
        padded = torch.full((len(q), max(map(len, tables))), -1)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = torch.tensor(table)
        return self._attend(q, keys, values, padded, torch.tensor(lengths))

    def truncate(self, sequence: Hashable, length: int) -> None:
        if not 0 <= length <= self.lengths.get(sequence, -1):
            raise WorkbenchError(f"sequence {sequence!r} cannot be cut to {length} tokens; live: {self.lengths}")
        table = self.books.tables[sequence]
        keep = -(-length // self.books.block_size)
        self.books.pool.give_back(table[keep:])
        del table[keep:]
        self.lengths[sequence] = length

    def fork(self, sequence: Hashable, new_sequence: Hashable) -> None:
        self.books.fork(sequence, new_sequence)

    def release(self, sequence: Hashable) -> None:
        self.books.release(sequence)

    @property
    def _bytes_per_token(self) -> int:
        return (
            0
            if self._keys is None or self._values is None
            else (self._keys.nbytes + self._values.nbytes) // (self.books.num_blocks * self.books.block_size)
        )

    @property
    def bytes_in_use(self) -> int:
        """Of whole blocks, a shared one counted once."""
        return self.blocks_in_use * self.books.block_size * self._bytes_per_token

    @property
    def bytes_reserved(self) -> int:
        return self.books.num_blocks * self.books.block_size * self._bytes_per_token
