"""Keys and values in three tiers: a batch's first sequences lie on the device, the next in the host, the last on disk.

    prompts' step   attention on the device for all; what does not belong there is stored away afterwards
    decode step     attention where the keys and values lie: on the device, or in the host, to which the new query, key
                    and value go and from which the result comes. What lies on disk is read into the host first, a
                    layer of a batch at a time: while one is computed with, the loader thread reads the next.

FlexGen attends in the host, because a query is far smaller than all the keys that it looks at (§4.1). The model knows
nothing of this: a `TieredCache` is its kv.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path

import torch

from workbench.kv.contiguous import Contiguous
from workbench.kv.slots import stored_dtype
from workbench.models.attention import sdpa_attention
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections
from workbench.offload.disk import DiskFile, Memory, nameless, whole_blocks
from workbench.offload.traffic import DOWN, READ, UP, WRITE, Traffic

Rows = torch.Tensor  # [N, H, D]


def part_of(batch: Batch, first: int, last: int) -> Batch:
    """The sequences first … last − 1 of a batch of texts."""
    a, b = batch.query_starts[first], batch.query_starts[last]
    return Batch(
        batch.token_ids[a:b],
        batch.positions[a:b],
        batch.sequences[first:last],
        tuple(start - a for start in batch.query_starts[first : last + 1]),
        batch.first_positions[first:last],
        None,
    )


class TieredCache:
    """The kv of one batch, whose sequences all have as many tokens. split: how many lie on device, host and disk."""

    def __init__(
        self,
        config: ModelConfig,
        split: tuple[int, int, int],
        max_tokens: int,
        dtype: torch.dtype,
        traffic: Traffic,
        disk: DiskCache | None = None,
        number: int = 0,
    ) -> None:
        self.config, self.dtype, self._traffic = config, stored_dtype(dtype, "cpu"), traffic
        self._ends = (split[0], split[0] + split[1], sum(split))
        self._device, self._host = (
            Contiguous(config, max_sequences=count, max_tokens=max_tokens, dtype=dtype) if count else None
            for count in split[:2]
        )
        self._disk, self._number = disk, number
        self._parts: list[Batch | None] = []
        self._past = 0

    def begin(self, batch: Batch) -> None:
        assert len(batch.sequences) == self._ends[-1] and len(set(batch.first_positions)) == 1
        self._past = batch.first_positions[0]
        self._parts = [part_of(batch, a, b) if a < b else None for a, b in pairwise((0, *self._ends))]
        for kv, part in zip((self._device, self._host), self._parts):
            if kv is not None and part is not None:
                kv.begin(part)

    def release(self) -> None:
        """Forget every sequence."""
        for kv in (self._device, self._host):
            for name in tuple(kv.lengths) if kv is not None else ():
                assert kv is not None
                kv.release(name)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        assert k is not None and v is not None and up is None, "checked by the executor"
        starts = (0, *(batch.query_starts[end] for end in self._ends))
        sides = (self._on_device, self._in_host, self._on_disk)
        parts = [
            attend(layer, q[a:b], k[a:b], v[a:b], part)
            for attend, part, (a, b) in zip(sides, self._parts, pairwise(starts))
            if part is not None
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _on_device(self, layer: int, q: Rows, k: Rows, v: Rows, part: Batch) -> Rows:
        assert self._device is not None
        return self._device.attend(layer, q, k, v, part)

    def _in_host(self, layer: int, q: Rows, k: Rows, v: Rows, part: Batch) -> Rows:
        assert self._host is not None
        if not self._past:
            with self._traffic.over(DOWN, k.nbytes + v.nbytes):
                self._host.put(layer, k, v, part)
            return self._of_prompts(layer, q, k, v, part)
        q, k, v = self._down(q, k, v)
        return self._up(self._host.attend(layer, q, k, v, part))

    def _on_disk(self, layer: int, q: Rows, k: Rows, v: Rows, part: Batch) -> Rows:
        assert self._disk is not None
        count = len(part.sequences)
        if not self._past:
            with self._traffic.over(DOWN, k.nbytes + v.nbytes):
                rows = self._disk.gathered(k, v, count)
            self._disk.write(layer, self._number, 0, rows, count)
            return self._of_prompts(layer, q, k, v, part)
        q, k, v = self._down(q, k, v)
        rows = self._disk.gathered(k, v, count)
        keys, values = self._disk.with_new(layer, self._number, self._past, rows)  # [tokens, sequences, H_kv, D]
        self._disk.write(layer, self._number, self._past, rows, count)
        parts = [self._look(layer, q[i : i + 1], keys[:, i], values[:, i]) for i in range(count)]
        return self._up(torch.cat(parts))

    def _of_prompts(self, layer: int, q: Rows, k: Rows, v: Rows, part: Batch) -> Rows:
        k, v = k.to(self.dtype), v.to(self.dtype)
        return torch.cat([self._look(layer, q[a:b], k[a:b], v[a:b]) for a, b in pairwise(part.query_starts)])

    def _look(self, layer: int, q: Rows, k: Rows, v: Rows) -> Rows:
        window, sinks = self.config.window_of(layer), self.config.attention_sinks
        q_as_stored = q.to(k.dtype)
        return sdpa_attention(q_as_stored, k, v, scale=self.config.attention_scale, window=window, sinks=sinks).to(
            q.dtype
        )

    def _down(self, *rows: Rows) -> list[Rows]:
        with self._traffic.over(DOWN, sum(one.nbytes for one in rows)):
            return [one.clone() for one in rows]

    def _up(self, rows: Rows) -> Rows:
        with self._traffic.over(UP, rows.nbytes):
            return rows.clone()


class DiskCache:
    """Keys and values of a block's sequences that lie on disk: for each layer and batch the tokens one after the other.

    A token is [2, sequences, H_kv, D], filled up to whole blocks. Two buffers in the host hold a layer of a batch each;
    the loader reads the next in the order of the block schedule, but where a step has a single visit.
    """

    def __init__(
        self,
        config: ModelConfig,
        sequences: Sequence[int],
        max_tokens: int,
        dtype: torch.dtype,
        traffic: Traffic,
        folder: Path,
        direct: bool | None = None,
    ) -> None:
        self._config, self._traffic = config, traffic
        self.dtype = stored_dtype(dtype, "cpu")
        self._sequences = list(sequences)
        pair = 2 * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        self._token_bytes = [count * pair for count in sequences]
        self._strides = [whole_blocks(size) for size in self._token_bytes]
        places, end = {}, 0
        for layer in range(config.num_layers):
            for batch, stride in enumerate(self._strides):
                places[layer, batch] = end
                end += stride * max_tokens
        self._places, largest = places, max(self._strides) * max_tokens
        self._file: DiskFile | None = nameless(folder, end, direct)
        self._buffers = [Memory(largest) for _ in range(2)]
        self._write_buffer = Memory(largest)
        self._loader = ThreadPoolExecutor(1, "offload cache")
        visits = [(layer, batch) for layer in range(config.num_layers) for batch, n in enumerate(sequences) if n]
        self._following = dict(zip(visits, [*visits[1:], visits[0]]))
        self._ahead: tuple[tuple[int, int], int, int, Future[None]] | None = None  # visit, tokens, buffer, its read
        self._reads, self._last = 0, 0

    def gathered(self, k: Rows, v: Rows, count: int) -> torch.Tensor:
        """[tokens, 2, sequences, H_kv, D] of rows that are sequences one after the other."""
        shape = (count, -1, self._config.num_kv_heads, self._config.head_dim)
        return torch.stack([rows.view(shape).transpose(0, 1) for rows in (k, v)], dim=1).to(self.dtype)

    def write(self, layer: int, batch: int, first: int, rows: torch.Tensor, count: int) -> None:
        """rows [tokens, 2, count, H_kv, D], the tokens from position `first` on."""
        tokens, stride = len(rows), self._strides[batch]
        self._tokens(self._write_buffer, batch, tokens)[:] = rows
        assert self._file is not None
        with self._traffic.over(WRITE, tokens * self._token_bytes[batch]):
            self._file.write(self._write_buffer, tokens * stride, self._places[layer, batch] + first * stride)

    def with_new(self, layer: int, batch: int, past: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [past + 1, sequences, H_kv, D] of this visit, views of a buffer that stays until the visit
        after the next; then the next visit's begin to come."""
        visit = (layer, batch)
        if self._ahead is None or self._ahead[:2] != (visit, past):
            self._submit(visit, past)
        assert self._ahead is not None
        buffer, load = self._ahead[2:]
        load.result()
        following, self._ahead = self._following[visit], None
        past_then = past + (following <= visit)
        if following != visit and past_then <= self._last:  # a single visit's new token is not written yet
            self._submit(following, past_then)
        every = self._tokens(self._buffers[buffer], batch, past + 1)
        every[past] = rows[0]
        return every[:, 0], every[:, 1]

    def _tokens(self, memory: Memory, batch: int, tokens: int) -> torch.Tensor:
        """[tokens, 2, sequences, H_kv, D], a view of memory."""
        values = self._strides[batch] // self.dtype.itemsize
        shape = (2, self._sequences[batch], self._config.num_kv_heads, self._config.head_dim)
        used = self._token_bytes[batch] // self.dtype.itemsize
        return memory.at(0, (tokens, values), self.dtype)[:, :used].view(tokens, *shape)

    def _submit(self, visit: tuple[int, int], past: int) -> None:
        buffer = self._reads % 2
        self._reads += 1
        self._ahead = (visit, past, buffer, self._loader.submit(self._read, visit, past, buffer))

    def _read(self, visit: tuple[int, int], past: int, buffer: int) -> None:
        """On the loader's thread."""
        batch, place = visit[1], self._places[visit]
        assert self._file is not None
        with self._traffic.over(READ, past * self._token_bytes[batch]):
            self._file.read(place, place + past * self._strides[batch], self._buffers[buffer], 0)

    def drop(self) -> None:
        """Wait for what an interrupted run reads ahead, if anything, and forget it."""
        if self._ahead is not None:
            wait([self._ahead[3]])
        self._ahead = None

    def begin(self, last: int) -> None:
        """A run whose last step looks back on so many tokens."""
        self._last = last

    def close(self) -> None:
        self._loader.shutdown(wait=True, cancel_futures=True)
        if self._file is not None:
            self._file.close()
            self._file = None
