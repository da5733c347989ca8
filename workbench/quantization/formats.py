"""Formats of few bits: a code for each number, and a scale (and zero) for each block of numbers that shares one.

    affine integers      x̂ = scale · code + zero   codes 0 … 2ᵇ − 1   a block from its least to its greatest
    symmetric integers   x̂ = scale · code          codes ±(2ᵇ⁻¹ − 1)  a block from −max|x| to max|x|
    fp8                  x̂ = scale · code          floats of 8 bits   max|x| becomes the largest of them

A block is whatever shares a scale: the tensor, a channel, a group of so many elements along one axis. `zero` is the
real number that code 0 stands for; the integer zero point z of other notations is −zero / scale, here not rounded, so
that a block far from 0 loses nothing by it.

    error of an element       |x − x̂| ≤ scale / 2                                   integers
                              |x − x̂| ≤ max(2⁻ᶠ⁻¹·|x|, half the least step · scale)  fp8 with f fraction bits

Scales and zeros are stored rounded. They are rounded so that the block still fits (scale up, zero down) and the codes
are chosen for the stored ones, so the bound holds for what is stored. What float arithmetic adds is in `error_bound`.

A block that holds NaN or an infinity, or is too wide for its scale's type, has NaN as its scale and comes back as NaN,
all of it: nothing that was no number looks like one afterwards. Nothing is raised for it, since that would make a GPU
wait for the answer.

Sources: affine and symmetric, Nagel et al., arXiv 2106.08295 §2; fp8 e4m3 and e5m2, Micikevicius et al.,
arXiv 2209.05433 table 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from workbench.errors import WorkbenchError, check_flag, is_whole, unknown


@dataclass(frozen=True)
class IntegerFormat:
    """Whole numbers of 2 to 8 bits, stored in exactly so many: see `pack`."""

    bits: int
    symmetric: bool = False

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or not 2 <= self.bits <= 8:
            raise WorkbenchError(f"an integer format has 2 to 8 bits, got {self.bits!r}")
        check_flag("symmetric", self.symmetric)

    @property
    def name(self) -> str:
        return f"int{self.bits}" + ("_symmetric" if self.symmetric else "")

    @property
    def highest(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    @property
    def lowest(self) -> int:
        return -self.highest if self.symmetric else 0

    @property
    def has_zero(self) -> bool:
        return not self.symmetric

    @property
    def is_packed(self) -> bool:
        return self.bits < 8

    @property
    def code_dtype(self) -> torch.dtype:
        """Of the codes as stored. Packed codes are bytes, a symmetric code c packed as c + highest."""
        return torch.int8 if self.symmetric and not self.is_packed else torch.uint8

    @property
    def multiple(self) -> int:
        """The number of codes must be a multiple of this, so that they fill whole bytes."""
        return 8 // min(_parts(self.bits))

    def code_bytes(self, number: int) -> int:
        """Bytes of so many codes."""
        return number * self.bits // 8


@dataclass(frozen=True)
class FloatFormat:
    """Floats of 8 bits with a scale."""

    name: str
    code_dtype: torch.dtype
    fraction_bits: int
    highest: float
    least_step: float  # between two neighbours around 0
    has_zero = False
    is_packed = False
    multiple = 1
    bits = 8

    def code_bytes(self, number: int) -> int:
        return number


FP8_E4M3 = FloatFormat("fp8_e4m3", torch.float8_e4m3fn, fraction_bits=3, highest=448.0, least_step=2.0**-9)
FP8_E5M2 = FloatFormat("fp8_e5m2", torch.float8_e5m2, fraction_bits=2, highest=57344.0, least_step=2.0**-16)

Format = IntegerFormat | FloatFormat
_EVERY: tuple[Format, ...] = (
    *(IntegerFormat(bits) for bits in range(8, 1, -1)),
    *(IntegerFormat(bits, symmetric=True) for bits in range(8, 1, -1)),
    FP8_E4M3,
    FP8_E5M2,
)
FORMATS: dict[str, Format] = {one.name: one for one in _EVERY}


def format_named(name: str | Format) -> Format:
    """The format of that name (or the one given). Raises WorkbenchError with the nearest known name."""
    if isinstance(name, IntegerFormat | FloatFormat):
        return name
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return FORMATS[name]


# -- a whole tensor and back ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in codes. Scales and zeros have its shape with 1 on the axes that a block spans.

    With groups, an axis of n elements becomes two axes, n / group and group.
    """

    format: Format
    codes: torch.Tensor  # packed along `packed` where they are narrower than a byte
    scale: torch.Tensor
    zero: torch.Tensor | None
    shape: tuple[int, ...]  # of the tensor that was quantized
    dtype: torch.dtype  # its type
    packed: int  # the axis, counted from the end, along which codes are packed

    @property
    def nbytes(self) -> int:
        """Codes, scales and zeros."""
        zero = 0 if self.zero is None else self.zero.nbytes
        return self.codes.nbytes + self.scale.nbytes + zero

    @property
    def bits_per_value(self) -> float:
        return 8 * self.nbytes / math.prod(self.shape)

    def dequantize(self) -> torch.Tensor:
        """x̂, in the shape and type of the tensor that was quantized."""
        wide = decode(self.codes, self.scale, self.zero, self.format, packed=self.packed)
        return wide.reshape(self.shape).to(self.dtype)

    def error_bound(self) -> torch.Tensor:
        """An upper bound of |x − x̂| for every element, in the shape of x; x̂ is what `dequantize` gives."""
        wide = decode(self.codes, self.scale, self.zero, self.format, packed=self.packed)
        bound = error_bound(wide, self.scale, self.zero, self.format, self.dtype)
        return bound.reshape(self.shape)


