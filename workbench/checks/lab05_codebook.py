"""Lab 05, levels by weighted k-means: cases and judges of quant-codebook."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.checks.lab05_tensors import first_wrong, read, same, told_missing
from workbench.checks.probes_lab04 import drawn
from workbench.checks.probes_lab05 import codebook_inputs

TOLERANCE = 1e-4


def level_cases(*sizes: tuple):
    """Cases of (out, in, levels, kind, steps)."""
    return lambda draw: [
        {
            "seed": draw.randrange(10**6),
            "out": out,
            "wide": wide,
            "count": count,
            "kind": kind,
            "steps": steps,
        }
        for out, wide, count, kind, steps in sizes
    ]


def assign_cases(*sizes: tuple):
    """Cases of (out, in, levels, kind)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "out": out, "wide": wide, "count": count, "kind": kind}
        for out, wide, count, kind in sizes
    ]


def inputs_of(case: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight, sensitivity, levels in float64."""
    sizes = {name: case[name] for name in ("seed", "out", "wide", "count", "kind")}
    return tuple(part.double() for part in codebook_inputs(**sizes))


# --- The nearest level ---


def judge_assign(case: dict, seen: dict) -> str | None:
    """For each weight a level of its row than which none is nearer."""
    if lacking := told_missing(seen):
        return lacking
    weight, _, levels = inputs_of(case)
    where = f"assign of W {list(weight.shape)} with {case['count']} levels a row: "
    if seen["changed"]:
        return f"{where}what was given was changed"
    codes = read(seen["codes"], "codes", weight.shape, "uint8", "[out, in]")
    if isinstance(codes, str):
        return where + codes
    if int(codes.max()) >= case["count"]:
        return f"{where}a code is {int(codes.max())}; codes are 0 … {case['count'] - 1}"
    distance = (weight[:, :, None] - levels[:, None, :]).abs()
    came = distance.gather(2, codes[..., None])[..., 0]
    least, right = distance.min(dim=-1)
    far = came > least + 1e-6
    if not far.any():
        return None
    row, column = (int(i) for i in far.nonzero()[0])
    told = (
        f"{where}the weight {weight[row, column]:.5g} at [{row}, {column}] took level {int(codes[row, column])} = "
        f"{levels[row, codes[row, column]]:.5g}, and level {int(right[row, column])} = {levels[row, right[row, column]]:.5g} "
        "is nearer: "
    )
    ordered = levels.sort(dim=1).values
    ways = (
        ("the farthest was taken", distance.argmax(-1)),
        ("distance has no sign: (w − level) without | |", (weight[:, :, None] - levels[:, None, :]).argmin(-1)),
        ("the levels of row 0 were taken for all rows", (weight[:, :, None] - levels[:1, None, :]).abs().argmin(-1)),
        ("the numbers are those of sorted levels; the levels keep their order", (weight[:, :, None] - ordered[:, None, :]).abs().argmin(-1)),
        ("the level below was taken; round to the nearest", (weight[:, :, None] < levels[:, None, :]).double().mul(1e9).add(distance).argmin(-1)),
    )  # fmt: skip
    hint = [words for words, way in ways if torch.equal(way, codes)]
    return told + (hint[0] if hint else "the smallest |w − level| over the levels of its row")


# --- The levels ---


@dataclass(frozen=True)
class Rounds:
    """One way to move the levels. The defaults are right."""

    told: str = ""
    mean: str = "weighted"
    empty: str = "stays"
    steps: int | None = None  # other than asked
    extra: int = 0
    shared: bool = False


FAULTS = (
    Rounds("each weight counted the same; it counts as its sensitivity says", mean="plain"),
    Rounds("the sum was not divided by the sensitivities' sum", mean="sum"),
    Rounds("the sum of sensitivity · w was divided by how many weights took the level, not by the sum of their sensitivities", mean="by number"),
    Rounds("each weight counted as the square of its sensitivity", mean="squared"),
    Rounds("sensitivity was taken inversely: it says how much a weight matters", mean="inverse"),
    Rounds("the median was taken; k-means takes the mean, with sensitivities", mean="median"),
    Rounds("a level that no weight took became 0; it stays where it is", empty="zero"),
    Rounds("a level that no weight took became nan (0 / 0); it stays where it is", empty="nan"),
    Rounds("a level that no weight took went to the mean of the row; it stays where it is", empty="mean"),
    Rounds("only one round was made, or the first assignment kept; weights choose anew in each round", steps=1),
    Rounds("one round too few", extra=-1),
    Rounds("one round too many", extra=1),
    Rounds("all rows got the same levels; each row has its own", shared=True),
)  # fmt: skip


def levels_by(weight, sensitivity, levels, steps: int, how: Rounds = Rounds()) -> torch.Tensor:
    """[out, K] float64."""
    steps = (steps if how.steps is None else how.steps) + how.extra
    counts = {"weighted": sensitivity, "sum": sensitivity, "by number": sensitivity, "plain": torch.ones_like(sensitivity),
              "median": sensitivity, "squared": sensitivity**2, "inverse": 1 / sensitivity}[how.mean]  # fmt: skip
    if how.shared:
        weight, counts, rows = weight.flatten()[None], counts.flatten()[None], len(levels)
        shared = levels_by(weight, counts, levels[:1], steps)
        return shared.expand(rows, -1)
    for _ in range(max(0, steps)):
        codes = (weight[:, :, None] - levels[:, None, :]).abs().argmin(-1)
        new = levels.clone()
        for row in range(len(levels)):
            for k in range(levels.shape[1]):
                took = codes[row] == k
                mass = counts[row][took].sum()
                if not mass > 0:
                    new[row, k] = {
                        "stays": levels[row, k],
                        "zero": 0.0,
                        "nan": torch.nan,
                        "mean": weight[row].mean(),
                    }[how.empty]
                elif how.mean == "median":
                    new[row, k] = weight[row][took].median()
                else:
                    by = {"sum": 1.0, "by number": float(took.sum())}.get(how.mean, mass)
                    new[row, k] = (counts[row] * weight[row])[took].sum() / by
        levels = new
    return levels


def judge_levels(case: dict, seen: dict) -> str | None:
    """The levels after the rounds."""
    if lacking := told_missing(seen):
        return lacking
    given, steps = inputs_of(case), case["steps"]
    where = f"fit_levels of W {list(given[0].shape)}, {case['count']} levels a row, {steps} round{'s' * (steps != 1)}: "
    if seen["changed"]:
        return f"{where}what was given was changed; make new tensors"
    came = read(seen["levels"], "levels", given[2].shape, "float32", "[out, K]")
    if isinstance(came, str):
        return where + came
    right = levels_by(*given, steps)
    if same(came, right, TOLERANCE):
        return None
    row, k = first_wrong(came, right, TOLERANCE)
    told = f"{where}level {k} of row {row} is {came[row, k]:.5g}, expected {right[row, k]:.5g} (it began at {given[2][row, k]:.5g}): "
    for fault in FAULTS:
        wrong = levels_by(*given, steps, fault)
        if same(came, wrong, TOLERANCE) and not same(wrong, right, TOLERANCE):
            return told + fault.told
    return told + "Σ sensitivity · w / Σ sensitivity over the weights that took it"


# --- What is kept apart ---


def outlier_cases(*sizes: tuple):
    """Cases of (out, in, how many)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "out": out, "wide": wide, "take": take} for out, wide, take in sizes
    ]


