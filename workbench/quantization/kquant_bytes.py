"""k-quants as bytes: blocks in a super-block of 256 weights, whose scales (and minima) are codes of few bits
themselves.

    x̂ = (d · scale) · code − (d_min · minimum)        Q2_K, Q4_K, Q5_K   code, scale, minimum ≥ 0
    x̂ = (d · scale) · (code − 2ᵇ⁻¹)                   Q3_K, Q6_K         scale of either sign

d and d_min are float16, one of each for 256 weights; scale and minimum are whole numbers of 4 to 8 bits, one of each
for a block of 16 or 32. The bytes are those of GGUF (ggml, `block_q2_K` … `block_q6_K`), field after field:

    Q2_K   scales 16 · low 64 · d 2 · d_min 2                     84 bytes   2.625 bits per weight
    Q3_K   high 32 · low 64 · scales 12 · d 2                    110         3.4375
    Q4_K   d 2 · d_min 2 · scales 12 · low 128                   144         4.5
    Q5_K   d 2 · d_min 2 · scales 12 · high 32 · low 128         176         5.5
    Q6_K   low 128 · high 64 · scales 16 · d 2                   210         6.5625

"low" and "high" are the lower and upper bits of the codes, each packed as `formats.pack` does, in stretches of 64, 128
or 256 codes. "scales" holds the minima too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.quantization.formats import pack, unpack

SUPER_BLOCK = 256


@dataclass(frozen=True)
class Layout:
    """How a super-block of 256 weights is stored, and what its numbers may be."""

    bits: int
    block: int  # weights to a scale
    scale_bits: int
    has_minimum: bool
    fields: tuple[tuple[str, int], ...]  # name and bytes, in order
    # of the code, lowest first: field, bits, codes packed together
    stretches: tuple[tuple[str, int, int], ...]

    @property
    def name(self) -> str:
        return f"Q{self.bits}_K"

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.fields)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / SUPER_BLOCK

    @property
    def blocks(self) -> int:
        return SUPER_BLOCK // self.block

    @property
    def middle(self) -> int:
        """The code of 0 where there is no minimum."""
        return 0 if self.has_minimum else 2 ** (self.bits - 1)

    @property
    def scale_range(self) -> tuple[int, int]:
        if self.has_minimum:
            return 0, 2**self.scale_bits - 1
        return -(2 ** (self.scale_bits - 1)), 2 ** (self.scale_bits - 1) - 1

    def split(self, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of super-blocks [n, bytes] uint8."""
        parts = raw.split([size for _, size in self.fields], dim=-1)
        return {name: part for (name, _), part in zip(self.fields, parts)}


LAYOUTS: dict[int, Layout] = {
    one.bits: one
    for one in (
        Layout(2, 16, 4, True, (("scales", 16), ("low", 64), ("d", 2), ("d_min", 2)), (("low", 2, 128),)),
        Layout(
            3, 16, 6, False, (("high", 32), ("low", 64), ("scales", 12), ("d", 2)), (("low", 2, 128), ("high", 1, 256))
        ),
        Layout(4, 32, 6, True, (("d", 2), ("d_min", 2), ("scales", 12), ("low", 128)), (("low", 4, 64),)),
        Layout(
            5,
            32,
            6,
            True,
            (("d", 2), ("d_min", 2), ("scales", 12), ("high", 32), ("low", 128)),
            (("low", 4, 64), ("high", 1, 256)),
        ),
        Layout(
            6, 16, 8, False, (("low", 128), ("high", 64), ("scales", 16), ("d", 2)), (("low", 4, 128), ("high", 2, 128))
        ),
    )
}


