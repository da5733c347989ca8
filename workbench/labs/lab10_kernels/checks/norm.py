"""Lab 10, a fused RMSNorm: cases and judges of kernels-norm, in float64 from the definition."""

from __future__ import annotations

import random

import torch

from workbench.labs.lab10_kernels.checks.judging import judge_tensor, told_inputs, told_loads, told_pair
from workbench.labs.lab10_kernels.checks.probes import norm_rows


def norm_case(
    draw: random.Random, width: int, rows: int = 2, residual: bool = False, eps: float = 1e-5, **more
) -> dict:
    return {"seed": draw.randrange(10**6), "rows": rows, "width": width, "with_residual": residual, "eps": eps, **more}


def plain_cases(draw: random.Random) -> list[dict]:
    return [norm_case(draw, 8), norm_case(draw, 16, rows=3)]


def residual_cases(draw: random.Random) -> list[dict]:
    return [norm_case(draw, 8, residual=True), norm_case(draw, 16, rows=3, residual=True)]


def odd_cases(draw: random.Random) -> list[dict]:
    """Widths that are no power of two."""
    return [
        norm_case(draw, draw.choice([5, 6, 7])),
        norm_case(draw, draw.choice([17, 24, 37]), residual=True),
        norm_case(draw, 1, rows=3),
    ]


def small_cases(draw: random.Random) -> list[dict]:
    """Rows so small that eps counts, and a row of zeros."""
    return [
        norm_case(draw, 8, size=1e-3, eps=1e-5),
        norm_case(draw, 8, size=1e-2, eps=1e-3, residual=True, zero_row=True),
    ]


def float16_cases(draw: random.Random) -> list[dict]:
    """Numbers whose squares are more than float16 holds."""
    return [
        norm_case(draw, 16, size=300.0, dtype="float16"),
        norm_case(draw, 48, size=100.0, residual=True, dtype="float16"),
    ]


def read_cases(draw: random.Random) -> list[dict]:
    return [norm_case(draw, draw.randint(33, 40), residual=True), norm_case(draw, 19)]


# --- Judging ---


def _sum_of(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, or x + residual, [rows, width] float64, weight [width])."""
    made = norm_rows(**{name: value for name, value in case.items() if name != "eps"})
    made = {name: tensor.double() for name, tensor in made.items()}
    return made["x"] + made.get("residual", 0.0), made["weight"]


def exact(case: dict) -> torch.Tensor:
    """y [rows, width] float64."""
    h, weight = _sum_of(case)
    return h / (h.square().mean(dim=1, keepdim=True) + case["eps"]).sqrt() * weight


def _where(case: dict) -> str:
    beside = "with a residual" if case["with_residual"] else "without residual"
    return f"{case['rows']} rows of {case['width']}, {beside}: "


def judge_norm(case: dict, seen: dict) -> str | None:
    """y, then x + residual."""
    where, dtype = _where(case), case.get("dtype", "float32")
    if case["with_residual"] and (wrong := told_pair(seen, "(y, x + residual)")):
        return where + wrong
    wrong = judge_tensor(seen, "out", exact(case), dtype, where=where, legend="[N, d]")
    if wrong is None and case["with_residual"]:
        total = {"x + residual": seen["total"]}
        wrong = judge_tensor(total, "x + residual", _sum_of(case)[0], dtype, where=where, legend="[N, d]")
    return wrong or told_inputs(seen, where)


def judge_reads(case: dict, seen: dict) -> str | None:
    """x, and the residual, once."""
    if wrong := judge_norm(case, seen):
        return wrong
    elements, where = case["rows"] * case["width"], _where(case)
    names = ("x", "residual")[: 1 + case["with_residual"]]
    return next((wrong for name in names if (wrong := told_loads(seen, name, elements, where))), None)
