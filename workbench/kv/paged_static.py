"""A paged KV cache whose decode step depends on tensors alone, so that it can be recorded once and replayed.

An eager step looks at lengths and tables in Python: how wide the gather is, who is attended together, whether a mask is
needed. Recorded, all of that would stay as it was. So the static step has fixed shapes, and everything that changes
from step to step is read from buffers on the device:

    write_at [rows]            where each text's new key and value go; padding rows write to the scratch place
    tables   [rows, width]     the blocks of each text; what lies behind its last block may be anything
    lengths  [rows]            tokens of each text, the new one included; 0 for a padding row

The host still keeps the books (`begin_static`: blocks, lengths, copy-on-write), as it does for every other batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from workbench.errors import WorkbenchError
from workbench.kv.latent import hiding
from workbench.kv.paged import Paged, Room
from workbench.kv.paged_step import Group, spread
from workbench.kv.paged_triton import KernelStep
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections


class StaticRows(NamedTuple):
    """The contents of the buffers for one batch of single tokens."""

    write_at: list[int]
    lengths: tuple[int, ...]
    tables: list[Sequence[int]]


class StaticPaged(Paged):
    """`Paged` with one more place, the scratch place, and a decode step that can be recorded."""

    def __init__(self, config: ModelConfig, **settings: Any) -> None:
        super().__init__(config, **settings)
        if self._eager:
            raise WorkbenchError(
                "a step with attention='eager' cannot be recorded: it cuts every text at its length; take 'sdpa',"
                " 'triton' or 'auto'"
            )
        self.scratch = self.num_blocks * self.block_size  # the place behind all blocks
        kind, device = type(self.store), self.store.tensors[0].device
        del self.store  # before the new one is allocated, so that only one exists at a time
        self.store = kind(config, self.scratch + 1, self.dtype, device, self.format)

    @property
    def table_width(self) -> int:
        """Blocks of the longest possible sequence."""
        return -(-self.max_tokens // self.block_size)

    @property
    def why_gathers(self) -> str:
        """Why a recorded step reads the whole width of all tables, however short the sequences; "" where kernels read
        only their tokens."""
        if self.kernels is not None and self.store.tensors[0].device.type == "cuda":
            return ""
        return (
            "without kernels a recorded step gathers as many tokens as the longest text may have"
            f" ({self.attention_reason})"
        )

    def begin_static(self, batch: Batch) -> StaticRows:
        """`begin` for a replayed step of one token per sequence: only tables and lengths change, as if all layers had
        run."""
        assert batch.num_tokens == len(batch.sequences) and batch.parents is None
        places = self.begin_books(batch)
        lengths, size = places.lengths, self.block_size
        tables = self.tables_of(batch)
        write_at = [table[(n - 1) // size] * size + (n - 1) % size for table, n in zip(tables, lengths)]
        return StaticRows(write_at, lengths, tables)

    def static_attention(self, write_at: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> StaticAttention:
        """What the model is given as its kv while a step is recorded: buffers on the device, see the module."""
        return StaticAttention(self, write_at, tables, lengths)


class StaticAttention:
    """Reads and writes the pool of a `StaticPaged` for one step, and reads no tensor value in Python."""

    def __init__(self, kv: StaticPaged, write_at: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> None:
        self._kv, self._step = kv, _StaticStep(kv, write_at, tables, lengths)

    def begin(self, batch: Batch) -> None:
        return None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        with self._entered(batch) as kv:
            return kv.attend(layer, q, k, v, batch, up)

    def room_for(self, layer: int, batch: Batch) -> Room | None:
        with self._entered(batch) as kv:
            return kv.room_for(layer, batch)

    def attend_written(self, layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        with self._entered(batch) as kv:
            return kv.attend_written(layer, q, batch)

    @contextmanager
    def _entered(self, batch: Batch) -> Iterator[StaticPaged]:
        """The pool with this step as its own."""
        kv = self._kv
        before = kv._step, kv._batch, kv._layers_done
        kv._step, kv._batch = self._step, batch
        try:
            yield kv
        finally:
            kv._step, kv._batch, kv._layers_done = before


class _StaticStep:
    """`paged_step.PagedStep` for one token each: by the kernels, or all in one group, masked over the whole width of
    the tables.

    Triton's interpreter cannot be recorded, so there a step gathers keys and values instead.
    """

    def __init__(self, kv: StaticPaged, write_at: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> None:
        self.write_at, self.groups, self.by_kernel = write_at, [], None
        compiled = kv.kernels is not None and tables.device.type == "cuda"
        if compiled:
            self.by_kernel = KernelStep(tables, lengths)
        else:
            self.groups = [_all_of(kv, tables, lengths)]
        self.all_together = not compiled


def _all_of(kv: StaticPaged, tables: torch.Tensor, lengths: torch.Tensor) -> Group:
    config, ends = kv.config, lengths[:, None]
    places = spread(tables.long(), kv.block_size)  # [rows, S]
    at = torch.arange(places.shape[1], device=places.device)[None, :]
    own = places[:, :1].masked_fill(ends <= 0, kv.scratch)
    read_at = torch.where(at < ends, places, own)  # only a sequence's own tokens are read, masked ones too
    masks = {}
    for window in {config.window_of(layer) for layer in config.kv_layers}:
        hidden = at >= ends.clamp(min=1)  # a padding row reads the scratch place, so its numbers stay finite
        if window is not None:
            hidden = hidden | ((at < ends - window) & (at >= config.attention_sinks))
        masks[window] = hiding(hidden, kv.dtype)[:, None, None, :]
    rows = torch.arange(len(lengths), device=places.device)
    return Group(rows, True, dict.fromkeys(masks, read_at), masks, None, config.latent_attention is not None)
