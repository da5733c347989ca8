"""A paged KV cache whose decode step depends on tensors alone, so that it can be recorded once and replayed.

An eager step looks at lengths and tables in Python: how wide the gather is, who is attended together, whether a mask is
needed. Recorded, all of that would stay as it was. So the static step has fixed shapes, and everything that changes from
step to step is read from buffers on the device:

    write_at [rows]            where each text's new key and value go; padding rows write to the scratch place
    tables   [rows, width]     the blocks of each text; what lies behind its last block may be anything
    lengths  [rows]            tokens of each text, the new one included; 0 for a padding row

The host still keeps the books (`begin_static`: blocks, lengths, copy-on-write), as it does for every other batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from workbench.errors import WorkbenchError
from workbench.kv.latent import hiding
from workbench.kv.paged import Paged, _Group, spread
from workbench.kv.paged_triton import KernelStep
from workbench.kv.slots import Places
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig


class StaticRows(NamedTuple):
    """What the buffers are filled with for one batch of single tokens."""

    write_at: list[int]
    lengths: tuple[int, ...]
    tables: list[Sequence[int]]


class StaticPaged(Paged):
    """`Paged` with one place more, the scratch place, and a decode step that can be recorded. All else is the same."""

    def __init__(self, config: ModelConfig, **settings) -> None:
        super().__init__(config, **settings)
        if self._eager:
            raise WorkbenchError(
                "a step with attention='eager' cannot be recorded: it cuts every text at its length; take 'sdpa', 'triton' or "
                "'auto'"
            )
        self.scratch = self.num_blocks * self.block_size  # the place behind all blocks
        kind, device = type(self._store), self._store.tensors[0].device
        del self._store  # before its successor is made: never both
        self._store = kind(config, self.scratch + 1, self.dtype, device, self.format)
        self._books_only = False

    @property
    def table_width(self) -> int:
        """Blocks of the longest text."""
        return -(-self.max_tokens // self.block_size)

    @property
    def why_gathers(self) -> str:
        """Why a recorded step reads the whole width of all tables, however short the texts; "" where kernels read what is
        there."""
        if self._kernels is not None and self._store.tensors[0].device.type == "cuda":
            return ""
        return f"without kernels a recorded step gathers as many tokens as the longest text may have ({self.attention_because})"

    def begin_static(self, batch: Batch) -> StaticRows:
        """`begin` for a batch of one token a text whose step is replayed: the books alone, as if all layers were done."""
        assert batch.num_tokens == len(batch.sequences) and batch.parents is None
        self._books_only = True
        try:
            self.begin(batch)
        finally:
            self._books_only = False
        self._layers_done = self.config.num_layers
        lengths, size = self._places.lengths, self.block_size
        tables = [self.tables.tables[name] for name in batch.sequences]
        write_at = [table[(n - 1) // size] * size + (n - 1) % size for table, n in zip(tables, lengths)]
        return StaticRows(write_at, lengths, tables)

    def _open(self, batch: Batch, places: Places) -> None:
        if not self._books_only:
            super()._open(batch, places)

    def static_attention(
        self, write_at: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
    ) -> StaticAttention:
        """What the model is given as its kv while a step is recorded: buffers on the device, see the module."""
        return StaticAttention(self, write_at, tables, lengths)


class StaticAttention:
    """Reads and writes the pool of a `StaticPaged` for one step, and looks at no value in Python."""

    def __init__(self, kv: StaticPaged, write_at, tables, lengths) -> None:
        self._kv, self._step = kv, _StaticStep(kv, write_at, tables, lengths)

    def begin(self, batch: Batch) -> None:
        return None

    def attend(self, layer: int, q: torch.Tensor, k, v, batch: Batch, up=None) -> torch.Tensor:
        kv = self._kv
        before = kv._step, kv._batch, kv._layers_done
        kv._step, kv._batch = self._step, batch
        try:
            return kv.attend(layer, q, k, v, batch, up)
        finally:
            kv._step, kv._batch, kv._layers_done = before


class _StaticStep:
    """`paged._Step` for one token a text: by the kernels, or all in one group, masked over the whole width of the tables.

    In Triton's interpreter the kernels are no operations of torch, so there a step is recorded over what is gathered.
    """

    def __init__(self, kv: StaticPaged, write_at, tables, lengths) -> None:
        self.write_at, self.groups, self.by_kernel = write_at, [], None
        compiled = kv._kernels is not None and tables.device.type == "cuda"
        if compiled:
            self.by_kernel = KernelStep(tables, lengths)
        else:
            self.groups = [_all_of(kv, tables, lengths)]
        self.all_together = not compiled


def _all_of(kv: StaticPaged, tables: torch.Tensor, lengths: torch.Tensor) -> _Group:
    config, ends = kv.config, lengths[:, None]
    places = spread(tables.long(), kv.block_size)  # [rows, S]
    at = torch.arange(places.shape[1], device=places.device)[None, :]
    own = places[:, :1].masked_fill(ends <= 0, kv.scratch)
    read_at = torch.where(at < ends, places, own)  # only a text's own tokens are read, the hidden ones too
    masks = {}
    for window in {config.window_of(layer) for layer in config.kv_layers}:
        hidden = at >= ends.clamp(min=1)  # a padding row sees the scratch place, so its numbers stay finite
        if window is not None:
            hidden = hidden | ((at < ends - window) & (at >= config.attention_sinks))
        masks[window] = hiding(hidden, kv.dtype)[:, None, None, :]
    rows = torch.arange(len(lengths), device=places.device)
    return _Group(rows, True, dict.fromkeys(masks, read_at), masks, None, config.latent_attention is not None)
