"""Lab 10, a product with weights of four bits: cases and judges of kernels-int4. What is right is dequantized in
float64."""

from __future__ import annotations

import random

import torch

from workbench.labs.lab10_kernels.checks.judging import judge_tensor, told_inputs, told_loads
from workbench.labs.lab10_kernels.checks.probes import int4_weight


def int4_case(draw: random.Random, outs: int, width: int, group: int, rows: int = 1, **more) -> dict:
    return {"seed": draw.randrange(10**6), "rows": rows, "outs": outs, "width": width, "group": group, **more}


def nibble_cases(draw: random.Random) -> list[dict]:
    """Scales 1 and zeros 0: the codes are the weights. One group, then two."""
    return [int4_case(draw, 3, 8, 8, plain=True), int4_case(draw, 4, 16, 8, plain=True)]


def group_cases(draw: random.Random) -> list[dict]:
    return [int4_case(draw, 3, 24, 8), int4_case(draw, 5, 32, draw.choice([4, 8]))]


def row_cases(draw: random.Random) -> list[dict]:
    """Several rows of x: as many as fill a block, and fewer."""
    return [int4_case(draw, 5, 16, 8, rows=4), int4_case(draw, 3, 16, 4, rows=3)]


def tail_cases(draw: random.Random) -> list[dict]:
    """Groups and widths that are no power of two, more outputs than a program has rows, more bytes than a tile has."""
    return [
        int4_case(draw, 2, 36, 6, rows=2),
        int4_case(draw, 16 + draw.randint(1, 9), 24, 12),
        int4_case(draw, 2, 160, 32),
        int4_case(draw, 1, 2, 2),
    ]


def float16_cases(draw: random.Random) -> list[dict]:
    """Products that sum up to more than float16 holds, and mostly cancel in the end."""
    return [
        int4_case(draw, 2, 128, 64, dtype="float16", cancel=True),
        int4_case(draw, 3, 64, 32, rows=2, dtype="float16"),
    ]


def read_cases(draw: random.Random) -> list[dict]:
    return [int4_case(draw, 5, 32, 8, rows=3)]


# --- Judging ---


def exact(case: dict) -> torch.Tensor:
    """[rows, outs] float64."""
    group, outs, width = case["group"], case["outs"], case["width"]
    made = int4_weight(**case)
    grouped = made["codes"].view(outs, width // group, group // 2)
    codes = torch.cat((grouped & 15, grouped >> 4), dim=2).double()
    weight = made["scale"].double()[..., None] * codes + made["zero"].double()[..., None]
    return made["x"].double() @ weight.reshape(outs, width).T


def _where(case: dict) -> str:
    rows = f"{case['rows']} row{'s' * (case['rows'] > 1)} of x"
    return f"{rows}, weight [{case['outs']}, {case['width']}] in groups of {case['group']}: "


def judge_int4(case: dict, seen: dict) -> str | None:
    where, dtype = _where(case), case.get("dtype", "float32")
    right = exact(case)
    size = max(1.0, float(right.abs().max()))  # rounding is relative to the terms, not to what they sum up to
    return judge_tensor(
        seen,
        "out",
        right,
        dtype,
        where=where,
        legend="[N, out]",
        tolerance=1e-5 * size if dtype == "float32" else 5e-3 * size + 0.05 * case.get("cancel", False),
    ) or told_inputs(seen, where)


def judge_reads(case: dict, seen: dict) -> str | None:
    """Each byte of the weight once, for all rows of x."""
    return judge_int4(case, seen) or told_loads(seen, "codes", case["outs"] * case["width"] // 2, _where(case))
