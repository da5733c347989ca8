"""Formats of few bits against fractions: no element is further off than stated, no byte uncounted."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.quantization import (
    FORMATS,
    FloatFormat,
    IntegerFormat,
    decode,
    encode,
    fit,
    format_named,
    pack,
    quantize_tensor,
    unpack,
)

INTEGERS = [name for name, one in FORMATS.items() if isinstance(one, IntegerFormat)]
FLOATS = [name for name, one in FORMATS.items() if isinstance(one, FloatFormat)]
QUICK = settings(max_examples=40, deadline=None, derandomize=True, database=None)
NUMBERS = st.sampled_from([8, 16]).flatmap(  # of which codes of any width fill whole bytes
    lambda size: st.lists(st.floats(-1000, 1000, width=32), min_size=size, max_size=size)
)


def fractions(t: torch.Tensor) -> list[Fraction]:
    return [Fraction(x) for x in t.double().flatten().tolist()]


# -- by hand ---------------------------------------------------------------------------------------------------


def test_affine_codes_count_from_the_least_element_in_steps_of_the_scale():
    x = torch.tensor([-1.0, -0.5, 0.26, 0.875])
    q = quantize_tensor(x, "int4")
    assert q.zero.item() == -1.0 and q.scale.item() == 0.125  # (0.875 + 1) / 15
    assert unpack(q.codes).tolist() == [0, 4, 10, 15]
    assert q.dequantize().tolist() == [-1.0, -0.5, 0.25, 0.875]


def test_symmetric_codes_count_from_zero_to_both_sides():
    q = quantize_tensor(torch.tensor([-127.0, 3.0, 0.4, 126.6]), "int8_symmetric")
    assert q.codes.tolist() == [-127, 3, 0, 127] and q.codes.dtype == torch.int8
    assert q.scale.item() == 1.0 and q.zero is None
    q = quantize_tensor(torch.tensor([-7.0, 3.0, 0.4, 6.6]), "int4_symmetric")
    assert unpack(q.codes).tolist() == [0, 10, 7, 14]  # stored as code + 7
    assert q.dequantize().tolist() == [-7.0, 3.0, 0.0, 7.0]


def test_fp8_keeps_four_significant_bits():
    q = quantize_tensor(torch.tensor([448.0, 17.0, 19.0, -1.0625, 2.0**-9, 0.4 * 2.0**-9]), "fp8_e4m3")
    assert q.scale.item() == 1.0
    # a tie goes to the even fraction
    assert q.dequantize().tolist() == [448.0, 16.0, 20.0, -1.0, 2.0**-9, 0.0]


def test_two_codes_share_a_byte_the_first_half_in_the_low_bits():
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    assert pack(codes).tolist() == [[1 + 16 * 3, 2 + 16 * 4]]
    assert pack(codes.T, 0).tolist() == [[49], [66]]


def test_three_bits_are_two_and_one():
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.uint8)
    low, high = [0 + 4 * 2 + 16 * 0 + 64 * 2, 1 + 4 * 3 + 16 * 1 + 64 * 3], 2**4 + 2**5 + 2**6 + 2**7
    assert pack(codes, bits=3).tolist() == [[*low, high]]


@pytest.mark.parametrize("bits", range(2, 9))
@QUICK
@given(data=st.data())
def test_unpacking_gives_back_what_was_packed_and_no_bit_is_wasted(bits, data):
    multiple = FORMATS[f"int{bits}"].multiple
    size = multiple * data.draw(st.integers(1, 5))
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=size, max_size=size))
    x = torch.tensor(codes, dtype=torch.uint8)
    packed = pack(x, bits=bits)
    assert unpack(packed, bits=bits).tolist() == codes
    assert 8 * packed.nbytes == bits * size == 8 * FORMATS[f"int{bits}"].code_bytes(size)
    assert unpack(pack(x[:, None], 0, bits), 0, bits)[:, 0].tolist() == codes


# -- the stated bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INTEGERS)
@QUICK
@given(x=NUMBERS)
def test_no_element_of_an_integer_format_is_further_off_than_half_the_stored_scale(name, x):
    x = torch.tensor(x, dtype=torch.float64)  # where arithmetic adds nothing to speak of
    f = FORMATS[name]
    scale, zero = fit(x, f, -1)
    codes = encode(x, scale, zero, f)
    codes = unpack(codes, bits=f.bits).int() + f.lowest if f.is_packed else codes.int()
    s, z = Fraction(scale.item()), Fraction(0 if zero is None else zero.item())
    for value, code in zip(fractions(x), codes.tolist()):
        assert f.lowest <= code <= f.highest
        assert abs(value - (s * code + z)) <= s / 2 * (1 + Fraction(2) ** -40)


@pytest.mark.parametrize("name", FLOATS)
@QUICK
@given(x=NUMBERS)
def test_no_element_of_fp8_is_further_off_than_half_a_unit_in_the_last_place(name, x):
    x = torch.tensor(x)
    f = FORMATS[name]
    scale, zero = fit(x, f, -1)
    s = Fraction(scale.item())
    assert zero is None
    for value, code in zip(fractions(x), fractions(encode(x, scale, zero, f).double())):
        relative = abs(value) / 2 ** (f.fraction_bits + 1)
        bound = max(relative, Fraction(f.least_step) / 2 * s)
        assert abs(value - s * code) <= bound * (1 + Fraction(2) ** -19)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@QUICK
@given(x=NUMBERS, far=st.sampled_from([0.0, 3.0, 500.0]), size=st.sampled_from([1e-6, 1e-2, 1.0]))
def test_what_comes_back_is_within_the_bound_that_is_given_with_it(name, dtype, x, far, size):
    x = (torch.tensor(x) * size + far).to(dtype)
    q = quantize_tensor(x, name)
    assert q.dequantize().dtype == dtype
    for value, back, bound in zip(fractions(x), fractions(q.dequantize()), q.error_bound().tolist()):
        assert abs(value - back) <= bound


def test_the_bound_is_not_a_loose_one():
    """Many random elements come close to it, so a step off or a scale too small would pass it."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for name in FORMATS:
        q = quantize_tensor(x, name, over=0)
        worst = ((q.dequantize() - x).abs() / q.error_bound()).max()
        assert 0.9 < worst <= 1, name


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_are_rounded_up_and_zeros_down_so_that_every_block_fits(scale_dtype):
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(1)) + 5
    for name in INTEGERS:
        f = FORMATS[name]
        scale, zero = (None if t is None else t.double() for t in fit(x, f, -1, scale_dtype))
        low = scale * f.lowest if zero is None else zero
        assert (low <= x.amin(-1, keepdim=True) + 1e-6).all()
        assert (low + scale * (f.highest - f.lowest) >= x.amax(-1, keepdim=True) - 1e-6).all()


