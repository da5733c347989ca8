"""The panel of naive.step_time: step time against text length, predicted and measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.experiments.inputs import plain
from workbench.instruments.costs import StepCosts
from workbench.instruments.records import Measurement
from workbench.labs.lab01_naive_generation.step_time import EXPERIMENT, predicted_step, rows_without_cache
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, measured, predicted, recorded, table, view
from workbench.panels.limits import limit_runs
from workbench.panels.plots import LIMIT_COLOURS, NOTE, matching
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, spread_words

LIMIT_WORDS = {
    "launch": "launch-bound: starting the operations takes longer than what they do, so a longer text costs no more",
    "bandwidth": "bandwidth-bound: reading the weights and handing on activations takes longer than the arithmetic",
    "compute": "compute-bound: the arithmetic takes longest, 2 FLOPs for each parameter and row and attention on top",
}


class StepTimePanel(Panel):
    """Lab 01: step time against text length, without a cache. rows=your count_rows is compared with the count."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        expected = self.experiment.predict(self.ceilings(), **settings)
        costs, _ = predicted_step(self.ceilings(), settings["model"], int(expected[-1][0]), settings["attention"])
        steps, archive = matching(self.measurements, unit="s"), matching(self.record, unit="s")
        by = steps[0].settings if steps else settings
        chart = Chart(
            predicted("predicted", expected),
            recorded("", archive, "length"),
            measured(f"measured: {by['model']}, {by['attention']}", steps, "length"),
            x=Axis("text length (tokens = rows of the step)", scale="log", ticks=VALUES, room=(1.18, 1.18)),
            y=Axis("time of one step", style.milliseconds, "log"),
            legend="upper left",
            also=lambda axes: _draw_limits(axes, expected),
        )
        columns = {
            "tokens": "{m.settings[length]:,}",
            "measured (p10 to p90)": spread_words,
            "predicted": lambda m: style.milliseconds(m.predicted),
            "measured ÷ predicted": lambda m: f"{m.median / m.predicted:.2f} ×" if m.predicted else "",
            "limit": lambda m: m.limit or "",
            "GFLOP": lambda m: f"{m.counts['flops'] / 1e9:.3g}",
        }
        expected_cells = ("{m[0]:,}", "", lambda point: style.milliseconds(point[1]), "", "{m[2]}", "")
        return view(
            chart,
            table=table(steps or expected, columns if steps else dict(zip(columns, expected_cells))),
            caption="The same as a table" if steps else "Predicted; Run measures",
            words=_words(settings, costs, expected, steps, self.measurements),
        )


def _draw_limits(axes: Axes, predicted: Sequence[tuple]) -> None:
    """A faint band behind each stretch of lengths with the same limit, and its name."""
    edges = [predicted[0][0] * 0.85]
    edges += [(a[0] * b[0]) ** 0.5 for a, b in itertools.pairwise(predicted)] + [predicted[-1][0] * 1.18]
    start = 0
    for i in range(1, len(predicted) + 1):
        if i == len(predicted) or predicted[i][2] != predicted[start][2]:
            limit = predicted[start][2]
            axes.axvspan(edges[start], edges[i], color=LIMIT_COLOURS[limit], alpha=0.09, linewidth=0, zorder=0)
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 10}
            style.write(axes, (edges[start] * edges[i]) ** 0.5, 0.02, f"{limit}-bound", color=NOTE, **place)
            start = i


def _words(
    settings: dict, costs: StepCosts, predicted: Sequence[tuple], measured: list[Measurement], all_: list[Measurement]
) -> str:
    sentences = [_regimes(predicted), _arithmetic(costs)]
    if measured:
        sentences.append(beside_prediction(measured))
        sentences.append(_growth(measured))
        if any(m.settings["attention"] == "eager" for m in measured):
            sentences.append(
                "Eager attention also writes and reads again its n × n scores, which the prediction leaves out."
            )
        now = {"model": plain(settings)["model"], "attention": settings["attention"]}
        if len(matching(measured, **now)) < len(measured):
            sentences.append(
                "The dashed line is for the controls as they are now, the points for what is named beside them."
            )
    sentences.append(_whole_generation(settings, measured))
    counted = [m for m in all_ if m.unit == "rows"]
    if counted:
        sentences.append("Counted: " + counted[0].check + ".")
    return "\n".join(s for s in sentences if s)


def _regimes(predicted: Sequence[tuple]) -> str:
    """Which limit holds from which length on, and what that means."""
    runs = limit_runs(predicted)
    parts = [f"from {x:,} rows on " + LIMIT_WORDS[limit] for x, limit in runs]
    if len(runs) == 1:
        parts = ["at every length shown " + LIMIT_WORDS[runs[0][1]]]
    return "Predicted: " + "; ".join(parts) + "."


def _arithmetic(costs: StepCosts) -> str:
    attention = costs.flops_by_part["attention"] / costs.flops
    return (
        f"A step over {costs.rows:,} rows is {costs.flops / 1e9:.3g} GFLOP, {attention:.0%} of them attention; of "
        f"{costs.rows:,} rows of output one is used."
    )


def _growth(measured: list[Measurement]) -> str:
    if len(measured) < 2:
        return ""
    a, b = measured[-2], measured[-1]
    longer, slower = b.settings["length"] / a.settings["length"], b.median / a.median
    return (
        f"Measured: a text {longer:.2g} × as long ({a.settings['length']:,} to {b.settings['length']:,} tokens) takes"
        f" {slower:.2g} × the time."
    )


def _whole_generation(settings: dict, measured: list[Measurement]) -> str:
    """Rows of the whole generation, and what the measured steps say it takes."""
    start, new = settings["prompt_tokens"], settings["new_tokens"]
    rows = rows_without_cache(start, new)
    text = f"Generating {new:,} tokens after a prompt of {start:,} sends {rows:,} rows through the model"
    if len(measured) < 2 or start + new - 1 > measured[-1].settings["length"]:
        return text + "."
    lengths, seconds = [m.settings["length"] for m in measured], [m.median for m in measured]
    total = float(np.interp(np.arange(start, start + new), lengths, seconds).sum())
    return text + f": at the measured step times, {style.milliseconds(total)} in all."
