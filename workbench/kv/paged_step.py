"""One step's attention over a paged KV cache: which places each sequence reads, alone, together or where they lie.

Sequences that bring one token and are about as long as each other are gathered and attended together, on a CPU as many
at once as its cache holds: what was copied is read again from there. Kernels and the loop over blocks do the same
without the copy (`workbench.kv.paged_triton`, `workbench.kv.paged_blocks`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from workbench.kv.contiguous import RECTANGLE_WASTE
from workbench.kv.latent import hiding
from workbench.kv.paged_store import Store
from workbench.kv.paged_triton import KernelStep
from workbench.models.attention import causal_mask, fused_mask
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import absorbing_pays
from workbench.models.transfers import moved, sent

GATHERED_BYTES = 4 << 20  # at once on a CPU: more leaves its caches, and from 32 MiB on the system gives new pages


def spread(tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """[b, blocks] tables -> [b, blocks · block_size] places."""
    inside = torch.arange(block_size, device=tables.device)
    return (tables[:, :, None] * block_size + inside).flatten(1)


@dataclass
class Group:
    """Sequences of a batch that are attended over together: one with any number of new tokens, or several with one
    each."""

    rows: slice | torch.Tensor  # of the batch
    together: bool
    read_at: Mapping[int | None, torch.Tensor]  # by window: [S] places, or [b, S]
    masks: Mapping[int | None, torch.Tensor | None]
    tree: tuple[int, ...] | None
    absorbed: bool  # the form of latent attention


class HoldsBlocks(Protocol):
    """What a step needs of a `kv.paged.Paged`."""

    config: ModelConfig
    block_size: int
    max_tokens: int
    dtype: torch.dtype
    store: Store
    kernels: Any  # a `paged_triton.Kernels` or `paged_blocks.BlockLoop`, or None where places are gathered


class PagedStep:
    """What all layers share while one batch is processed: where rows are written, which places each sequence reads."""

    def __init__(
        self, kv: HoldsBlocks, batch: Batch, lengths: tuple[int, ...], tables: list[Sequence[int]], *, eager: bool
    ) -> None:
        self._eager = eager
        self._kv, self._device, self._dtype = kv, batch.token_ids.device, kv.dtype
        self._latent = kv.config.latent_attention
        self._windows = {kv.config.window_of(i) for i in kv.config.kv_layers}
        self._sinks = kv.config.attention_sinks
        sizes = [b - a for a, b in pairwise(batch.query_starts)]
        trees = batch.parents or (None,) * len(sizes)
        size = kv.block_size
        write_at = [
            table[at // size] * size + at % size
            for table, length, n in zip(tables, lengths, sizes)
            for at in range(length - n, length)
        ]
        [self.write_at] = sent([write_at], dtype=torch.int64, device=self._device)
        taken = kv.kernels.takes(kv.store, sizes, trees) if kv.kernels else []
        self.by_kernel = self._by_kernel(taken, batch, lengths, tables, sizes) if taken else None
        single = [i for i, n in enumerate(sizes) if n == 1 and trees[i] is None] if not taken else []
        if eager or len(single) < 2:
            single = []
        beside = {*single, *taken}
        self.groups = [
            self._alone(slice(a, b), lengths[i], tables[i], trees[i])
            for i, (a, b) in enumerate(pairwise(batch.query_starts))
            if i not in beside
        ]
        rows = batch.query_starts
        alike = _alike(single, lengths, self._max_gathered())
        # then they stay in the batch's order
        self.all_together = len(alike) == 1 and not self.groups and not taken
        for some in alike:
            some = sorted(some)
            self.groups.append(
                self._together([rows[i] for i in some], [lengths[i] for i in some], [tables[i] for i in some])
            )

    def _max_gathered(self) -> int | None:
        """Tokens that are gathered at once; None for all of a step, on a GPU."""
        if self._device.type != "cpu":
            return None
        per_layer = self._kv.config.expanded_kv_values_per_token() // len(self._kv.config.kv_layers)
        return GATHERED_BYTES // (per_layer * self._dtype.itemsize)

    def _by_kernel(
        self, taken: list[int], batch: Batch, lengths: Sequence[int], tables: list[Sequence[int]], sizes: list[int]
    ) -> KernelStep:
        """The kernels' input for these sequences and their rows, or for the whole batch."""
        rows = None
        if len(taken) < len(sizes):
            rows = [row for i in taken for row in range(*batch.query_starts[i : i + 2])]
        of_taken = [tables[i] for i in taken], [lengths[i] for i in taken], [sizes[i] for i in taken]
        return KernelStep.of(*of_taken, self._kv.block_size, self._kv.max_tokens, self._device, rows)

    def _alone(self, rows: slice, length: int, table: Sequence[int], tree: tuple[int, ...] | None) -> Group:
        n = rows.stop - rows.start
        at = spread(sent([table], dtype=torch.int64, device=self._device)[0][None], self._kv.block_size)[0, :length]
        absorbed = self._latent is not None and absorbing_pays(self._latent, n)
        masks: dict[int | None, torch.Tensor | None] = {}
        for window in self._windows:
            mask = None if self._eager else fused_mask(n, length, window, self._device, self._sinks, tree)
            if absorbed and not self._eager:
                if mask is None and n > 1:  # no causal mask is implied here
                    mask = causal_mask(n, length, window, self._device, self._sinks)
                mask = None if mask is None else hiding(~mask, self._dtype)[None, :, None, :]
            masks[window] = mask
        return Group(rows, False, dict.fromkeys(self._windows, at), masks, tree, absorbed)

    def _together(self, rows: list[int], lengths: list[int], tables: list[Sequence[int]]) -> Group:
        longest, shortest = max(lengths), min(lengths)
        blocks = max(map(len, tables))
        flat = array("q")  # torch converts a list of lists number by number, which is slow
        for table in tables:
            flat.extend(table)
            flat.extend([table[0]] * (blocks - len(table)))
        [padded] = moved([torch.frombuffer(flat, dtype=torch.int64)], self._device)
        places = spread(padded.view(len(tables), blocks), self._kv.block_size)[:, :longest]
        ends, at_rows = (one[:, None] for one in sent([lengths, rows], dtype=torch.int64, device=self._device))
        at = torch.arange(longest, device=self._device)[None, :]
        if shortest < longest:
            # only a sequence's own tokens are read, masked ones too
            places = torch.where(at < ends, places, places[:, :1])
        read_at: dict[int | None, torch.Tensor] = {}
        masks: dict[int | None, torch.Tensor | None] = {}
        for window in self._windows:
            first = 0 if window is None or self._sinks else max(0, shortest - window)
            read_at[window], masks[window] = places[:, first:], None
            if shortest < longest or longest - first > (window or longest):
                hidden = at[:, first:] >= ends
                if window is not None:
                    hidden = hidden | ((at[:, first:] < ends - window) & (at[:, first:] >= self._sinks))
                masks[window] = hiding(hidden, self._dtype)[:, None, None, :]
        return Group(at_rows[:, 0], True, read_at, masks, None, self._latent is not None)


def _alike(indices: list[int], lengths: Sequence[int], max_tokens: int | None = None) -> list[list[int]]:
    """Sequences in groups that, padded to their longest, read at most RECTANGLE_WASTE times what they need, and where
    they are more than one at most `max_tokens` tokens."""
    groups: list[list[int]] = []
    total = 0
    for i in sorted(indices, key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        padded = (len(groups[-1]) + 1) * longest if groups else 0
        if groups and padded <= RECTANGLE_WASTE * (total + lengths[i]) and (max_tokens is None or padded <= max_tokens):
            groups[-1].append(i)
            total += lengths[i]
        else:
            groups.append([i])
            total = lengths[i]
    return groups
