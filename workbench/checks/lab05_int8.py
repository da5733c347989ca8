"""Lab 05, int8 products with outlier columns apart: cases and judges of quant-llm-int8."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from workbench.checks.lab05_tensors import fault_of, first_wrong, numbers, read, same, told_missing
from workbench.checks.probes_lab05 import product_inputs

TOLERANCE = 2e-5  # float32 sums of some dozen products; a code more or less is a hundred times that


def product_case(
    draw: random.Random, tokens: int, out: int, wide: int, outliers: int, kind: str = "normal"
) -> dict:
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
    if lacking := told_missing(seen):
        return lacking
    x, _ = inputs_of(case)
    threshold = case["threshold"]
    where = f"outlier_columns of x {list(x.shape)} at {threshold:g}: "
    if seen["changed"]:
        return f"{where}x was changed; make new tensors"
    size = x.abs().amax(0)
    right = (size > threshold).nonzero()[:, 0]
    came = seen["columns"]
    if "returned" in came or len(came["shape"]) != 1 or came["dtype"] != "int64":
        what = came.get("returned") or f"{came['dtype']} {came['shape']}"
        return f"{where}{what} came back, where the numbers of the columns were expected: int64 [n] (nonzero gives [n, 1])"
    found = came["data"]
    if found == right.tolist():
        return None
    told = f"{where}columns {found} came back, expected {right.tolist()}: "
    missed, more = (
        [j for j in right.tolist() if j not in found],
        [j for j in found if j not in right.tolist()],
    )
    if missed and float(x[:, missed[0]].max()) <= threshold:
        return told + f"column {missed[0]} reaches {float(x[:, missed[0]].min()):.3g}: what counts is |x|"
    if missed:
        tokens = int((x[:, missed[0]].abs() > threshold).sum())
        return told + (
            f"column {missed[0]} reaches {float(size[missed[0]]):.3g} in {tokens} of {len(x)} tokens; one token is enough"
        )
    if more and max(more) >= x.shape[1]:
        return told + f"x has {x.shape[1]} columns"
    if more:
        return told + f"column {more[0]} never passes {float(size[more[0]]):.3g}"
    return told + "each once, and in ascending order"


# --- The product ---


@dataclass(frozen=True)
class Product:
    """One way to multiply. The defaults are right."""

    told: str = ""
    zeroed: bool = True  # outlier columns of x are 0 in the integer product and its scales
    outliers: int = 1  # how often their product is added
    inputs: str = "token"  # a scale of x for each "token", for "all", or per "channel"
    weight_scale: bool = True
    rounding: str = "round"
    half_inputs: bool = False
    clip_at: int | None = None  # where sums of int8 wrap around


FAULTS = (
    Product("the scale of a token was taken with its outliers inside, so all else has few codes left", zeroed=False),
    Product("the outlier columns are missing: x[:, columns] · W[:, columns]ᵀ is added to the integer product", outliers=0),
    Product("the outlier columns are in it twice", outliers=2),
    Product("one scale was taken for all tokens; each token has its own", inputs="all"),
    Product("x has a scale for each channel here; one for each token comes out of the sum, one a channel does not", inputs="channel"),
    Product("the scales of the weight are missing", weight_scale=False),
    Product("x was not rounded to int8 codes", rounding="none"),
    Product("the codes of x were cut off; round to the nearest", rounding="cut"),
    Product("the outliers of x were rounded to float16; here they stay in float32", half_inputs=True),
    Product("sums of products of int8 were kept in 8 bits and wrapped around: multiply with .int()", clip_at=256),
    Product("sums of products of int8 were kept in 16 bits and wrapped around: multiply with .int()", clip_at=65536),
)  # fmt: skip


def product_of(x: torch.Tensor, codes, scale, outliers, columns: list[int], how: Product) -> torch.Tensor:
    """y [N, out] in float64 from what is stored."""
    x = x.double()
    large = x[:, columns].half().double() if how.half_inputs else x[:, columns]
    rest = x.clone()
    if how.zeroed:
        rest[:, columns] = 0.0
    if how.inputs == "all":
        step = rest.abs().max().expand(len(x), 1) / 127
    elif how.inputs == "channel":
        step = rest.abs().amax(0, keepdim=True) / 127
    else:
        step = rest.abs().amax(1, keepdim=True) / 127
    ratio = rest / step.where(step > 0, 1.0)
    rounded = {"round": ratio.round(), "cut": cut_codes(rest), "none": ratio}[how.rounding]
    product = rounded @ codes.double().T
    if how.clip_at:
        product = (product + how.clip_at / 2).remainder(how.clip_at) - how.clip_at / 2
    product = product * (step.mean() if how.inputs == "channel" else step)
    if how.weight_scale:
        product = product * scale.T
    return product + how.outliers * (large @ outliers.T)


def cut_codes(rest: torch.Tensor) -> torch.Tensor:
    """Codes whose fraction was dropped, as float32 has them: the largest of a row is hardly ever 127 then."""
    scale = rest.float().abs().amax(1, keepdim=True) / 127
    return (rest.float() / scale.where(scale > 0, 1.0)).trunc().double()


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
    right = product_of(x, *stored, columns, Product())
    size = float(right.abs().max().clamp(min=1e-6))
    y, right = y / size, right / size
    if same(y, right, TOLERANCE):
        return None
    at = first_wrong(y, right, TOLERANCE)
    told = f"{where}y{list(at)} is {float(y[at]) * size:.6g}, expected {float(right[at]) * size:.6g}: "
    if not bool(torch.isfinite(y[at])):
        return told + "a token of zeros has range 0, and 0 / 0 is nan; its codes are 0"
    faulty = ((f.told, product_of(x, *stored, columns, f) / size) for f in FAULTS)
    hint = fault_of(y, right, faulty, TOLERANCE)
    return told + (
        hint
        or "scale_x · scale_w · Σ q_x·q_w over the ordinary columns, plus the product of the outlier columns"
    )


def judge_stored(case: dict, seen: dict) -> str | None:
    """Codes, scales and outliers of the weight."""
    if lacking := told_missing(seen):
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
        return f"{where}a scale is {scale[~scale.isfinite()][0].item()}: an output without weights has range 0, and 0 / 0 is nan"
    if told := _scale_told(weight.double(), scale, right_scale, rows):
        return where + told
    there = codes[:, columns] != 0
    if there.any():
        return (
            f"{where}codes of outlier column {columns[int(there.nonzero()[0, 1])]} are not 0, so that column would be in the "
            "sum twice: once in int8 and once in 16 bits"
        )
    if not torch.equal(codes.double(), right_codes):
        at = first_wrong(codes.double(), right_codes, 0.0)
        rest = weight.clone()
        rest[:, columns] = 0.0
        cut = torch.equal(codes.double(), cut_codes(rest))
        hint = "codes were cut off; round to the nearest" if cut else "code = round(w / scale of its output)"
        return f"{where}the code at {list(at)} is {int(codes[at])}, expected {int(right_codes[at])}: {hint}"
    if not torch.equal(outliers, right_outliers):
        return f"{where}outliers start {numbers(outliers)}, expected {numbers(right_outliers)}: W[:, columns] in float16"
    return None


def _scale_told(weight: torch.Tensor, scale, right, rows) -> str | None:
    off = rows[:, None] & ~((scale - right).abs() <= 1e-5 * right)
    if not off.any():
        return None
    row = int(off.nonzero()[0, 0])
    came, wanted = float(scale[row]), float(right[row])
    told = f"the scale of output {row} is {came:.6g}, expected max |w| / 127 = {wanted:.6g} of its ordinary columns: "
    ways = (
        (float(weight[row].abs().max()) / 127, "the outlier columns are inside; they are gone when the scale is taken"),
        (wanted * 127 / 128, "the codes go from −127 to 127, so that 0 is in the middle: / 127"),
        (wanted * 127 / 255, "codes on both sides of 0 are 127, not 255"),
        (float(right.max()), "that is one scale for the whole matrix; each output has its own"),
        (float(weight.abs().max()) / 127, "that is one scale for the whole matrix, outliers and all; each output has its own"),
    )  # fmt: skip
    hint = [words for value, words in ways if abs(came - value) <= 1e-5 * value]
    return told + (hint[0] if hint else "over the inputs of one output")
