"""The panel of naive.step_time: step time against text length, predicted and measured."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.experiments.inputs import plain
from workbench.experiments.naive_generation import predicted_step, rows_without_cache
from workbench.instruments.costs import StepCosts
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, recorded_label, spread_words

LIMIT_COLOURS = {"launch": style.IDLE, "bandwidth": style.WEIGHTS, "compute": style.COMPUTE}
LIMIT_WORDS = {
    "launch": "launch-bound: starting the operations takes longer than what they do, so a longer text costs no more",
    "bandwidth": "bandwidth-bound: reading the weights and handing on activations takes longer than the arithmetic",
    "compute": "compute-bound: the arithmetic takes longest, 2 FLOPs for each parameter and row and attention on top",
}


class StepTimePanel(Panel):
    """Step time against text length. rows=my_count_rows compares your count of rows with the counted one."""

    experiment_name = "naive.step_time"

    def view(self, settings: dict[str, Any]) -> View:
        predicted = self.experiment.predict(self.ceilings(), **settings)
        costs, _ = predicted_step(self.ceilings(), settings["model"], predicted[-1][0], settings["attention"])
        measured = _steps(self.measurements)
        figure, (axes,) = style.new_figure()
        reach = [m.settings["length"] for m in _steps(self.record)]
        _draw_limits(axes, predicted, reach)
        axes.plot(
            *zip(*((x, s * 1e3) for x, s, _ in predicted)),
            color=style.INK,
            label="predicted",
            **style.PREDICTED,
        )
        if self.record:
            _draw_steps(axes, _steps(self.record), recorded_label(self.record), style.IDLE, style.RECORDED)
        if measured:
            by = measured[0].settings
            _draw_steps(
                axes, measured, f"measured: {by['model']}, {by['attention']}", style.TARGET, style.MEASURED
            )
        _scale(axes, predicted, measured + _steps(self.record))
        style.label(axes, x="text length (tokens = rows of the step)", y="time of one step")
        style.legend(axes, loc="upper left")
        figure.subplots_adjust(left=0.115, right=0.985, top=0.965, bottom=0.145)
        return View(
            figure=figure,
            alt=_alt(settings, predicted, measured),
            header=["tokens", "measured (p10 to p90)", "predicted", "measured ÷ predicted", "limit", "GFLOP"],
            rows=[_row(m) for m in measured] or [_predicted_row(p) for p in predicted],
            caption="The same as a table" if measured else "Predicted; Run measures",
            words=_words(settings, costs, predicted, measured, self.measurements),
        )


def _steps(measurements: list[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.unit == "s"]


def _draw_steps(axes: Axes, steps: list[Measurement], label: str, colour: str, look: dict) -> None:
    x = [m.settings["length"] for m in steps]
    middle = [m.median * 1e3 for m in steps]
    axes.plot(x, middle, color=colour, label=label, zorder=3, **look)
    if look is style.MEASURED:
        low, high = zip(*(m.spread for m in steps))
        bars = [[m - 1e3 * s for m, s in zip(middle, low)], [1e3 * s - m for m, s in zip(middle, high)]]
        axes.errorbar(x, middle, yerr=bars, fmt="none", ecolor=colour, elinewidth=1.6, capsize=4, zorder=3)


def _draw_limits(axes: Axes, predicted: list[tuple], reach: list[float]) -> None:
    """A faint band behind each stretch of lengths with the same limit, and its name. `reach`: what else is drawn."""
    edges = [predicted[0][0] * 0.85]
    edges += [(a[0] * b[0]) ** 0.5 for a, b in itertools.pairwise(predicted)] + [predicted[-1][0] * 1.18]
    start = 0
    for i in range(1, len(predicted) + 1):
        if i == len(predicted) or predicted[i][2] != predicted[start][2]:
            limit = predicted[start][2]
            axes.axvspan(
                edges[start], edges[i], color=LIMIT_COLOURS[limit], alpha=0.09, linewidth=0, zorder=0
            )
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 10}
            style.write(
                axes, (edges[start] * edges[i]) ** 0.5, 0.02, f"{limit}-bound", color="#4B5563", **place
            )
            start = i
    axes.set_xlim(min([edges[0], *(0.85 * x for x in reach)]), max([edges[-1], *(1.18 * x for x in reach)]))


def _scale(axes: Axes, predicted: list[tuple], measured: list[Measurement]) -> None:
    style.log_ticks(axes, "x", [x for x, _, _ in predicted])
    every = [s * 1e3 for _, s, _ in predicted] + [v * 1e3 for m in measured for v in (m.median, *m.spread)]
    low, high = min(every) / 1.8, max(every) * 2.2
    ticks = [base * 10.0**e for e in range(-4, 6) for base in (1, 2, 5)]
    inside = [t for t in ticks if low <= t <= high]
    if len(inside) > 8:
        inside = [t for t in inside if f"{t:e}"[0] == "1"]
    style.log_ticks(axes, "y", inside, text=lambda ms: style.milliseconds(ms / 1e3))
    axes.set_ylim(low, high)


def _row(m: Measurement) -> list[str]:
    ratio = f"{m.median / m.predicted:.2f} ×" if m.predicted else ""
    flops = f"{m.counts['flops'] / 1e9:.3g}"
    return [
        f"{m.settings['length']:,}",
        spread_words(m),
        style.milliseconds(m.predicted),
        ratio,
        m.limit or "",
        flops,
    ]


def _predicted_row(point: tuple) -> list[str]:
    return [f"{point[0]:,}", "", style.milliseconds(point[1]), "", point[2], ""]


def _alt(settings: dict, predicted: list[tuple], measured: list[Measurement]) -> str:
    first, last = predicted[0], predicted[-1]
    text = (
        f"Step time against text length, both axes logarithmic. Predicted, dashed: {style.milliseconds(first[1])} "
        f"at {first[0]:,} tokens, {style.milliseconds(last[1])} at {last[0]:,}."
    )
    if measured:
        a, b = measured[0], measured[-1]
        text += (
            f" Measured, solid: {style.milliseconds(a.median)} at {a.settings['length']:,} tokens, "
            f"{style.milliseconds(b.median)} at {b.settings['length']:,}."
        )
    return text


def _words(
    settings: dict,
    costs: StepCosts,
    predicted: list[tuple],
    measured: list[Measurement],
    all_: list[Measurement],
) -> str:
    sentences = [_regimes(predicted), _arithmetic(costs)]
    if measured:
        sentences.append(beside_prediction(measured))
        sentences.append(_growth(measured))
        if any(m.settings["attention"] == "eager" for m in measured):
            sentences.append(
                "Eager attention also writes and reads again its n × n scores, which the prediction leaves out."
            )
        if any(
            m.settings["model"] != plain(settings)["model"]
            or m.settings["attention"] != settings["attention"]
            for m in measured
        ):
            sentences.append(
                "The dashed line is for the controls as they are now, the points for what is named beside them."
            )
    sentences.append(_whole_generation(settings, measured))
    counted = [m for m in all_ if m.unit == "rows"]
    if counted:
        sentences.append("Counted: " + counted[0].check + ".")
    return "\n".join(s for s in sentences if s)


def _regimes(predicted: list[tuple]) -> str:
    """Which limit holds from which length on, and what that means."""
    runs: list[tuple[float, str]] = []
    for x, _, limit in predicted:
        if not runs or runs[-1][1] != limit:
            runs.append((x, limit))
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
    return f"Measured: a text {longer:.2g} × as long ({a.settings['length']:,} to {b.settings['length']:,} tokens) takes {slower:.2g} × the time."


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
