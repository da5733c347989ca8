"""Lab 05, spreading the rounding error: cases and judges of quant-gptq.

Codes are judged column by column: what a column was to be follows from the codes that the answer itself gave to the
columns before it, so that a tie decided the other way costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.checks.lab05_tensors import fault_of, first_wrong, read, same, told_missing
from workbench.checks.probes_lab05 import column_inputs, factor_of, moments

# --- The factor ---


def factor_cases(*sizes: tuple):
    """Cases of (in, kind, damping)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "wide": wide, "kind": kind, "damping": damping}
        for wide, kind, damping in sizes
    ]


def damped(h: torch.Tensor, amount: float | torch.Tensor) -> torch.Tensor:
    return h.double() + amount * torch.eye(len(h), dtype=torch.float64)


def upper(a: torch.Tensor) -> torch.Tensor:
    """U with UᵀU = a; of nan where there is none."""
    factor, failed = torch.linalg.cholesky_ex(a, upper=True)
    return factor if not failed else torch.full_like(a, torch.nan)


def exact_factor(h: torch.Tensor, damping: float) -> torch.Tensor:
    return upper(torch.linalg.inv(damped(h, damping * h.double().diagonal().mean())))


def factor_ways(h: torch.Tensor, damping: float) -> list[tuple[str, Callable[[], torch.Tensor]]]:
    mean = h.double().diagonal().mean()
    inverse = torch.linalg.inv(damped(h, damping * mean))
    return [
        ("that is the lower factor, L·Lᵀ; take the upper one, Uᵀ·U (upper=True)", lambda: upper(inverse).T),
        ("U·Uᵀ is the inverse here, as of the factor of H turned round; it is to be Uᵀ·U", lambda: upper(inverse.flip(0, 1)).T.flip(0, 1)),
        ("that is the factor of H; it is to be that of its inverse", lambda: upper(damped(h, damping * mean))),
        ("that is the inverse itself; take its Cholesky factor", lambda: inverse),
        ("the damping was not added", lambda: upper(torch.linalg.inv(h.double()))),
        ("the damping itself was added; it is a share of the mean of H's diagonal", lambda: exact_factor_of(h, damping)),
        ("the damping is a share of the mean of the diagonal, not of its largest", lambda: exact_factor_of(h, damping * h.double().diagonal().max())),
        ("the damping goes on the diagonal only", lambda: upper(torch.linalg.inv(h.double() + damping * mean))),
        ("the damping is a share of the mean of the diagonal, not of all of H", lambda: exact_factor_of(h, damping * h.double().mean())),
        ("the damping was added to the inverse; it goes to H", lambda: upper(damped(torch.linalg.inv(h.double()), damping * mean))),
    ]  # fmt: skip


def exact_factor_of(h: torch.Tensor, amount) -> torch.Tensor:
    return upper(torch.linalg.inv(damped(h, amount)))


def judge_factor(case: dict, seen: dict) -> str | None:
    """U upper triangular with UᵀU = (H + λI)⁻¹."""
    if lacking := told_missing(seen):
        return lacking
    wide = case["wide"]
    h = moments(case["seed"], wide, case["kind"])
    what = "that fewer inputs than channels made" if case["kind"] == "few" else "of many inputs"
    where = f"inverse_factor of H [{wide}, {wide}] {what}, damping {case['damping']:g}: "
    if seen["changed"]:
        return f"{where}H was changed; work on a copy (.clone())"
    came = read(seen["factor"], "U", (wide, wide), "float64", "[in, in]")
    if isinstance(came, str):
        return where + came
    right = exact_factor(h, case["damping"])
    size = right.abs().max()
    tolerance = 1e-5
    if same(came / size, right / size, tolerance):
        return None
    at = first_wrong(came / size, right / size, tolerance)
    told = f"{where}U{list(at)} is {came[at]:.5g}, expected {right[at]:.5g}: "
    for words, way in factor_ways(h, case["damping"]):
        try:
            wrong = way()
        except RuntimeError:  # H has no inverse without damping
            continue
        if fault_of(came / size, right / size, [("it", wrong / size)], tolerance):
            return told + words
    return told + "Uᵀ·U = (H + λ·I)⁻¹ with λ = damping · mean of the diagonal"


# --- The columns ---


def column_cases(*sizes: tuple):
    """Cases of (out, in, group, bits, reach of the codes)."""
    return lambda draw: [
        {
            "seed": draw.randrange(10**6),
            "out": out,
            "wide": wide,
            "group": group,
            "bits": bits,
            "reach": reach,
        }
        for out, wide, group, bits, reach in sizes
    ]


@dataclass(frozen=True)
class Columns:
    """One way to go through the columns. The defaults are right.

    spread(U, j): by what the error of column j is multiplied for all columns (those that are done stay).
    """

    told: str = ""
    divided: int = 1
    sign: float = -1.0
    spread: Callable[[torch.Tensor, int], torch.Tensor] = lambda u, j: u[j]
    rounding: str = "round"
    group: Callable[[int, int, int], int] = lambda j, group, count: j // group
    offset: bool = True
    last_first: bool = False
    next_only: bool = False
    rows: str = "each"
    later: bool = True
    error_of: str = "now"
    clamped: bool = True
    inside: bool = False  # errors stay inside their group


