"""Products of a few rows with weights in 32, 16, 8 and 4 bits: every version gives what float64 gives, whatever the
shape, and what lies where in a word is what the module says."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_claims import TOLERANCE, assert_near, dtypes, on_each_device

from workbench.kernels import launch, matvec, matvec_codes, matvec_int4, matvec_int8, tuning
from workbench.kernels.arrivals import counters
from workbench.kernels.launch import Unsupported
from workbench.kernels.matvec_codes import packed, unpacked

few = settings(max_examples=12, deadline=None)
SIZES = st.sampled_from([1, 2, 3, 4, 5, 16, 17, 32])
OUTPUTS = st.sampled_from([1, 7, 64, 65, 130])
INPUTS = st.sampled_from([1, 31, 77, 128, 200, 260])


@pytest.fixture(autouse=True)
def what_is_not_written_is_nan():
    """`new_empty` gives NaN: an output, or a part of a split, that a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, seed: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def few_programs(device: str, max_programs: int, *sizes: int) -> tuple[int, ...]:
    """In the interpreter, where each program takes its time, sizes with as many left over and at most so many whole
    programs of 4: what comes beyond them is computed by the same lines. On a GPU the sizes as they are."""
    return tuple(size if device == "cuda" else min(size, 4 * max_programs + size % 4) for size in sizes)


def tolerance(dtype: torch.dtype) -> float:
    return 2 * TOLERANCE[dtype]  # up to 260 terms, in another order


# -- 16 and 32 bits ----------------------------------------------------------------------------------------------