@dataclass(frozen=True)
class SuperBlocks:
    """n super-blocks in whole numbers: codes [n, blocks, block] from 0, scales and minima [n, blocks], d and d_min
    [n]."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    d: torch.Tensor  # float16
    d_min: torch.Tensor | None

    def values(self, layout: Layout) -> torch.Tensor:
        """x̂ [n, blocks, block] float32; every product is exact, only the difference is rounded (and Q6_K's
        product)."""
        step = self.d.float()[:, None] * self.scales
        wide = step[..., None] * (self.codes.float() - layout.middle)
        if self.minima is None or self.d_min is None:
            return wide
        return wide - (self.d_min.float()[:, None] * self.minima)[..., None]


# -- bytes -----------------------------------------------------------------------------------------------------------


def to_bytes(whole: SuperBlocks, layout: Layout) -> torch.Tensor:
    """[n, layout.nbytes] uint8, as GGUF has them."""
    n = len(whole.d)
    fields = {"d": whole.d[:, None].view(torch.uint8)}
    if whole.d_min is not None:
        fields["d_min"] = whole.d_min[:, None].view(torch.uint8)
    fields["scales"] = _SCALES[layout.bits][0](whole)
    codes, shift = whole.codes.to(torch.uint8).reshape(n, SUPER_BLOCK), 0
    for field, bits, stretch in layout.stretches:
        part = (codes >> shift) & (2**bits - 1)
        fields[field] = pack(part.view(n, -1, stretch), bits=bits).flatten(1)
        shift += bits
    return torch.cat([fields[name] for name, _ in layout.fields], dim=-1)


def from_bytes(raw: torch.Tensor, layout: Layout) -> SuperBlocks:
    """The inverse of `to_bytes`."""
    fields, n = layout.split(raw), len(raw)
    codes, shift = torch.zeros(n, SUPER_BLOCK, dtype=torch.uint8, device=raw.device), 0
    for field, bits, stretch in layout.stretches:
        packed = fields[field].reshape(n, SUPER_BLOCK // stretch, -1)
        codes |= unpack(packed, bits=bits).flatten(1) << shift
        shift += bits
    scales, minima = _SCALES[layout.bits][1](fields["scales"])
    d, *d_min = (fields[name].contiguous().view(torch.float16)[:, 0] for name in ("d", "d_min") if name in fields)
    return SuperBlocks(codes.view(n, layout.blocks, -1), scales, minima, d, d_min[0] if d_min else None)


def _join_halves(whole: SuperBlocks) -> torch.Tensor:
    """Q2_K: scale and minimum of a block in the two halves of a byte."""
    assert whole.minima is not None, "a layout with minima"
    return (whole.scales | whole.minima << 4).to(torch.uint8)


def _halves(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return packed & 15, packed >> 4


def _join_signed(whole: SuperBlocks) -> torch.Tensor:
    """Q3_K: sixteen of 6 bits, stored as scale + 32 and packed as `formats.pack` packs codes of 6 bits."""
    return pack((whole.scales + 32).to(torch.uint8), bits=6)


def _signed(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return unpack(packed, bits=6).to(torch.int8) - 32, None


def _join_pairs(whole: SuperBlocks) -> torch.Tensor:
    """Q4_K, Q5_K: eight scales and eight minima of 6 bits in 12 bytes.

    Bytes 0–3 hold the first four scales, 4–7 the first four minima, each with two bits to spare; 8–11 the lower halves
    of the last four of both, whose two upper bits are in what was spare.
    """
    assert whole.minima is not None, "a layout with minima"
    scales, minima = whole.scales.to(torch.uint8), whole.minima.to(torch.uint8)
    first, last = scales.chunk(2, -1)
    first_minima, last_minima = minima.chunk(2, -1)
    low = (last & 15) | ((last_minima & 15) << 4)
    return torch.cat((first | (last >> 4 << 6), first_minima | (last_minima >> 4 << 6), low), -1)


def _pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    first, first_minima, low = packed.chunk(3, -1)
    scales = torch.cat((first & 63, (low & 15) | (first >> 6 << 4)), -1)
    minima = torch.cat((first_minima & 63, (low >> 4) | (first_minima >> 6 << 4)), -1)
    return scales, minima


def _join_bytes(whole: SuperBlocks) -> torch.Tensor:
    """Q6_K: signed bytes."""
    return whole.scales.to(torch.int8).view(torch.uint8)


def _bytes(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return packed.contiguous().view(torch.int8), None


_SCALES: dict[int, tuple[Callable, Callable]] = {
    2: (_join_halves, _halves),
    3: (_join_signed, _signed),
    4: (_join_pairs, _pairs),
    5: (_join_pairs, _pairs),
    6: (_join_bytes, _bytes),
}
