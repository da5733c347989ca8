"""The panel of cache.decode: every token without a cache and with one, rows and time, predicted and measured."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab03_kv_cache.token_times import EXPERIMENT, predict_ways, rows_in_all, rows_of_token
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Drawing, Series, predicted, view
from workbench.panels.limits import limits_in_words
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, recorded_label

COLOURS = {"recompute": style.COMPUTE, "contiguous": style.CACHE, "yours": style.LEARNER}
NAMES = {"recompute": "without a cache", "contiguous": "with the cache", "yours": "with your cache"}


class CachePanel(Panel):
    """Lab 03: every token without a cache and with one. kv=: your own cache class beside ours."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        expected = predict_ways(self.ceilings(), **settings)
        made, archive = _by_way(self.measurements), _by_way(self.record)
        return view(
            _chart(settings, expected, made, archive, recorded_label(self.record) if archive else ""),
            Drawing(lambda axes: _draw_rows(axes, settings, self.measurements), "Below it the rows of each step."),
            columns=1,
            height=5.2,
            height_ratios=[2.4, 1],
            sharex=True,
            table=(["", *(NAMES[way] for way in made or expected)], _table(settings, expected, self.measurements)),
            caption="The whole text in numbers" if made else "Predicted; Run measures",
            words=_words(settings, expected, self.measurements),
        )


def _by_way(measurements: list[Measurement]) -> dict[str, list[tuple[int, float]]]:
    """{way: [(number of the new token, seconds), …]}"""
    points: dict[str, list[tuple[int, float]]] = {}
    for m in measurements:
        points.setdefault(m.settings["kv"], []).extend(enumerate(m.samples, m.settings["first_token"]))
    return points


