"""The panel of smaller.larger_batch: how many sequences of each variant one memory takes, and what they earn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.costs import Prediction
from workbench.instruments.records import Measurement
from workbench.labs.lab04_smaller_caches.larger_batch import (
    COMPARED,
    EXPERIMENT,
    Fit,
    gains,
    predicted_fits,
    tokens_per_s,
)
from workbench.labs.lab04_smaller_caches.panels.plots import COLOURS, MARKS, bars_of_ways
from workbench.labs.lab04_smaller_caches.variants import WAYS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Drawing, Series, measured, predicted, recorded, table, view
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, listed, recorded_label, spread_words

KNOBS = ("size", "memory", "context")
Expected = dict[str, tuple[Fit, Prediction]]


class LargerBatchPanel(Panel):
    """Lab 04: one memory, filled with each variant's caches, and the tokens a second that so many sequences make."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        expected = predicted_fits(self.ceilings(), **settings)
        made = self.made(settings, KNOBS)
        titles = [WAYS[name].title for name in COMPARED]
        sequences = [expected[name][0].sequences for name in COMPARED]
        title = f"sequences in {settings['memory']:,} MB"
        said = ", ".join(f"{title} {count:,}" for title, count in zip(titles, sequences))
        last = {name: next(iter(matching(made, way=name)), None) for name in COMPARED}
        ratios = gains(made)
        return view(
            _rates(expected, made, self.record),
            Drawing(
                lambda axes: bars_of_ways(axes, COMPARED, titles, sequences, title, lambda n: f"{n:,.0f}"),
                f"Bars, {title}: {said}.",
                title,
            ),
            height=4.1,
            width_ratios=[2.0, 1],
            table=table(
                COMPARED,
                {
                    "": lambda way: WAYS[way].title,
                    "sequences": lambda way: f"{expected[way][0].sequences:,}",
                    "reserved": lambda way: f"{expected[way][0].bytes_reserved:,}",
                    "with one more": lambda way: f"{expected[way][0].bytes_with_one_more:,}",
                    "a step, measured (p10 to p90)": lambda way: spread_words(last[way]),
                    "predicted": lambda way: milliseconds(expected[way][1].seconds),
                    "limit": lambda way: expected[way][1].limit,
                    "tokens a second": lambda way: f"{tokens_per_s(m):,.0f}" if (m := last[way]) else "",
                    "by MHA's, in turns": lambda way: _range(ratios.get(way)),
                    "by MHA's, predicted": lambda way: f"{_rate(expected, way) / _rate(expected, COMPARED[0]):.2f} ×",
                },
            ),
            caption=f"{settings['memory']:,} MB of keys and values, {settings['context']:,} tokens in every sequence, "
            + ("measured" if made else "predicted; Run measures"),
            words=_words(settings, expected, made, self.record),
        )


def _rate(expected: Expected, way: str) -> float:
    found, step = expected[way]
    return found.sequences / step.seconds


def _range(ratios: Sequence[float] | None) -> str:
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} × ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _rates(expected: Expected, made: list[Measurement], record: list[Measurement]) -> Chart:
    """Tokens a second against sequences: a cross at the prediction, solid as measured, hollow as recorded. The line
    goes through MHA's prediction: as many times the sequences, as many times the tokens."""
    series: list[Series] = []
    for way in COMPARED:
        title = WAYS[way].title
        mark: dict[str, Any] = {"marker": MARKS[way], "legend": False}
        point = [(expected[way][0].sequences, _rate(expected, way))]
        look: dict[str, Any] = {"marker": "x", "markersize": 7, "markeredgewidth": 1.6}
        series += [
            predicted(f"{title}, predicted", point, COLOURS[way], legend=False, **look),
            recorded(title, matching(record, way=way), _sequences, COLOURS[way], y=tokens_per_s, **mark),
            measured(title, matching(made, way=way), _sequences, COLOURS[way], y=tokens_per_s, markersize=7, **mark),
        ]
    first, largest = expected[COMPARED[0]][0].sequences, max(f.sequences for f, _ in expected.values())
    a_sequence = _rate(expected, COMPARED[0]) / first
    ends = [(first, first * a_sequence), (largest, largest * a_sequence)]

    def note(axes: Axes) -> None:
        words = "×: predicted"
        if record:
            words += f"\nhollow: {record[0].settings['size']}, {recorded_label(record)}"
        style.write(axes, 0.02, 0.97, words, fontsize=10, transform=axes.transAxes, va="top")

    line = Series("as many more tokens as sequences", ends, "predicted", style.IDLE, legend=False, look={"zorder": 1})
    return Chart(
        *(line, *series) if largest > first else series,
        x=Axis("sequences in the memory", lambda n: f"{n:,.0f}", scale="log"),
        y=Axis("tokens a second, all sequences", lambda n: f"{n:,.0f}", "log", room=(1.8, 2.2)),
        title="dashed: in proportion to the sequences",
        also=note,
    )


def _sequences(m: Measurement) -> float:
    return m.counts["sequences"]


def _words(settings: dict[str, Any], expected: Expected, made: list[Measurement], record: list[Measurement]) -> str:
    base, *others = COMPARED
    counts = listed([f"{expected[way][0].sequences:,} with {WAYS[way].title}" for way in COMPARED])
    rates = {way: _rate(expected, way) / _rate(expected, base) for way in others}
    lines = [
        f"{settings['size']}, {settings['context']:,} tokens in every sequence. Into {settings['memory']:,} MB fit "
        f"{counts}.",
        f"Predicted, tokens a second by those of {WAYS[base].title}: "
        f"{listed([f'{WAYS[way].title} {rate:.2f} ×' for way, rate in rates.items()])}.",
    ]
    ratios = gains(made)
    if ratios:
        said = [f"{WAYS[way].title} {_range(found)}" for way, found in ratios.items()]
        lines.append(f"Measured in turns: {listed(said)}. {beside_prediction(made)}")
    elif made:
        lines.append(beside_prediction(made))
    poor = [way for way, found in ratios.items() if statistics.median(found) < 0.8 * _fraction(expected, way)]
    if poor:
        lines.append(
            f"{listed([WAYS[way].title for way in poor])}: fewer tokens a second than sequences were gained. What a "
            "sequence costs besides the bytes it keeps (its arithmetic, scores that are written and read, layers that "
            "read the same keys again, codes that are brought back to numbers) grows with the batch."
        )
    if record:
        lines.append(f"Hollow: {recorded_label(record)}.")
    return "\n".join(lines)


def _fraction(expected: Expected, way: str) -> float:
    """How many times as many sequences as the first."""
    return expected[way][0].sequences / expected[COMPARED[0]][0].sequences
