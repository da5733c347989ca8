"""Lab 10, softmax in tiles: cases and judges of kernels-softmax. What is right is softmax as it is defined, in float64."""

from __future__ import annotations

import random

import torch

from workbench.checks.lab10_judging import judge_tensor, told_inputs, told_loads
from workbench.checks.probes_lab10 import softmax_rows


def softmax_case(
    draw: random.Random, columns: int, tile: int, rows: int = 2, size: float = 1.5, **more
) -> dict:
    return {
        "seed": draw.randrange(10**6),
        "rows": rows,
        "columns": columns,
        "tile": tile,
        "size": size,
        **more,
    }


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
    return [
        softmax_case(draw, columns, 8, blank=blank, rows=1) for blank in ([0], [0, 1], [1, 2], [3], [0, 2])
    ]


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
    return _rows(case).softmax(dim=1)


def _rows(case: dict) -> torch.Tensor:
    return softmax_rows(**case).double()


FAULTS = (
    ("no rescale", "the sum forgot to rescale: what was summed up below the old maximum counts exp(m_old − m_new) of it"),
    ("last sum", "only the last tile is in the sum; add to what the tiles before have"),
    ("zeros", "what lies behind the end took part as zeros, e⁰ each: load −inf there"),
    ("by tile", "each tile was made a softmax of its own; the sum of the whole row divides"),
    ("not divided", "exp(x − m) was not divided by the sum"),
    ("swapped rows", "that is the softmax of row 0; a row begins at program_id · n"),
    ("all rescaled", "what the new tile adds was rescaled, too; it already stands below the new maximum"),
    ("first tile", "only the first tile is in the sum"),
)  # fmt: skip


def faulty_softmax(case: dict, fault: str) -> torch.Tensor:
    """The same with one mistake."""
    x, tile = _rows(case), case["tile"]
    tiles = list(x.split(tile, dim=1))
    if fault == "by tile":
        return torch.cat([one.softmax(dim=1) for one in tiles], dim=1)
    if fault == "swapped rows":
        return x[:1].softmax(dim=1).expand_as(x)
    if fault == "zeros":
        tiles[-1] = torch.nn.functional.pad(tiles[-1], (0, tile - tiles[-1].shape[1]))
    m, total = x.new_full((len(x), 1), -torch.inf), x.new_zeros(len(x), 1)
    for number, one in enumerate(tiles):
        new = torch.maximum(m, one.amax(dim=1, keepdim=True))
        shift = new.masked_fill(new == -torch.inf, 0.0)
        added, old = (one - shift).exp().sum(dim=1, keepdim=True), (m - shift).exp()
        if fault == "no rescale":
            total = total + added
        elif fault == "last sum":
            total = added
        elif fault == "first tile":
            total = added if number == 0 else total * old
        elif fault == "all rescaled":
            total = (total + added) * (old if number else 1.0)
        else:
            total = total * old + added
        m = new
    return (x - m).exp() / (1.0 if fault == "not divided" else total)


def _where(case: dict) -> str:
    return f"{case['rows']} row{'s' * (case['rows'] > 1)} of {case['columns']}, tiles of {case['tile']}: "


def judge_softmax(case: dict, seen: dict) -> str | None:
    where, dtype = _where(case), case.get("dtype", "float32")
    blank = case.get("blank")
    hint = "exp of more than 88 overflows in float32; subtract the running maximum first"
    if blank:
        hint = f"tile {blank[0]} is all −inf, and −inf − (−inf) is nan; subtract 0 as long as the maximum is −inf"
    return judge_tensor(
        seen, "out", right_softmax(case), dtype, where=where, legend="[rows, n]", not_finite=hint,
        faults=[(told, lambda fault=fault: faulty_softmax(case, fault)) for fault, told in FAULTS],
        tolerance=2e-6 if dtype == "float32" else 1e-3,
    ) or told_inputs(seen, where)  # fmt: skip


def judge_reads(case: dict, seen: dict) -> str | None:
    """Two passes over memory, in tiles."""
    if wrong := judge_softmax(case, seen):
        return wrong
    where, elements = _where(case), case["rows"] * case["columns"]
    if seen["largest"] is not None and seen["largest"] > case["tile"]:
        return (
            f"{where}a block of {seen['largest']} elements was loaded at once; a tile has TILE = {case['tile']}, "
            "however long the row is"
        )
    return told_loads(
        seen, "x", 2 * elements, where,
        lambda n: f"{n / elements:.3g} times each; maximum and sum come out of one pass, the second one writes",
    )  # fmt: skip
