"""Which bit of which byte belongs to what, for looking at: packed codes, a super-block of k-quants, NF4 with its
scales.

Nothing here knows a layout. Each bit is turned on alone and packed by the code that packs weights, and where a bit
shows up is where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.errors import WorkbenchError, is_whole
from workbench.quantization.formats import IntegerFormat, pack
from workbench.quantization.kquant import layout_of
from workbench.quantization.kquant_bytes import SUPER_BLOCK, Layout, SuperBlocks, to_bytes
from workbench.quantization.nf4 import SCALES_TOGETHER


@dataclass(frozen=True, order=True)
class PackedBit:
    """One bit of a packed byte, and what it is part of."""

    byte: int
    place: int  # 0 the lowest
    part: str  # "code", "scale", "minimum", "d" or "d_min"
    index: int  # of the code, or of the block whose scale it is
    bit: int  # of that number, 0 the lowest


@dataclass(frozen=True)
class ByteRange:
    """Bytes start … end − 1 of what is stored together, under their name."""

    name: str
    start: int
    end: int
    meaning: str
    bits_per_weight: float  # what they cost each weight


def packed_bits(bits: int, count: int) -> tuple[PackedBit, ...]:
    """Of `count` codes of `bits` bits as `formats.pack` lays them, byte after byte, the lowest bit first.

    Raises WorkbenchError for bits that are not 2 to 8, and codes that do not fill whole bytes.
    """
    IntegerFormat(bits)
    if not is_whole(count) or count < 1:
        raise WorkbenchError(f"count must be a whole number of at least 1, got {count!r}")
    alone = torch.eye(count, dtype=torch.uint8)
    found = [_places(pack(alone << bit, bits=bits), "code", bit) for bit in range(bits)]
    return tuple(sorted(place for places in found for place in places))


def super_block_bits(bits: int) -> tuple[PackedBit, ...]:
    """Of all numbers of a super-block of k-quants, byte after byte. Raises WorkbenchError for bits that are not 2 to
    6."""
    layout = layout_of(bits)
    nothing = to_bytes(_super_blocks(layout, 1), layout)
    found: list[PackedBit] = []
    for part, count, width in _parts(layout):
        for bit in range(width):
            turned = to_bytes(_super_blocks(layout, count, part, bit), layout) ^ nothing
            found += _places(turned, part, bit)
    return tuple(sorted(found))


def super_block_ranges(bits: int) -> tuple[ByteRange, ...]:
    """The fields of a super-block of k-quants, in order. Raises WorkbenchError for bits that are not 2 to 6."""
    layout, at, found = layout_of(bits), 0, []
    low, high = (next((b for f, b, _ in layout.stretches if f == name), 0) for name in ("low", "high"))
    both = "scales and minima" if layout.has_minimum else "scales"
    meaning = {
        "d": "float16: what all scales are multiples of",
        "d_min": "float16: what all minima are multiples of",
        "scales": f"{both} of {layout.blocks} blocks, {layout.scale_bits} bits each",
        "low": f"the lower {low} bits of 256 codes" if high else f"256 codes of {low} bits",
        "high": f"the upper {high} bit{'s' * (high > 1)} of 256 codes",
    }
    for name, size in layout.fields:
        found.append(ByteRange(name, at, at + size, meaning[name], 8 * size / SUPER_BLOCK))
        at += size
    return tuple(found)


def nf4_ranges(block: int = 64, *, double: bool = True) -> tuple[ByteRange, ...]:
    """What 256 blocks of NF4 keep (one block without double quantization), one tensor after the other.

    The mean of all scales is left out: 4 bytes for a whole matrix. Raises WorkbenchError for a block that is odd.
    """
    if not is_whole(block) or block < 2 or block % 2:
        raise WorkbenchError(f"block must be an even number, got {block!r}")
    blocks = SCALES_TOGETHER if double else 1
    parts = [("codes", blocks * block // 2, "codes of 4 bits, two in a byte")]
    if double:
        parts += [
            ("scale", blocks, f"fp8: the scale of {block} weights, less the mean of all"),
            ("scale_step", 4, f"float32: what {blocks} fp8 scales are multiplied with"),
        ]
    else:
        parts.append(("scale", 4, f"float32: the scale of {block} weights"))
    at, found = 0, []
    for name, size, meaning in parts:
        found.append(ByteRange(name, at, at + size, meaning, 8 * size / (blocks * block)))
        at += size
    return tuple(found)


def _places(packed: torch.Tensor, part: str, bit: int) -> list[PackedBit]:
    """packed [count, bytes]: row i has one bit on, the one of number i."""
    rows, columns = packed.nonzero(as_tuple=True)
    assert rows.tolist() == list(range(len(packed)))
    values = packed[rows, columns].tolist()
    return [
        PackedBit(byte, value.bit_length() - 1, part, index, bit)
        for index, (byte, value) in enumerate(zip(columns.tolist(), values))
    ]


def _parts(layout: Layout) -> list[tuple[str, int, int]]:
    """Name, how many and of how many bits."""
    found = [("code", SUPER_BLOCK, layout.bits), ("scale", layout.blocks, layout.scale_bits), ("d", 1, 16)]
    if layout.has_minimum:
        found += [("minimum", layout.blocks, layout.scale_bits), ("d_min", 1, 16)]
    return found


def _super_blocks(layout: Layout, n: int, part: str = "", bit: int = 0) -> SuperBlocks:
    """n super-blocks of zeros, but number i of a part in super-block i has this bit on."""
    has = layout.has_minimum
    numbers = {
        "code": torch.zeros(n, SUPER_BLOCK, dtype=torch.uint8),
        "scale": torch.zeros(n, layout.blocks, dtype=torch.int16),
        "minimum": torch.zeros(n, layout.blocks, dtype=torch.int16),
        "d": torch.zeros(n, 1, dtype=torch.int16),
        "d_min": torch.zeros(n, 1, dtype=torch.int16),
    }
    if part:
        highest = bit == layout.scale_bits - 1 and part == "scale" and not has  # of two's complement
        value = -(1 << bit) if highest or bit == 15 else 1 << bit
        numbers[part][range(n), range(n)] = value
    d, d_min = (numbers[name].view(torch.float16)[:, 0] for name in ("d", "d_min"))
    codes = numbers["code"].view(n, layout.blocks, layout.block)
    return SuperBlocks(codes, numbers["scale"], numbers["minimum"] if has else None, d, d_min if has else None)
