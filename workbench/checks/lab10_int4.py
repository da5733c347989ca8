"""Lab 10, a product with weights of four bits: cases and judges of kernels-int4. What is right is dequantized in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from workbench.checks.lab10_judging import judge_tensor, told_inputs, told_loads
from workbench.checks.probes_lab10 import int4_weight


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


@dataclass(frozen=True)
class Fault:
    """One way to be wrong; the defaults are right."""

    told: str = ""
    order: str = "halves"  # or "upper first", "neighbours", "neighbours, upper first", "lower alone"
    signed: bool = False
    scale: str = "group"  # or "first", "row 0", "by bytes", "none"
    zero: str = "added"  # or "ignored", "before", "subtracted", "once"


RIGHT = Fault()
FAULTS = (
    Fault("the upper four bits were taken for the first half of a group, the lower for the second", order="upper first"),
    Fault("a byte was taken for two neighbours; its lower bits are column j of the group, its upper j + group/2",
          order="neighbours"),
    Fault("a byte was taken for two neighbours, the upper bits first; its lower bits are column j of the group, its "
          "upper j + group/2", order="neighbours, upper first"),
    Fault("the halves were taken of the whole row; they are a group's", order="halves of the row"),
    Fault("only the lower four bits took part", order="lower alone"),
    Fault("only the upper four bits took part", order="upper alone"),
    Fault("codes above 7 were taken for negative numbers; they are 0 … 15", signed=True),
    Fault("the zeros were left out: x̂ = scale · code + zero", zero="ignored"),
    Fault("zero was subtracted from the code before scaling; here it is a real number: x̂ = scale · code + zero",
          zero="before"),
    Fault("zero was subtracted: x̂ = scale · code + zero", zero="subtracted"),
    Fault("zero was added to the code before scaling: x̂ = scale · code + zero", zero="scaled"),
    Fault("the zeros were added for the lower bits alone", zero="once"),
    Fault("the scales were left out", scale="none"),
    Fault("every group was scaled as the first one", scale="first"),
    Fault("every output was scaled as output 0", scale="row 0"),
    Fault("byte i was scaled as group i // group; a group has group/2 bytes", scale="by bytes"),
)  # fmt: skip


def exact(case: dict, fault: Fault = RIGHT) -> torch.Tensor:
    """[rows, outs] float64."""
    group = case["group"]
    made = int4_weight(**case)
    x, codes = made["x"].double(), made["codes"]
    outs, width = case["outs"], case["width"]
    grouped = codes.view(outs, width // group, group // 2)
    low, high = (grouped & 15).double(), (grouped >> 4).double()
    if fault.signed:
        low, high = (t - 16.0 * (t > 7) for t in (low, high))
    scale, zero = (_chosen(made[name].double(), group, fault.scale) for name in ("scale", "zero"))
    if fault.scale == "none":
        scale = torch.ones_like(scale)
    low, high = (_real(t, scale, zero, fault.zero, last=number) for number, t in enumerate((low, high)))
    if fault.order in ("lower alone", "upper alone"):
        low, high = (low, high * 0) if fault.order == "lower alone" else (low * 0, high)
    columns = {
        "upper first": torch.cat((high, low), dim=2).reshape(outs, width),
        "neighbours": torch.stack((low, high), dim=3).reshape(outs, width),
        "neighbours, upper first": torch.stack((high, low), dim=3).reshape(outs, width),
        "halves of the row": torch.cat((low.reshape(outs, -1), high.reshape(outs, -1)), dim=1),
    }
    return x @ columns.get(fault.order, torch.cat((low, high), dim=2).reshape(outs, width)).T


def _chosen(of: torch.Tensor, group: int, how: str) -> torch.Tensor:
    """[outs, groups] -> what is used for each byte [outs, groups, group/2]."""
    if how == "first":
        of = of[:, :1].expand_as(of)
    if how == "row 0":
        of = of[:1].expand_as(of)
    half = max(group // 2, 1)
    if how == "by bytes":
        at = torch.arange(of.shape[1] * half) // group
        return of[:, at].view(len(of), -1, half)
    return of[..., None].expand(-1, -1, half)


def _real(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, how: str, last: int) -> torch.Tensor:
    return {
        "added": scale * codes + zero,
        "ignored": scale * codes,
        "before": scale * (codes - zero),
        "scaled": scale * (codes + zero),
        "subtracted": scale * codes - zero,
        "once": scale * codes + (0.0 if last else zero),
    }[how]


def _where(case: dict) -> str:
    rows = f"{case['rows']} row{'s' * (case['rows'] > 1)} of x"
    return f"{rows}, weight [{case['outs']}, {case['width']}] in groups of {case['group']}: "


def judge_int4(case: dict, seen: dict) -> str | None:
    where, dtype = _where(case), case.get("dtype", "float32")
    hint = "what lies behind the end was used; load 0 there"
    if dtype == "float16":
        hint = "a sum above 65,504 is none in float16; multiply and add in float32, round once at the end"
    right = exact(case)
    size = max(1.0, float(right.abs().max()))  # rounding is relative to the terms, not to what they sum up to
    return judge_tensor(
        seen, "out", right, dtype, where=where, legend="[N, out]", not_finite=hint,
        faults=[(fault.told, lambda fault=fault: exact(case, fault)) for fault in FAULTS],
        tolerance=1e-5 * size if dtype == "float32" else 5e-3 * size + 0.05 * case.get("cancel", False),
    ) or told_inputs(seen, where)  # fmt: skip


def judge_reads(case: dict, seen: dict) -> str | None:
    """Each byte of the weight once, for all rows of x."""
    if wrong := judge_int4(case, seen):
        return wrong
    elements, where = case["outs"] * case["width"] // 2, _where(case)

    def told(loaded: int) -> str:
        if loaded == case["rows"] * elements:
            return "each row of x loads the weight anew; load a tile of it once, for all rows"
        return "a byte holds two codes: load it once"

    return told_loads(seen, "codes", elements, where, told)
