"""quantize.awq_search: how AWQ finds the scale of the linears of one layer, and what the scale does to each channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError
from workbench.experiments.contract import Experiment, Setting, no_times
from workbench.experiments.inputs import MODEL, plain, shape_of
from workbench.labs.lab05_quantization.inputs import LENGTH, SEQUENCES, calibration_for, inputs_of_layer
from workbench.quantization import Grouped, Inputs, IntegerFormat, awq
from workbench.quantization.awq import clipped, scale_for
from workbench.quantization.outliers import plant_outliers

if TYPE_CHECKING:
    from workbench.instruments.bench import Bench
    from workbench.instruments.records import Measurement

Search = Callable[[list[torch.Tensor], Inputs, IntegerFormat, int, int], list[tuple[float, float]]]
CHANNEL_VALUES = {  # what is told of every channel, and its unit
    "input": "mean |x|",
    "scale": "scale",
    "lost": "share of output energy",
    "lost_scaled": "share of output energy",
}
ROUNDING = 1e-5  # of an error, what the order of additions may change


def words_of(stage: tuple[str, ...] | list[str]) -> str:
    """('attention.q', 'attention.k') -> 'q, k'."""
    return ", ".join(name.partition(".")[2] for name in stage)


def run_awq_search(
    bench: Bench,
    *,
    model,
    planted: bool,
    layer: int,
    bits: int,
    group: int,
    grid: int,
    sequences: int,
    length: int,
    search: Search | None = None,
) -> Iterator[Measurement]:
    """For the linears of the layer that share an input, in the order they run: `measured` "search" (the relative output
    error at every α of the grid), then "channel" (one value a channel each: `what` of CHANNEL_VALUES).

    search: a learner's own, in place of `workbench.quantization.awq.search`; its curve follows ours as "yours".
    Nothing before the layer is rounded. planted: the model is `plant_outliers` of it.
    """
    decoder = bench.model(model)
    calibration = calibration_for(bench, decoder, sequences, length)
    if planted:
        decoder = plant_outliers(decoder)
    parts, inputs = inputs_of_layer(bench, decoder, calibration, layer)
    format = IntegerFormat(bits)
    settings = plain(
        {
            "model": model,
            "planted": planted,
            "layer": layer,
            "bits": bits,
            "group": group,
            "grid": grid,
            "sequences": sequences,
            "length": length,
        }
    )
    for stage in parts.stages:
        _check_group(parts.linear(stage[0]).in_features, group, words_of(stage))
    for number, stage in enumerate(parts.stages):
        bench.check_stop()
        bench.report(f"linears {number + 1} of {len(parts.stages)}: {words_of(stage)}")
        seen, weights = inputs[stage[0]], [parts.linear(name).weight.detach().float() for name in stage]
        found = awq.search(weights, seen, format, group, grid)
        about = {**settings, "linears": words_of(stage)}
        alpha, error = min(found, key=lambda point: point[1])
        scale, together = scale_for(seen, alpha), torch.cat(weights)
        check = _check_begins_with_rtn(found, together, seen, format, group)
        narrowed = clipped(together * scale, seen.divided(scale), format, group).dequantize() / scale
        counts = {
            "alpha": alpha,
            "error": error,
            "error_rtn": found[0][1],
            "error_clipped": seen.output_error(together, narrowed),
            "share_of_rtn": error / found[0][1] if found[0][1] else 1.0,
            "channels": len(scale),
            "largest_scale": float(scale.max()),
            "smallest_scale": float(scale.min()),
            "is_folded": int(parts.can_divide_before(stage)),
        }
        yield _measurement(
            bench, {**about, "measured": "search"}, [e for _, e in found], "relative output error", counts, check
        )
        if search is not None:
            yield _yours(bench, about, found, search(weights, seen, format, group, grid))
        yield from _channels(bench, about, together, seen, scale, format, group)


def _yours(bench: Bench, about: dict[str, Any], ours: list, theirs: Any) -> Measurement:
    """A learner's curve beside ours. Raises WorkbenchError for what is no list of (α, error), one for each of ours."""
    try:
        points = [(float(alpha), float(error)) for alpha, error in theirs]
    except (TypeError, ValueError):
        points = []
    if len(points) != len(ours) or not all(math.isfinite(number) for point in points for number in point):
        raise WorkbenchError(
            f"your search gave {str(theirs)[:60]!r}; expected [(α, output error)] for {len(ours)} α, each a finite"
            " number"
        )
    apart = max(max(abs(a - b), abs(e - f) / f if f else abs(e)) for (a, e), (b, f) in zip(points, ours))
    alpha, error = min(points, key=lambda point: point[1])
    verdict = "every point as ours" if apart <= ROUNDING * 10 else f"off from ours by up to {apart:.2g} of the error"
    return _measurement(
        bench,
        {**about, "measured": "yours"},
        [e for _, e in points],
        "relative output error",
        {"alpha": alpha, "error": error, "largest_difference": apart},
        f"your search: {verdict}",
    )


