"""Lab 05: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value.

All tensors are made from a seed and a name, the same in every process, so that a judge elsewhere can work out by itself
what a right answer gives. Where a part needs what another part gives, it gets what the same answer gave.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.checks.inputs import drawn
from workbench.checks.tensors import as_tensor, kind_of, missing, shown
from workbench.grading.check import refused_or_not
from workbench.labs.lab05_quantization.checks.parts import Machine, Stored, Weights
from workbench.quantization import Inputs, IntegerFormat


def _changed(given: list[torch.Tensor], before: list[torch.Tensor]) -> bool:
    """nan is what it was where it was nan before."""
    return not all(torch.allclose(now, was, rtol=0, atol=0, equal_nan=True) for now, was in zip(given, before))


def _called(function: Any, *given: Any) -> tuple[Any, bool]:
    """What came back, and whether a tensor that was given is another one afterwards."""
    tensors = [x for one in given for x in (one if isinstance(one, list) else [one]) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    out = function(*given)
    return out, _changed(tensors, before)


def _parts(value: Any, count: int) -> list | None:
    return list(value) if isinstance(value, tuple | list) and len(value) == count else None


# --- quant-pack ---


def weights_of_kind(kind: str, seed: int, out: int, wide: int, group: int) -> torch.Tensor:
    """[out, in] of one of the kinds that groups find easy or hard."""
    w = drawn(seed, kind, out, wide)
    if kind == "all positive":
        w += 40.0
    elif kind == "all negative":
        w = -7.0 - w.abs()
    elif kind == "a large group":
        w.view(out, -1, group)[:, 1] *= 30.0
    elif kind == "a large weight a row":
        w[:, 3] = 25.0
    elif kind == "equal in a group":
        blocks = w.view(out, -1, group)
        blocks[0, 0], blocks[1, 1], blocks[-1, -1] = 0.75, -2.5, 0.0  # float16 has these exactly
    elif kind == "all zero":
        w.zero_()
    else:
        assert kind == "normal", kind
    return w


def run_groups(answer: Any, kind: str, seed: int, out: int, wide: int, group: int, bits: int) -> dict:
    """quantize(weight, bits, group), and dequantize of what it gave."""
    if lacking := missing(answer, "quantize", "dequantize"):
        return lacking
    weight = weights_of_kind(kind, seed, out, wide, group)
    given, changed = _called(answer["quantize"], weight, bits, group)
    found = _parts(given, 3)
    if found is None:
        return {"returned": type(given).__name__}
    back = answer["dequantize"](*found)
    named = zip(("codes", "scale", "zero", "back"), (*found, back))
    return {name: shown(part) for name, part in named} | {"changed": changed}


def codes_of(seed: int, *sizes: int) -> torch.Tensor:
    return (drawn(seed, "codes", *sizes) * 1e4).long().remainder(16).to(torch.uint8)


def run_packing(answer: Any, seed: int, sizes: list[int]) -> dict:
    """pack, and unpack of what it gave."""
    if lacking := missing(answer, "pack", "unpack"):
        return lacking
    codes = codes_of(seed, *sizes)
    packed, changed = _called(answer["pack"], codes)
    packed = as_tensor(packed)
    seen = {"packed": shown(packed), "changed": changed}
    return seen | ({"back": shown(answer["unpack"](packed))} if isinstance(packed, torch.Tensor) else {})


def run_refused(answer: Any, part: str, seed: int, out: int, wide: int, group: int) -> dict:
    """quantize with groups that do not divide, or pack of an odd number."""
    if lacking := missing(answer, part):
        return lacking
    if part == "pack":
        return refused_or_not(lambda: answer["pack"](codes_of(seed, out, wide)))
    return refused_or_not(lambda: answer["quantize"](drawn(seed, "weight", out, wide), 4, group))


# --- quant-llm-int8 ---


def on_grid(seed: int, name: str, rows: int, columns: int, outliers: list[int]) -> torch.Tensor:
    """[rows, columns] whose scale max|·| / 127 over the other columns puts no number near the middle of two codes.

    So whoever computes in another order gets the same codes.
    """
    codes = (drawn(seed, name, rows, columns) * 50).round().clamp(-120, 120)
    codes += 0.35 * drawn(seed, f"{name} beside", rows, columns).clamp(-1, 1)
    free = [j for j in range(columns) if j not in outliers]
    for row in range(rows):
        codes[row, free[row % len(free)]] = 127.0 if row % 2 else -127.0
    return codes * (0.01 + 0.02 * drawn(seed, f"{name} scale", rows, 1).sigmoid())


def product_inputs(
    seed: int, tokens: int, out: int, wide: int, outliers: list[int], kind: str = "normal"
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, in] and W [out, in]. In the outlier columns x passes 6 in absolute value, somewhere; nowhere else."""
    x = on_grid(seed, "x", tokens, wide, outliers)
    weight = on_grid(seed, "w", out, wide, outliers)
    for place, j in enumerate(outliers):
        large = 25.0 + 5.0 * drawn(seed, f"large{j}", tokens)
        x[:, j] = -large if place % 2 else large
        weight[:, j] = 4.0 * drawn(seed, f"beside{j}", out) + 0.001
        if kind == "one token":
            keep = x[place % tokens, j].clone()
            x[:, j] = 0.5 * drawn(seed, f"small{j}", tokens).clamp(-2, 2)
            x[place % tokens, j] = keep
    if kind == "zeros":
        x[1] = 0.0
        weight[2] = 0.0
    return x, weight


