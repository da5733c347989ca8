"""The kernels of states against the recurrence in float64: every version, awkward shapes, ragged prompts, cells that
are written and those that are not, and what they must move computed by hand."""

from __future__ import annotations

import pytest
import torch
from kernel_claims import assert_near, on_each_device

from workbench.kernels import chunked_scan as scan
from workbench.kernels import launch
from workbench.kernels import state_update as update
from workbench.kernels.launch import Unsupported, Work
from workbench.models.mixers import linear_attention, mamba2

SHAPES = [(1, 1, 1), (2, 5, 20), (1, 33, 48), (3, 64, 16)]  # H, N, D
DTYPES = [torch.float32, torch.float16]


def made(rows: int, heads: int, size: int, value: int, dtype: torch.dtype, device: str, seed: int = 0):
    """q, k, v, log_a of so many rows."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (rows, heads, size), (rows, heads, size), (rows, heads, value), (rows, heads)
    q, k, v, log_a = (torch.randn(shape, generator=rng) for shape in shapes)
    scale = size**-0.5
    return tuple(one.to(device, dtype) for one in (q * scale, k * scale, v, -log_a.abs()))


def cells(count: int, heads: int, size: int, value: int, device: str) -> torch.Tensor:
    return torch.randn(count, heads, size, value, generator=torch.Generator().manual_seed(9)).to(device)


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", update.VERSIONS)
def test_a_token_of_several_sequences_goes_from_cell_to_cell_and_no_other_is_written(device, version, dtype):
    for heads, size, value in SHAPES:
        inputs = made(3, heads, size, value, dtype, device)
        states = cells(7, heads, size, value, device)
        sources, targets = (torch.tensor(at, device=device) for at in ([0, 6, 2], [1, 6, 5]))  # the second in place
        wide, before = states.double(), states.clone()
        truth = update.state_update_reference(*(one.double() for one in inputs), wide, sources, targets)
        with launch.launches() as counted:
            y = update.state_update(*inputs, states, sources, targets, version)
        assert y.dtype == dtype and counted.total() == 1
        assert_near(y, truth)
        assert_near(states, wide)
        assert states[[0, 2, 3, 4]].equal(before[[0, 2, 3, 4]])


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", scan.VERSIONS)
def test_prompts_of_any_length_side_by_side_are_the_recurrence(device, version, dtype):
    """Empty, one token, a whole chunk, one more than a chunk."""
    lengths = [0, 1, scan.TOKENS, scan.TOKENS + 1, 5]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    for heads, size, value in SHAPES[1:3]:
        inputs = made(sum(lengths), heads, size, value, dtype, device)
        states = cells(len(lengths), heads, size, value, device)
        before = states.clone()
        truth = scan.chunked_scan_reference(*(one.double() for one in inputs), states.double(), starts)
        with launch.launches() as counted:
            came = scan.chunked_scan(*inputs, states, starts, version)
        assert counted.total() == 1 and states.equal(before) and came[0].dtype == dtype
        for got, right in zip(came, truth):
            assert_near(got.to(dtype), right)
        assert came[1][0].equal(before[0]), "a sequence without tokens"


@on_each_device
def test_they_are_what_mamba_2_and_linear_attention_compute(device):
    q, k, v, log_a = made(2 * 40, 3, 8, 12, torch.float32, device)
    states = cells(2, 3, 8, 12, device)
    starts = torch.tensor([0, 40, 80], dtype=torch.int32, device=device)
    batched = [one.unflatten(0, (2, 40)) for one in (q, k, v, log_a)]
    y, after = mamba2.chunked(*batched, states, 16)
    got = scan.chunked_scan(q, k, v, log_a, states, starts)
    assert_near(got[0], y.flatten(0, 1).double())
    assert_near(got[1], after.double())
    keys = [linear_attention.phi(one) for one in batched[:2]]
    above, *left = linear_attention.recurrent(*keys, batched[2], (states, torch.ones(2, 3, 8, device=device)))
    below = torch.einsum("bthn,bthn->bth", keys[0], 1 + keys[1].cumsum(1))
    flat = (*(one.flatten(0, 1).contiguous() for one in keys), v, torch.zeros_like(log_a))
    y, after = scan.chunked_scan(*flat, states, starts)
    assert_near(y, (above * below[..., None]).flatten(0, 1).double())
    assert_near(after, left[0].double())


@on_each_device
def test_decays_that_leave_nothing_give_no_nan(device):
    q, k, v, _ = made(70, 1, 4, 16, torch.float32, device)
    log_a = torch.full((70, 1), -1e4, device=device)
    states, starts = cells(1, 1, 4, 16, device), torch.tensor([0, 70], dtype=torch.int32, device=device)
    y, after = scan.chunked_scan(q, k, v, log_a, states, starts)
    assert_near(y, (q * k).sum(-1, keepdim=True).double() * v.double())
    assert after.isfinite().all()


def test_what_must_be_moved_is_computed_by_hand():
    q, v = torch.zeros(3, 2, 4), torch.zeros(3, 2, 8)
    state = 3 * 2 * 4 * 8
    small = 4 * (2 * 3 * 2 * 4 + 3 * 2 * 8 + 3 * 2) + 16 * 3
    assert update.state_update_work(q, v) == Work(4 * state + small, 4 * state + 4 * 48, 5 * state, 1)
    assert update.state_update_work(q[:0], v[:0]).launches == 0
    one = 4 * 2 * 4 * 8
    read = 4 * (2 * 24 + 48 + 6) + 8
    assert scan.chunked_scan_work(q, v, 1, 1) == Work(one + read, one + 4 * 48, 6 * 5 * 32)
    assert scan.chunked_scan_work(q, v, 1).flops == 6 * (2 * 32 * 12 + 4 * 32)


@on_each_device
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": torch.zeros(3, 2, 5)}, "k must have shape"),
        ({"states": torch.zeros(4, 2, 4, 9)}, "v must have shape|states must have shape"),
        ({"states": torch.zeros(4, 2, 4, 8, dtype=torch.float64)}, "states must be one of float32"),
        ({"sources": torch.zeros(3, dtype=torch.int32)}, "sources must be one of int64"),
        ({"log_a": torch.zeros(3, 4)[:, ::2]}, "log_a must be contiguous"),
        ({"version": 3}, "versions 1, 2"),
    ],
)
def test_what_they_do_not_do_is_refused_and_nothing_is_written(device, wrong, message):
    states = torch.ones(4, 2, 4, 8, device=device)
    at = torch.arange(3, device=device)
    right = {
        "q": torch.zeros(3, 2, 4),
        "k": torch.zeros(3, 2, 4),
        "v": torch.zeros(3, 2, 8),
        "log_a": torch.zeros(3, 2),
    }
    right |= {"states": states, "sources": at, "targets": at}
    given = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in (right | wrong).items()}
    with pytest.raises(Unsupported, match=message):
        update.state_update(**given)
    assert bool((states == 1).all())
    with pytest.raises(Unsupported, match="from 1 to 256"):
        update.check_sizes("state_update", 257, 8)