def _chart(settings: dict, expected: dict, made: dict, archive: dict, label: str) -> Chart:
    series = [predicted(f"{NAMES[way]}, predicted", points, COLOURS[way]) for way, points in expected.items()]
    for way, points in archive.items():
        shown = points[:: max(1, len(points) // 16)]
        hollow = {"legend": way == "contiguous"}  # one name for all
        series.append(
            Series(label if hollow["legend"] else f"{NAMES[way]}, {label}", shown, "recorded", COLOURS[way], **hollow)
        )
    for way, points in made.items():
        look = {"markersize": 4 if len(points) <= 100 else 0, "linewidth": 1.4}
        series.append(Series(f"{NAMES[way]}, measured", points, "measured", COLOURS[way], look=look))
    series = [one if one.kind == "recorded" else replace(one, legend=False) for one in series]

    def names(axes: Axes) -> None:
        """The name of each way over the last half of its lines."""
        right = max(one.points[-1][0] for one in series if one.kind != "recorded")
        for way in dict.fromkeys((*expected, *made)):
            lines = [list(zip(*points))[1] for points in (expected.get(way), made.get(way)) if points]
            top = max(s for line in lines for s in line[len(line) // 2 :])
            beside = 0.6 if way == "yours" else 1.0  # its line lies where ours does
            style.write(axes, right * beside, top * 1.12, NAMES[way], ha="right", va="bottom", fontsize=11)

    longest = max(settings["new_tokens"], *(points[-1][0] for points in made.values()), 1)
    return Chart(
        *series,
        x=Axis("", limits=(0.5, longest + 0.5)),
        y=Axis("time of the step (dashed: predicted)", milliseconds, "log", room=(1.8, 2.6 if archive else 2.0)),
        legend="upper left",
        also=names,
    )


def _draw_rows(axes: Axes, settings: dict, measurements: list[Measurement]) -> None:
    prompt, new = settings["prompt_tokens"], settings["new_tokens"]
    if measurements:  # the bars say what was counted, so they belong to the run
        prompt, new = (measurements[0].settings[k] for k in ("prompt_tokens", "new_tokens"))
    numbers = range(1, new + 1)
    for way in ("recompute", "contiguous"):
        rows = [rows_of_token(way, prompt, i) for i in numbers]
        axes.fill_between(numbers, rows, 0.7, step="mid", color=COLOURS[way], alpha=0.75, linewidth=0)
    top = prompt + new
    style.log_ticks(axes, "y", [v for v in (1, 10, 100, 1000, 10_000) if v <= top])
    axes.set_ylim(0.7, top * 1.6)
    axes.set_xlim(0.5, max(settings["new_tokens"], new) + 0.5)
    style.label(axes, x="number of the new token (the first takes the prompt)", y="rows of the step")


def _counted(measurements: list[Measurement], way: str, count: str) -> float:
    return sum(m.counts[count] for m in measurements if m.settings["kv"] == way)


def _table(settings: dict, predicted: dict, measurements: list[Measurement]) -> list[list[str]]:
    ways, made = list(predicted), _by_way(measurements)
    steps = {way: [s for _, s, _ in points] for way, points in predicted.items()}
    if made:
        ways = list(made)
        steps = {way: [s for _, s in points] for way, points in made.items()}
    rows = [
        ["first token (the prompt)", *(style.milliseconds(steps[w][0]) for w in ways)],
        ["a further token (median)", *(style.milliseconds(statistics.median(steps[w][1:] or steps[w])) for w in ways)],
        ["the last one", *(style.milliseconds(steps[w][-1]) for w in ways)],
    ]
    if not made:
        counts = [rows_in_all(w, settings["prompt_tokens"], settings["new_tokens"]) for w in ways]
        return [*rows, ["rows in all", *(f"{n:,}" for n in counts)]]
    last = {w: [m for m in measurements if m.settings["kv"] == w][-1] for w in ways}
    return [
        *rows,
        ["all of them", *(style.milliseconds(sum(steps[w])) for w in ways)],
        ["tokens a second", *(f"{len(steps[w]) / sum(steps[w]):,.1f}" for w in ways)],
        ["rows in all", *(f"{_counted(measurements, w, 'rows'):,}" for w in ways)],
        ["model calls", *(f"{_counted(measurements, w, 'model_calls'):,}" for w in ways)],
        ["measured ÷ predicted, further tokens", *(_ratio(measurements, w) for w in ways)],
        ["limit, at the end", *(last[w].limit or "" for w in ways)],
        ["bytes in the cache, at the end", *(f"{last[w].counts['bytes_in_use']:,}" for w in ways)],
    ]


def _ratio(measurements: list[Measurement], way: str) -> str:
    ratios = [
        m.median / m.predicted
        for m in measurements
        if m.settings["kv"] == way and m.settings["phase"] == "decode" and m.predicted
    ]
    return f"{statistics.median(ratios):.2f} ×" if ratios else ""


def _words(settings: dict, predicted: dict, measurements: list[Measurement]) -> str:
    prompt, new = settings["prompt_tokens"], settings["new_tokens"]
    rows = {way: rows_in_all(way, prompt, new) for way in ("recompute", "contiguous")}
    lines = [
        f"{new:,} tokens after a prompt of {prompt:,}: {rows['recompute']:,} rows without a cache, "
        f"{rows['contiguous']:,} with it, {rows['recompute'] / rows['contiguous']:,.1f} × fewer. "
        + _predicted_saving(predicted, new)
    ]
    for way, points in predicted.items():
        later = [p for p in points if p[0] > 1] or points
        lines.append(f"Predicted {NAMES[way]}: {limits_in_words(later, 'token')}.")
    lines += _measured_words(measurements)
    return "\n".join(lines)


def _predicted_saving(predicted: dict, new: int) -> str:
    totals = {way: _total(points) for way, points in predicted.items()}
    return (
        f"Predicted: {style.milliseconds(totals['recompute'])} against {style.milliseconds(totals['contiguous'])}, "
        f"{totals['recompute'] / totals['contiguous']:.1f} × faster. Rows are not time: a step of one row still "
        "reads every weight."
    )


def _total(points: list[tuple[int, float, str]]) -> float:
    """The sum over all tokens, those between two predicted ones taken as on a line."""
    total = points[0][1]
    for (i, a, _), (j, b, _) in itertools.pairwise(points):
        total += sum(a + (b - a) * k / (j - i) for k in range(1, j - i + 1))
    return total


def _measured_words(measurements: list[Measurement]) -> list[str]:
    made = _by_way(measurements)
    lines = []
    n = min((len(points) for points in made.values()), default=0)
    if "contiguous" in made and n:
        total = {way: sum(s for _, s in points[:n]) for way, points in made.items()}
        lines.append(
            f"Measured, {n:,} tokens: {style.milliseconds(total['recompute'])} without,"
            f" {style.milliseconds(total['contiguous'])} with the cache, {total['recompute'] / total['contiguous']:.1f}"
            " × faster. " + beside_prediction([m for m in measurements if m.settings["kv"] == "contiguous"])
        )
    for way in made:
        if way != "recompute":
            last = [m for m in measurements if m.settings["kv"] == way][-1]
            sentence = f"{NAMES[way].capitalize()}: {last.check}."
            if way == "yours":
                rows = _counted(measurements, way, "rows")
                sentence += f" It sent {rows:,} rows, ours {_counted(measurements, 'contiguous', 'rows'):,}."
            lines.append(sentence)
    return lines
