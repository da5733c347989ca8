"""Lab 05, the scale search of AWQ: cases and judges of quant-awq."""

from __future__ import annotations

import random

import torch

from workbench.checks.inputs import drawn
from workbench.checks.tensors import first_wrong, missing_message, numbers, read, same
from workbench.labs.lab05_quantization.checks.probes import awq_weights, calibration_inputs
from workbench.quantization import Inputs, IntegerFormat, quantize_tensor

# --- The error of the outputs ---


def inputs_case(draw: random.Random, rows: int, wide: int, kind: str, **more: object) -> dict:
    return {"seed": draw.randrange(10**6), "rows": rows, "wide": wide, "kind": kind, **more}


def error_cases(*sizes: tuple):
    """Cases of (rows of x, out, in, kind)."""
    return lambda draw: [inputs_case(draw, rows, wide, kind, out=out) for rows, out, wide, kind in sizes]


def error_of(weight: torch.Tensor, stands_in: torch.Tensor, h: torch.Tensor) -> float:
    lost, whole, h = (weight - stands_in).double(), weight.double(), h.double()
    return float(((lost @ h) * lost).sum() / ((whole @ h) * whole).sum())


def judge_error(case: dict, seen: dict) -> str | None:
    """‖X(W − Ŵ)ᵀ‖² / ‖XWᵀ‖²."""
    if lacking := missing_message(seen):
        return lacking
    inputs = calibration_inputs(case["seed"], case["rows"], case["wide"], case["kind"])

    (weight,) = awq_weights(case["seed"], [case["out"]], case["wide"])
    lost, value = 0.1 * drawn(case["seed"], "lost", case["out"], case["wide"]), seen["value"]
    where = f"output_error of W {list(weight.shape)}: "
    if isinstance(value, bool) or not isinstance(value, int | float) or seen["returned"] != "float":
        return f"{where}a {seen['returned']} came back, where a float was expected"
    right = error_of(weight, weight + lost, inputs.second_moments)
    if abs(value - right) <= 1e-3 * right:
        return None
    return f"{where}{value:.6g} came back, expected {right:.6g}: Σ δ·H·δᵀ over the rows δ of W − Ŵ, over the same of W"


# --- The scale ---

ALPHAS = [0.0, 0.5, 1.0]


def scale_cases(*sizes: tuple):
    """Cases of (rows of x, in, kind)."""
    return lambda draw: [inputs_case(draw, *size, alphas=[*ALPHAS, round(draw.uniform(0.1, 0.9), 2)]) for size in sizes]


def scale_of(inputs: Inputs, alpha: float) -> torch.Tensor:
    """[in] float64."""
    mean = inputs.mean_abs.double()
    scale = mean.clamp(min=1e-4 * float(mean.max())) ** alpha
    return scale / (scale.max() * scale.min()).sqrt()


def judge_scale(case: dict, seen: dict) -> str | None:
    """s for every α."""
    if lacking := missing_message(seen):
        return lacking
    inputs = calibration_inputs(case["seed"], case["rows"], case["wide"], case["kind"])
    for alpha, given in zip(case["alphas"], seen["scales"]):
        where = f"scale_for at α = {alpha:g}" + (", one channel of zeros: " if case["kind"] == "dead" else ": ")
        came = read(given, "s", (case["wide"],), "", "[in]")
        if isinstance(came, str):
            return where + came
        right = scale_of(inputs, alpha)
        if same(came / right, torch.ones_like(right), 1e-3):
            continue
        (at,) = first_wrong(came / right, torch.ones_like(right), 1e-3)
        return (
            f"{where}s[{at}] is {came[at]:.5g}, expected (mean |x|)^α / √(largest · smallest) = {right[at]:.5g} (mean"
            f" |x| {inputs.mean_abs[at]:.4g}; of all, {inputs.mean_abs.min():.4g} … {inputs.mean_abs.max():.4g})"
        )
    return None


