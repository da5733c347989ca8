"""The paged cache's attention on a CPU without a gather: one C++ loop over the blocks of all sequences of a step.

    gathered  every key and value is copied, padded to the longest of a group, and read again   3 × the bytes and more
    blocks    each query reads its own tokens where they lie, through its sequence's table      the bytes, once

It is the CPU's twin of the kernels in `workbench.kv.paged_triton` and has their place in a `Paged`. Threads take one
sequence after the other (where there are few, one of its key-value heads), so a step takes as long as its tokens and
not as its longest text. The loop is `paged_blocks.cpp`, compiled where a compiler is (`workbench.native.build`).

It takes sequences with one new token and with a few (drafted ones in a chain, the end of a prompt), where attention is
bound by reading keys. Many new tokens are a product of matrices, which torch does faster, and trees have masks: both
are gathered. (Measured for 2 key-value heads of 64, three queries each: 8 new tokens of a text of 900 take as long
either way, 16 are faster gathered; of 16 texts of 180 tokens 16 are still faster here.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from workbench.kv.paged_store import KeysAndValues, Latents, Store
from workbench.kv.paged_triton import KernelStep
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections
from workbench.native.build import library

SOURCE = Path(__file__).with_name("paged_blocks.cpp")
FEW_TOKENS = 8  # new ones of a sequence, so many at most go through the loop
Pointer, Whole = ctypes.c_void_p, ctypes.c_int64


class StepArguments(ctypes.Structure):
    """`struct Step` of paged_blocks.cpp: what all layers share."""

    _fields_ = [
        *((name, Pointer) for name in ("tables", "lengths", "query_starts")),
        *((name, Whole) for name in ("sequences", "table_width", "kv_heads", "group", "size", "block_size")),
    ]


class LayerArguments(ctypes.Structure):
    """`struct Layer` of paged_blocks.cpp. Strides in floats."""

    _fields_ = [
        *((name, Pointer) for name in ("q", "keys", "values", "out")),
        *((name, Whole) for name in ("q_stride", "key_stride", "value_stride", "window", "sinks")),
        ("scale", ctypes.c_float),
    ]


def why_not_blocks(
    config: ModelConfig, store_kind: type[Store], *, dtype: torch.dtype, device: torch.device | str, format: str | None
) -> str:
    """Why the loop cannot attend over such a store, "" where it can. dtype: as stored."""
    if torch.device(device).type != "cpu":
        return f"the loop over blocks is for CPUs, and this cache is on {device}"
    if store_kind is not KeysAndValues:
        kept = "latents" if store_kind is Latents else f"keys and values in {format}"
        return f"the loop over blocks reads keys and values, and this cache keeps {kept}"
    if dtype != torch.float32:
        return f"the loop over blocks reads float32, and this cache keeps {str(dtype).removeprefix('torch.')}"
    if config.head_dim != config.value_head_dim:
        return f"keys of {config.head_dim} and values of {config.value_head_dim} numbers are not of one size"
    loop = library(SOURCE)
    if isinstance(loop, str):
        return loop
    return "" if loop.has_size(Whole(config.head_dim)) else f"the loop knows no heads of size {config.head_dim}"


class BlockLoop:
    """The loop for one cache. The store is an argument of each call, so its owner may replace it."""

    def __init__(self, config: ModelConfig, block_size: int) -> None:
        loop = library(SOURCE)
        assert not isinstance(loop, str), "why_not_blocks was asked"
        self.config, self.block_size = config, block_size
        self._attend = loop.attend
        self._attend.restype = None

    def takes(self, store: Store, sizes: Sequence[int], trees: Sequence[tuple[int, ...] | None]) -> list[int]:
        """The sequences of a batch that go through the loop."""
        return [i for i, (n, tree) in enumerate(zip(sizes, trees)) if tree is None and n <= FEW_TOKENS]

    def attend(
        self,
        store: Store,
        place: int,
        q: torch.Tensor,
        step: KernelStep,
        window: int | None,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        """q [N, H, D] float32 of the step's sequences, over layer `place` of the store -> [N, H, D]."""
        assert isinstance(store, KeysAndValues) and up is None and q.dtype == torch.float32
        config, (keys, values) = self.config, store.room(place)
        if q.stride()[1:] != (q.shape[2], 1):
            q = q.contiguous()
        out = q.new_empty(q.shape)
        starts = step.query_starts
        layer = LayerArguments(
            *(t.data_ptr() for t in (q, keys, values, out)),
            *(t.stride(0) for t in (q, keys, values)),
            window or 0,
            config.attention_sinks,
            config.attention_scale,
        )
        shared = StepArguments(
            step.tables.data_ptr(),
            step.lengths.data_ptr(),
            None if starts is None else starts.data_ptr(),
            *step.tables.shape,
            config.num_kv_heads,
            config.num_heads // config.num_kv_heads,
            config.head_dim,
            self.block_size,
        )
        self._attend(ctypes.byref(shared), ctypes.byref(layer), Whole(torch.get_num_threads()))
        return out
