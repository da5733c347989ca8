"""What the bits of a number say, for looking at. How the codes of many numbers share bytes: `packed_bits`.

    floats     (−1)^sign · 2^(exponent − bias) · 1.fraction       normal
               (−1)^sign · 2^(1 − bias)        · 0.fraction       subnormal: exponent bits all 0, even steps down to 0
    integers   two's complement: the highest bit counts −2^(b−1), the others their power of two; or all their power
    NF4        the number of one of sixteen levels

Everything here is worked out from the bits in whole numbers and exact powers of two; nothing asks torch, which the
tests do. Values are those of the codes alone: a stored weight multiplies them by the scale of its block.

Sources: IEEE 754-2019 §3.4 (float32, float16), bfloat16 is float32 without its lower half; fp8, Micikevicius et al.,
arXiv 2209.05433 table 1; NF4, Dettmers et al., arXiv 2305.14314 appendix E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.errors import WorkbenchError, is_whole, unknown
from workbench.quantization.nf4 import NF4_LEVELS


@dataclass(frozen=True)
class BitField:
    """Neighbouring bits with one role, as they are written: the highest first."""

    role: str  # "sign", "exponent", "fraction" or "code"
    bits: str  # "0111"
    meaning: str  # "7, less the bias of 7: 2^0"


@dataclass(frozen=True)
class BitView:
    """A number of a format, taken apart."""

    format: str
    pattern: int  # all bits as one whole number
    fields: tuple[BitField, ...]
    value: float
    kind: str  # "normal", "subnormal", "zero", "infinity", "nan", "integer" or "level"
    formula: str  # "+ 2^3 × 1.25 = 10"
    below: float | None  # the next lower finite number of the format; None where there is none
    above: float | None

    @property
    def bits(self) -> str:
        return "".join(field.bits for field in self.fields)

    def flip(self, place: int) -> BitView:
        """The number with one bit flipped; place 0 is the lowest bit. Raises WorkbenchError for a place that does not
        exist."""
        if not is_whole(place) or not 0 <= place < len(self.bits):
            raise WorkbenchError(f"{self.format} has bits 0 to {len(self.bits) - 1}, 0 the lowest; got {place!r}")
        return bit_fields(self.pattern ^ (1 << place), self.format)


@dataclass(frozen=True)
class FloatBits:
    """A sign, an exponent and a fraction."""

    name: str
    exponent_bits: int
    fraction_bits: int
    has_infinity: bool = True  # else only exponent and fraction all ones is no number: e4m3 goes one exponent further

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    def parts(self, pattern: int) -> tuple[int, int, int]:
        sign, rest = divmod(pattern, 2 ** (self.width - 1))
        return sign, *divmod(rest, 2**self.fraction_bits)

    def kind(self, pattern: int) -> str:
        _, exponent, fraction = self.parts(pattern)
        ones = exponent == 2**self.exponent_bits - 1
        if ones and self.has_infinity:
            return "nan" if fraction else "infinity"
        if ones and fraction == 2**self.fraction_bits - 1:
            return "nan"
        if exponent:
            return "normal"
        return "subnormal" if fraction else "zero"

    def value(self, pattern: int) -> float:
        sign, exponent, fraction = self.parts(pattern)
        kind = self.kind(pattern)
        if kind == "nan":
            return math.nan
        significand = fraction / 2**self.fraction_bits + (kind == "normal")
        size = math.inf if kind == "infinity" else math.ldexp(significand, max(exponent, 1) - self.bias)
        return -size if sign else size

    def nearest(self, value: float) -> int:
        """The pattern of the nearest number, ties to even; beyond the largest: infinity, or the largest where there is
        none."""
        if math.isnan(value):
            return self.first_beyond + self.has_infinity * 2 ** (self.fraction_bits - 1)
        max_pattern = self.first_beyond - (not self.has_infinity)
        size, sign = abs(value), int(math.copysign(1, value) < 0) << (self.width - 1)
        if math.isinf(size):
            return sign | max_pattern
        exponent = max(math.frexp(size)[1] - 1, 1 - self.bias) if size else 1 - self.bias
        # whole steps of this exponent, ties to even
        steps = round(math.ldexp(size, self.fraction_bits - exponent))
        pattern = ((exponent + self.bias - 1) << self.fraction_bits) + steps  # one step too many: the next exponent
        return sign | min(pattern, max_pattern)

    @property
    def first_beyond(self) -> int:
        """The least positive pattern that is no finite number."""
        ones = 2 ** (self.width - 1) - 1
        return ones - (2**self.fraction_bits - 1) if self.has_infinity else ones

    def fields(self, pattern: int) -> tuple[BitField, ...]:
        sign, exponent, fraction = self.parts(pattern)
        kind = self.kind(pattern)
        power = f"2^{max(exponent, 1) - self.bias}"
        said = {
            "normal": f"{exponent}, less the bias of {self.bias}: {power}",
            "subnormal": f"all 0: the least exponent, {power}, and no 1 before the fraction",
            "zero": "all 0",
            "infinity": "all 1: no finite number",
            "nan": "all 1: no finite number",
        }[kind]
        parts = 2**self.fraction_bits
        whole = {
            "normal": f"1 + {fraction}/{parts} = {1 + fraction / parts}",
            "subnormal": f"0 + {fraction}/{parts} = {fraction / parts}",
            "zero": "0",
            "infinity": "0: infinity",
            "nan": "not 0: not a number" if self.has_infinity else "all 1 as well: not a number",
        }[kind]
        return (
            BitField("sign", str(sign), "−" if sign else "+"),
            BitField("exponent", f"{exponent:0{self.exponent_bits}b}", said),
            BitField("fraction", f"{fraction:0{self.fraction_bits}b}", whole),
        )

    def formula(self, pattern: int) -> str:
        sign, exponent, fraction = self.parts(pattern)
        kind, mark = self.kind(pattern), "−" if sign else "+"
        if kind in ("nan", "infinity", "zero"):
            return {"nan": "not a number", "infinity": f"{mark} infinity", "zero": f"{mark} 0"}[kind]
        significand = fraction / 2**self.fraction_bits + (kind == "normal")
        return f"{mark} 2^{max(exponent, 1) - self.bias} × {significand} = {self.value(pattern)!r}"

    def neighbours(self, pattern: int) -> tuple[float | None, float | None]:
        """Finite numbers are in the order of their patterns, the negative ones backwards; the two zeros are one."""
        if self.kind(pattern) == "nan":
            return None, None
        half = 2 ** (self.width - 1)
        rank = half - pattern if pattern >= half else pattern  # of −0 and +0: 0

        def at(rank: int) -> float | None:
            if abs(rank) >= self.first_beyond:
                return None
            return self.value(half - rank if rank < 0 else rank)

        return at(rank - 1), at(rank + 1)


@dataclass(frozen=True)
class IntegerBits:
    """Whole numbers: two's complement, or from 0."""

    name: str
    width: int
    signed: bool

    def value(self, pattern: int) -> float:
        return float(pattern - 2**self.width if self.signed and pattern >= 2 ** (self.width - 1) else pattern)

    def kind(self, pattern: int) -> str:
        return "integer"

    def nearest(self, value: float) -> int:
        if math.isnan(value):
            raise WorkbenchError(f"{self.name} has no code for NaN")
        low = -(2 ** (self.width - 1)) if self.signed else 0
        high = low + 2**self.width - 1
        return round(min(max(value, low), high)) % 2**self.width

    def fields(self, pattern: int) -> tuple[BitField, ...]:
        bits = f"{pattern:0{self.width}b}"
        places = [2**i for i in reversed(range(self.width))]
        counted = [str(place) for place, bit in zip(places, bits) if bit == "1"]
        if not self.signed:
            return (BitField("code", bits, " + ".join(counted) or "0"),)
        rest = counted[1:] if bits[0] == "1" else counted
        return (
            BitField("sign", bits[0], f"−{places[0]}" if bits[0] == "1" else "0"),
            BitField("code", bits[1:], " + ".join(rest) or "0"),
        )

    def formula(self, pattern: int) -> str:
        parts = [field.meaning for field in self.fields(pattern)]
        return f"{' + '.join(parts)} = {int(self.value(pattern))}"

    def neighbours(self, pattern: int) -> tuple[float | None, float | None]:
        value, there = self.value(pattern), {self.value(p) for p in range(2**self.width)}
        return (value - 1 if value - 1 in there else None), (value + 1 if value + 1 in there else None)


