"""The small kernels against their float64 oracles: every version, on awkward shapes and strided views, with what they
do not do refused, what they launch counted, and what they must move computed by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_claims import assert_near, dtypes, on_each_device, poisoned

from workbench.decoding import filters as oracle
from workbench.kernels import KERNELS, ceilings, launch, norm, rotary, sampling, softmax, swiglu
from workbench.kernels.launch import Unsupported, Work

few = settings(max_examples=6, deadline=None)
SIZES = st.sampled_from([1, 2, 3, 7, 16, 33, 100, 257])
ROWS = st.integers(1, 9)


def made(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a view with room between the rows, the room full of NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def test_the_listing_has_a_module_for_each_name():
    assert all(KERNELS[name].__name__ == f"workbench.kernels.{name}" for name in KERNELS)
    assert len(KERNELS) >= 6 and "norm" in KERNELS and "nrom" not in KERNELS
    with pytest.raises(KeyError, match="no kernel 'nrom'; there are ceilings"):
        KERNELS["nrom"]


# -- ceilings --------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("version", ceilings.VERSIONS)
@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8193, 40_000])
def test_a_sum_reads_every_value_once(device, version, size):
    for dtype in dtypes(device):
        x = (torch.arange(size) % 7).to(device, dtype)  # whole numbers: the sum is exact
        with launch.launches() as counted:
            total = ceilings.read_sum(x, version)
        assert total.shape == () and total.dtype == torch.float32
        assert total.item() == ceilings.read_sum_reference(x.double()).item()
        work = ceilings.read_sum_work(x, version)
        assert counted.total() == work.launches and work.bytes_read == size * dtype.itemsize


@on_each_device
@pytest.mark.parametrize("dtype", ceilings.COPIES)
def test_a_copy_is_bit_for_bit(device, dtype):
    x = torch.randint(-100, 100, (3, 2731), generator=torch.Generator().manual_seed(0)).to(device).to(dtype)
    out = torch.full_like(x, 55)
    with launch.launches() as counted:
        assert ceilings.copy(x, out) is out
    assert out.equal(x) and counted == {"_copy": ceilings.copy_work(x).launches}
    assert out.equal(ceilings.copy_reference(x, torch.empty_like(x)))


def test_what_ceilings_move():
    x = torch.zeros(100, 1000)
    assert ceilings.read_sum_work(x) == Work(400_000, 4, 100_000, 2)
    assert ceilings.read_sum_work(x, 1).launches == 2  # 13 sums of blocks, then theirs
    assert ceilings.copy_work(x.half()) == Work(200_000, 200_000, 0, 1)
    assert ceilings.copy_work(x.half()).bound_s(4e9, 1e12) == pytest.approx(1e-4)


@on_each_device
def test_a_copy_into_something_else_is_refused_and_changes_nothing(device):
    x, out = made(8, device=device), torch.zeros(4, 2, device=device)
    with pytest.raises(Unsupported, match=r"out must be like x, \[8\]"):
        ceilings.copy(x, out)
    assert (out == 0).all()
    with pytest.raises(Unsupported, match="must be contiguous; its strides"):
        ceilings.read_sum(made(8, 8, device=device).T)
    with pytest.raises(Unsupported, match="x must be one of float32, float16, bfloat16; got int32"):
        ceilings.read_sum(torch.zeros(8, dtype=torch.int32, device=device))
    with pytest.raises(Unsupported, match="there are versions 1, 2; got 3"):
        ceilings.read_sum(x, 3)


# -- softmax ---------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("version", softmax.VERSIONS)
@given(rows=ROWS, n=SIZES, seed=st.integers(0, 99))
@few
def test_softmax_of_any_shape(device, version, rows, n, seed):
    for dtype in dtypes(device):
        x = strided(4 * made(rows, n, seed=seed, device=device, dtype=dtype))
        out = poisoned(rows, n, dtype=dtype, device=device)
        with launch.launches() as counted:
            assert softmax.softmax(x, version, out=out) is out
        assert_near(out, softmax.softmax_reference(x.double()))
        assert counted.total() == softmax.softmax_work(x).launches == 1


@on_each_device
def test_softmax_of_rows_that_do_not_fit(device):
    x = made(2, softmax.LONGEST + 5, device=device)
    for version in softmax.VERSIONS:
        assert_near(softmax.softmax(x, version), softmax.softmax_reference(x.double()))


@on_each_device
@pytest.mark.parametrize("version", softmax.VERSIONS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_softmax_of_removed_values_is_that_of_torch(device, version):
    gone, nan, inf = float("-inf"), float("nan"), float("inf")
    rows = [
        [gone] * 4 + [1.0, 2.0],
        [1.0] + [gone] * 5,
        [gone] * 6,
        [nan] + [0.0] * 5,
        [inf] + [0.0] * 5,
        [1e30, -1e30, 1e30, 0.0, gone, 3e38],
    ]
    x = torch.tensor(rows, device=device).repeat(1, 3)
    got = softmax.softmax(x, version)
    torch.testing.assert_close(got, x.softmax(-1), equal_nan=True, rtol=2e-6, atol=0)
    in_place = x.clone()
    assert softmax.softmax(in_place, version, out=in_place) is in_place
    torch.testing.assert_close(in_place, got, equal_nan=True, rtol=0, atol=0)


def test_what_softmax_moves_and_what_its_versions_ask_for():
    x = torch.zeros(10, 100, dtype=torch.float16)
    assert softmax.softmax_work(x) == Work(2000, 2000, 5000, 1)
    assert [softmax.softmax_bytes(x, version) for version in (1, 2, 3)] == [8000, 6000, 4000]
    assert softmax.softmax_bytes(torch.zeros(1, softmax.LONGEST + 1), 3) == 3 * 4 * (softmax.LONGEST + 1)


# -- norm ------------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("version", norm.VERSIONS)
@given(rows=ROWS, d=SIZES, adds=st.booleans(), seed=st.integers(0, 99))
@few
def test_norm_of_any_shape(device, version, rows, d, adds, seed):
    for dtype in dtypes(device):
        x = strided(made(rows, d, seed=seed, device=device, dtype=dtype))
        weight = made(d, seed=seed + 1, device=device, dtype=dtype)
        residual = made(rows, d, seed=seed + 2, device=device, dtype=dtype) if adds else None
        out = strided(poisoned(rows, d, dtype=dtype, device=device))
        with launch.launches() as counted:
            got = norm.rms_norm(x, weight, 1e-5, residual, out, version)
        assert counted.total() == norm.rms_norm_work(x, weight, residual, version).launches
        values = x
        if adds:
            got, total = got
            assert total.dtype == dtype and total.equal((x.float() + residual.float()).to(dtype))
            values = total  # the norm is that of the sum as it was kept
        assert got is out
        assert_near(got, norm.rms_norm_reference(values.double(), weight.double(), 1e-5))


@on_each_device
@pytest.mark.parametrize("version", norm.VERSIONS)
def test_a_residual_stream_of_another_type_is_added_to_in_place(device, version):
    x, weight = made(3, 40, device=device, dtype=torch.float16), made(40, seed=1, device=device)
    stream = made(3, 40, seed=2, device=device)
    expected = stream + x.float()
    y, total = norm.rms_norm(x, weight, 1e-6, stream, version=version, dtype=torch.float16, in_place=True)
    assert total is stream and stream.equal(expected) and y.dtype == torch.float16
    assert_near(y, norm.rms_norm_reference(expected.double(), weight.double(), 1e-6))


@on_each_device
def test_norm_of_rows_that_do_not_fit(device):
    x, weight = made(2, norm.LONGEST + 3, device=device), made(norm.LONGEST + 3, seed=1, device=device)
    for version in norm.VERSIONS:
        y, _ = norm.rms_norm(x, weight, 1e-5, x, version=version)
        assert_near(y, norm.rms_norm_reference(2 * x.double(), weight.double(), 1e-5))


def test_what_a_norm_moves():
    x, weight = torch.zeros(10, 100, dtype=torch.float16), torch.zeros(100, dtype=torch.float16)
    assert norm.rms_norm_work(x, weight) == Work(2200, 2000, 4000, 1)
    assert norm.rms_norm_work(x, weight, x) == Work(4200, 4000, 5000, 1)
    assert norm.rms_norm_work(x, weight, x, version=2).launches == 2
    assert norm.rms_norm_work(x, weight, dtype=torch.float32).bytes_written == 4000
    assert norm.rms_norm_work(x[:0], weight).launches == 0


@on_each_device
def test_a_norm_that_there_is_not_is_refused(device):
    x, weight = made(4, 8, device=device), made(8, device=device)
    residual = torch.zeros(4, 8, device=device)
    with pytest.raises(Unsupported, match=r"weight must have shape \[8\], got \[7\]"):
        norm.rms_norm(x, weight[:7], 1e-5, residual, in_place=True)
    with pytest.raises(Unsupported, match="contiguous in its last axis"):
        norm.rms_norm(made(8, 4, device=device).T, weight, 1e-5, residual, in_place=True)
    with pytest.raises(Unsupported, match=r"x must be one of .*; got float64"):
        norm.rms_norm(x.double(), weight, 1e-5, residual, in_place=True)
    assert (residual == 0).all()
    with pytest.raises(Unsupported, match="in_place writes x \\+ residual over the residual; give one"):
        norm.rms_norm(x, weight, 1e-5, in_place=True)
    with pytest.raises(Unsupported, match="versions 1, 2, 3; got 0"):
        norm.rms_norm(x, weight, 1e-5, version=0)


# -- rotary ----------------------------------------------------------------------------------------------------------


def turns(positions: int, size: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] * 0.3 / (1 + torch.arange(size // 2))
    cos, sin = angle.cos(), angle.sin()
    both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return both.to(device, dtype)


@on_each_device
@pytest.mark.parametrize("version", rotary.VERSIONS)
@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 7),
    half=st.sampled_from([1, 2, 3, 8, 20, 64]),
    seed=st.integers(0, 99),
    normed=st.booleans(),
)
@few
def test_heads_of_any_shape_turn(device, version, tokens, heads, half, seed, normed):
    for dtype in dtypes(device):
        x = strided(made(tokens, heads, 2 * half, seed=seed, device=device, dtype=dtype))
        table = turns(11, 2 * half, device, dtype)
        positions = torch.randint(0, 11, (tokens,), generator=torch.Generator().manual_seed(seed)).to(device)
        rotary_heads = seed % (heads + 1)
        weights = made(rotary_heads, 2 * half, seed=seed + 1, device=device) if normed else None
        expected = rotary.rotate_rows_reference(
            x.double(),
            positions,
            table.double(),
            rotary_heads,
            norm_weights=None if weights is None else weights.double(),
            eps=1e-5,
        )
        out = strided(poisoned(tokens, heads, 2 * half, dtype=dtype, device=device))
        rotary.rotate_rows(x, positions, table, rotary_heads, out, version, norm_weights=weights, eps=1e-5)
        assert_near(out, expected)
        with launch.launches() as counted:
            rotary.rotate_rows(x, positions, table, rotary_heads, x, version, norm_weights=weights, eps=1e-5)
        assert x.equal(out) and x[:, rotary_heads:].equal(expected[:, rotary_heads:].to(dtype))
        assert counted.total() == rotary.rotate_rows_work(x, table, rotary_heads, in_place=True).launches
        cos, sin = table[positions][:, :1], table[positions][:, 1:]
        assert_near(
            rotary.rotate(out, cos, sin, version), rotary.rotate_reference(out.double(), cos.double(), sin.double())
        )


@on_each_device
@few
@given(
    tokens=st.integers(0, 5),
    groups=st.sampled_from([(1, 1), (4, 2), (7, 1), (33, 3)]),
    size=st.sampled_from([2, 6, 64, 80]),
    normed=st.booleans(),
    half=st.booleans(),
    together=st.booleans(),
)
def test_keys_and_values_are_written_as_they_turn(device, tokens, groups, size, normed, half, together):
    """To their places and nowhere else, whether keys and values lie side by side or apart."""
    dtype, (q_heads, kv_heads) = dtypes(device)[-1 if half else 0], groups
    x, table = made(tokens, q_heads + 2 * kv_heads, size, dtype=dtype, device=device), turns(9, size, device, dtype)
    positions = torch.arange(tokens, device=device) + 3
    at = torch.tensor([6, 0, 11, 3, 9][:tokens], dtype=torch.int64, device=device)
    if together:
        keys, values = poisoned(12, 2, kv_heads, size, dtype=dtype, device=device).unbind(1)
    else:
        keys, values = (poisoned(12, kv_heads, size, dtype=dtype, device=device) for _ in "kv")
    norms = {}
    if normed:
        norms = {"norm_weights": torch.rand(q_heads + kv_heads, size, device=device) + 0.5, "eps": 1e-5}
    wide = (
        torch.full((12, kv_heads, size), torch.nan, dtype=torch.float64, device=device),
        torch.full((12, kv_heads, size), torch.nan, dtype=torch.float64, device=device),
    )
    q_truth = rotary.rotate_and_write_reference(x.double(), positions, table, *wide, at, **norms)
    before = x.clone()
    with launch.launches() as counted:
        q = rotary.rotate_and_write(x, positions, table, keys, values, at, **norms)
    assert counted.total() == (tokens > 0)
    assert q.data_ptr() == x.data_ptr() and x[:, q_heads:].equal(before[:, q_heads:])
    elsewhere = torch.ones(12, dtype=torch.bool, device=device).index_fill(0, at, False)
    for got, truth in zip((q, keys[at], values[at]), (q_truth, wide[0][at], wide[1][at])):
        assert tokens == 0 or assert_near(got, truth) is None
    assert values[at].equal(before[:, q_heads + kv_heads :])
    assert keys[elsewhere].isnan().all() and values[elsewhere].isnan().all()


def test_places_that_do_not_fit_are_refused_and_nothing_is_written():
    x, table, positions = torch.ones(2, 6, 8), torch.ones(4, 2, 8), torch.zeros(2, dtype=torch.int64)
    keys, values, at = torch.zeros(5, 2, 8), torch.zeros(5, 2, 8), torch.tensor([1, 2])
    for asked, words in (
        ({"keys": keys[:, :1]}, r"values must have shape \[any, 1, 8\]"),
        ({"values": values[..., :6]}, r"values must have shape \[any, 2, 8\]"),
        ({"keys": torch.zeros(5, 4, 8), "values": torch.zeros(5, 4, 8)}, "x holds q, k and v, more heads than 8"),
        ({"at": at.int()}, "at must be one of int64"),
        ({"at": at[:1]}, r"at must have shape \[2\]"),
    ):
        given = {"keys": keys, "values": values, "at": at} | asked
        with pytest.raises(Unsupported, match=words):
            rotary.rotate_and_write(x, positions, table, **given)
    assert x.eq(1).all() and not keys.any() and not values.any()


@on_each_device
def test_rotate_is_the_turn_of_the_fast_decoder(device):
    from workbench.models.fast_layers import rotated

    x, table = made(4, 3, 16, device=device), turns(4, 16, device, torch.float32)
    assert_near(rotary.rotate(x, table[:, :1], table[:, 1:]), rotated(x.double(), (table[:, :1], table[:, 1:])))


@on_each_device
def test_a_position_outside_the_table_gives_nan_and_leaves_the_others(device):
    x, table = made(4, 2, 8, device=device), turns(6, 8, device, torch.float32)
    got = rotary.rotate_rows(x, torch.tensor([5, 6, -1, 0], device=device), table, 1)
    assert got[1:3, 0].isnan().all() and got[:, 1].equal(x[:, 1])
    assert torch.isfinite(got[[0, 3]]).all()


def test_what_a_turn_moves():
    x, table = torch.zeros(10, 6, 8, dtype=torch.float16), torch.zeros(99, 2, 8)
    assert rotary.rotate_rows_work(x, table, 4) == Work(960 + 720, 960, 960, 1)
    assert rotary.rotate_rows_work(x, table, 4, in_place=True) == Work(640 + 720, 640, 960, 1)
    weights = torch.zeros(4, 8)
    assert rotary.rotate_rows_work(x, table, 4, norm_weights=weights) == Work(1680 + 128, 960, 2240, 1)
    assert rotary.rotate_work(x, torch.zeros(10, 1, 8)) == Work(960 + 640, 960, 1440, 1)


@on_each_device
def test_turns_that_there_are_not_are_refused(device):
    x, table = made(4, 2, 8, device=device), turns(6, 8, device, torch.float32)
    positions = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(Unsupported, match=r"even size of at most 512.*got 7"):
        rotary.rotate_rows(x[..., :7], positions, table)
    with pytest.raises(Unsupported, match="rotary_heads must be 0 … 2"):
        rotary.rotate_rows(x, positions, table, 3)
    with pytest.raises(Unsupported, match="positions must be one of int64; got int32"):
        rotary.rotate_rows(x, positions.int(), table)
    with pytest.raises(Unsupported, match=r"table must have shape \[any, 2, 8\]"):
        rotary.rotate_rows(x, positions, table[..., :6])
    with pytest.raises(Unsupported, match=r"norm_weights must have shape \[2, 8\]"):
        rotary.rotate_rows(x, positions, table, norm_weights=x[0, :1])
    with pytest.raises(Unsupported, match=r"cos must have shape \[4, 1, 8\]"):
        rotary.rotate(x, table[:3, :1], table[:4, 1:])


# -- swiglu ----------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("version", swiglu.VERSIONS)
@pytest.mark.parametrize("activation", swiglu.ACTIVATIONS)
@given(rows=ROWS, size=st.sampled_from([1, 3, 16, 257, 1024, 1500]), seed=st.integers(0, 99))
@few
def test_the_gated_product_of_any_shape(device, version, activation, rows, size, seed):
    for dtype in dtypes(device):
        x = strided(3 * made(rows, 2 * size, seed=seed, device=device, dtype=dtype))
        out = poisoned(rows, size, dtype=dtype, device=device)
        with launch.launches() as counted:
            assert swiglu.swiglu(x, version, activation=activation, out=out) is out
        assert_near(out, swiglu.swiglu_reference(x.double(), activation=activation))
        assert counted.total() == swiglu.swiglu_work(x, version, activation=activation).launches


@on_each_device
def test_a_gate_far_from_zero_is_open_or_shut(device):
    x = torch.tensor([[200.0, -200.0, 0.0, 3.0, 3.0, 3.0]], device=device)
    for activation in swiglu.ACTIVATIONS:
        assert swiglu.swiglu(x, activation=activation).tolist() == [[600.0, 0.0, 0.0]]


@on_each_device
def test_what_a_gated_product_moves_and_refuses(device):
    x = torch.zeros(10, 200, dtype=torch.float16, device=device)
    assert swiglu.swiglu_work(x) == Work(4000, 2000, 5000, 1)
    assert swiglu.swiglu_work(x, 1, activation="gelu_tanh") == Work(4000, 2000, 11_000, 2)
    with pytest.raises(Unsupported, match="an even number; got 199"):
        swiglu.swiglu(x[:, :199])
    with pytest.raises(Unsupported, match="activations are silu, gelu_tanh; got 'relu'"):
        swiglu.swiglu(x, activation="relu")


# -- argmax ----------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("version", sampling.VERSIONS)
@given(rows=ROWS, size=st.sampled_from([1, 2, 100, 1024, 1025, 5000]), seed=st.integers(0, 99))
@few
def test_the_best_token_and_of_equals_the_first(device, version, rows, size, seed):
    for dtype in dtypes(device):
        x = strided(made(rows, size, seed=seed, device=device).round().to(dtype))  # few values: many ties
        with launch.launches() as counted:
            got = sampling.argmax(x, version)
        assert got.tolist() == [row.index(max(row)) for row in x.tolist()]
        assert counted.total() == sampling.argmax_work(x, version).launches


@on_each_device
@pytest.mark.parametrize("version", sampling.VERSIONS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_row_without_a_distribution_has_no_token(device, version):
    x = made(6, 1100, device=device)
    x[1, 1050], x[2, 3], x[3] = float("nan"), float("inf"), float("-inf")
    x[4, :-1] = float("-inf")
    assert [token == -1 for token in sampling.argmax(x, version).tolist()] == [False, True, True, True, False, False]
    ones = torch.ones(6, device=device)
    drawn = sampling.sample(x, 0.5 * ones, ones, version=version).tolist()
    assert [token == -1 for token in drawn] == [False, True, True, True, False, False]
    assert drawn[4] == 1099


# -- sample ----------------------------------------------------------------------------------------------------------

SAMPLING = {  # temperature, top_k, top_p; 0 and 1 are off
    "as it is": (1.0, 0, 1.0),
    "cooler": (0.6, 0, 1.0),
    "the ten best": (1.0, 10, 1.0),
    "a nucleus": (1.0, 0, 0.7),
    "a nucleus of the twenty best, hotter": (1.7, 20, 0.8),
    "the best alone": (0.9, 1, 0.9),
    "a nucleus of one": (1.0, 50, 1e-6),
    "greedy": (0.0, 5, 0.5),
}


def distribution_of(logits: torch.Tensor, temperature: float, k: int, p: float) -> torch.Tensor:
    """[V] float64 probabilities by the engine's own filters."""
    kept = oracle.apply_temperature(logits.float(), temperature)
    kept = oracle.keep_top_k(kept, k) if k else kept
    return oracle.keep_top_p(kept, p).double().softmax(-1)


