"""The grouped product against its float64 oracle: every version, experts with many rows, one and none, rows that are
gathered, and a mixture of experts made of it; what is not done refused, and what must be moved computed by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_claims import HERE, assert_near, dtypes, on_each_device, poisoned, where_kernels_run

from workbench.kernels import grouped_matmul as gm
from workbench.kernels import launch
from workbench.kernels.launch import Unsupported, Work
from workbench.kernels.swiglu import swiglu
from workbench.kernels.tuning import Config
from workbench.models.config import ExpertsShape, ModelConfig
from workbench.models.experts import MixtureOfExperts

versions = pytest.mark.parametrize("version", gm.VERSIONS)
COUNTS = {
    "uneven": [17, 0, 1, 40, 0],
    "one expert has all": [0, 0, 21],
    "one place": [0, 1],
    "a single expert": [5],
    "whole tiles": [16, 32, 16],
}


def made(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


def starts_of(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)


@on_each_device
@versions
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("wide", "size"), [(1, 1), (70, 48), (64, 128)], ids=str)
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(device, version, counts, wide, size):
    for dtype in dtypes(device):
        x = made(sum(counts), size, device=device, dtype=dtype)
        weight = made(len(counts), wide, size, seed=1, device=device, dtype=dtype)
        starts, out = starts_of(counts, device), poisoned(len(x), wide, dtype=dtype, device=device)
        with launch.launches() as counted:
            assert gm.grouped_matmul(x, weight, starts, version, out=out) is out
        assert_near(out, gm.grouped_matmul_reference(x.double(), weight.double(), starts))
        assert counted.total() == gm.grouped_matmul_work(x, weight, starts).launches == 1


@on_each_device
@versions
def test_places_read_the_rows_that_are_named(device, version):
    counts, rows = [3, 0, 20, 2], made(25, seed=2).argsort(0) % 7
    for dtype in dtypes(device):
        x, weight = made(7, 33, device=device, dtype=dtype), made(4, 20, 33, seed=1, device=device, dtype=dtype)
        starts, named = starts_of(counts, device), rows.int().to(device)
        y = gm.grouped_matmul(x, weight, starts, version, rows=named)
        assert_near(y, gm.grouped_matmul_reference(x.double(), weight.double(), starts, rows=named))
        assert y.equal(gm.grouped_matmul(x[named.long()], weight, starts, version))


@on_each_device
@versions
def test_experts_without_rows_are_not_read_and_rows_of_others_do_not_leak(device, version):
    """A tile that is not full reads its own last row again, not the first of the next expert."""
    starts = starts_of([3, 0, 5], device)
    x, weight = made(8, 16, device=device), made(3, 16, 16, seed=1, device=device)
    weight[1] = float("nan")
    y = gm.grouped_matmul(x, weight, starts, version)
    assert y.isfinite().all()
    x[3:] = float("nan")
    assert gm.grouped_matmul(x, weight, starts, version)[:3].equal(y[:3])


@on_each_device
@versions
def test_without_a_place_nothing_is_launched(device, version):
    x, weight = made(0, 16, device=device), made(3, 8, 16, device=device)
    starts = starts_of([0, 0, 0], device)
    with launch.launches() as counted:
        assert gm.grouped_matmul(x, weight, starts, version).shape == (0, 8)
    assert counted.total() == gm.grouped_matmul_work(x, weight, starts).launches == 0


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=9), rows=st.sampled_from([1, 16, 32]))
@settings(max_examples=200, deadline=None)
def test_there_are_programs_for_every_tile_and_none_too_many_in_the_worst_case(counts, rows):
    places, experts = sum(counts), len(counts)
    bound = gm.tile_bound(places, experts, rows)
    assert sum(-(-count // rows) for count in counts) <= bound
    single = min(experts, places)  # all but one have one place more than whole tiles
    worst = [1] * (single - 1) + [places - single + 1] if places else []
    assert bound - 1 <= sum(-(-count // rows) for count in worst) <= bound


@on_each_device
@pytest.mark.parametrize("rows", [16, 64])
def test_any_tile_gives_the_same(device, rows):
    counts = [70, 1, 0, 30]
    x, weight = made(101, 40, device=device), made(4, 50, 40, seed=1, device=device)
    starts = starts_of(counts, device)
    config = Config.of(ROWS=rows, BLOCK_OUT=16, BLOCK_IN=16)
    truth = gm.grouped_matmul_reference(x.double(), weight.double(), starts)
    for version in (2, 3):
        assert_near(gm.grouped_matmul(x, weight, starts, version, config=config), truth)


@where_kernels_run
@versions
def test_a_mixture_of_experts_is_two_grouped_products_and_the_gate_between(version):
    shape = ExpertsShape(8, 3, 0, 24, 0)
    config = ModelConfig("qwen3_moe", 64, 40, 1, 2, 2, 20, 24, 64, experts=shape)
    torch.manual_seed(0)
    mixture = MixtureOfExperts(config).to(HERE)
    x = made(19, 40, seed=3, device=HERE)
    with torch.no_grad():
        weights, chosen = mixture.router(x)
        up = torch.stack([torch.cat((one.gate.weight, one.up.weight)) for one in mixture.experts])
        down = torch.stack([one.down.weight for one in mixture.experts])
        order = chosen.flatten().argsort(stable=True)
        starts = torch.zeros(9, dtype=torch.int32, device=HERE)
        starts[1:] = torch.bincount(chosen.flatten(), minlength=8).cumsum(0)
        inner = swiglu(gm.grouped_matmul(x, up, starts, version, rows=(order // 3).int()))
        places = torch.empty(57, 40, device=HERE)
        places[order] = gm.grouped_matmul(inner, down, starts, version)
        got = (places.view(19, 3, 40) * weights[..., None]).sum(1)
        assert_near(got, mixture.double()(x.double()), 1e-5)


def test_what_must_be_moved_is_computed_by_hand():
    x, weight = torch.zeros(10, 6), torch.zeros(4, 5, 6)
    starts = torch.tensor([0, 7, 7, 10, 10], dtype=torch.int32)
    assert gm.grouped_matmul_work(x, weight, starts) == Work(4 * (2 * 30 + 60 + 5), 4 * 50, 2 * 10 * 30, 1)
    rows = torch.zeros(10, dtype=torch.int32)
    read = 2 * (2 * 30 + 18) + 4 * (5 + 10)
    assert gm.grouped_matmul_work(x[:3].half(), weight.half(), starts, rows=rows) == Work(read, 100, 600, 1)


def test_tiles_grow_with_the_rows_of_an_expert():
    def rows(places):
        return gm.default_config(places, 8, torch.bfloat16)["ROWS"]

    assert [rows(places) for places in (0, 8, 128, 129, 512, 100_000)] == [16, 16, 16, 32, 64, 128]
    assert gm.default_config(100_000, 8, torch.float32)["ROWS"] == 32


@on_each_device
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight": torch.zeros(3, 5, 7)}, "weight must have shape"),
        ({"weight": torch.zeros(0, 5, 6)}, "1 to 1024 matrices"),
        ({"weight": torch.zeros(3, 6, 5).mT}, "weight must be contiguous"),
        ({"weight": torch.zeros(3, 5, 6).half()}, "must have one type"),
        ({"starts": torch.zeros(3, dtype=torch.int32)}, r"starts must have shape \[4\]"),
        ({"starts": torch.zeros(4, dtype=torch.int64)}, "starts must be int32"),
        ({"rows": torch.zeros(2, dtype=torch.int64)}, "rows must be int32|out must have shape"),
        ({"out": torch.ones(3, 5)}, "out must have shape"),
        ({"version": 4}, "versions 1, 2, 3"),
    ],
)
def test_what_it_does_not_do_is_refused_and_nothing_is_written(device, wrong, message):
    right = {
        "x": torch.zeros(2, 6),
        "weight": torch.zeros(3, 5, 6),
        "starts": torch.tensor([0, 1, 1, 2], dtype=torch.int32),
        "out": torch.ones(2, 5),
    }
    given = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in (right | wrong).items()}
    with launch.launches() as counted, pytest.raises(Unsupported, match=message):
        gm.grouped_matmul(**given)
    assert counted.total() == 0 and (given["out"] == 1).all()


@pytest.mark.skipif(not launch.INTERPRETED, reason="where kernels are compiled bfloat16 is multiplied")
def test_bfloat16_is_multiplied_in_the_interpreter_by_version_1_alone():
    x, weight = made(2, 6, dtype=torch.bfloat16), made(1, 5, 6, dtype=torch.bfloat16)
    starts = starts_of([2], "cpu")
    truth = gm.grouped_matmul_reference(x.double(), weight.double(), starts)
    assert_near(gm.grouped_matmul(x, weight, starts, 1), truth)
    for version in (2, 3):
        with pytest.raises(Unsupported, match="interpreter multiplies bfloat16 wrongly"):
            gm.grouped_matmul(x, weight, starts, version)