@on_each_device
@few
@given(
    rows=SIZES,
    out=OUTPUTS,
    inside=INPUTS,
    splits=st.sampled_from([None, 1, 2, 5]),
    biased=st.booleans(),
    version=st.sampled_from([1, 2, 3]),
    half=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_version_gives_the_product(device, rows, out, inside, splits, biased, version, half, seed):
    dtype = dtypes(device)[-1 if half else 0]
    if not matvec.on_tensor_cores(rows, dtype, version):
        rows, out = few_programs(device, 2, rows, out)
    x, weight = random(rows, inside, seed=seed, dtype=dtype, device=device), None
    weight = random(out, inside, seed=seed + 1, dtype=dtype, device=device)
    bias = random(out, seed=seed + 2, dtype=dtype, device=device) if biased else None
    y = matvec.matvec(x, weight, bias, splits if version == 3 else None, version=version)
    truth = matvec.matvec_reference(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.dtype == dtype
    assert_near(y, truth, tolerance(dtype))


@on_each_device
@few
@given(
    rows=SIZES,
    size=st.sampled_from([1, 3, 32, 33, 65]),
    inside=INPUTS,
    splits=st.sampled_from([None, 1, 2, 5]),
    biased=st.booleans(),
    version=st.sampled_from([2, 3]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    half=st.booleans(),
)
def test_a_gate_is_part_of_the_product(device, rows, size, inside, splits, biased, version, activation, half):
    dtype = dtypes(device)[-1 if half else 0]
    if not matvec.on_tensor_cores(rows, dtype, version):
        rows, size = few_programs(device, 2, rows, size)
    x = random(rows, inside, seed=1, dtype=dtype, device=device)
    weight = random(2 * size, inside, seed=2, dtype=dtype, device=device) / inside**0.5
    bias = random(2 * size, seed=3, dtype=dtype, device=device) if biased else None
    splits = splits if version == 3 else None
    with launch.launches() as counted:
        y = matvec.matvec(x, weight, bias, splits, activation=activation, version=version)
    wide = None if bias is None else bias.double()
    truth = matvec.matvec_reference(x.double(), weight.double(), wide, activation=activation)
    assert y.dtype == dtype and y.shape == (rows, size)
    assert_near(y, truth, tolerance(dtype))
    assert splits is None or counted.total() == 1 + (splits > 1)


@on_each_device
@few
@given(
    rows=SIZES,
    out=OUTPUTS,
    inside=INPUTS,
    splits=st.sampled_from([None, 1, 2, 5]),
    biased=st.booleans(),
    version=st.sampled_from([2, 3]),
    half=st.booleans(),
    wide=st.booleans(),
)
def test_a_product_is_added_to_a_residual_in_place(device, rows, out, inside, splits, biased, version, half, wide):
    dtype = dtypes(device)[-1 if half else 0]
    if not matvec.on_tensor_cores(rows, dtype, version):
        rows, out = few_programs(device, 2, rows, out)
    x = random(rows, inside, seed=1, dtype=dtype, device=device)
    weight = random(out, inside, seed=2, dtype=dtype, device=device)
    bias = random(out, seed=3, dtype=dtype, device=device) if biased else None
    residual = random(rows, out, seed=4, dtype=torch.float32 if wide else dtype, device=device)
    before = residual.double()
    splits = splits if version == 3 else None
    with launch.launches() as counted:
        y = matvec.matvec(x, weight, bias, splits, residual=residual, version=version)
    truth = matvec.matvec_reference(
        x.double(), weight.double(), None if bias is None else bias.double(), residual=before
    )
    assert y is residual
    assert_near(y, truth, tolerance(dtype))
    assert splits is None or counted.total() == 1 + (splits > 1)


@on_each_device
@few
@given(
    rows=SIZES,
    out=st.sampled_from([2, 64, 66, 130]),
    inside=INPUTS,
    splits=st.sampled_from([None, 1, 2, 5]),
    besides=st.sampled_from(["", "bias", "gate", "residual", "bias and gate"]),
    version=st.sampled_from([2, 3]),
    half=st.booleans(),
    wide=st.booleans(),
)
def test_a_norm_is_part_of_the_product(device, rows, out, inside, splits, besides, version, half, wide):
    """Whatever stands at its end; x far from 1, and in a type of its own."""
    dtype = dtypes(device)[-1 if half else 0]
    if not matvec.on_tensor_cores(rows, dtype, version):
        rows, out = few_programs(device, 2, rows, out)
    x = 30 * random(rows, inside, seed=1, dtype=torch.float32 if wide else dtype, device=device)
    weight = random(out, inside, seed=2, dtype=dtype, device=device) / inside**0.5
    of_norm = 1 + 0.5 * random(inside, seed=3, dtype=torch.float32 if wide else dtype, device=device)
    bias = random(out, seed=4, dtype=dtype, device=device) if "bias" in besides else None
    asked = {"activation": "silu"} if "gate" in besides else {}
    if besides == "residual":
        asked = {"residual": random(rows, out, seed=5, dtype=dtype, device=device)}
    splits = splits if version == 3 else None
    exact = {**asked, "norm": (of_norm.double(), 1e-5)}
    if besides == "residual":
        exact["residual"] = asked["residual"].double()
    wide_bias = None if bias is None else bias.double()
    truth = matvec.matvec_reference(x.double(), weight.double(), wide_bias, **exact)
    if not matvec.norms(rows, dtype, version):
        with pytest.raises(launch.Unsupported, match="does not norm"):
            matvec.matvec(x, weight, bias, splits, norm=(of_norm, 1e-5), version=version, **asked)
        return
    with launch.launches() as counted:
        y = matvec.matvec(x, weight, bias, splits, norm=(of_norm, 1e-5), version=version, **asked)
    assert y.dtype == dtype
    assert_near(y, truth, tolerance(dtype))
    assert splits is None or counted.total() == 1 + (splits > 1)


@on_each_device
@few
@given(
    rows=SIZES,
    out=st.sampled_from([2, 64, 66, 130]),
    inside=INPUTS,
    splits=st.sampled_from([2, 5]),
    besides=st.sampled_from(["", "bias", "gate", "residual", "bias and gate"]),
    normed=st.booleans(),
    half=st.booleans(),
)
def test_the_last_program_adds_the_parts_up(device, rows, out, inside, splits, besides, normed, half):
    """In one launch, whatever is done besides, bit for bit as a launch of its own does; counters are zeros again.

    But for a gate in the interpreter: numpy's exponential differs by where in a vector a number lies.
    """
    exact = not normed and (device != "cpu" or "gate" not in besides)
    dtype = dtypes(device)[-1 if half else 0]
    if not matvec.on_tensor_cores(rows, dtype, 3):
        rows, out = few_programs(device, 2, rows, out)
    x = random(rows, inside, seed=1, dtype=dtype, device=device)
    weight = random(out, inside, seed=2, dtype=dtype, device=device) / inside**0.5
    asked = {"bias": random(out, seed=3, dtype=dtype, device=device) if "bias" in besides else None}
    if "gate" in besides:
        asked["activation"] = "silu"
    if normed and matvec.norms(rows, dtype):
        asked["norm"] = 1 + random(inside, seed=4, dtype=dtype, device=device) / 2, 1e-5
    count = counters(device)
    ours, apart = (
        {"residual": random(rows, out, seed=5, dtype=dtype, device=device)} if besides == "residual" else {}
        for _ in range(2)
    )
    for again in range(2):
        with launch.launches() as counted:
            y = matvec.matvec(x, weight, splits=splits, arrivals=count, **asked, **ours)
        assert counted.total() == 1 and not count.any()
        expected = matvec.matvec(x, weight, splits=splits, **asked, **apart)
        assert y.equal(expected) if exact else assert_near(y, expected.double()) is None, again
    with launch.launches() as counted:
        matvec.matvec(x, weight, splits=splits, arrivals=count[:0], **asked)
    assert counted.total() == 2


@on_each_device
@pytest.mark.parametrize("bits, version", [(4, 3), (8, 3), (8, 4)])
@pytest.mark.parametrize("rows", [3, 20])
def test_the_last_program_adds_the_parts_of_a_weight_in_codes_up(device, bits, version, rows):
    """In one launch, bit for bit as a launch of its own does; counters are zeros again."""
    weight = Weight.random(bits, 70, 640, 128, has_zero=True, device=device)
    for dtype in (torch.float32, torch.float16):
        x, count = random(rows, 640, seed=1, dtype=dtype, device=device), counters(device)
        expected = weight.times(x, version, splits=3)
        for _ in range(2):
            with launch.launches() as counted:
                y = weight.times(x, version, splits=3, arrivals=count)
            assert counted.total() == 1 and not count.any() and y.equal(expected)
        with launch.launches() as counted:
            weight.times(x, version, splits=3, arrivals=count[:0])
        assert counted.total() == 2


def test_arrivals_that_cannot_count_are_refused():
    x, weight = torch.ones(2, 8), torch.ones(6, 8)
    for arrivals, words in ((torch.zeros(9), "must be one of int32"), (counters("cpu")[::2], "must be contiguous")):
        with pytest.raises(launch.Unsupported, match=words):
            matvec.matvec(x, weight, arrivals=arrivals)


def test_a_norm_that_cannot_be_is_refused():
    x, weight = torch.ones(2, 8), torch.ones(6, 8)
    for asked, words in (
        ({"norm": (torch.ones(7), 1e-5)}, r"norm weight must have shape \[8\], got \[7\]"),
        ({"norm": (torch.ones(8).double(), 1e-5)}, "norm_weight must be one of float32"),
        ({"norm": (torch.ones(8), 1e-5), "version": 1}, "version 1 does not norm 2 rows for weights in float32"),
    ):
        with pytest.raises(launch.Unsupported, match=words):
            matvec.matvec(x, weight, **asked)


def test_a_residual_that_cannot_be_is_refused_and_stays_as_it_was():
    x, weight, residual = torch.ones(1, 8), torch.ones(6, 8), torch.zeros(1, 6)
    for asked, words in (
        ({"residual": residual, "activation": "silu"}, "gated or added"),
        ({"residual": residual, "version": 1}, "take version 2 or 3"),
        ({"residual": residual[:, :5]}, r"residual must have shape \[1, 6\], got \[1, 5\]"),
        ({"residual": torch.zeros(1, 12)[:, ::2]}, "residual must be contiguous"),
        ({"residual": residual.double()}, "residual must be one of float32"),
    ):
        with pytest.raises(launch.Unsupported, match=words):
            matvec.matvec(x, weight, **asked)
    assert not residual.any()


def test_a_gate_that_cannot_be_is_refused():
    x, weight = torch.zeros(1, 8), torch.zeros(6, 8)
    for asked, words in (
        ({"activation": "relu"}, "one of silu, gelu_tanh; got 'relu'"),
        ({"activation": "silu", "version": 1}, "take version 2 or 3"),
        ({"activation": "silu", "weight": weight[:5]}, "an even number; got 5"),
    ):
        with pytest.raises(launch.Unsupported, match=words):
            matvec.matvec(x, **{"weight": weight, **asked})


@on_each_device
def test_rows_may_lie_apart(device):
    for rows in (2, 6):
        x = random(rows, 96, seed=1, device=device)[:, 16:80]
        weight = random(20, 96, seed=2, device=device)[:, 8:72]
        assert_near(matvec.matvec(x, weight), x.double() @ weight.double().T, tolerance(x.dtype))


@on_each_device
def test_what_is_beyond_the_last_row_or_input_does_not_matter(device):
    """Tails are masked, not multiplied by what happens to lie there."""
    x, weight = (random(8, 80, seed=s, device=device) for s in (1, 2))
    x[:, 77:] = weight[:, 77:] = float("nan")
    x[5:] = float("inf")
    y = matvec.matvec(x[:5, :77], weight[:6, :77])
    assert_near(y, x[:5, :77].double() @ weight[:6, :77].double().T, tolerance(x.dtype))


# -- codes -------------------------------------------------------------------------------------------------------


@dataclass
class Weight:
    """A random weight in codes, and what it stands for."""

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    group: int | None
    added: int
    packs: bool = False  # scale and zero in one word

    @classmethod
    def random(cls, bits, out, inside, group, *, has_zero, device, seed=0) -> Weight:
        generator = torch.Generator().manual_seed(seed)
        low, high = (0, 16) if bits == 4 else (-128, 128)
        codes = torch.randint(low, high, (out, inside), generator=generator)
        groups = 1 if group is None else inside // group
        scale = (0.01 + torch.rand(groups, out, generator=generator)).half().T
        zero = torch.randn(groups, out, generator=generator).half().T if has_zero else None
        codes = codes.to(device, torch.uint8 if bits == 4 else torch.int8)
        zero = None if zero is None else zero.to(device)
        return cls(bits, codes, scale.to(device), zero, group, 0 if has_zero else -7)

    @property
    def numbers(self) -> torch.Tensor:
        """[out, in] float64, by the formula."""
        group = self.codes.shape[1] if self.group is None else self.group
        wide = (self.codes.double() + self.added).unflatten(1, (-1, group)) * self.scale.double()[..., None]
        return (wide if self.zero is None else wide + self.zero.double()[..., None]).flatten(1)

    def times(self, x: torch.Tensor, version: int, **settings) -> torch.Tensor:
        settings |= {"group": self.group, "added": self.added, "version": version}
        steps = (packed(self.scale, self.zero), None) if self.packs else (self.scale, self.zero)
        if self.bits == 4:
            words = matvec_int4.interleaved(self.codes)
            return matvec_int4.matvec_int4(x, words, *steps, **settings)
        codes = matvec_int8.interleaved(self.codes) if version == 4 else self.codes
        return matvec_int8.matvec_int8(x, codes, *steps, **settings)


def test_a_scale_and_a_zero_are_the_halves_of_a_word():
    scale = torch.tensor([[0.5, -2.0], [65504.0, 6e-8]]).half()
    zero = torch.tensor([[-0.0, 1.0], [-1e-7, -65504.0]]).half()
    words = packed(scale, zero)
    assert words.dtype == torch.int32 and words.stride() == (1, 2), "all outputs of a group side by side"
    for got, one in zip(unpacked(words, None), (scale, zero)):
        assert torch.equal(got.contiguous().view(torch.int16), one.view(torch.int16)), "−0 and all others bit by bit"
    weight = Weight.random(4, 6, 64, 32, has_zero=True, device="cpu")
    with pytest.raises(Unsupported, match="has the zeros in it"):
        steps = packed(weight.scale, weight.zero), weight.zero
        matvec_int4.matvec_int4(torch.ones(1, 64), matvec_int4.interleaved(weight.codes), *steps, group=32)


SHAPES = st.sampled_from([(77, None), (200, None), (256, None), (128, 32), (192, 64), (192, 96), (256, 128), (64, 32)])


@on_each_device
@pytest.mark.parametrize("bits, versions", [(4, [1, 2, 3]), (8, [1, 2, 3, 4])])
@few
@given(rows=SIZES, out=OUTPUTS, shape=SHAPES, data=st.data(), has_zero=st.booleans(), half=st.booleans())
def test_every_version_gives_the_product_with_the_numbers(
    device, bits, versions, rows, out, shape, data, has_zero, half
):
    inside, group = shape
    version, dtype = data.draw(st.sampled_from(versions)), dtypes(device)[-1 if half else 0]
    splits = data.draw(st.sampled_from([None, 1, 2, 5])) if version > 2 else None
    if not matvec_codes.on_tensor_cores(rows, dtype, version):
        (rows,) = few_programs(device, 2, rows)
    weight = Weight.random(bits, out, inside, group, has_zero=has_zero, device=device, seed=rows)
    weight = dataclasses.replace(weight, packs=has_zero and data.draw(st.booleans()))
    x = random(rows, inside, seed=out, dtype=dtype, device=device)
    y = weight.times(x, version, splits=splits)
    assert y.dtype == dtype
    assert_near(y, x.double() @ weight.numbers.T, tolerance(dtype))


@on_each_device
@pytest.mark.parametrize("bits, version", [(4, 2), (4, 3), (8, 3), (8, 4)])
def test_every_code_at_every_place_is_read_as_it_is(device, bits, version):
    """x is one input alone, so what comes out is that column of codes; every code stands in every place of a word."""
    count = 2**bits
    codes = (torch.arange(128)[None, :] * 3 + torch.arange(count)[:, None]) % count
    codes = codes.to(device, torch.uint8) if bits == 4 else (codes - 128).to(device, torch.int8)
    weight = Weight(bits, codes, torch.ones(count, 1, device=device), None, None, 0)
    for dtype in dtypes(device)[1:]:  # of 16 bits: there masks make the numbers
        chosen = torch.eye(128, dtype=dtype, device=device)
        for at in range(0, 128, 32):
            y = weight.times(chosen[at : at + 32], version)
            assert torch.equal(y, codes.T[at : at + 32].to(dtype))


def test_a_code_lies_where_the_module_says():
    for k in range(128):
        codes = torch.zeros(1, 128, dtype=torch.uint8)
        codes[0, k] = 9
        j, i, l, h = k // 32, k // 8 % 4, k // 2 % 4, k % 2  # noqa: E741 - as in the module
        words = torch.zeros(16, dtype=torch.int64)
        words[4 * l + j] = 9 << (4 * i + 16 * h)
        assert torch.equal(matvec_int4.interleaved(codes)[0].long() & 0xFFFFFFFF, words)
    for k in range(64):
        codes = torch.zeros(1, 64, dtype=torch.int8)
        codes[0, k] = -5
        j, i, l, h = k // 16, k // 8 % 2, k // 2 % 4, k % 2  # noqa: E741
        bytes_ = torch.zeros(16, 4, dtype=torch.int8)
        bytes_[4 * l + j, 2 * i + h] = -5
        assert torch.equal(matvec_int8.interleaved(codes)[0].view(torch.int8), bytes_.flatten())


@few
@given(out=st.integers(1, 5), inside=st.integers(1, 300), seed=st.integers(0, 99))
def test_interleaving_loses_nothing(out, inside, seed):
    codes = torch.randint(0, 256, (out, inside), generator=torch.Generator().manual_seed(seed))
    nibbles, bytes_ = (codes % 16).to(torch.uint8), (codes - 128).to(torch.int8)
    assert torch.equal(matvec_int4.deinterleaved(matvec_int4.interleaved(nibbles), inside), nibbles)
    assert torch.equal(matvec_int8.deinterleaved(matvec_int8.interleaved(bytes_), inside), bytes_)


def test_what_eight_and_four_bits_share_is_in_one_file():
    for one, other in ((matvec_int8, "matvec_int4"), (matvec_int4, "matvec_int8")):
        assert f"from workbench.kernels.{other} import" not in inspect.getsource(one)
        for name in ("step_and_offset", "order_of_rows", "check_scales", "padded", "splits_of", "key_of"):
            assert getattr(one, name) is getattr(matvec_codes, name)


def test_the_twins_are_the_formula():
    x = random(3, 128, seed=5).double()
    for bits in (4, 8):
        weight = Weight.random(bits, 9, 128, 32, has_zero=True, device="cpu")
        module = matvec_int4 if bits == 4 else matvec_int8
        twin = getattr(module, f"matvec_int{bits}_reference")
        got = twin(x, module.interleaved(weight.codes), weight.scale, weight.zero, group=32)
        assert got.dtype == torch.float64 and torch.allclose(got, x @ weight.numbers.T, rtol=1e-12, atol=1e-12)


# -- how it is cut -----------------------------------------------------------------------------------------------


@on_each_device
def test_launches_are_counted_and_work_says_how_many(device, monkeypatch):
    monkeypatch.setattr(matvec, "multiprocessors", lambda _: 8)  # so small products are divided
    x, weight = random(2, 4096, seed=1, device=device), random(5, 4096, seed=2, device=device)
    int4 = Weight.random(4, 5, 4096, 128, has_zero=True, device=device)
    words = matvec_int4.interleaved(int4.codes)
    int8 = Weight.random(8, 5, 4096, 128, has_zero=True, device=device)
    for splits, expected in ((None, 2), (1, 1), (3, 2)):
        with launch.launches() as counted:
            y = matvec.matvec(x, weight, None, splits)
        assert counted.total() == matvec.matvec_work(x, weight, None, splits).launches == expected
        assert_near(y, x.double() @ weight.double().T, 4 * TOLERANCE[x.dtype])
        with launch.launches() as counted:
            int4.times(x, 3, splits=splits)
        work = matvec_int4.matvec_int4_work(x, words, int4.scale, int4.zero, group=128, splits=splits)
        assert counted.total() == work.launches == expected
        with launch.launches() as counted:
            int8.times(x, 3, splits=splits)
        work = matvec_int8.matvec_int8_work(x, int8.codes, int8.scale, int8.zero, group=128, splits=splits)
        assert counted.total() == work.launches == expected
        one = {"group": 128, "splits": splits, "merges": True}
        assert matvec_int4.matvec_int4_work(x, words, int4.scale, int4.zero, **one).launches == 1
        assert matvec_int8.matvec_int8_work(x, int8.codes, int8.scale, int8.zero, **one).launches == 1


def test_work_is_what_must_be_moved():
    x, weight, bias = torch.ones(2, 256), torch.ones(5, 256), torch.ones(5)
    assert matvec.matvec_work(x, weight, bias) == launch.Work(4 * (512 + 1280 + 5), 4 * 10, 2 * 2 * 5 * 256 + 10)
    words, scale = torch.zeros(5, 32, dtype=torch.int32), torch.ones(5, 2).half()
    expected = launch.Work(4 * 512 + 5 * 128 + 2 * 20, 4 * 10, 2 * 2 * 5 * 256)
    assert matvec_int4.matvec_int4_work(x, words, scale, scale, group=128) == expected
    codes = torch.zeros(5, 256, dtype=torch.int8)
    expected = launch.Work(4 * 512 + 5 * 256 + 2 * 10, 4 * 10, 2 * 2 * 5 * 256)
    for given_codes in (codes, matvec_int8.interleaved(codes)):
        assert matvec_int8.matvec_int8_work(x, given_codes, scale, group=128) == expected


@on_each_device
def test_nothing_is_launched_for_nothing(device):
    weight = random(5, 64, seed=1, device=device)
    with launch.launches() as counted:
        assert matvec.matvec(weight[:0], weight).shape == (0, 5)
        assert matvec.matvec(weight, weight[:0], splits=2).shape == (5, 0)
        assert Weight.random(4, 5, 64, 32, has_zero=True, device=device).times(weight[:0], 3).shape == (0, 5)
        assert Weight.random(8, 5, 64, 32, has_zero=True, device=device).times(weight[:0], 4).shape == (0, 5)
    assert counted.total() == 0
    assert matvec.matvec_work(weight[:0], weight).launches == 0


@on_each_device
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_every_candidate_gives_the_product(device, rows):
    """What tuning may choose is right, so a table from another machine cannot make a product wrong."""
    dtype = dtypes(device)[-1]
    (out,) = (70,) if matvec.on_tensor_cores(rows, dtype, 3) else few_programs(device, 5, 70)
    x, weight = (random(n, 300, seed=n, dtype=dtype, device=device) for n in (rows, out))
    for config in matvec.candidates(rows, 300, dtype):
        assert_near(matvec.matvec(x, weight, config=config), x.double() @ weight.double().T, tolerance(dtype))
    x = random(rows, 256, seed=1, dtype=dtype, device=device)
    int4, int8 = (Weight.random(bits, 70, 256, 128, has_zero=True, device=device) for bits in (4, 8))
    for version in (2, 3):
        for config in matvec_int4.candidates(rows, 256, dtype, version):
            assert_near(int4.times(x, version, config=config), x.double() @ int4.numbers.T, tolerance(dtype))
    for version in (2, 3, 4):
        for config in matvec_int8.candidates(rows, 256, dtype, version)[:4]:
            assert_near(int8.times(x, version, config=config), x.double() @ int8.numbers.T, tolerance(dtype))


@on_each_device
def test_tuning_keeps_one_of_the_candidates_in_the_table(device, monkeypatch, tmp_path):
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    x, weight = random(1, 128, seed=1, device=device), random(8, 128, seed=2, device=device)
    int4, int8 = (Weight.random(bits, 8, 128, 128, has_zero=True, device=device) for bits in (4, 8))
    words = matvec_int4.interleaved(int4.codes)
    short = {"budget_s": 0.0, "repeats": 1}
    found = {
        "matvec": matvec.tune_matvec(x, weight, **short),
        "matvec_int4": matvec_int4.tune_matvec_int4(x, words, int4.scale, int4.zero, group=128, **short),
        "matvec_int8": matvec_int8.tune_matvec_int8(x, int8.codes, int8.scale, int8.zero, group=128, **short),
    }
    table = tuning.table_for(device).configs
    assert {kernel: config for (kernel, _), config in table.items()} == found
    assert ("matvec", str(matvec.key_of(1, 8, 128, torch.float32, 3))) in table


# -- what is refused ---------------------------------------------------------------------------------------------


def refused(message: str, call, *arguments, **settings) -> None:
    with pytest.raises(launch.Unsupported, match=message):
        call(*arguments, **settings)


@on_each_device
def test_what_is_not_supported_is_refused_with_what_is(device):
    x, weight = random(2, 64, seed=1, device=device), random(5, 64, seed=2, device=device)
    many = random(33, 64, seed=3, device=device)
    refused("0 to 32 rows, got 33.*F.linear", matvec.matvec, many, weight)
    refused(r"weight must have shape \[any, 64\], got \[5, 63\]", matvec.matvec, x, weight[:, :63])
    refused("must have one type", matvec.matvec, x, weight.half())
    refused("x must be one of float32, float16, bfloat16; got float64", matvec.matvec, x.double(), weight.double())
    refused("contiguous in its last axis", matvec.matvec, x, random(64, 5, seed=2, device=device).T)
    refused("versions 1, 2, 3; got 4", matvec.matvec, x, weight, version=4)
    refused("splits is None or 1 to 64, got 0", matvec.matvec, x, weight, splits=0)
    refused("version 2 does not divide", matvec.matvec, x, weight, splits=2, version=2)
    int4 = Weight.random(4, 5, 64, 32, has_zero=True, device=device)
    words = matvec_int4.interleaved(int4.codes)
    call = matvec_int4.matvec_int4
    refused("multiple of 32 inputs.*got 16 of 64", call, x, words, int4.scale, group=16)
    refused(r"scale must have shape \[5, 1\]", call, x, words, int4.scale)
    refused(r"words must have shape \[any, 16\]", call, x, words[:, :8], int4.scale, group=32)
    refused("words must be one of int32; got uint8", call, x, words.to(torch.uint8), int4.scale, group=32)
    refused("zero must lie as scale", call, x, words, int4.scale, int4.zero.contiguous(), group=32)
    refused("added is a whole number", call, x, words, int4.scale, group=32, added=0.5)
    int8 = Weight.random(8, 5, 64, 32, has_zero=True, device=device)
    call = matvec_int8.matvec_int8
    refused("version 4 takes interleaved words", call, x, int8.codes, int8.scale, group=32, version=4)
    refused("version 2 takes codes", call, x, matvec_int8.interleaved(int8.codes), int8.scale, group=32, version=2)
    refused("0 to 32 rows", call, many, int8.codes, int8.scale, group=32)
    if launch.INTERPRETED:
        narrow = x.bfloat16()
        refused("multiplies bfloat16 wrongly", call, narrow, int8.codes, int8.scale, group=32)