def drawn(logits: torch.Tensor, uniforms: torch.Tensor, settings: tuple, version: int) -> torch.Tensor:
    rows, device = len(uniforms), logits.device
    heat, k, p = settings
    full = torch.full((rows,), 1.0, device=device)
    return sampling.sample(
        logits.expand(rows, -1),
        uniforms.float().to(device),
        heat * full,
        (k * full).int() if k else None,
        p * full if p < 1 else None,
        version,
    ).cpu()


@on_each_device
@pytest.mark.parametrize("version", sampling.VERSIONS)
@pytest.mark.parametrize("settings", SAMPLING.values(), ids=SAMPLING)
def test_every_uniform_number_gives_the_token_of_the_inverse_distribution(device, version, settings):
    """A grid over [0, 1), and for the likeliest tokens a number just inside each end of their share: 2e-6 from it.

    In the interpreter a row that is filtered takes a tenth of a second, so there the grid is coarse.
    """
    searches = bool(settings[1]) + (settings[2] < 1)
    grid = 4096 if device == "cuda" else (24, 4, 3)[searches]
    vocabulary = 60 if device == "cpu" else 60_000
    logits = 2 * made(vocabulary, seed=3)
    logits[1::9] = float("-inf")
    ends = distribution_of(logits, *settings).cumsum(-1)
    starts = torch.cat((torch.zeros(1, dtype=torch.float64), ends[:-1]))
    likely = (ends - starts).topk((8, 2, 1)[searches]).indices
    likely = likely[(ends - starts)[likely] > 1e-5]
    points = [starts[likely] + 2e-6, ends[likely] - 2e-6, (torch.arange(grid) + 0.5)]
    points[2] = points[2].double() / len(points[2])
    uniforms = torch.cat(points).clamp(0, 1 - 2**-24).float().double()
    distance = (uniforms[:, None] - ends).abs().amin(-1) if device == "cpu" else torch.ones(len(uniforms))
    expected = torch.searchsorted(ends / ends[-1], uniforms, right=True)
    got = drawn(logits.to(device), uniforms, settings, version)
    clear = distance > 5e-7
    assert clear.double().mean() > 0.95
    off = (got != expected) & clear
    allowed = 0 if device == "cpu" else len(uniforms) // 100  # 60,000 tokens: many ends lie near every number
    assert off.sum() <= allowed, (uniforms[off], got[off], expected[off])
    assert set(expected.tolist()) >= set(likely.tolist())


