"""Lab 10, softmax in tiles: cases and judges of kernels-softmax. What is right is softmax as it is defined, in
float64."""

from __future__ import annotations

import random

import torch

from workbench.labs.lab10_kernels.checks.judging import judge_tensor, told_inputs, told_loads
from workbench.labs.lab10_kernels.checks.probes import softmax_rows


def softmax_case(draw: random.Random, columns: int, tile: int, rows: int = 2, size: float = 1.5, **more) -> dict:
    return {"seed": draw.randrange(10**6), "rows": rows, "columns": columns, "tile": tile, "size": size, **more}


def one_tile_cases(draw: random.Random) -> list[dict]:
    """Rows that fit in one tile: full, and with room behind the end."""
    return [softmax_case(draw, 16, 16), softmax_case(draw, draw.randint(9, 15), 16)]


def tile_cases(draw: random.Random) -> list[dict]:
    """Longer rows, whose largest number lies in the last tile, or anywhere."""
    return [
        softmax_case(draw, 24, 8, rise=3.0),
        softmax_case(draw, 16 + draw.randint(1, 7), 8, rise=3.0),
        softmax_case(draw, 16 + draw.randint(1, 7), 8, rows=3),
    ]


def read_cases(draw: random.Random) -> list[dict]:
    return [softmax_case(draw, 24 + draw.randint(1, 7), 8)]


def blank_cases(draw: random.Random) -> list[dict]:
    """Tiles of −inf alone: first, in the middle, several, last."""
    columns = 24 + draw.randint(2, 7)
    return [softmax_case(draw, columns, 8, blank=blank, rows=1) for blank in ([0], [0, 1], [1, 2], [3], [0, 2])]


def edge_cases(draw: random.Random) -> list[dict]:
    """Numbers whose exponential overflows, float16, a row of one, tiles of one."""
    return [
        softmax_case(draw, 16 + draw.randint(1, 7), 8, rise=150.0),
        softmax_case(draw, 20, 8, size=40.0),
        softmax_case(draw, 70 + draw.randint(1, 7), 32, dtype="float16", size=0.3, rows=1),
        softmax_case(draw, 1, 4, rows=3),
        softmax_case(draw, 3, 1, rows=1),
    ]


# --- Judging ---


def right_softmax(case: dict) -> torch.Tensor:
    return softmax_rows(**case).double().softmax(dim=1)


def _where(case: dict) -> str:
    rows = f"{case['rows']} row{'s' * (case['rows'] > 1)} of {case['columns']}, tiles of {case['tile']}"
    blank = case.get("blank")
    return rows + (f", all −inf in {blank}: " if blank else ": ")


def judge_softmax(case: dict, seen: dict) -> str | None:
    where, dtype = _where(case), case.get("dtype", "float32")
    return judge_tensor(
        seen,
        "out",
        right_softmax(case),
        dtype,
        where=where,
        legend="[rows, n]",
        tolerance=2e-6 if dtype == "float32" else 1e-3,
    ) or told_inputs(seen, where)


def judge_reads(case: dict, seen: dict) -> str | None:
    """Two passes over memory, in tiles."""
    if wrong := judge_softmax(case, seen):
        return wrong
    where = _where(case)
    if seen["largest"] is not None and seen["largest"] > case["tile"]:
        return (
            f"{where}a block of {seen['largest']} elements was loaded at once; a tile has TILE = {case['tile']}, "
            "however long the row is"
        )
    return told_loads(seen, "x", 2 * case["rows"] * case["columns"], where)
