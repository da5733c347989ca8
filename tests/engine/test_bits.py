"""Bits taken apart, against torch's own types: every pattern of 8 bits and fewer, samples of the wider ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.quantization import FORMATS, pack, unpack
from workbench.quantization.bits import BIT_FORMATS, bit_fields, from_bits
from workbench.quantization.kquant_bytes import LAYOUTS, from_bytes
from workbench.quantization.nf4 import NF4_LEVELS, NormalFloat
from workbench.quantization.packed_bits import nf4_ranges, packed_bits, super_block_bits, super_block_ranges

QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)
FLOATS = {
    "fp32": (torch.float32, torch.int32),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}


def as_torch(name: str, patterns: list[int]) -> torch.Tensor:
    """The values of these patterns as torch reads them, float64 (float32 and narrower fit exactly)."""
    dtype, whole = FLOATS[name]
    width = BIT_FORMATS[name].width
    signed = [p - 2**width if whole != torch.uint8 and p >= 2 ** (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=whole).view(dtype).float().double()


def patterns_of(name: str) -> list[int]:
    """All of 8 and 16 bits. Of 32: around zero, the least normal number, the largest and infinity, and a spread."""
    width = BIT_FORMATS[name].width
    if width <= 16:
        return list(range(2**width))
    ends = [0, 1 << 23, 0x7F800000]
    near = [e + d for e in ends for d in range(-3, 4) if e + d >= 0]
    spread = torch.randint(0, 2**31, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    return [p | sign for p in near + spread for sign in (0, 1 << 31)]


def rounded_by_torch(name: str, x: torch.Tensor) -> torch.Tensor:
    """e4m3 stops at its largest number here; what torch's own conversion makes beyond it depends on its version."""
    return (x.clamp(-448, 448) if name == "fp8_e4m3" else x).to(FLOATS[name][0]).double()


