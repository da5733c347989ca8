"""Products of a few rows in C++: the same numbers as `F.linear`, for every shape, and nothing read beyond a tensor."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from workbench.errors import WorkbenchError
from workbench.kernels.cpu import floats
from workbench.models.linear import LINEARS, Looped, Plain, why_not_looped

needs_loop = pytest.mark.skipif(bool(floats.why_not_here()), reason=floats.why_not_here() or "there is a loop")
TYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}  # sums are float32 whatever the weight
SHAPES = [(1, 1), (3, 5), (4, 8), (7, 31), (8, 32), (17, 100), (70, 64), (200, 33)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 13, 40)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_loop
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_it_is_the_product(dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(floats, "SMALL", 0)
    for out, inside in SHAPES:
        weight, bias = drawn(out, inside, dtype=dtype), drawn(out, seed=1)
        plain, biased = floats.FloatProduct(weight), floats.FloatProduct(weight, bias)
        for rows in ROWS:
            x = drawn(rows, inside, seed=rows)
            wanted = F.linear(x.double(), weight.double())
            assert relative_difference(plain(x).double(), wanted) < TYPES[dtype], (out, inside, rows)
            assert relative_difference(biased(x).double(), wanted + bias) < TYPES[dtype], (out, inside, rows)


@needs_loop
def test_it_reads_x_as_it_lies():
    weight = drawn(24, 40)
    product, wide = floats.FloatProduct(weight), drawn(5, 100, seed=2)
    for x in (wide[:, 7:47], wide[:, ::2][:, :40], wide[:1, :40].expand(5, -1), wide[::2, :40], drawn(40, 5, seed=3).T):
        before = x.clone()
        assert relative_difference(product(x), F.linear(x, weight)) < 1e-5
        assert torch.equal(x, before)
    assert product(wide[:0, :40]).shape == (0, 24)
    assert torch.equal(floats.FloatProduct(drawn(5, 0), drawn(5))(drawn(3, 0)), drawn(5).expand(3, -1))


@needs_loop
def test_one_number_that_is_none_spoils_its_own_rows_and_outputs_alone():
    weight, x = drawn(20, 48), drawn(7, 48, seed=1)
    x[2, 3], x[4, 47], weight[9, 5] = math.nan, math.inf, math.nan
    finite = floats.FloatProduct(weight)(x).isfinite()
    wanted = torch.ones(7, 20, dtype=torch.bool)
    wanted[2], wanted[4], wanted[:, 9] = False, False, False
    assert torch.equal(finite, wanted)


@needs_loop
def test_what_it_cannot_read_is_refused():
    product = floats.FloatProduct(drawn(8, 16))
    for x in (drawn(2, 15), drawn(16), drawn(2, 3, 16), drawn(2, 16, dtype=torch.bfloat16), drawn(2, 16).to("meta")):
        with pytest.raises(WorkbenchError, match=r"takes x \[N, 16\] in float32 on the CPU, got"):
            product(x)


@needs_loop
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_as_a_linear_it_stands_for_the_plain_one(dtype):
    assert LINEARS["looped"] is Looped
    weight, bias = drawn(30, 64, dtype=dtype), drawn(30, seed=1, dtype=dtype)
    looped, plain = Looped(weight, bias), Plain(weight, bias)
    assert looped.weight.data_ptr() == weight.data_ptr() and looped.weight_bytes == plain.weight_bytes
    for rows in (1, 5, Looped.MAX_ROWS, Looped.MAX_ROWS + 1):
        x = drawn(rows, 64, seed=rows, dtype=dtype)
        y = looped(x)
        assert y.dtype == dtype
        assert relative_difference(y.double(), plain(x).double()) < (1e-5 if dtype == torch.float32 else 2.0**-6)


@needs_loop
def test_more_rows_and_whoever_counts_operations_get_the_product_that_torch_knows(monkeypatch):
    """And a gradient finds its way."""
    looped, calls = Looped(drawn(30, 64)), []
    inner = looped._product
    monkeypatch.setattr(looped, "_product", lambda x: calls.append(len(x)) or inner(x))
    looped(drawn(Looped.MAX_ROWS, 64))
    looped(drawn(Looped.MAX_ROWS + 1, 64))
    with FlopCounterMode(display=False) as counted:
        looped(drawn(2, 64))
    assert counted.get_total_flops() == 2 * 2 * 30 * 64
    x = drawn(2, 64).requires_grad_()
    looped(x).sum().backward()
    assert x.grad is not None and calls == [Looped.MAX_ROWS]


def test_why_a_weight_does_not_go_through_the_loop():
    assert "CPU" in why_not_looped(torch.float32, "cuda")
    assert "float64" in why_not_looped(torch.float64, "cpu")
    with pytest.raises(WorkbenchError, match=r"the loop is for float32, float16 and bfloat16.*use the plain linear"):
        Looped(drawn(4, 4, dtype=torch.float64))