FAULTS = (
    Columns("each weight was rounded for itself; the error of a column moves those to come", later=False),
    Columns("the error was not divided by U[j, j]", divided=0),
    Columns("the error was divided by U[j, j] twice", divided=2),
    Columns("the error was added; what was lost is taken off the columns to come", sign=1.0),
    Columns("column j of U was taken; it is row j, U[j, j+1:] (below the diagonal U is 0)", spread=lambda u, j: u[:, j]),
    Columns("row j of the inverse UᵀU was taken; columns that are done must be out of it, so it is row j of U",
            spread=lambda u, j: (u.T @ u)[j] / (u.T @ u)[j, j] * u[j, j]),
    Columns("the error moved column j + 1 alone; all columns to come move", next_only=True),
    Columns("codes were cut off; round to the nearest", rounding="cut"),
    Columns("column j is in group j // group; the scales of another group were taken", group=lambda j, group, count: j % count),
    Columns("the scales of the first group were taken for all columns", group=lambda j, group, count: 0),
    Columns("the columns were taken from the last to the first", last_first=True),
    Columns("the error of one output moved the others too; each output by itself", rows="mean"),
    Columns("the zero is missing", offset=False),
    Columns("codes were cut off (a cast to uint8 drops the fraction), so no error was left to spread", rounding="late"),
    Columns("the error is that of the column as it is now, not of the weight as it was given", error_of="given"),
    Columns("the error is that of the code that is stored: clamp it first", clamped=False),
    Columns("the error moved the columns of its own group alone; all columns to come move", inside=True),
)  # fmt: skip


def codes_by(weight: torch.Tensor, u: torch.Tensor, scale, zero, highest: int, how: Columns) -> torch.Tensor:
    """Codes [out, in] float64."""
    w, scale, zero = weight.double().clone(), scale.double(), zero.double()
    wide, count = w.shape[1], scale.shape[1]
    group, codes = wide // count, torch.zeros_like(w)
    for j in reversed(range(wide)) if how.last_first else range(wide):
        at = how.group(j, group, count)
        step, offset = scale[:, at], zero[:, at] * how.offset
        ratio = (w[:, j] - offset) / step
        code = {"round": ratio.round(), "cut": ratio.trunc(), "late": ratio}[how.rounding]
        codes[:, j] = code.clamp(0, highest).trunc()  # as a cast to uint8 does
        code = code.clamp(0, highest) if how.clamped else code
        if not how.later:
            continue
        was = w[:, j] if how.error_of == "now" else weight[:, j].double()
        error = (was - (code * step + offset)) / u[j, j] ** how.divided
        if how.rows == "mean":
            error = error.mean().expand_as(error)
        end = j + 2 if how.next_only else (j // group + 1) * group if how.inside else wide
        w[:, j + 1 : end] += how.sign * error[:, None] * how.spread(u, j)[j + 1 : end]
    return codes


def judge_columns(case: dict, seen: dict) -> str | None:
    """Every code the nearest for what the column is when its turn comes."""
    out, wide, group, bits = case["out"], case["wide"], case["group"], case["bits"]
    given = column_inputs(case["seed"], out, wide, group, bits, case["reach"])
    where = f"quantize_columns of W [{out}, {wide}] at {bits} bits, groups of {group}: "
    told = told_missing(seen) or (
        f"{where}something that was given was changed; work on copies (.double() of float64 is no copy: .clone())"
        if seen["changed"]
        else None
    )
    return told or _judge_codes(where, seen["codes"], *given, factor_of(case["seed"], wide), 2**bits - 1)


def _judge_codes(where: str, seen: dict, weight, scale, zero, u: torch.Tensor, highest: int) -> str | None:
    codes = read(seen, "codes", weight.shape, "uint8", "[out, in]")
    if isinstance(codes, str):
        return where + codes
    w, codes = weight.double().clone(), codes.double()
    group = w.shape[1] // scale.shape[1]
    for j in range(w.shape[1]):
        step, offset = scale[:, j // group].double(), zero[:, j // group].double()
        exact = ((w[:, j] - offset) / step).clamp(0, highest)
        far = ~((codes[:, j] - exact).abs() <= 0.5 + 1e-3)
        if far.any():
            row = int(far.nonzero()[0])
            told = (
                f"{where}the code at [{row}, {j}] is {int(codes[row, j])}; when its turn comes this weight is {w[row, j]:.5g}, "
                f"{exact[row]:.4g} steps above its zero (it was {float(weight[row, j]):.5g} before): "
            )
            if float(codes.max()) > highest:
                return told + f"codes are 0 … {highest}; a weight beyond takes the last one"
            for fault in FAULTS:
                if torch.equal(codes_by(weight, u, scale, zero, highest, fault), codes):
                    return told + fault.told
            return told + "code, error over U[j, j], and the columns to come move by err · U[j, j+1:]"
        error = (w[:, j] - (codes[:, j] * step + offset)) / u[j, j]
        w[:, j + 1 :] -= error[:, None] * u[j, j + 1 :]
    return None