def same(a: float, b: float) -> bool:
    """Of the same sign too, and NaN is NaN."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


# -- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
def test_a_pattern_is_the_number_that_torch_reads(name):
    patterns = patterns_of(name)
    for pattern, theirs in zip(patterns, as_torch(name, patterns).tolist(), strict=True):
        assert same(from_bits(name, pattern), theirs), hex(pattern)


def test_whole_numbers_and_levels_are_read_as_they_are_stored():
    eight = torch.arange(256, dtype=torch.uint8)
    assert [from_bits("int8", p) for p in range(256)] == eight.view(torch.int8).double().tolist()
    assert [from_bits("uint8", p) for p in range(256)] == eight.double().tolist()
    assert [from_bits("int4", p) for p in range(16)] == [*range(8), *range(-8, 0)]
    assert [from_bits("uint4", p) for p in range(16)] == unpack(pack(eight[:16])).tolist()
    one = NormalFloat(pack(eight[:16].view(1, 1, 16)), torch.ones(1, 1))
    assert [from_bits("nf4", p) for p in range(16)] == pytest.approx(one.dequantize()[0].tolist(), abs=1e-8)
    assert [from_bits("nf4", p) for p in range(16)] == list(NF4_LEVELS)


# -- rounding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
@QUICK
@given(x=st.floats(width=32))
def test_a_value_becomes_the_number_that_torch_rounds_it_to(name, x):
    theirs = rounded_by_torch(name, torch.tensor(x)).item()
    assert same(bit_fields(x, name).value, theirs)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp16", "bf16"])
def test_ties_go_to_the_even_pattern_and_the_ends_are_those_of_torch(name):
    """The middles between neighbours, the ends, and what lies just around them."""
    patterns = range(2 ** BIT_FORMATS[name].width // 2)
    finite = as_torch(name, list(patterns))
    finite = finite[finite.isfinite()]
    middles = ((finite[1:] + finite[:-1]) / 2)[:: max(1, len(finite) // 500)]
    last = finite[-1] + (finite[-1] - finite[-2]) / 2
    asked = torch.cat((middles, last.view(1), last.view(1) * (1 - 2**-20), last.view(1) * (1 + 2**-20))).float()
    for x, theirs in zip(asked.tolist(), rounded_by_torch(name, asked).tolist(), strict=True):
        assert same(bit_fields(x, name).value, theirs), x


@pytest.mark.parametrize("name", BIT_FORMATS)
def test_every_number_is_nearest_to_itself(name):
    for pattern in patterns_of(name) if BIT_FORMATS[name].width < 16 else patterns_of(name)[::97]:
        value = from_bits(name, pattern)
        assert same(bit_fields(value, name).value, value)
        if not math.isnan(value):
            assert bit_fields(value, name).pattern == pattern


def test_whole_numbers_stop_at_their_ends_and_levels_at_one():
    assert [bit_fields(x, "int4").value for x in (-100.0, -3.4, 2.5, 3.5, 99.0)] == [-8, -3, 2, 4, 7]
    assert [bit_fields(x, "uint8").value for x in (-1.0, 254.6, math.inf)] == [0, 255, 255]
    assert [bit_fields(x, "nf4").value for x in (-9.0, 0.03, math.inf)] == [-1.0, 0.0, 1.0]
    for name in ("int8", "uint4", "nf4"):
        with pytest.raises(WorkbenchError, match="no code for NaN"):
            bit_fields(math.nan, name)


# -- what is said ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BIT_FORMATS)
def test_the_bits_are_the_pattern_and_neighbours_are_next_to_it(name):
    patterns = patterns_of(name)[:: 1 if BIT_FORMATS[name].width < 16 else 61]
    views = [bit_fields(p, name) for p in patterns]
    for pattern, view in zip(patterns, views, strict=True):
        assert int(view.bits, 2) == pattern and len(view.bits) == BIT_FORMATS[name].width
        for place in (0, len(view.bits) - 1):
            assert view.flip(place).pattern == pattern ^ (1 << place)
    if BIT_FORMATS[name].width > 8:
        return
    finite = sorted({v.value for v in views if math.isfinite(v.value)})
    for view in views:
        if math.isnan(view.value):
            assert view.below is None and view.above is None
            continue
        lower, higher = [x for x in finite if x < view.value], [x for x in finite if x > view.value]
        assert view.below == (lower[-1] if lower else None) and view.above == (higher[0] if higher else None)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_neighbours_of_wide_floats_are_those_of_nextafter(name):
    dtype, _ = FLOATS[name]
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for x in (0.0, -0.0, 1.0, -1.0, 0.1, -3.7, 1e-30, tiny, -tiny, largest, -largest, 2.0**-24):
        view = bit_fields(x, name)
        for to, found in ((-math.inf, view.below), (math.inf, view.above)):
            mine, towards = (torch.tensor(t, dtype=dtype) for t in (view.value, to))
            if name == "fp16":  # for which torch has no nextafter, and numpy does
                with np.errstate(over="ignore"):
                    theirs = float(np.nextafter(mine.numpy(), towards.numpy()))
            else:
                theirs = torch.nextafter(mine, towards).double().item()
            assert found == (theirs if math.isfinite(theirs) else None), (x, to)


def test_the_value_is_what_the_fields_say():
    """Of a number that is no 0, infinity or NaN: sign, exponent and fraction are enough to get it back."""
    for name in FLOATS:
        kind = BIT_FORMATS[name]
        for pattern in patterns_of(name)[:: 1 if kind.width == 8 else 37]:
            view = bit_fields(pattern, name)
            sign, exponent, fraction = (int(field.bits, 2) for field in view.fields)
            if view.kind in ("normal", "subnormal"):
                significand = (view.kind == "normal") + fraction / 2**kind.fraction_bits
                power = 2.0 ** (max(exponent, 1) - (2 ** (kind.exponent_bits - 1) - 1))
                assert view.value == (-1) ** sign * significand * power
                assert view.formula.endswith(repr(view.value)) and f"2^{max(exponent, 1) - kind.bias}" in view.formula
                assert view.fields[2].meaning.endswith(str(significand))


@pytest.mark.parametrize(
    ("name", "pattern", "kind", "formula", "said"),
    [
        ("fp8_e4m3", 0x7F, "nan", "not a number", "all 1 as well"),
        ("fp8_e4m3", 0x78, "normal", "+ 2^8 × 1.0 = 256.0", "1 + 0/8"),  # where others have infinity
        ("fp8_e4m3", 0x01, "subnormal", "+ 2^-6 × 0.125 = 0.001953125", "0 + 1/8"),
        ("fp8_e5m2", 0x7C, "infinity", "+ infinity", "0: infinity"),
        ("fp8_e5m2", 0xFD, "nan", "not a number", "not 0"),
        ("fp16", 0x0001, "subnormal", "+ 2^-14 × 0.0009765625 = 5.960464477539063e-08", "0 + 1/1024"),
        ("bf16", 0xC0A0, "normal", "− 2^2 × 1.25 = -5.0", "1 + 32/128"),
        ("fp32", 0x80000000, "zero", "− 0", "0"),
    ],
)
def test_special_numbers_are_explained(name, pattern, kind, formula, said):
    view = bit_fields(pattern, name)
    assert view.kind == kind and view.formula == formula and said in view.fields[2].meaning
    if kind == "subnormal":
        assert "no 1 before the fraction" in view.fields[1].meaning


def test_whole_numbers_are_sums_of_their_places():
    view = bit_fields(0b10010110, "int8")
    assert [f.role for f in view.fields] == ["sign", "code"] and view.formula == "−128 + 16 + 4 + 2 = -106"
    assert bit_fields(0, "uint4").formula == "0 = 0" and bit_fields(7.0, "nf4").formula == "level 15 = 1.0"


# -- packed bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_bit_of_packed_codes_is_where_it_is_said_to_be(bits):
    count = 2 * FORMATS[f"int{bits}"].multiple
    places = packed_bits(bits, count)
    assert [(p.byte, p.place) for p in places] == [(b, i) for b in range(count * bits // 8) for i in range(8)]
    codes = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    packed = pack(codes, bits=bits).tolist()
    for p in places:
        assert (packed[p.byte] >> p.place) & 1 == (int(codes[p.index]) >> p.bit) & 1


def test_four_and_three_bits_by_hand():
    assert [(p.index, p.bit) for p in packed_bits(4, 4)[:8]] == [(i, b) for i in (0, 2) for b in range(4)]
    high = [p for p in packed_bits(3, 8) if p.byte == 2]
    assert [(p.index, p.bit) for p in high] == [(i, 2) for i in range(8)]


@pytest.mark.parametrize("bits", LAYOUTS)
def test_a_super_block_has_every_bit_once_and_each_is_what_it_is_said_to_be(bits):
    layout, places = LAYOUTS[bits], super_block_bits(bits)
    assert [(p.byte, p.place) for p in places] == [(b, i) for b in range(layout.nbytes) for i in range(8)]
    raw = torch.randint(0, 256, (1, layout.nbytes), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    whole = from_bytes(raw, layout)
    numbers = {
        "code": whole.codes.flatten(),
        "scale": whole.scales[0].int() + (32 if bits == 3 else 0),  # stored from 0 up, turned bit by bit
        "d": whole.d.view(torch.int16),
    }
    if layout.has_minimum:
        numbers |= {"minimum": whole.minima[0], "d_min": whole.d_min.view(torch.int16)}
    assert {p.part for p in places} == set(numbers)
    for p in places:
        stored = (int(raw[0, p.byte]) >> p.place) & 1
        assert stored == (int(numbers[p.part][p.index]) >> p.bit) & 1, p
    ranges = super_block_ranges(bits)
    assert [r.start for r in ranges[1:]] == [r.end for r in ranges[:-1]] and ranges[-1].end == layout.nbytes
    assert sum(r.bits_per_weight for r in ranges) == layout.bits_per_weight
    inside = {r.name: {p.part for p in places if r.start <= p.byte < r.end} for r in ranges}
    assert inside["d"] == {"d"} and inside["low"] == {"code"}
    assert inside["scales"] == ({"scale", "minimum"} if layout.has_minimum else {"scale"})


def test_the_bytes_of_nf4_are_those_that_a_stored_weight_keeps():
    kept = NormalFloat.rounded(torch.randn(16, 1024, generator=torch.Generator().manual_seed(0)), 64)
    sizes = {r.name: r.end - r.start for r in nf4_ranges(64)}
    assert sizes == {name: t.nbytes for name, t in kept.tensors().items() if name != "scale_mean"}
    assert sum(r.bits_per_weight for r in nf4_ranges(64)) == 4 + 8 / 64 + 32 / (64 * 256)
    assert sum(r.bits_per_weight for r in nf4_ranges(64, double=False)) == 4.5


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bit_fields(1.0, "fp8_e4m3fn"), "did you mean 'fp8_e4m3'"),
        (lambda: from_bits("bf61", 0), "did you mean 'bf16'"),
        (lambda: bit_fields(256, "int8"), "from 0 to 255, got 256"),
        (lambda: from_bits("int4", -1), "from 0 to 15, got -1"),
        (lambda: from_bits("int4", 1.0), "got 1.0"),
        (lambda: bit_fields(True, "int4"), "a float .* or an int .* got True"),
        (lambda: bit_fields("1", "int4"), "got '1'"),
        (lambda: bit_fields(1, "int4").flip(4), "bits 0 to 3, 0 the lowest; got 4"),
        (lambda: packed_bits(9, 8), "2 to 8 bits"),
        (lambda: packed_bits(3, 4), "multiple of 8, got 4"),
        (lambda: packed_bits(4, 0), "at least 1, got 0"),
        (lambda: super_block_bits(7), "2 to 6 bits, got 7"),
        (lambda: nf4_ranges(3), "even number, got 3"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(call, message):
    with pytest.raises(WorkbenchError, match=message):
        call()