@on_each_device
@pytest.mark.parametrize("version", sampling.VERSIONS)
def test_of_equal_tokens_at_the_edge_top_k_keeps_all_and_top_p_the_first(device, version):
    logits = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, -0.0, float("-inf")], device=device)
    for filters, kept in (
        ((1.0, 2, 1.0), [1, 2, 4, 5]),  # all that equal the second
        ((1.0, 5, 1.0), [0, 1, 2, 3, 4, 5, 6]),  # the fifth is 0, and −0 equals it
        ((1.0, 4, 0.5), [1, 2]),  # half of four equal ones, exactly
        ((1.0, 4, 0.5000001), [1, 2, 4]),
        ((1.0, 0, 0.8), [0, 1, 2, 4, 5]),  # the four hold 0.784 of all, so one 0 stays, the first
    ):
        shares = distribution_of(logits.cpu(), *filters)
        assert torch.nonzero(shares)[:, 0].tolist() == kept  # so the engine has it
        middles = (shares.cumsum(-1) - shares / 2)[kept]
        assert drawn(logits, middles, filters, version).tolist() == kept


@on_each_device
@pytest.mark.parametrize("version", sampling.VERSIONS)
def test_rows_of_their_own_settings_in_many_parts(device, version):
    """V is more than one part; every row has other settings; the oracle that sorts agrees."""
    rows, size = 6, 2 * sampling.PART + 77
    for dtype in dtypes(device)[-1:]:
        logits = strided((3 * made(rows, size, seed=5)).to(device, dtype))
        uniforms = torch.tensor([0.0, 0.2, 0.5, 0.9, 0.99, 1 - 2**-24], device=device)
        heat = torch.tensor([1.0, 0.0, 0.5, 2.0, 1e-42, 1.0], device=device)
        k = torch.tensor([0, 7, 3000, 100, 5, 1], dtype=torch.int32, device=device)
        p = torch.tensor([0.9, 0.5, 1.0, 0.3, 0.8, 1.0], device=device)
        with launch.launches() as counted:
            got = sampling.sample(logits, uniforms, heat, k, p, version)
        assert got.tolist() == sampling.sample_reference(logits, uniforms, heat, k, p).tolist()
        assert counted.total() == sampling.sample_work(logits, k, p, version).launches