@dataclass(frozen=True)
class LevelBits:
    """The number of a level in a table."""

    name: str
    width: int
    levels: tuple[float, ...]

    def value(self, pattern: int) -> float:
        return self.levels[pattern]

    def kind(self, pattern: int) -> str:
        return "level"

    def nearest(self, value: float) -> int:
        if math.isnan(value):
            raise WorkbenchError(f"{self.name} has no code for NaN")
        return min(range(len(self.levels)), key=lambda code: abs(self.levels[code] - max(min(value, 1), -1)))

    def fields(self, pattern: int) -> tuple[BitField, ...]:
        return (BitField("code", f"{pattern:0{self.width}b}", f"level {pattern} of 0 to {len(self.levels) - 1}"),)

    def formula(self, pattern: int) -> str:
        return f"level {pattern} = {self.levels[pattern]!r}"

    def neighbours(self, pattern: int) -> tuple[float | None, float | None]:
        below = self.levels[pattern - 1] if pattern > 0 else None
        return below, self.levels[pattern + 1] if pattern + 1 < len(self.levels) else None


BIT_FORMATS: dict[str, FloatBits | IntegerBits | LevelBits] = {
    one.name: one
    for one in (
        FloatBits("fp32", 8, 23),
        FloatBits("bf16", 8, 7),
        FloatBits("fp16", 5, 10),
        FloatBits("fp8_e4m3", 4, 3, has_infinity=False),
        FloatBits("fp8_e5m2", 5, 2),
        IntegerBits("int8", 8, signed=True),
        IntegerBits("uint8", 8, signed=False),
        IntegerBits("int4", 4, signed=True),
        IntegerBits("uint4", 4, signed=False),
        LevelBits("nf4", 4, NF4_LEVELS),
    )
}


