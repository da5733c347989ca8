"""What the kernels' tests share: where they run, in which types, and how far from the truth they may be.

A test that needs a CUDA device takes it as a parameter of those below, and one that runs its kernels wherever they run
takes HERE and says so; `workbench gpu-tests` runs both (tests/kits/test_gpu_tests.py proves that none is left out).

With WORKBENCH_GPU_REHEARSAL=1 the tests for "cuda" run on a CPU, in Triton's interpreter, with the choices that are
made on a GPU: what counts launches or takes for granted how a model is arranged is seen to fail without one.
"""

from __future__ import annotations

import os

import pytest
import torch

from workbench.kernels import launch

REHEARSED = os.environ.get("WORKBENCH_GPU_REHEARSAL") == "1"
INTERPRETER = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        not launch.INTERPRETED, reason="this machine has a GPU: kernels are compiled, not interpreted"
    ),
)
GPU = pytest.param(
    "cpu" if REHEARSED else "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            launch.INTERPRETED and not REHEARSED, reason="needs a CUDA device; the interpreter runs the same tests"
        ),
    ],
    id="cuda",
)
GPU_ALONE = pytest.param(  # what has no twin in the interpreter
    "cuda",
    marks=[
        pytest.mark.gpu(alone=True),
        pytest.mark.skipif(
            launch.INTERPRETED,
            reason="needs a CUDA device: what it shows (CUDA graphs, streams, the choice made there) has no twin",
        ),
    ],
    id="cuda",
)
HERE = "cpu" if launch.INTERPRETED else "cuda"
where_kernels_run = pytest.mark.gpu(here=True)  # for a test that takes HERE: it runs on either machine
on_each_device = pytest.mark.parametrize("device", [INTERPRETER, GPU])


def choose_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands at "auto" is on this CPU what it would be on a GPU, where the interpreter can do it."""
    from workbench.kv import paged
    from workbench.models import fused, linear, measured_linear

    kernels, plain, attention = fused.choose_kernels, linear.chosen_linear, paged.choose_attention

    def choose_kernels(model, asked, *, compiled):
        able = not (compiled or fused.why_not_here(model) or fused.why_not_shape(model.config))
        return kernels(model, "triton" if asked == "auto" and able else asked, compiled=compiled)

    def chosen_linear(dtype, device):
        able = not linear.why_not_triton(dtype, device)
        return (linear.TritonMatvec, "as on a GPU") if able else plain(dtype, device)

    def choose_attention(name, config, kind, **given):
        try:
            return attention("triton" if name == "auto" else name, config, kind, **given)
        except ValueError:
            return attention(name, config, kind, **given)

    monkeypatch.setattr(fused, "choose_kernels", choose_kernels)
    monkeypatch.setattr(paged, "choose_attention", choose_attention)
    for module in (measured_linear, linear):
        monkeypatch.setattr(module, "chosen_linear", chosen_linear)


# relative to the largest value of the reference; bfloat16 only where kernels are compiled
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def dtypes(device: str) -> list[torch.dtype]:
    return [torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """An output full of NaN: what a kernel leaves out is seen."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_near(got: torch.Tensor, truth: torch.Tensor, tolerance: float | None = None) -> None:
    """|got − truth| ≤ tolerance · max |truth|, everywhere, and nothing is NaN. truth in float64."""
    assert got.shape == truth.shape, f"shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    assert torch.isfinite(got).all(), "not all of the output is finite"
    allowed = (TOLERANCE[got.dtype] if tolerance is None else tolerance) * max(truth.abs().max().item(), 1e-30)
    worst = (got.double() - truth.double()).abs().max().item()
    assert worst <= allowed, f"off by {worst:.3g}, allowed {allowed:.3g}"
