"""Storage of keys and values at the places of a paged cache. Tensors [layers, places, heads, size]."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from workbench.errors import unknown
from workbench.instruments.memory import require_bytes
from workbench.kv.slots import check_size, require_books
from workbench.models.config import ModelConfig
from workbench.models.placed import InCodedBlocks, Keys, blocks_of
from workbench.quantization.formats import FORMATS, Format, decode, encode, fit

PAGED_FORMATS: dict[str, Format] = {"int8": FORMATS["int8"], "fp8": FORMATS["fp8_e4m3"], "int4": FORMATS["int4"]}
SCALE_DTYPE = torch.float16


def require_pool(num_blocks: int, block_size: int, bytes_per_token: int, device: torch.device | str) -> int:
    """Places of a pool. Raises WorkbenchError with bytes needed and available, before anything is allocated."""
    check_size("num_blocks", num_blocks, None)
    places = num_blocks * block_size
    what = f"a paged KV cache of {num_blocks:,} blocks × {block_size:,} tokens"
    require_bytes(places * bytes_per_token, str(device), what)
    require_books(num_blocks, "blocks")
    return places


class Store(ABC):
    """The tensors of all layers. `tensors`: all of them, each with the places on its second axis."""

    tensors: tuple[torch.Tensor, ...]

    @abstractmethod
    def __init__(
        self, config: ModelConfig, places: int, dtype: torch.dtype, device: torch.device | str, format: str | None
    ) -> None: ...

    @staticmethod
    @abstractmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, format: str | None) -> int: ...

    @abstractmethod
    def write(self, layer: int, at: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """k, v [N, H_kv, D] to the places at [N]."""
        ...

    def room(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values [places, H_kv, D] of a layer, views to write to; None where they are stored as something
        else."""
        return None

    def where(self, block_size: int) -> Keys | InCodedBlocks | None:
        """Where all layers lie, for a step that reads and writes them by itself; None where they are stored as
        something else."""
        return None

    @abstractmethod
    def read(self, layer: int, at: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """The contents of [...] places: keys and values [..., H_kv, D], or latents [..., 1, rank], as new tensors."""
        ...


def _gather(stored: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[places, ...] at [...] -> [..., ...]"""
    return stored.index_select(0, at.flatten()).unflatten(0, at.shape)


class KeysAndValues(Store):
    """Unquantized keys and values. If they have the same size they are stored side by side, [layers, places, 2, heads,
    size], so that one gather reads both."""

    def __init__(
        self,
        config: ModelConfig,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
        format: str | None = None,
    ) -> None:
        heads, sizes = config.num_kv_heads, (config.head_dim, config.value_head_dim)
        self._side_by_side = sizes[0] == sizes[1]
        room = (len(config.kv_layers), places)
        shapes = [(2, heads, sizes[0])] if self._side_by_side else [(heads, size) for size in sizes]
        self.tensors = tuple(torch.zeros((*room, *shape), dtype=dtype, device=device) for shape in shapes)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, format: str | None = None) -> int:
        return config.expanded_kv_values_per_token() * dtype.itemsize

    def write(self, layer: int, at: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is not None, "keys come with values"
        new = (torch.stack((k, v), dim=1),) if self._side_by_side else (k, v)
        for stored, rows in zip(self.tensors, new):
            stored[layer].index_copy_(0, at, rows.to(stored.dtype))

    def room(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.whole()
        return keys[layer], values[layer]

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all layers, views [layers, places, heads, size]."""
        keys, values = self.tensors[0].unbind(2) if self._side_by_side else self.tensors
        return keys, values

    def where(self, block_size: int) -> Keys:
        return blocks_of(*self.whole(), block_size)

    def read(self, layer: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = [_gather(stored[layer], at) for stored in self.tensors]
        k, v = found[0].unbind(-3) if self._side_by_side else found
        return k, v


class Latents(Store):
    """One latent per token, followed by its rotary key; see `workbench.kv.latent`."""

    def __init__(
        self,
        config: ModelConfig,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
        format: str | None = None,
    ) -> None:
        room = (config.num_layers, places, 1, config.latent_shape.cached_dim)
        self._latents = torch.zeros(room, dtype=dtype, device=device)
        self.tensors = (self._latents,)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, format: str | None = None) -> int:
        return config.kv_values_per_token() * dtype.itemsize

    def write(self, layer: int, at: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self._latents[layer].index_copy_(0, at, k.to(self._latents.dtype))

    def read(self, layer: int, at: torch.Tensor) -> torch.Tensor:
        return _gather(self._latents[layer], at)


class Codes(Store):
    """Quantized, with a scale (and a zero, where the format has one) of each token and head.

    A block needs no neighbour to be read, and a token no later one: so blocks are shared, cut and moved like any
    others. A scale a channel over a group of tokens is more exact for keys (`kv.quantized`), and ties those tokens
    together.
    """

    def __init__(
        self, config: ModelConfig, places: int, dtype: torch.dtype, device: torch.device | str, format: str | None
    ) -> None:
        self._format, self._dtype = _format_named(format), dtype
        self._name = str(format)
        room = (len(config.kv_layers), places, config.num_kv_heads)
        code, bits = self._format.code_dtype, self._format.bits
        parts = []
        for size in (config.head_dim, config.value_head_dim):
            parts.append(torch.zeros((*room, size * bits // 8), dtype=code, device=device))
            for _ in range(1 + self._format.has_zero):
                parts.append(torch.zeros((*room, 1), dtype=SCALE_DTYPE, device=device))
        self.tensors = tuple(parts)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, format: str | None) -> int:
        """L · H_kv · ((D + D_v) · bits / 8 + 2 bytes for each scale and zero)."""
        kind = _format_named(format)
        codes = (config.head_dim + config.value_head_dim) * kind.bits // 8
        return len(config.kv_layers) * config.num_kv_heads * (codes + 2 * (1 + kind.has_zero) * SCALE_DTYPE.itemsize)

    def write(self, layer: int, at: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is not None, "keys come with values"
        half = len(self.tensors) // 2
        for parts, new in ((self.tensors[:half], k), (self.tensors[half:], v)):
            scale, zero = fit(new, self._format, -1, SCALE_DTYPE)
            coded = (encode(new, scale, zero, self._format), scale, zero)
            for stored, part in zip(parts, coded):
                assert part is not None, "as many tensors as the format has parts"
                stored[layer].view(torch.uint8).index_copy_(0, at, part.to(stored.dtype).contiguous().view(torch.uint8))

    def where(self, block_size: int) -> InCodedBlocks:
        half = len(self.tensors) // 2
        (k, k_scale, *k_zero), (v, v_scale, *v_zero) = self.tensors[:half], self.tensors[half:]
        keys, values = (k, k_scale, k_zero[0] if k_zero else None), (v, v_scale, v_zero[0] if v_zero else None)
        return InCodedBlocks(keys, values, self._name, block_size)

    def read(self, layer: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half, found = len(self.tensors) // 2, []
        for parts in (self.tensors[:half], self.tensors[half:]):
            codes, scale, *zero = (_gather(t[layer].view(torch.uint8), at).view(t.dtype) for t in parts)
            found.append(decode(codes, scale, zero[0] if zero else None, self._format).to(self._dtype))
        return found[0], found[1]


def _format_named(name: str | None) -> Format:
    if name is None or name not in PAGED_FORMATS:
        raise unknown("format of kv 'paged'", str(name), PAGED_FORMATS)
    return PAGED_FORMATS[name]
