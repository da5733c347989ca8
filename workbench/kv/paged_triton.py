"""The paged cache's attention through kernels: no gather, no mask, one launch per layer for all sequences of a batch;
over latents and few bits two, where long texts are split.

    what lies in the blocks     a batch of single tokens              texts with several new tokens
    keys and values             kernels/paged_decode.py               kernels/paged_prefill.py, also single tokens
    latents                     kernels/latent_decode.py              gathered, as without kernels
    few bits                    kernels/paged_quantized.py            gathered

A tree is gathered in every case: the kernels see a text's tokens in their order. What all layers share, the table of
each text and its length, goes to the device once a step, in one copy. Tables are padded to a power of two of blocks, so
that few shapes come and the number of splits, which follows from the shape, stays the same for a while.

Triton is imported here when a cache is made with attention="triton", or "auto" on a CUDA device, and not before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.kv.paged_store import Codes, KeysAndValues, Latents, Store
from workbench.models.config import ModelConfig
from workbench.models.latent import UpProjections
from workbench.models.transfers import moved, sent

SEQUENCES_AND_HEADS = 1 << 14  # key-value heads of sequences whose splits the last program merges; 64 KiB


def why_not(
    config: ModelConfig,
    store_kind: type[Store],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    format: str | None,
) -> str:
    """Why kernels cannot attend over such a store on this device, "" where they can: tried on an empty batch."""
    try:
        from workbench.kernels import launch
    except ImportError as error:
        return f"Triton is not installed ({error})"
    except WorkbenchError as error:
        return str(error)
    reason = launch.why_not(device)
    if reason:
        return reason
    windows = {config.window_of(layer) for layer in config.kv_layers}
    if store_kind is Latents and windows != {None}:
        return "the kernel for latents sees whole texts, and this model has windows"
    kernels = Kernels(config, block_size, format, device)
    store = store_kind(config, block_size, dtype, device, format)
    width = config.head_dim if store_kind is not Latents else config.latent_shape.cached_dim
    q = torch.empty((0, config.num_heads, width), dtype=dtype, device=device)
    none = KernelStep.of([], [], [], block_size, 1, device)
    try:
        kernels.mix(store, 0, q, none, None)
    except WorkbenchError as error:
        return str(error)
    except ImportError as error:
        return f"there is no kernel for this kind of cache ({error})"
    return ""


@dataclass(frozen=True)
class KernelStep:
    """The kernels' description of a batch, on the device, for all layers. Built by `of`, or from existing tensors."""

    tables: torch.Tensor  # [B, blocks] int32; entries past a sequence's blocks are arbitrary
    lengths: torch.Tensor  # [B] int32, new tokens included
    query_starts: torch.Tensor | None = None  # [B+1] int32; None: one new token each
    max_queries: int = 1
    rows: torch.Tensor | None = None  # of the batch, in the order of these sequences; None: all of them

    @classmethod
    def of(
        cls,
        tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        sizes: Sequence[int],
        block_size: int,
        max_tokens: int,
        device: torch.device | str,
        rows: Sequence[int] | None = None,
    ) -> KernelStep:
        """From tables, lengths and numbers of new tokens, in one copy to the device."""
        most = max(map(len, tables), default=1)
        width = max(most, min(1 << (most - 1).bit_length(), -(-max_tokens // block_size)))
        flat = array("i")
        for table in tables:
            flat.extend(table)
            flat.extend([0] * (width - len(table)))
        flat.extend(lengths)
        flat.extend(accumulate(sizes, initial=0))
        count = len(lengths)
        [packed] = moved([torch.frombuffer(flat, dtype=torch.int32)], device)
        cells = count * width
        single = all(n == 1 for n in sizes)
        return cls(
            packed[:cells].view(count, width),
            packed[cells : cells + count],
            None if single else packed[cells + count :],
            max(sizes, default=1),
            None if rows is None else sent([rows], dtype=torch.int64, device=device)[0],
        )


class Kernels:
    """The kernels of one cache. The store is an argument of each call, so its owner may replace it. A layer of a cache
    is attended over after the other, so one set of counters is enough."""

    def __init__(self, config: ModelConfig, block_size: int, format: str | None, device: torch.device | str) -> None:
        from workbench.kernels.arrivals import counters

        self.config, self.format = config, format
        self._look: dict[str, Any] = {"block_size": block_size, "scale": config.attention_scale}
        self._arrivals = counters(device, SEQUENCES_AND_HEADS)

    def takes(self, store: Store, sizes: Sequence[int], trees: Sequence[tuple[int, ...] | None]) -> list[int]:
        """The sequences of a batch that go through the kernels."""
        several = isinstance(store, KeysAndValues)
        return [i for i, (n, tree) in enumerate(zip(sizes, trees)) if tree is None and (n == 1 or several)]

    def attend(
        self,
        store: Store,
        place: int,
        q: torch.Tensor,
        step: KernelStep,
        window: int | None,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        """q [N, H, D] of the step's sequences, over layer `place` of the store -> [N, H, D_v]. up: of latents."""
        if up is None:
            return self.mix(store, place, q, step, window)
        folded = up.absorb(q).to(store.tensors[0].dtype)
        mixed = self.mix(store, place, folded, step, window)
        return up.restore(mixed.to(up.v_up.dtype)).to(q.dtype)

    def mix(self, store: Store, place: int, q: torch.Tensor, step: KernelStep, window: int | None) -> torch.Tensor:
        """The launches themselves."""
        if isinstance(store, Latents):
            from workbench.kernels.latent_decode import latent_decode

            rank = self.config.latent_shape.kv_rank
            latents = store.tensors[0][place]
            return latent_decode(q, latents, step.tables, step.lengths, kv_rank=rank, **self._look)
        look: dict[str, Any] = {**self._look, "window": window, "sinks": self.config.attention_sinks}
        if isinstance(store, Codes):
            from workbench.kernels.paged_quantized import Coded, paged_decode_quantized

            assert self.format is not None, "codes have a format"
            coded_k, coded_v = (Coded(codes, scale, zero, self.format) for codes, scale, zero in _coded(store, place))
            return paged_decode_quantized(q, coded_k, coded_v, step.tables, step.lengths, **look)
        assert isinstance(store, KeysAndValues)
        k, v = store.room(place)
        if step.query_starts is None:
            from workbench.kernels.paged_decode import paged_decode

            return paged_decode(q, k, v, step.tables, step.lengths, arrivals=self._arrivals, **look)
        from workbench.kernels.paged_prefill import paged_prefill

        starts, most = step.query_starts, step.max_queries
        return paged_prefill(q, k, v, step.tables, starts, step.lengths, max_queries=most, **look)


def _coded(store: Codes, place: int) -> list[tuple[Any, ...]]:
    """(codes, scale, zero or None) of the keys and of the values of a layer."""
    layer = [stored[place] for stored in store.tensors]
    half = len(layer) // 2
    return [(*parts, *[None] * (3 - half)) for parts in (layer[:half], layer[half:])]
