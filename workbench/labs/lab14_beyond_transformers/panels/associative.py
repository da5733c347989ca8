"""The panel of beyond.associative: right answers by learning rate, for each mixer and state size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab14_beyond_transformers.associative import (
    EXPERIMENT,
    HYBRID,
    MIXERS,
    RATES,
    SOLVED,
    STATE_SIZES,
    capacity,
    guess,
    shape_of,
    sizes_of,
)
from workbench.models.state_shape import ATTENTION
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, Drawing, Series, predicted, table, view
from workbench.panels.plots import empty, flop_words, matching, short
from workbench.panels.view import View
from workbench.panels.words import listed, recorded_label

COLOURS = {
    ATTENTION: style.CACHE,
    HYBRID: style.TARGET,
    "gated_delta": style.DRAFT,
    "mamba2": style.WEIGHTS,
    "linear_attention": style.COMPUTE,
    "s4d": style.IDLE,
}
MARKS = {ATTENTION: "o", HYBRID: "v", "gated_delta": "D", "mamba2": "s", "linear_attention": "^", "s4d": "P"}
NAMES = {
    ATTENTION: "attention",
    HYBRID: "hybrid",
    "gated_delta": "gated DeltaNet",
    "mamba2": "Mamba-2",
    "linear_attention": "linear attention",
    "s4d": "S4D",
}


GUESS = "#B9BEC6"


def percent(share: float) -> str:
    return f"{share:.0%}"


class AssociativePanel(Panel):
    """Lab 14: multi-query associative recall by learning rate, mixer and state size."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        mixers = MIXERS if settings["mixers"] == "all" else (settings["mixers"],)
        measured, record = (_of(mixers, taken) for taken in (self.measurements, self.record))
        shown = measured or record
        pairs = shown[0].settings["pairs"] if shown else settings["pairs"]
        charts = [self._chart(size, pairs, mixers, first=size == STATE_SIZES[0]) for size in STATE_SIZES]
        return view(
            *charts,
            Drawing(lambda axes: _key(axes, mixers)),
            height=4.2,
            width_ratios=[1, 1, 0.62],
            table=_table(shown) if shown else _shapes(settings, mixers),
            caption=self._caption(shown, settings, pairs),
            words=_words(measured, record, pairs, mixers),
        )

    def _chart(self, size: int, pairs: int, mixers: Sequence[str], *, first: bool) -> Chart:
        series = []
        for kind, taken in (("measured", self.measurements), ("recorded", self.record)):
            for mixer in mixers:
                of_size = matching(taken, mixer=mixer, state_size=0 if mixer == ATTENTION else size)
                points = [(m.settings["rate"], m.median) for m in of_size]
                errors = [m.counts["standard_error"] for m in of_size] if kind == "measured" else []
                spread = [(y - e, y + e) for (_, y), e in zip(points, errors)]
                look = {"marker": MARKS[mixer]} | ({"markerfacecolor": "none"} if kind == "recorded" else {})
                name = NAMES[mixer] + (", recorded" if kind == "recorded" else "")
                series.append(Series(name, points, kind, COLOURS[mixer], spread, legend=False, look=look))
        expected = capacity("linear_attention", size, pairs)
        if expected is not None:
            series.append(predicted(f"{size} orthogonal keys", [(rate, expected) for rate in RATES], style.INK))
        return Chart(
            *series,
            x=Axis("learning rate", lambda x: f"{x:g}", "log", VALUES, room=(1.6, 1.6)),
            y=Axis("right answers" if first else "", percent, limits=(0, 1.05), ticks=(0, 0.25, 0.5, 0.75, 1)),
            title=f"keys of N = {size} values",
            levels=[(guess(pairs), f"always the most frequent of the {pairs} values", GUESS)],
        )

    def _caption(self, shown: Sequence[Measurement], settings: dict[str, Any], pairs: int) -> str:
        steps = shown[0].settings["steps"] if shown else settings["steps"]
        text = f"{pairs} pairs, then {pairs} queries; {steps:,} steps from nothing at each rate; attention has no N"
        if self.record:
            text += f"; hollow: {recorded_label(self.record)}"
        return text if shown else text + ". Dashed: expected; Run trains every model"


