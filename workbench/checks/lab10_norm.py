"""Lab 10, a fused RMSNorm: cases and judges of kernels-norm, in float64 from the definition."""

from __future__ import annotations

import random

import torch

from workbench.checks.lab10_judging import judge_tensor, told_inputs, told_loads, told_pair
from workbench.checks.probes_lab10 import norm_rows


def norm_case(
    draw: random.Random, width: int, rows: int = 2, residual: bool = False, eps: float = 1e-5, **more
) -> dict:
    return {
        "seed": draw.randrange(10**6), "rows": rows, "width": width, "with_residual": residual, "eps": eps, **more,
    }  # fmt: skip


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


def _made(case: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    made = norm_rows(**{name: value for name, value in case.items() if name != "eps"})
    residual = made.get("residual")
    return made["x"].double(), made["weight"].double(), None if residual is None else residual.double()


FAULTS = (
    ("of the block", "the mean of the squares was taken over the whole block of {block}; a row has {width}"),
    ("summed", "the squares were summed, not averaged"),
    ("eps outside", "eps was added to the root; it belongs under it"),
    ("no eps", "eps was left out"),
    ("centred", "the mean was subtracted first: that is LayerNorm, RMSNorm only divides"),
    ("no weight", "the weight was left out"),
    ("one more", "the weight was taken as 1 + weight; here it is the factor itself"),
    ("not the root", "it was divided by the mean square, not by its root"),
    ("absolute", "it was divided by the mean of |x|, not by the root of the mean square"),
    ("of x alone", "x was normed without the residual: the norm is of x + residual"),
    ("of the residual", "the residual was normed; the norm is of x + residual"),
    ("rms of x", "x + residual was divided by the root mean square of x alone"),
    ("exchanged", "the two outputs are exchanged: (y, x + residual)"),
    ("residual after", "the residual was added after the norm: the norm is of x + residual"),
)  # fmt: skip
TOTAL_FAULTS = (
    ("x", "that is x; the second output is x + residual, what the next layer adds to"),
    ("residual", "that is the residual; the second output is x + residual"),
    ("normed", "that is the normed sum; the second output is x + residual as it is"),
)


def exact(case: dict, fault: str = "") -> torch.Tensor:
    """y [rows, width] float64, right or with one mistake."""
    x, weight, residual = _made(case)
    total = x if residual is None else x + residual
    h = {"of x alone": x, "of the residual": residual}.get(fault, total)
    h = total if h is None else h
    if fault == "exchanged":
        return total
    if fault == "residual after" and residual is not None:
        return exact(case, "of x alone") + residual
    if fault == "centred":
        h = h - h.mean(dim=1, keepdim=True)
    width, eps = case["width"], case["eps"]
    block = 1 << (width - 1).bit_length()
    of = x if fault == "rms of x" else h
    mean = of.square().sum(dim=1, keepdim=True) / {"of the block": block, "summed": 1}.get(fault, width)
    root = (mean + eps).sqrt()
    root = {
        "eps outside": mean.sqrt() + eps,
        "no eps": mean.sqrt(),
        "not the root": mean + eps,
        "absolute": of.abs().mean(dim=1, keepdim=True) + eps,
    }.get(fault, root)
    weight = {"no weight": torch.ones_like(weight), "one more": 1.0 + weight}.get(fault, weight)
    return h / root * weight


def _where(case: dict) -> str:
    beside = "with a residual" if case["with_residual"] else "without residual"
    return f"{case['rows']} rows of {case['width']}, {beside}: "


def judge_norm(case: dict, seen: dict) -> str | None:
    """y, then x + residual."""
    where, dtype = _where(case), case.get("dtype", "float32")
    if case["with_residual"] and (wrong := told_pair(seen, "(y, x + residual)")):
        return where + wrong
    block = 1 << (case["width"] - 1).bit_length()
    hint = "the square of 300 is more than float16 holds; compute in float32" if dtype == "float16" else ""
    if case.get("zero_row"):
        hint = "a row of zeros has no root to divide by but eps"
    wrong = judge_tensor(
        seen, "out", exact(case), dtype, where=where, legend="[N, d]", not_finite=hint,
        faults=[
            (told.format(block=block, width=case["width"]), lambda fault=fault: exact(case, fault)) for fault, told in FAULTS
        ],
    )  # fmt: skip
    if wrong is None and case["with_residual"]:
        x, _, residual = _made(case)
        of = {"x": x, "residual": residual, "normed": exact(case)}
        wrong = judge_tensor(
            {"x + residual": seen["total"]}, "x + residual", x + residual, dtype, where=where, legend="[N, d]",
            faults=[(told, lambda fault=fault: of[fault]) for fault, told in TOTAL_FAULTS],
        )  # fmt: skip
    return wrong or told_inputs(seen, where)


def judge_reads(case: dict, seen: dict) -> str | None:
    """x, and the residual, once."""
    if wrong := judge_norm(case, seen):
        return wrong
    elements, where = case["rows"] * case["width"], _where(case)

    def told(loaded: int) -> str:
        return (
            f"{loaded / elements:.3g} times each; a row stays in registers between its sum and its quotient"
        )

    for name in ("x", "residual")[: 1 + case["with_residual"]]:
        if wrong := told_loads(seen, name, elements, where, told):
            return wrong
    return None