def test_what_sampling_moves_and_launches():
    logits = torch.zeros(4, 3000, dtype=torch.float16)
    k, p = torch.zeros(4, dtype=torch.int32), torch.ones(4)
    assert sampling.argmax_work(logits) == Work(24_000, 32, 12_000, 2)
    assert sampling.sample_work(logits) == Work(24_000 + 32, 32, 48_000, 3)
    assert sampling.sample_work(logits, k, p) == Work(24_000 + 64, 32, 48_000, 21)
    assert sampling.sample_work(logits, k, p, version=1).launches == 1
    assert sampling.sample_bytes(logits, k, p, 1) == 68 * 24_000
    assert sampling.sample_bytes(logits, k, None, 2) == 10 * 24_000 + 8_000


@on_each_device
def test_settings_that_do_not_fit_are_refused(device):
    logits, ones = made(4, 30, device=device), torch.ones(4, device=device)
    with pytest.raises(Unsupported, match=r"uniform must have shape \[4\], got \[3\]"):
        sampling.sample(logits, ones[:3], ones)
    with pytest.raises(Unsupported, match="top_k must be one of int32; got int64"):
        sampling.sample(logits, ones, ones, ones.long())
    with pytest.raises(Unsupported, match="temperature must be one of float32; got float64"):
        sampling.sample(logits, ones, ones.double())
    with pytest.raises(Unsupported, match="1 … 4194304 logits, got 0"):
        sampling.argmax(logits[:, :0])
    with pytest.raises(Unsupported, match=r"logits must have shape \[any, any\]"):
        sampling.argmax(logits[0])