def quantize_tensor(
    x: torch.Tensor,
    format: str | Format,
    *,
    over: int | tuple[int, ...] | None = None,
    group: int | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizedTensor:
    """x in codes, one scale for each block.

    over: the axes that a block spans, default all of them (one scale for the tensor). For a matrix [out, in], over=1
    is a scale for each output channel. group: so many elements along the one axis `over`; with over=1, group=128 each
    row has in / 128 scales. Codes of fewer than 8 bits are packed along the last of these axes.
    Raises WorkbenchError for axes that are not there, groups that do not divide, and an odd number to pack.
    """
    format = format_named(format)
    if not x.is_floating_point() or x.numel() == 0:
        raise WorkbenchError(f"only floating-point tensors with elements are quantized, got {list(x.shape)} {x.dtype}")
    axes = _axes(x, over)
    blocks = x
    if group is not None:
        if over is None or len(axes) != 1:
            raise WorkbenchError(
                f"group={group} goes with over=… of one axis, along which the groups lie; got over={over!r}"
            )
        size = x.shape[axes[0]]
        if not is_whole(group) or group < 1 or size % group:
            raise WorkbenchError(
                f"group must be a whole number that divides the {size} elements of axis {axes[0] + x.dim()}, got"
                f" {group!r}"
            )
        # the axis, from the end, is now the inner of two
        blocks = x.unflatten(axes[0], (size // group, group))
    packed = max(axes)
    scale, zero = fit(blocks, format, axes, scale_dtype)
    codes = encode(blocks, scale, zero, format, packed=packed)
    return QuantizedTensor(format, codes, scale, zero, tuple(x.shape), x.dtype, packed)


def _axes(x: torch.Tensor, over: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """From the end, so that they stay right when an axis before them is split."""
    axes = range(x.dim()) if over is None else (over,) if isinstance(over, int) else over
    wrong = [a for a in axes if not is_whole(a) or not -x.dim() <= a < x.dim()]
    found = tuple(sorted({a if a < 0 else a - x.dim() for a in axes})) if not wrong else ()
    if wrong or not found or len(found) != len(axes):
        raise WorkbenchError(f"over must be different axes of a tensor of {x.dim()} dimensions, got {over!r}")
    return found


# -- the parts, for those who keep codes in tensors of their own ---------------------------------------------


def fit(
    x: torch.Tensor, format: Format, axes: int | tuple[int, ...], scale_dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero of blocks that span `axes`, as stored: x's shape with 1 there. zero None: there is none."""
    x = _wide(x)
    zero = None
    if format.has_zero:
        low, high = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
        zero = -_round_up(-low, scale_dtype)
        reach = high - zero.to(x.dtype)
    else:
        reach = x.abs().amax(axes, keepdim=True)
    scale = reach / format.highest
    scale = torch.where(reach > 0, scale.clamp(min=torch.finfo(torch.float32).tiny), scale)
    scale = _round_up(scale, scale_dtype)
    good = scale.isfinite() if zero is None else scale.isfinite() & zero.isfinite()
    return scale.where(good, math.nan), zero


def encode(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, format: Format, *, packed: int = -1
) -> torch.Tensor:
    """The code nearest to each element. packed: the axis that is shorter afterwards, where codes are packed."""
    x = _wide(x)
    step = scale.to(x.dtype)
    x = (x if zero is None else x - zero.to(x.dtype)) / step.where(step != 0, 1)
    x = x.nan_to_num(0.0)  # of a block whose scale is NaN; any code will do
    if isinstance(format, FloatFormat):
        return x.clamp(-format.highest, format.highest).to(torch.float32).to(format.code_dtype)
    codes = x.round().clamp(format.lowest, format.highest)
    if not format.is_packed:
        return codes.to(format.code_dtype)
    return pack((codes - format.lowest).to(torch.uint8), packed, format.bits)


def decode(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    format: Format,
    *,
    packed: int = -1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x̂ of codes, computed in float32. out: a tensor (or view) of the unpacked shape to write to."""
    if out is None or out.dtype != torch.float32:
        shape = list(codes.shape)
        shape[packed] = shape[packed] * 8 // format.bits
        wide = torch.empty(shape, dtype=torch.float32, device=codes.device)
    else:
        wide = out
    scale = scale.to(torch.float32)
    if format.is_packed:
        if format.bits == 4:
            half = codes.shape[packed]
            torch.bitwise_and(codes, 15, out=(first := torch.empty_like(codes)))
            wide.narrow(packed, 0, half).copy_(first)
            wide.narrow(packed, half, half).copy_(torch.bitwise_right_shift(codes, 4, out=first))
        else:
            wide.copy_(unpack(codes, packed, format.bits))
        if isinstance(format, IntegerFormat) and format.lowest:
            wide.add_(format.lowest)
    elif format is FP8_E4M3:
        wide.copy_(_float16_of_e4m3(codes))
        scale = scale * E4M3_AS_FLOAT16
    else:
        wide.copy_(codes)
    wide.mul_(scale)
    if zero is not None:
        wide.add_(zero.to(torch.float32))
    return wide if out is None or out is wide else out.copy_(wide)


def error_bound(
    decoded: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    format: Format,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """An upper bound of |x − x̂| for every element, from what is stored: decoded is x̂, scale and zero as stored.

    The bound of the module, and on top what arithmetic in float32 can add (4 roundings of 2⁻²⁴, of the size of the
    element and of the zero) and, for a narrower `dtype` of x and x̂, its rounding.
    """
    size, step = decoded.double().abs(), scale.double()
    if isinstance(format, FloatFormat):
        # holds for |x| and for |x̂|, a power of two apart
        relative = 2.0 ** -(format.fraction_bits + 1) * size
        bound = torch.maximum(relative, format.least_step / 2 * step) * (1 + 2.0**-19)
    else:
        offset = 0 if zero is None else zero.double().abs()
        bound = step * (0.5 + 2.0**-20) + 2.0**-21 * (size + offset)
    info = torch.finfo(dtype)
    return bound + (info.eps / 2 * (size + bound) + info.tiny * info.eps)


def pack(codes: torch.Tensor, axis: int = -1, bits: int = 4) -> torch.Tensor:
    """Codes of `bits` bits without a gap, [… n …] uint8 -> [… n·bits/8 …] uint8.

    A code is cut into parts of 4, 2 and 1 bits (3 bits are 2 + 1), and the parts of all codes lie one after the other.
    In a byte of k parts the first comes from the first k-th of the axis, in the lowest bits, the next from the next:
    stretches, not neighbours, so that taking them apart writes whole stretches (as GGUF's Q4_0 does).
    Raises WorkbenchError for a number of codes that does not fill whole bytes.
    """
    size, multiple = codes.shape[axis], 8 // min(_parts(bits))
    if size % multiple:
        raise WorkbenchError(
            f"codes of {bits} bits fill whole bytes {multiple} at a time, so their number along axis {axis} must be a "
            f"multiple of {multiple}, got {size}"
        )
    packed, shift = [], 0
    for part in _parts(bits):
        fields = (
            ((codes >> shift) & (2**part - 1)).chunk(8 // part, axis) if bits > part else codes.chunk(8 // part, axis)
        )
        together = fields[0]
        for place, field in enumerate(fields[1:], 1):
            together = together | (field << (place * part))
        packed.append(together)
        shift += part
    return packed[0] if len(packed) == 1 else torch.cat(packed, axis)


def unpack(packed: torch.Tensor, axis: int = -1, bits: int = 4) -> torch.Tensor:
    """The inverse of `pack`: [… n·bits/8 …] uint8 -> [… n …] uint8 of 0 to 2**bits − 1."""
    size, shift = packed.shape[axis] * 8 // bits, 0
    codes: torch.Tensor | None = None
    pieces = packed.split([size * part // 8 for part in _parts(bits)], axis)
    for part, piece in zip(_parts(bits), pieces):
        fields = torch.cat([(piece >> (place * part)) & (2**part - 1) for place in range(8 // part)], axis)
        codes = fields if codes is None else codes | (fields << shift)
        shift += part
    assert codes is not None, "a number of bits has parts"
    return codes


def _parts(bits: int) -> tuple[int, ...]:
    """As a sum of 8, 4, 2 and 1, the largest first: 7 bits are 4 + 2 + 1."""
    return tuple(part for part in (8, 4, 2, 1) if bits & part)


E4M3_AS_FLOAT16 = 2.0**8  # the bias of the exponent is 7 in e4m3 and 15 in float16


def _float16_of_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 codes / 2⁸ as float16, exactly, by moving bits: torch's own conversion takes ten times as long on a CPU.

    e4m3  s eeee fff   ->   float16  s 0eeee fff0000000. NaN becomes ±480 / 2⁸: `encode` makes none.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    return bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def _round_up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The least number of `dtype` that is not below x."""
    if dtype not in _BITS:
        raise WorkbenchError(
            f"scales are stored as {', '.join(str(t).removeprefix('torch.') for t in _BITS)}, got {dtype}"
        )
    near = x.to(dtype)
    bits = near.view(_BITS[dtype])
    up = torch.where(bits >= 0, bits + 1, bits - 1).view(dtype)  # of a negative number: closer to 0
    return torch.where(near.to(x.dtype) < x, up, near)
