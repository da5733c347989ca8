"""Lab 05, levels by weighted k-means: cases and judges of quant-codebook."""

from __future__ import annotations

import torch

from workbench.checks.inputs import drawn
from workbench.checks.tensors import first_wrong, missing_message, read, same
from workbench.labs.lab05_quantization.checks.probes import codebook_inputs

TOLERANCE = 1e-4


def level_cases(*sizes: tuple):
    """Cases of (out, in, levels, kind, steps)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "out": out, "wide": wide, "count": count, "kind": kind, "steps": steps}
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
    weight, sensitivity, levels = codebook_inputs(**sizes)
    return weight.double(), sensitivity.double(), levels.double()


# --- The nearest level ---


def judge_assign(case: dict, seen: dict) -> str | None:
    """For each weight a level of its row than which none is nearer."""
    if lacking := missing_message(seen):
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
    return (
        f"{where}the weight {weight[row, column]:.5g} at [{row}, {column}] took level {int(codes[row, column])} ="
        f" {levels[row, codes[row, column]]:.5g}, and level {int(right[row, column])} ="
        f" {levels[row, right[row, column]]:.5g} is nearer"
    )


# --- The levels ---


def levels_by(weight, sensitivity, levels, steps: int) -> torch.Tensor:
    """[out, K] float64."""
    for _ in range(steps):
        codes = (weight[:, :, None] - levels[:, None, :]).abs().argmin(-1)
        mass = torch.zeros_like(levels).scatter_add(1, codes, sensitivity)
        total = torch.zeros_like(levels).scatter_add(1, codes, sensitivity * weight)
        levels = (total / mass).where(mass > 0, levels)
    return levels


def judge_levels(case: dict, seen: dict) -> str | None:
    """The levels after the rounds."""
    if lacking := missing_message(seen):
        return lacking
    given, steps = inputs_of(case), case["steps"]
    where = f"fit_levels of W {list(given[0].shape)}, {case['count']} levels a row, {steps} round{'s' * (steps != 1)}: "
    if seen["changed"]:
        return f"{where}what was given was changed; make new tensors"
    came = read(seen["levels"], "levels", given[2].shape, "", "[out, K]")
    if isinstance(came, str):
        return where + came
    right = levels_by(*given, steps)
    if same(came, right, TOLERANCE):
        return None
    row, k = first_wrong(came, right, TOLERANCE)
    return (
        f"{where}level {k} of row {row} is {came[row, k]:.5g}, expected {right[row, k]:.5g} (it began at"
        f" {given[2][row, k]:.5g}): Σ sensitivity · w / Σ sensitivity over the weights that took it"
    )


# --- What is kept apart ---


def outlier_cases(*sizes: tuple):
    """Cases of (out, in, how many)."""
    return lambda draw: [
        {"seed": draw.randrange(10**6), "out": out, "wide": wide, "take": take} for out, wide, take in sizes
    ]


def judge_outliers(case: dict, seen: dict) -> str | None:
    """The largest of the whole matrix, their places and values, and zeros where they stood."""
    if lacking := missing_message(seen):
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
        ("values", (count,), ""),
        ("rest", weight.shape, ""),
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
        i, j = more[0]
        if not (i < len(weight) and j < weight.shape[1]):
            return f"{where}place {[i, j]} is among those taken, and W is {list(weight.shape)}"
        least = float(weight.abs().flatten()[places].min())
        return (
            f"{where}place {[i, j]} is {'' if more[0] in came else 'not '}among those taken, and |w| there is"
            f" {abs(float(weight[i, j])):.4g}; the largest {count} begin at {least:.4g}"
        )
    for (i, j), value in came.items():
        if abs(value - float(weight[i, j])) > 1e-6:
            return (
                f"{where}the value of place {[i, j]} is {value:.5g}, expected {weight[i, j]:.5g}: what stood there,"
                " with its sign"
            )
    expected = weight.clone()
    expected[rows, columns] = 0.0
    if same(rest, expected, 1e-6):
        return None
    i, j = first_wrong(rest, expected, 1e-6)
    return (
        f"{where}rest is {rest[i, j]:.5g} at {[i, j]}, expected {expected[i, j]:.5g}: 0 where a weight was taken, else"
        " as it was"
    )