def run_outlier_columns(answer: Any, threshold: float, **sizes: Any) -> dict:
    """outlier_columns(x, threshold)."""
    if lacking := missing(answer, "outlier_columns"):
        return lacking
    x, _ = product_inputs(**sizes)
    columns, changed = _called(answer["outlier_columns"], x, threshold)
    return {"columns": shown(columns), "changed": changed}


def run_product(answer: Any, outliers: list[int], **sizes: Any) -> dict:
    """store(weight, columns), and multiply with what it gave."""
    if lacking := missing(answer, "store", "multiply"):
        return lacking
    x, weight = product_inputs(outliers=outliers, **sizes)
    columns = torch.tensor(sorted(outliers), dtype=torch.int64)
    given, changed = _called(answer["store"], weight, columns)
    found = _parts(given, 3)
    if found is None:
        return {"returned": type(given).__name__}
    y, changed_x = _called(answer["multiply"], x, *found, columns)
    named = zip(("codes", "scale", "outliers", "y"), (*found, y))
    return {name: shown(part) for name, part in named} | {"changed": changed, "changed_x": changed_x}


# --- quant-awq ---


def calibration_inputs(seed: int, rows: int, wide: int, kind: str = "channels") -> Inputs:
    """Of inputs [rows, in] some of whose channels are larger than others. "dead": one that no input reaches."""
    x = drawn(seed, "x", rows, wide) * (1.2 * drawn(seed, "size", wide)).exp()
    if kind == "mixed":  # every channel moves with its neighbours
        x = x @ (torch.eye(wide) + 0.8 * torch.diag(torch.ones(wide - 1), 1))
    if kind == "dead":
        x[:, 2] = 0.0
    x[0] *= 6.0  # the largest |x| of a channel is not the mean of anything
    return Inputs(x.T @ x, x.abs().mean(0), x.abs().amax(0), rows)


def run_scale(answer: Any, alphas: list[float], seed: int, rows: int, wide: int, kind: str) -> dict:
    """scale_for(inputs, alpha) for each of these."""
    if lacking := missing(answer, "scale_for"):
        return lacking
    inputs = calibration_inputs(seed, rows, wide, kind)
    return {"scales": [shown(answer["scale_for"](inputs, alpha)) for alpha in alphas]}


def awq_weights(seed: int, outs: list[int], wide: int) -> list[torch.Tensor]:
    return [(1.0 + i) * drawn(seed, f"w{i}", out, wide) for i, out in enumerate(outs)]


def run_output_error(answer: Any, seed: int, rows: int, out: int, wide: int, kind: str) -> dict:
    """output_error(weight, stands_in, second_moments)."""
    if lacking := missing(answer, "output_error"):
        return lacking
    inputs = calibration_inputs(seed, rows, wide, kind)
    (weight,) = awq_weights(seed, [out], wide)
    stands_in = weight + 0.1 * drawn(seed, "lost", out, wide)
    value = answer["output_error"](weight, stands_in, inputs.second_moments)
    return {"value": value, "returned": kind_of(value)}


def run_search(
    answer: Any, seed: int, rows: int, outs: list[int], wide: int, kind: str, bits: int, group: int, grid: int
) -> dict:
    """search(weights, inputs, format, group, grid): [(α, error)]."""
    if lacking := missing(answer, "output_error", "scale_for", "search"):
        return lacking
    inputs, weights = calibration_inputs(seed, rows, wide, kind), awq_weights(seed, outs, wide)
    before = [w.clone() for w in weights]
    found = answer["search"](weights, inputs, IntegerFormat(bits), group, grid)
    if not isinstance(found, tuple | list) or not all(_parts(point, 2) for point in found):
        return {"returned": type(found).__name__}
    return {"points": [[float(a), float(e)] for a, e in found], "changed": _changed(weights, before)}


def run_fold(answer: Any, seed: int, outs: list[int], wide: int) -> dict:
    """fold(gain, weights, scale), with powers of two for scales: nothing is rounded."""
    if lacking := missing(answer, "fold"):
        return lacking
    weights, gain = awq_weights(seed, outs, wide), 1 + drawn(seed, "gain", wide).abs()
    scale = 2.0 ** (2 * drawn(seed, "scale", wide)).round()
    given, changed = _called(answer["fold"], gain, weights, scale)
    found = _parts(given, 2)
    if found is None or not isinstance(found[1], tuple | list):
        return {"returned": type(given).__name__ if found is None else f"pair with a {type(found[1]).__name__}"}
    return {"gain": shown(found[0]), "weights": [shown(w) for w in found[1]], "changed": changed}


