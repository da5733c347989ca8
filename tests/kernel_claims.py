"""What the kernels' tests share: where they run, in which types, and how far from the truth they may be."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels import launch

INTERPRETER = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        not launch.INTERPRETED, reason="this machine has a GPU: kernels are compiled, not interpreted"
    ),
)
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(launch.INTERPRETED, reason="needs a CUDA device; the interpreter runs the same tests"),
    ],
)
GPU_ALONE = pytest.param(  # what has no twin in the interpreter
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            launch.INTERPRETED,
            reason="needs a CUDA device: what it shows (CUDA graphs, streams, the choice made there) has no twin",
        ),
    ],
)
on_each_device = pytest.mark.parametrize("device", [INTERPRETER, GPU])

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