def bit_fields(value: float | int, format: str) -> BitView:
    """A number taken apart. A float is a value, and the nearest number of the format is shown (ties to even; beyond
    the largest floats become infinity, while e4m3, which has none, integers and levels stop at their ends). An int is a
    pattern, the bits themselves.

    Raises WorkbenchError for an unknown format, a pattern of more bits than the format has, and NaN where it has none.
    """
    kind = _named(format)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WorkbenchError(f"bit_fields takes a float (a value) or an int (a pattern of bits), got {value!r}")
    pattern = kind.nearest(value) if isinstance(value, float) else _checked(kind, value)
    return BitView(
        format,
        pattern,
        kind.fields(pattern),
        kind.value(pattern),
        kind.kind(pattern),
        kind.formula(pattern),
        *kind.neighbours(pattern),
    )


def from_bits(format: str, pattern: int) -> float:
    """The value of these bits. Raises WorkbenchError for an unknown format, and for bits outside it."""
    kind = _named(format)
    return kind.value(_checked(kind, pattern))


def _named(format: str) -> FloatBits | IntegerBits | LevelBits:
    if format not in BIT_FORMATS:
        raise unknown("format", format, BIT_FORMATS)
    return BIT_FORMATS[format]


def _checked(kind: FloatBits | IntegerBits | LevelBits, pattern: int) -> int:
    if not is_whole(pattern) or not 0 <= pattern < 2**kind.width:
        raise WorkbenchError(
            f"a pattern of {kind.name} is a whole number from 0 to {2**kind.width - 1}, got {pattern!r}"
        )
    return pattern
