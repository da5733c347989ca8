"""Lab 05, int8 products with outlier columns apart: cases and judges of quant-llm-int8."""

from __future__ import annotations

import random

import torch

from workbench.checks.tensors import first_wrong, missing_message, numbers, read, same
from workbench.labs.lab05_quantization.checks.probes import product_inputs

TOLERANCE = 2e-5  # float32 sums of some dozen products; a code more or less is a hundred times that


def product_case(draw: random.Random, tokens: int, out: int, wide: int, outliers: int, kind: str = "normal") -> dict:
    return {
        "seed": draw.randrange(10**6),
        "tokens": tokens,
        "out": out,
        "wide": wide,
        "outliers": sorted(draw.sample(range(wide), outliers)),
        "kind": kind,
    }


def product_cases(*sizes: tuple):
    """Cases of (N, out, in, outlier columns[, kind])."""
    return lambda draw: [product_case(draw, *one) for one in sizes]


def column_cases(*sizes: tuple, threshold: float = 6.0):
    return lambda draw: [product_case(draw, *one) | {"threshold": threshold} for one in sizes]


def inputs_of(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return product_inputs(**{name: value for name, value in case.items() if name != "threshold"})


# --- Which columns ---


def judge_columns(case: dict, seen: dict) -> str | None:
    """Exactly the columns with a value beyond the threshold, in order."""
    if lacking := missing_message(seen):
        return lacking
    x, _ = inputs_of(case)
    threshold = case["threshold"]
    where = f"outlier_columns of x {list(x.shape)} at {threshold:g}: "
    if seen["changed"]:
        return f"{where}x was changed; make new tensors"
    size = x.abs().amax(0)
    right = (size > threshold).nonzero()[:, 0].tolist()
    came = seen["columns"]
    if "returned" in came or len(came["shape"]) != 1 or came["dtype"] != "int64":
        what = came.get("returned") or f"{came['dtype']} {came['shape']}"
        return f"{where}{what} came back, where the numbers of the columns were expected: int64 [n]"
    found = came["data"]
    if found == right:
        return None
    told = f"{where}columns {found} came back, expected {right}: "
    for j in range(x.shape[1]):
        if (j in found) != (j in right):
            tokens = int((x[:, j].abs() > threshold).sum())
            return f"{told}|x| of column {j} reaches {size[j]:.3g}, and passes in {tokens} of {len(x)} tokens"
    return told + "each once, and in ascending order"


# --- The product ---


def product_of(x: torch.Tensor, codes, scale, outliers, columns: list[int]) -> torch.Tensor:
    """y [N, out] in float64 from what is stored."""
    x = x.double()
    rest = x.clone()
    rest[:, columns] = 0.0
    step = rest.abs().amax(1, keepdim=True) / 127
    rounded = (rest / step.where(step > 0, 1.0)).round()
    return rounded @ codes.double().T * step * scale.T + x[:, columns] @ outliers.T


def stored_of(weight: torch.Tensor, columns: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, outliers) in float64."""
    outliers, rest = weight[:, columns].half().double(), weight.double().clone()
    rest[:, columns] = 0.0
    scale = rest.abs().amax(1, keepdim=True) / 127
    return (rest / scale.where(scale > 0, 1.0)).round(), scale, outliers


def judge_product(case: dict, seen: dict) -> str | None:
    """What is stored, then what comes of it."""
    if told := judge_stored(case, seen):
        return told
    x, weight = inputs_of(case)
    columns = case["outliers"]
    where = f"multiply of x {list(x.shape)} and W {list(weight.shape)} with outlier columns {columns}: "
    if seen["changed_x"]:
        return f"{where}something that was given was changed; make new tensors"
    y = read(seen["y"], "y", (len(x), len(weight)), "float32", "[N, out]")
    if isinstance(y, str):
        return where + y
    stored = stored_of(weight, columns)
    right = product_of(x, *stored, columns)
    size = float(right.abs().max().clamp(min=1e-6))
    y, right = y / size, right / size
    if same(y, right, TOLERANCE):
        return None
    at = first_wrong(y, right, TOLERANCE)
    return (
        f"{where}y{list(at)} is {float(y[at]) * size:.6g}, expected {float(right[at]) * size:.6g}: scale_x · scale_w ·"
        " Σ q_x·q_w over the ordinary columns, plus the product of the outlier columns"
    )


def judge_stored(case: dict, seen: dict) -> str | None:
    """Codes, scales and outliers of the weight."""
    if lacking := missing_message(seen):
        return lacking
    _, weight = inputs_of(case)
    columns, (out, wide) = case["outliers"], weight.shape
    where = f"store of W {[out, wide]} with outlier columns {columns}: "
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, where (codes, scale, outliers) was expected"
    if seen["changed"]:
        return f"{where}the weight that was given was changed; make new tensors"
    found = []
    for name, shape, dtype, legend in (
        ("scale", (out, 1), "float32", "[out, 1]"),
        ("codes", (out, wide), "int8", "[out, in]"),
        ("outliers", (out, len(columns)), "float16", "[out, n]"),
    ):
        part = read(seen[name], name, shape, dtype, legend)
        if isinstance(part, str):
            return where + part
        found.append(part)
    scale, codes, outliers = found
    right_codes, right_scale, right_outliers = stored_of(weight, columns)
    rows = right_scale[:, 0] > 0
    if not bool(scale.isfinite().all()):
        return (
            f"{where}a scale is {scale[~scale.isfinite()][0].item()}: an output without weights has range 0, and 0 / 0"
            " is nan"
        )
    off = rows[:, None] & ~((scale - right_scale).abs() <= 1e-5 * right_scale)
    if off.any():
        row = int(off.nonzero()[0, 0])
        return (
            f"{where}the scale of output {row} is {float(scale[row]):.6g}, expected max |w| / 127 ="
            f" {float(right_scale[row]):.6g} of its ordinary columns"
        )
    there = codes[:, columns] != 0
    if there.any():
        return (
            f"{where}codes of outlier column {columns[int(there.nonzero()[0, 1])]} are not 0, so that column would be"
            " in the sum twice: once in int8 and once in 16 bits"
        )
    if not torch.equal(codes.double(), right_codes):
        at = first_wrong(codes.double(), right_codes, 0.0)
        return (
            f"{where}the code at {list(at)} is {int(codes[at])}, expected round(w / scale of its output) ="
            f" {int(right_codes[at])}"
        )
    if not torch.equal(outliers, right_outliers):
        return (
            f"{where}outliers start {numbers(outliers)}, expected {numbers(right_outliers)}: W[:, columns] in float16"
        )
    return None