def test_fp8_codes_are_read_as_torch_reads_them():
    """All 256 of them, though bits are moved by hand for e4m3. NaN is none that `encode` makes."""
    one = torch.ones(1)
    for name in FLOATS:
        f = FORMATS[name]
        codes = torch.arange(256, dtype=torch.uint8).view(f.code_dtype)
        known = codes.float().isfinite()
        assert torch.equal(decode(codes, one, None, f)[known], codes.float()[known])


def test_a_block_of_equal_numbers_comes_back_as_it_was():
    for value in (0.0, 1.5, -3.25, -0.0):
        for name in ("int8", "int4", "int8_symmetric", "fp8_e4m3"):
            back = quantize_tensor(torch.full((4,), value), name).dequantize()
            assert (back - value).abs().max() <= 2**-10 * abs(value)  # of a scale in float16
    assert quantize_tensor(torch.full((4,), -3.25), "int4").dequantize().tolist() == [-3.25] * 4


# -- blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "group", "scales", "bits"),
    [
        (None, None, (1, 1), 4 + 32 / 128),
        (1, None, (4, 1), 4 + 32 / 32),
        (-1, None, (4, 1), 4 + 32 / 32),
        (0, None, (1, 32), 4 + 32 / 4),
        ((0, 1), None, (1, 1), 4 + 32 / 128),
        (1, 8, (4, 4, 1), 4 + 32 / 8),
        (0, 2, (2, 1, 32), 4 + 32 / 2),
    ],
)
def test_a_scale_serves_the_axes_it_was_asked_to_and_every_byte_is_counted(over, group, scales, bits):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    q = quantize_tensor(x, "int4", over=over, group=group)
    assert tuple(q.scale.shape) == scales == tuple(q.zero.shape)
    assert q.bits_per_value == bits and q.nbytes == bits * 128 / 8
    assert q.dequantize().shape == x.shape
    assert ((q.dequantize() - x).abs() <= q.error_bound()).all()