def judge_outliers(case: dict, seen: dict) -> str | None:
    """The largest of the whole matrix, their places and values, and zeros where they stood."""
    if lacking := told_missing(seen):
        return lacking
    weight = drawn(case["seed"], "w", case["out"], case["wide"]).double()
    count = case["take"]
    where = f"take_outliers({count}) of W {list(weight.shape)}: "
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, where (rest, rows, columns, values) was expected"
    if seen["changed"]:
        return f"{where}the weight that was given was changed; make new tensors"
    found = []
    for name, shape, dtype in (
        ("rows", (count,), "int64"),
        ("columns", (count,), "int64"),
        ("values", (count,), "float32"),
        ("rest", weight.shape, "float32"),
    ):
        part = read(seen[name], name, shape, dtype)
        if isinstance(part, str):
            return where + part
        found.append(part)
    rows, columns, values, rest = found
    came = {(int(i), int(j)): float(v) for i, j, v in zip(rows, columns, values)}
    places = weight.abs().flatten().topk(count).indices
    right = {(int(p) // weight.shape[1], int(p) % weight.shape[1]) for p in places}
    if set(came) != right:
        more = sorted(set(came) - right) or sorted(right - set(came))
        told = f"{where}place {list(more[0])} is {'' if more[0] in came else 'not '}among those taken, "
        if {(j, i) for i, j in came} == right:
            return told + "rows and columns are exchanged"
        i, j = more[0]
        if not (i < len(weight) and j < weight.shape[1]):
            return told + f"and W is {list(weight.shape)}"
        least = float(weight.abs().flatten()[places].min())
        signs = {
            (int(p) // weight.shape[1], int(p) % weight.shape[1])
            for p in weight.flatten().topk(count).indices
        }
        hint = "; what counts is |w|, without its sign" if set(came) == signs else ""
        rows_taken = [sum(i == row for i, _ in came) for row in range(len(weight))]
        if not hint and max(rows_taken) - min(rows_taken) <= 1:
            hint = "; of the whole matrix, not of each row"
        return (
            told
            + f"and |w| there is {abs(float(weight[i, j])):.4g}; the largest {count} begin at {least:.4g}"
            + hint
        )
    for (i, j), value in came.items():
        if abs(value - float(weight[i, j])) > 1e-6:
            return f"{where}the value of place {[i, j]} is {value:.5g}, expected {weight[i, j]:.5g}: what stood there, with its sign"
    expected = weight.clone()
    expected[rows, columns] = 0.0
    if same(rest, expected, 1e-6):
        return None
    i, j = first_wrong(rest, expected, 1e-6)
    return f"{where}rest is {rest[i, j]:.5g} at {[i, j]}, expected {expected[i, j]:.5g}: 0 where a weight was taken, else as it was"