def _key(axes: Axes, mixers: Sequence[str]) -> None:
    """Names of the lines of both plots."""
    empty(axes)
    axes.set(xlim=(0, 1), ylim=(9, -1))
    for y, mixer in enumerate(mixers):
        axes.plot([0, 0.1, 0.2], [y] * 3, color=COLOURS[mixer], linewidth=2)
        axes.plot([0.1], [y], color=COLOURS[mixer], marker=MARKS[mixer], markersize=8)
        style.write(axes, 0.26, y, NAMES[mixer], va="center", fontsize=10)
    lines: list[dict[str, Any]] = [style.PREDICTED | {"color": style.INK}, {"color": GUESS, "linewidth": 2}]
    for y, (look, name) in enumerate(zip(lines, ("N orthogonal keys", "a guess")), start=len(mixers)):
        axes.plot([0, 0.2], [y] * 2, **look)
        style.write(axes, 0.26, y, name, va="center", fontsize=10)


def _of(mixers: Sequence[str], taken: Sequence[Measurement]) -> list[Measurement]:
    return [m for m in taken if m.settings["mixer"] in mixers]


def _table(shown: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    return table(
        shown,
        {
            "mixer": lambda m: NAMES[m.settings["mixer"]],
            "N": lambda m: m.settings["state_size"] or "",
            "learning rate": "{m.settings[rate]:g}",
            "right answers": lambda m: f"{m.median:.1%} ± {m.counts['standard_error']:.1%}",
            "without error, by N orthogonal keys": lambda m: percent(m.predicted) if m.predicted else "",
            "values of state": "{m.counts[state_values]:,}",
            "parameters": "{m.counts[parameters]:,}",
            "tokens trained": lambda m: short(m.counts["tokens_trained"]),
            "FLOPs of training": lambda m: flop_words(m.counts["flops"]),
        },
    )


def _shapes(settings: dict[str, Any], mixers: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Before Run: what will be trained."""
    pairs, width, layers = settings["pairs"], settings["width"], settings["layers"]
    every = [(mixer, size, shape_of(mixer, size, width, layers, pairs)) for mixer in mixers for size in sizes_of(mixer)]
    return table(
        every,
        {
            "mixer": lambda one: NAMES[one[0]],
            "N": lambda one: one[1] or "",
            "without error, by N orthogonal keys": lambda one: (
                percent(share) if (share := capacity(one[0], one[1], pairs)) else ""
            ),
            "values of state": lambda one: f"{one[2].state_values():,}",
            "parameters": lambda one: f"{one[2].num_parameters():,}",
        },
    )


def _words(
    measured: Sequence[Measurement], record: Sequence[Measurement], pairs: int, mixers: Sequence[str]
) -> list[str]:
    shown, lines = measured or record, []
    if shown and not measured:
        lines.append("Recorded, not measured here.")
    lines += _verdicts(shown, mixers)
    if not shown:
        lines.append(
            f"Every key is asked for once: guess which mixers answer {SOLVED:.0%} of the queries at some learning rate,"
            " and which at none."
        )
    lines.append(
        f"Expected: a sum of k vᵀ over keys of N values returns N of {pairs} pairs without error, as no more keys are"
        " orthogonal (arXiv 2102.11174). More answers than that can be right, since only the nearest value counts."
    )
    lines.append(
        "A low point at one rate says nothing about what a mixer can hold: published failures of recurrent models on"
        " this task came in part from the rate (arXiv 2508.19029) and from the initial weights (arXiv 2410.11135). A"
        " mixer that fails at all rates here may still learn with more steps, another width or another beginning."
    )
    if shown:
        tokens, flops = (sum(m.counts[name] for m in shown) for name in ("tokens_trained", "flops"))
        lines.append(
            f"{len(shown)} models were trained on {short(tokens)} tokens in all, {flop_words(flops)}; one seed each."
        )
    return lines


def _verdicts(shown: Sequence[Measurement], mixers: Sequence[str]) -> list[str]:
    """Which mixers solve it at the best rate, which at none, and how wide the window of rates is."""
    solved, failed = [], []
    for mixer in mixers:
        for size in sizes_of(mixer):
            taken = matching(shown, mixer=mixer, state_size=size)
            if not taken:
                continue
            name = NAMES[mixer] + (f", N = {size}" if size else "")
            best = max(taken, key=lambda m: m.median)
            rates = [m.settings["rate"] for m in taken if m.median >= SOLVED]
            worst = min(taken, key=lambda m: m.median)
            if rates:
                text = f"{name} at {len(rates)} of {len(taken)} rates"
                if len(rates) < len(taken):
                    text += f" ({worst.median:.0%} at {worst.settings['rate']:g})"
                solved.append(text)
            else:
                failed.append(f"{name} ({best.median:.0%} at {best.settings['rate']:g})")
    lines = []
    if solved:
        lines.append(f"Solved, {SOLVED:.0%} and more at the best rate: {'; '.join(solved)}.")
    if failed:
        lines.append(f"At none of the rates: {listed(failed)}.")
    return lines