def _check_group(channels: int, group: int, linears: str) -> None:
    if channels % group:
        raise WorkbenchError(f"group must divide the {channels} inputs of {linears}, got {group}; choose a smaller one")


def _check_begins_with_rtn(
    found: list[tuple[float, float]], weight: torch.Tensor, inputs: Inputs, format: IntegerFormat, group: int
) -> str:
    """In words. α = 0 scales nothing, so its error is RTN's. Raises WorkbenchError where it is not."""
    rtn = inputs.output_error(weight, Grouped.rounded(weight, format, group).dequantize())
    if found[0][0] != 0 or abs(found[0][1] - rtn) > ROUNDING * rtn:
        raise WorkbenchError(
            f"the search begins with an error of {found[0][1]:.6g} at α = {found[0][0]:g}, and RTN has {rtn:.6g}: the "
            "search is wrong, so it was thrown away"
        )
    return f"at α = 0 the error is RTN's, {rtn:.4g}"


def _channels(
    bench: Bench,
    about: dict[str, Any],
    weight: torch.Tensor,
    inputs: Inputs,
    scale: torch.Tensor,
    format: IntegerFormat,
    group: int,
) -> Iterator[Measurement]:
    """Of every channel: mean |x|, s, and what rounding its column alone loses of the outputs, Σx²·‖δ‖², without s and
    with it."""
    energy = inputs.energy(weight)
    values = {"input": inputs.mean_abs, "scale": scale}
    for what, by in (("lost", torch.ones_like(scale)), ("lost_scaled", scale)):
        delta = weight - Grouped.rounded(weight * by, format, group).dequantize() / by
        lost = inputs.second_moments.diagonal().double() * delta.double().square().sum(0)
        values[what] = lost / energy if energy else lost
    for what, unit in CHANNEL_VALUES.items():
        yield _measurement(
            bench,
            {**about, "measured": "channel", "what": what},
            values[what].tolist(),
            unit,
            {"largest_to_median": _ratio(values[what])},
            "one sample a channel, in the order of the inputs",
        )


def _ratio(values: torch.Tensor) -> float:
    median = float(values.median())
    return float(values.max()) / median if median > 0 else 0.0


def _measurement(bench: Bench, settings: dict, samples: list[float], unit: str, counts: dict, check: str):
    return bench.measurement(
        name="quantize.awq_search", settings=settings, samples=samples, unit=unit, counts=counts, check=check
    )


EXPERIMENT = Experiment(
    name="quantize.awq_search",
    lab=5,
    question="By how much does AWQ scale a channel up before it is rounded?",
    how=(
        "for every α of a grid the weights of the linears that share an input are multiplied by s = (mean |x|)^α,"
        " rounded and divided by s again; the error is that of their outputs on calibration text, ‖X(W − Ŵ)ᵀ‖² /"
        " ‖XWᵀ‖². What a channel loses is its own column's share of that, without what it has in common with others."
    ),
    settings=(
        MODEL,
        Setting("planted", False, "flag", help="outlier channels are planted first, which changes no output"),
        Setting("layer", 0, "int", 0, 200, help="whose linears are scaled"),
        Setting("bits", 3, "choice", choices=(2, 3, 4, 5, 6, 8), help="of the codes"),
        Setting("group", 128, "choice", choices=(16, 32, 64, 128), help="inputs that share a scale"),
        Setting("grid", 20, "int", 2, 50, help="α from 0 to 1 in so many steps"),
        SEQUENCES,
        LENGTH,
    ),
    run=run_awq_search,
    limits=lambda *, model, **_: {"layer": shape_of(model).num_layers - 1},
    predict=no_times,
    learner=("search",),
    record={"cpu": (), "cuda": ()},  # errors are the same everywhere
)