def test_a_block_knows_nothing_of_the_others():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    loud = x.clone()
    loud[1] *= 100
    for name in FORMATS:
        for a, b in zip(
            quantize_tensor(x, name, over=1).dequantize(), quantize_tensor(loud, name, over=1).dequantize()
        ):
            assert torch.equal(a, b) or b.abs().max() > 50
        assert torch.equal(
            quantize_tensor(x, name, over=1).dequantize()[0], quantize_tensor(x[:1], name).dequantize()[0]
        )


def test_groups_are_blocks_of_neighbours_along_one_axis():
    x = torch.tensor([[0.0, 15.0, 100.0, 250.0]])
    q = quantize_tensor(x, "int4", over=1, group=2)
    assert q.scale.flatten().tolist() == [1.0, 10.0] and q.zero.flatten().tolist() == [0.0, 100.0]
    assert q.dequantize().tolist() == x.tolist()
    transposed = quantize_tensor(x.T, "int4", over=0, group=2)
    assert transposed.dequantize().T.tolist() == x.tolist() and transposed.nbytes == q.nbytes


def test_scales_add_three_per_cent_to_four_bits_in_groups_of_128():
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(4))
    assert quantize_tensor(x, "int4_symmetric", over=1, group=128).bits_per_value == 4.125
    assert quantize_tensor(x, "int4", over=1, group=128).bits_per_value == 4.25


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_block_with_what_is_no_number_comes_back_as_nan_and_the_others_untouched(name, bad):
    """1e30 is a number, and too wide for a scale in float16."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))
    broken = x.clone()
    broken[1, 2] = bad
    q = quantize_tensor(broken, name, over=1)
    back = q.dequantize()
    assert q.scale.isnan().flatten().tolist() == [False, True, False] and back[1].isnan().all()
    assert torch.equal(back[[0, 2]], quantize_tensor(x, name, over=1).dequantize()[[0, 2]])
    assert q.error_bound()[1].isnan().all()


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize_tensor(x, "int44"), "unknown format 'int44'; did you mean 'int4'"),
        (lambda x: format_named("fp8"), "did you mean 'fp8_e"),
        (lambda x: IntegerFormat(9), "2 to 8 bits, got 9"),
        (lambda x: IntegerFormat(True), "got True"),
        (lambda x: IntegerFormat(4.0), "got 4.0"),
        (lambda x: quantize_tensor(x.int(), "int8"), "floating-point tensors"),
        (lambda x: quantize_tensor(x[:0], "int8"), r"with elements are quantized, got \[0, 6\]"),
        (lambda x: quantize_tensor(x, "int8", over=2), "axes of a tensor of 2 dimensions, got 2"),
        (lambda x: quantize_tensor(x, "int8", over=(0, -2)), "different axes"),
        (lambda x: quantize_tensor(x, "int8", over=()), "different axes"),
        (lambda x: quantize_tensor(x, "int8", over=True), "different axes"),
        (lambda x: quantize_tensor(x, "int8", over=1, group=4), "divides the 6 elements of axis 1, got 4"),
        (lambda x: quantize_tensor(x, "int8", over=1, group=0), "got 0"),
        (lambda x: quantize_tensor(x, "int8", over=1, group=2.0), "got 2.0"),
        (lambda x: quantize_tensor(x, "int8", group=2), "over=… of one axis"),
        (lambda x: quantize_tensor(x, "int8", over=(0, 1), group=2), "over=… of one axis"),
        (lambda x: quantize_tensor(x, "int4", over=0), "multiple of 2, got 3"),
        (lambda x: quantize_tensor(x, "int3", over=1), "codes of 3 bits fill whole bytes 8 at a time.*got 6"),
        (lambda x: quantize_tensor(x, "int8", scale_dtype=torch.float64), "scales are stored as float16"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(call, message):
    with pytest.raises(WorkbenchError, match=message):
        call(torch.randn(3, 6))


def test_every_format_goes_by_its_name():
    assert {"int8", "int4", "int2", "int8_symmetric", "fp8_e4m3", "fp8_e5m2"} <= set(FORMATS)
    for name, one in FORMATS.items():
        assert one.name == name and format_named(name) is one and format_named(one) is one
