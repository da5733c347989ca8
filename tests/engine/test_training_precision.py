"""Training multiplies in bfloat16 only where the processor can; the steps of the optimizer are the same."""

from __future__ import annotations

import pytest
import torch

from workbench.models import autocast, muon
from workbench.models.autocast import precision_words, product_dtype, training_products
from workbench.models.muon import Muon


def matrices(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 8), (8, 24), (24, 8), (16, 16)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


@pytest.mark.parametrize("has, dtype", [({}, "float32"), ({"amx_bf16": True}, "bfloat16"), ({"bf16": 1}, "bfloat16")])
def test_products_are_narrow_where_the_processor_says_so(monkeypatch, has, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert str(product_dtype("cpu")) == f"torch.{dtype}" and product_dtype("cuda") is torch.bfloat16
    assert dtype in precision_words("cpu")
    with training_products("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == getattr(torch, dtype)
    with training_products("cpu", enabled=False):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_steps_in_float32_are_those_of_torch_as_near_as_bfloat16_is(monkeypatch):
    ours, theirs = matrices(), matrices()
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    one, other = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    monkeypatch.setattr(muon, "product_dtype", lambda device: torch.float32)
    start = [p.detach().clone() for p in ours]
    for turn in range(3):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(turn))
            q.grad = p.grad.clone()
        one.step()
        other.step()
    for p, q, before in zip(ours, theirs, start):
        assert (p - q).norm() < 0.03 * (p - before).norm()
        assert torch.equal(one.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])


def test_singular_values_come_near_one():
    made = muon.orthogonal(torch.stack([p.detach() for p in matrices()[:1]]), (3.4445, -4.775, 2.0315), 5, 1e-7)
    values = torch.linalg.svdvals(made[0])
    assert values.min() > 0.6 and values.max() < 1.3


def test_a_parameter_without_gradient_stays(monkeypatch):
    monkeypatch.setattr(autocast.torch.cpu, "get_capabilities", lambda: {})
    here, there = matrices()[:2]
    here.grad, before = torch.ones_like(here), there.detach().clone()
    Muon([here, there], lr=0.1, adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(there, before) and not torch.equal(here, matrices()[0])