# --- quant-gptq ---


def moments(seed: int, wide: int, kind: str = "full") -> torch.Tensor:
    """H [in, in] float32. "few": fewer inputs than channels, so that it has no inverse."""
    rows = max(2, wide // 2) if kind == "few" else 3 * wide
    x = drawn(seed, "x", rows, wide) * (0.5 * drawn(seed, "size", wide)).exp()
    x = x + 0.6 * x.roll(1, dims=1)  # neighbours go together
    return x.T @ x


def factor_of(seed: int, wide: int) -> torch.Tensor:
    """Some upper triangular matrix with a positive diagonal, float64."""
    upper = (0.4 * drawn(seed, "factor", wide, wide)).triu(1).double()
    return upper + torch.diag(0.5 + drawn(seed, "diagonal", wide).abs().double())


def column_inputs(
    seed: int, out: int, wide: int, group: int, bits: int, reach: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [out, in], scale and zero [out, in/group]: all codes together span `reach` of the weights' range."""
    weight = drawn(seed, "w", out, wide)
    levels, each = 2**bits - 1, wide // group
    scale = (0.7 + 0.6 * drawn(seed, "scale", out, each).sigmoid()) * 5.0 * reach / levels
    zero = -0.5 * levels * scale + 0.3 * drawn(seed, "zero", out, each)
    return weight, scale, zero


def run_factor(answer: Any, seed: int, wide: int, kind: str, damping: float) -> dict:
    """inverse_factor(second_moments, damping)."""
    if lacking := missing(answer, "inverse_factor"):
        return lacking
    factor, changed = _called(answer["inverse_factor"], moments(seed, wide, kind), damping)
    return {"factor": shown(factor), "changed": changed}


def run_columns(answer: Any, seed: int, out: int, wide: int, group: int, bits: int, reach: float) -> dict:
    """quantize_columns(weight, factor, scale, zero, highest)."""
    if lacking := missing(answer, "quantize_columns"):
        return lacking
    weight, scale, zero = column_inputs(seed, out, wide, group, bits, reach)
    codes, changed = _called(answer["quantize_columns"], weight, factor_of(seed, wide), scale, zero, 2**bits - 1)
    return {"codes": shown(codes), "changed": changed}


# --- quant-codebook ---


def codebook_inputs(
    seed: int, out: int, wide: int, count: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight, sensitivity [out, in], levels [out, count] in no order. "empty": one level that no weight is near.

    "unreached": input channels of sensitivity 0, among them all weights near one level.
    """
    weight, levels = drawn(seed, "w", out, wide), drawn(seed, "levels", out, count)
    sensitivity = (1.5 * drawn(seed, "sensitivity", wide)).exp().expand(out, wide).clone()
    if kind == "empty":
        levels[:, 1] = 40.0
    elif kind == "unreached":
        levels[:, 0], weight[:, 3:5] = 20.0, 19.0 + 0.1 * drawn(seed, "far", out, 2)
        sensitivity[:, 3:5] = 0.0
    else:
        assert kind == "normal", kind
    return weight, sensitivity, levels


def run_assign(answer: Any, **sizes: Any) -> dict:
    if lacking := missing(answer, "assign"):
        return lacking
    weight, _, levels = codebook_inputs(**sizes)
    codes, changed = _called(answer["assign"], weight, levels)
    return {"codes": shown(codes), "changed": changed}


def run_levels(answer: Any, steps: int, **sizes: Any) -> dict:
    if lacking := missing(answer, "fit_levels"):
        return lacking
    levels, changed = _called(answer["fit_levels"], *codebook_inputs(**sizes), steps)
    return {"levels": shown(levels), "changed": changed}


def run_outliers(answer: Any, seed: int, out: int, wide: int, take: int) -> dict:
    if lacking := missing(answer, "take_outliers"):
        return lacking
    given, changed = _called(answer["take_outliers"], drawn(seed, "w", out, wide), take)
    found = _parts(given, 4)
    if found is None:
        return {"returned": type(given).__name__}
    named = zip(("rest", "rows", "columns", "values"), found)
    return {name: shown(part) for name, part in named} | {"changed": changed}


# --- quant-recipe ---


def run_recipe(answer: Any, part: str, **given: Any) -> dict:
    """Call the function named `part`; models, recipes and machines are made of their dicts."""
    if lacking := missing(answer, part):
        return lacking
    made = {"weights": Weights, "stored": Stored, "machine": Machine}
    given = {name: made[name](**value) if name in made else value for name, value in given.items()}
    if "recipes" in given:
        given["recipes"] = [Stored(**one) for one in given["recipes"]]
    value = answer[part](**given)
    return {"value": value, "returned": kind_of(value)}


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
