"""Lab 05, the scale search of AWQ: cases and judges of quant-awq."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from workbench.checks.lab05_tensors import fault_of, first_wrong, numbers, read, same, told_missing
from workbench.checks.probes_lab04 import drawn
from workbench.checks.probes_lab05 import awq_weights, calibration_inputs
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
    if lacking := told_missing(seen):
        return lacking
    inputs = calibration_inputs(case["seed"], case["rows"], case["wide"], case["kind"])

    (weight,) = awq_weights(case["seed"], [case["out"]], case["wide"])
    lost = 0.1 * drawn(case["seed"], "lost", case["out"], case["wide"]).double()
    w, h, value = weight.double(), inputs.second_moments.double(), seen["value"]
    where = f"output_error of W {list(w.shape)}: "
    if isinstance(value, bool) or not isinstance(value, int | float) or seen["returned"] != "float":
        return f"{where}a {seen['returned']} came back, where a float was expected"
    right = error_of(weight, weight + lost.float(), h)
    if abs(value - right) <= 1e-3 * right:
        return None
    up, down = ((lost @ h) * lost).sum(), ((w @ h) * w).sum()
    diagonal = h.diagonal()
    ways = (
        ("that is the error itself; divide by the same for W", up),
        ("that is its square root", (up / down).sqrt()),
        ("only the diagonal of H was used; channels go together, and H[i, j] says how far", (lost**2 * diagonal).sum() / (w**2 * diagonal).sum()),
        ("only the diagonal of H was used for the error", (lost**2 * diagonal).sum() / down),
        ("that is the error of the weights, whatever comes in; weigh it with H", (lost**2).sum() / (w**2).sum()),
        ("that is Σ (δH)²; it is Σ (δH)·δ", ((lost @ h) ** 2).sum() / ((w @ h) ** 2).sum()),
        ("the mean over the outputs of each one's share is not the share of all together", (((lost @ h) * lost).sum(1) / ((w @ h) * w).sum(1)).mean()),
        ("divided by ‖W‖² in place of ‖XWᵀ‖²", up / (w**2).sum()),
    )  # fmt: skip
    hint = [words for words, way in ways if abs(value - float(way)) <= 1e-3 * abs(float(way))]
    return f"{where}{value:.6g} came back, expected {right:.6g}: " + (
        hint[0] if hint else "Σ δ·H·δᵀ over the rows δ of W − Ŵ, over the same of W"
    )


# --- The scale ---

ALPHAS = [0.0, 0.5, 1.0]


def scale_cases(*sizes: tuple):
    """Cases of (rows of x, in, kind)."""
    return lambda draw: [
        inputs_case(draw, *size, alphas=[*ALPHAS, round(draw.uniform(0.1, 0.9), 2)]) for size in sizes
    ]


@dataclass(frozen=True)
class Scale:
    """(mean |x|)^α; the defaults are right."""

    told: str = ""
    of: str = "mean"
    power: float = 1.0
    normalize: str = "middle"
    least: float = 1e-4


SCALE_FAULTS = (
    Scale("that is the largest |x| of each channel; the mean says what usually comes", of="max"),
    Scale("that is the root mean square; the mean of |x| was asked", of="square"),
    Scale("the exponent has the wrong sign: channels with large inputs get large scales", power=-1.0),
    Scale("divide by √(largest s · smallest s), so that largest times smallest is 1", normalize="none"),
    Scale("divided by the largest; it is √(largest · smallest)", normalize="max"),
    Scale("divided by the mean; it is √(largest · smallest)", normalize="mean"),
    Scale("divided by largest · smallest, without the root", normalize="product"),
    Scale("the root was taken of the largest alone", normalize="root"),
    Scale("a channel that no input reached has mean 0, and 0 to any power but 0 is 0: take 1e-4 of the largest mean at least", least=0.0),
    Scale("the least mean is 1e-4 of the largest, not 1e-4", least=-1e-4),
)  # fmt: skip


def scale_of(inputs: Inputs, alpha: float, how: Scale = Scale()) -> torch.Tensor:
    """[in] float64."""
    size = {"mean": inputs.mean_abs, "max": inputs.max_abs,
            "square": (inputs.second_moments.diagonal() / inputs.rows).sqrt()}[how.of].double()  # fmt: skip
    size = size.clamp(min=how.least * float(size.max()) if how.least >= 0 else -how.least)
    scale = size ** (alpha * how.power)
    by = {"middle": (scale.max() * scale.min()).sqrt(), "none": torch.ones(()), "max": scale.max(), "mean": scale.mean(),
          "product": scale.max() * scale.min(), "root": scale.max().sqrt()}[how.normalize]  # fmt: skip
    return scale / by


def judge_scale(case: dict, seen: dict) -> str | None:
    """s for every α."""
    if lacking := told_missing(seen):
        return lacking
    inputs = calibration_inputs(case["seed"], case["rows"], case["wide"], case["kind"])
    for alpha, given in zip(case["alphas"], seen["scales"]):
        where = f"scale_for at α = {alpha:g}" + (
            ", one channel of zeros: " if case["kind"] == "dead" else ": "
        )
        came = read(given, "s", (case["wide"],), "", "[in]")
        if isinstance(came, str):
            return where + came
        right = scale_of(inputs, alpha)
        if same(came / right, torch.ones_like(right), 1e-3):
            continue
        (at,) = first_wrong(came / right, torch.ones_like(right), 1e-3)
        told = (
            f"{where}s[{at}] is {came[at]:.5g}, expected {right[at]:.5g} (mean |x| {inputs.mean_abs[at]:.4g}; of all, "
            f"{inputs.mean_abs.min():.4g} … {inputs.mean_abs.max():.4g}): "
        )
        hint = None
        for fault in SCALE_FAULTS:
            wrong = scale_of(inputs, alpha, fault)
            close = torch.isclose(came, wrong, rtol=1e-3, atol=0.0, equal_nan=True).all()
            if close and not same(wrong / right, torch.ones_like(right), 1e-3):
                hint = fault.told
                break
        return told + (hint or "(mean |x|)^α / √(largest · smallest)")
    return None


# --- The search ---


def search_cases(*sizes: tuple):
    """Cases of (rows of x, outputs of each linear, in, bits, group, grid[, kind])."""

    def cases(draw: random.Random) -> list[dict]:
        return [
            inputs_case(
                draw, rows, wide, *kind or ("channels",), outs=list(outs), bits=bits, group=group, grid=grid
            )
            for rows, outs, wide, bits, group, grid, *kind in sizes
        ]

    return cases


@dataclass(frozen=True)
class Search:
    """The error at one α; the defaults are right."""

    told: str = ""
    scaled: bool = True
    scaled_back: bool = True
    inverse: bool = False
    weights: str = "all"
    moments: str = "whole"
    outputs: bool = False
    whole_rows: bool = False


SEARCH_FAULTS = (
    Search("s was not used: every α gives what plain rounding gives", scaled=False, scaled_back=False),
    Search("the columns were not multiplied by s before rounding", scaled=False),
    Search("the rounded weight stands for W·s; divide it by s before it is compared with W", scaled_back=False),
    Search("the columns were divided by s and the weight multiplied afterwards; it is the other way round", inverse=True),
    Search("only the first of the linears was searched; those that share inputs share s", weights="first"),
    Search("only the last of the linears was searched; those that share inputs share s", weights="last"),
    Search("the mean of the linears' errors was taken; the error is that of all of them together", weights="mean"),
    Search("only the diagonal of H was used", moments="diagonal"),
    Search("that is the error of the weights; it is the outputs' that counts", moments="identity"),
    Search("H was divided by s as well; Ŵ is divided by s already, so it meets the inputs as they are", moments="divided"),
    Search("the rows were scaled; s is one number an input channel, a column", outputs=True),
    Search("the whole row had one scale; groups have their own", whole_rows=True),
)  # fmt: skip


def search_error(case: dict, inputs: Inputs, weights: list[torch.Tensor], alpha: float, how: Search) -> float:
    if how.weights == "mean":
        each = [search_error(case, inputs, [w], alpha, Search()) for w in weights]
        return sum(each) / len(each)
    chosen = {"all": weights, "first": weights[:1], "last": weights[-1:]}[how.weights]
    w = torch.cat(chosen)
    scale = scale_of(inputs, alpha).float()
    if how.outputs:
        if len(w) != len(scale):
            return float("nan")
        scale = scale[:, None]
    scale = 1 / scale if how.inverse else scale
    scaled = w * scale if how.scaled else w
    format = IntegerFormat(case["bits"])
    rounded = quantize_tensor(
        scaled, format, over=1, group=None if how.whole_rows else case["group"]
    ).dequantize()
    stands_in = rounded / scale if how.scaled_back else rounded
    h = inputs.second_moments
    if how.moments == "diagonal":
        h = torch.diag(h.diagonal())
    elif how.moments == "identity":
        h = torch.eye(len(h))
    elif how.moments == "divided":
        h = h / scale[:, None] / scale
    return error_of(w, stands_in, h)


def judge_search(case: dict, seen: dict) -> str | None:
    """Every α of the grid with its error."""
    if lacking := told_missing(seen):
        return lacking
    inputs = calibration_inputs(case["seed"], case["rows"], case["wide"], case["kind"])
    weights, grid = awq_weights(case["seed"], case["outs"], case["wide"]), case["grid"]
    where = f"search over {[list(w.shape) for w in weights]} at {case['bits']} bits, groups of {case['group']}, grid {grid}: "
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, where a list of pairs (α, error) was expected"
    if seen["changed"]:
        return f"{where}the weights that were given were changed"
    came, alphas = seen["points"], [i / grid for i in range(grid)]
    if [round(a, 6) for a, _ in came] != [round(a, 6) for a in alphas]:
        return f"{where}α = {numbers(torch.tensor([a for a, _ in came]), 30)}, expected 0, 1/{grid}, … {grid - 1}/{grid}, in this order"
    right = torch.tensor([search_error(case, inputs, weights, a, Search()) for a in alphas])
    errors = torch.tensor([e for _, e in came])
    off = ~((errors - right).abs() <= 0.02 * right)
    if not off.any():
        return None
    at = int(off.nonzero()[0])
    told = f"{where}at α = {alphas[at]:g} the error is {errors[at]:.5g}, expected {right[at]:.5g}: "
    for fault in SEARCH_FAULTS:
        wrong = torch.tensor([search_error(case, inputs, weights, a, fault) for a in alphas])
        fits = bool(((errors - wrong).abs() <= 0.01 * wrong).all())
        if fits and not bool(((wrong - right).abs() <= 0.02 * right).all()):
            return told + fault.told
    return told + "scale the columns, round, divide by s, and take output_error with H"


# --- Folding ---


def fold_cases(draw: random.Random) -> list[dict]:
    return [
        {"seed": draw.randrange(10**6), "outs": outs, "wide": wide}
        for outs, wide in (([3], 6), ([4, 2, 5], 5))
    ]


def judge_fold(case: dict, seen: dict) -> str | None:
    """gain / s and W · s, exactly: s is made of powers of two."""

    if lacking := told_missing(seen):
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
    came = read(seen["gain"], "gain", (wide,), "float32", "[in]")
    if isinstance(came, str):
        return where + came
    if not torch.equal(came, gain / scale):
        hint = fault_of(
            came,
            gain / scale,
            (
                ("that is gain · s; the inputs are divided", gain * scale),
                ("it was left as it is; the inputs are divided by s there", gain),
            ),
            1e-6,
        )
        return f"{where}the gain is {numbers(came)}, expected {numbers(gain / scale)}: {hint or 'gain / s'}"
    for i, (w, given) in enumerate(zip(weights, seen["weights"])):
        came = read(given, f"weight {i}", w.shape, "float32", "[out, in]")
        if isinstance(came, str):
            return where + came
        right = w.double() * scale
        if not torch.equal(came, right):
            ways = [
                ("that is W / s; the columns are multiplied", w.double() / scale),
                ("it was left as it is", w.double()),
            ]
            hint = fault_of(came, right, ways, 1e-6)
            return f"{where}weight {i} starts {numbers(came)}, expected {numbers(right)}: {hint or 'each column times its s'}"
    return None