# --- The search ---


def search_cases(*sizes: tuple):
    """Cases of (rows of x, outputs of each linear, in, bits, group, grid[, kind])."""

    def cases(draw: random.Random) -> list[dict]:
        return [
            inputs_case(draw, rows, wide, *kind or ("channels",), outs=list(outs), bits=bits, group=group, grid=grid)
            for rows, outs, wide, bits, group, grid, *kind in sizes
        ]

    return cases


def search_error(case: dict, inputs: Inputs, weights: list[torch.Tensor], alpha: float) -> float:
    w, scale = torch.cat(weights), scale_of(inputs, alpha).float()
    rounded = quantize_tensor(w * scale, IntegerFormat(case["bits"]), over=1, group=case["group"]).dequantize()
    return error_of(w, rounded / scale, inputs.second_moments)


def judge_search(case: dict, seen: dict) -> str | None:
    """Every α of the grid with its error."""
    if lacking := missing_message(seen):
        return lacking
    inputs = calibration_inputs(case["seed"], case["rows"], case["wide"], case["kind"])
    weights, grid = awq_weights(case["seed"], case["outs"], case["wide"]), case["grid"]
    where = (
        f"search over {[list(w.shape) for w in weights]} at {case['bits']} bits, groups of {case['group']}, grid"
        f" {grid}: "
    )
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, where a list of pairs (α, error) was expected"
    if seen["changed"]:
        return f"{where}the weights that were given were changed"
    came, alphas = seen["points"], [i / grid for i in range(grid)]
    if [round(a, 6) for a, _ in came] != [round(a, 6) for a in alphas]:
        return (
            f"{where}α = {numbers(torch.tensor([a for a, _ in came]), 30)}, expected 0, 1/{grid}, … {grid - 1}/{grid},"
            " in this order"
        )
    right = torch.tensor([search_error(case, inputs, weights, a) for a in alphas])
    errors = torch.tensor([e for _, e in came])
    off = ~((errors - right).abs() <= 0.02 * right)
    if not off.any():
        return None
    at = int(off.nonzero()[0])
    return f"{where}at α = {alphas[at]:g} the error is {errors[at]:.5g}, expected {right[at]:.5g}"


# --- Folding ---


def fold_cases(draw: random.Random) -> list[dict]:
    return [{"seed": draw.randrange(10**6), "outs": outs, "wide": wide} for outs, wide in (([3], 6), ([4, 2, 5], 5))]


def judge_fold(case: dict, seen: dict) -> str | None:
    """gain / s and W · s, exactly: s is made of powers of two."""

    if lacking := missing_message(seen):
        return lacking
    where = f"fold of {len(case['outs'])} weight{'s' * (len(case['outs']) > 1)} with {case['wide']} inputs: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where (gain, [weights]) was expected"
    if seen["changed"]:
        return f"{where}what was given was changed; make new tensors"
    weights, wide = awq_weights(case["seed"], case["outs"], case["wide"]), case["wide"]
    gain = (1 + drawn(case["seed"], "gain", wide).abs()).double()
    scale = 2.0 ** (2 * drawn(case["seed"], "scale", wide)).round().double()
    if len(seen["weights"]) != len(weights):
        return f"{where}{len(seen['weights'])} weights came back, expected {len(weights)}"
    came = read(seen["gain"], "gain", (wide,), "", "[in]")
    if isinstance(came, str):
        return where + came
    if not torch.equal(came, gain / scale):
        return f"{where}the gain is {numbers(came)}, expected gain / s = {numbers(gain / scale)}"
    for i, (w, given) in enumerate(zip(weights, seen["weights"])):
        came = read(given, f"weight {i}", w.shape, "", "[out, in]")
        if isinstance(came, str):
            return where + came
        right = w.double() * scale
        if not torch.equal(came, right):
            return f"{where}weight {i} starts {numbers(came)}, expected W · s, {numbers(right)}"
    return None
