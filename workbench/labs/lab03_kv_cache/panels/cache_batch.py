"""The panel of cache.batch: sequences side by side, and the texts for which a cache gains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.costs import Prediction
from workbench.instruments.records import Measurement
from workbench.labs.lab03_kv_cache.cache_batch import EXPERIMENT, predict_gain
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, measured, predicted, recorded, view
from workbench.panels.limits import limits_in_words
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import spread_words

Gain = list[tuple[int, Prediction, Prediction]]
COLOURS = {"recompute": style.COMPUTE, "contiguous": style.CACHE}
NOTHING = 1.1  # times faster; less is no gain to speak of


class CacheBatchPanel(Panel):
    """Lab 03: sequences side by side with a cache, and when a cache gains nothing."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        expected, made = self.experiment.predict(self.ceilings(), **settings), self.measurements
        gain = predict_gain(self.ceilings(), **settings)
        return view(
            _batch_chart(expected, made, self.record),
            _gain_chart(gain, made),
            height=3.7,
            table=(["", "measured (p10 to p90)", "predicted", "a token", "limit"], _rows(expected, gain, made)),
            caption="Steps" if made else "Predicted; Run measures",
            words=_words(expected, gain, made),
        )


def _batch_chart(expected: Sequence[tuple], made: list[Measurement], record: list[Measurement]) -> Chart:
    alone = matching(made, part="batch", way="one by one")
    together: dict[str, Any] = {"part": "batch", "way": "together"}
    a_token: dict[str, Any] = {"x": "batch", "y": lambda m, seconds: seconds / m.settings["batch"]}
    return Chart(
        predicted("predicted", [(b, s / b) for b, s, _ in expected]),
        recorded("", matching(record, **together), **a_token),
        measured("measured, together", matching(made, **together), colour=style.CACHE, spread=False, **a_token),
        x=Axis("sequences in the batch", scale="log", ticks=VALUES),
        y=Axis("time a token", milliseconds, "log", room=(30, 2)),
        title="sequences side by side",
        legend="lower left",
        levels=[(m.median, "measured, one by one", style.TARGET) for m in alone],
    )


def _gain_chart(gain: Gain, made: list[Measurement]) -> Chart:
    series, tops = [], []
    times = {
        "recompute": [(n, step.seconds) for n, step, _ in gain],
        "contiguous": [(n, step.seconds) for n, _, step in gain],
    }
    for way, name in (("recompute", "without a cache"), ("contiguous", "with the cache")):
        taken = matching(made, part="gain", way=way)
        expected = predicted(f"{name}, predicted", times[way], COLOURS[way])
        series += [expected, measured(f"{name}, measured", taken, "length", COLOURS[way], spread=False)]
        x = expected.points[-1][0]
        tops.append((x, max(y for one in series[-2:] for at, y in one.points if at == x), name))

    def names(axes: Axes) -> None:
        for x, top, name in tops:
            above = top == max(top for _, top, _ in tops)
            place = (top * 1.3, "bottom") if above else (top / 1.4, "top")
            style.write(axes, x, place[0], name, ha="right", va=place[1], fontsize=11)

    return Chart(
        *series,
        x=Axis("text length (tokens)", scale="log", ticks=[step[0] for step in gain]),
        y=Axis("time of one step", milliseconds, "log", room=(1.8, 2.6)),
        title="one step (dashed: predicted)",
        also=names,
    )


def _rows(expected: Sequence[tuple], gain: Gain, made: list[Measurement]) -> list[list[str]]:
    if not made:
        rows = [
            [f"batch of {b:,}", "", style.milliseconds(s), style.milliseconds(s / b), limit] for b, s, limit in expected
        ]
        for length, without, cached in gain:
            for name, step in (("without", without), ("with", cached)):
                rows.append([f"text of {length:,}, {name}", "", style.milliseconds(step.seconds), "", step.limit])
        return rows
    return [
        [
            _name(m),
            spread_words(m),
            "" if m.predicted is None else style.milliseconds(m.predicted),
            style.milliseconds(m.median / m.settings["batch"]) if "batch" in m.settings else "",
            m.limit or "",
        ]
        for m in made
    ]


def _name(m: Measurement) -> str:
    if m.settings["part"] == "batch":
        return "one by one" if m.settings["way"] == "one by one" else f"batch of {m.settings['batch']:,}"
    name = "without" if m.settings["way"] == "recompute" else "with"
    what = "text" if m.settings["part"] == "gain" else "first token, prompt"
    return f"{what} of {m.settings['length']:,}, {name}"


def _words(expected: Sequence[tuple], gain: Gain, made: list[Measurement]) -> str:
    lines = [
        f"Predicted, side by side: {limits_in_words(expected, 'a batch of')}. All sequences share one reading of the"
        f" weights, so a token takes {expected[0][1] * expected[-1][0] / expected[-1][1]:.1f} × less time in a batch"
        f" of {expected[-1][0]:,}; each keeps a cache of its own."
    ]
    alone, together = (matching(made, part="batch", way=way) for way in ("one by one", "together"))
    if alone and together:
        last = together[-1]
        a_token = last.median / last.settings["batch"]
        lines.append(
            f"Measured: {style.milliseconds(alone[0].median)} a token one by one, {style.milliseconds(a_token)} in a"
            f" batch of {last.settings['batch']:,}, {alone[0].median / a_token:.1f} × less; {last.check}."
        )
    lines.append(_gain_words(gain, made))
    first = matching(made, part="first token", way="contiguous")
    if first:
        lines.append(
            f"When only one token is asked, the cache gains nothing: the prompt's {first[0].settings['length']:,} rows"
            f" are new either way ({first[0].counts['ratio']:.2f} × measured)."
        )
    return "\n".join(lines)


def _gain_words(gain: Gain, made: list[Measurement]) -> str:
    """Up to which length nothing is gained, and which limit both steps have there."""
    ratios: list[tuple[int, float, str, str]]
    ratios = [(n, without.seconds / cached.seconds, without.limit, cached.limit) for n, without, cached in gain]
    source = "Predicted"
    limits = {m.settings["length"]: m.limit for m in matching(made, part="gain", way="recompute") if m.limit}
    both = [m for m in matching(made, part="gain", way="contiguous") if m.limit and m.settings["length"] in limits]
    if both:
        ratios = [(n, m.counts["ratio"], limits[n], m.limit or "") for m in both for n in [m.settings["length"]]]
        source = "Measured"
    shown = ", ".join(f"{r:.2g} × at {n:,} tokens" for n, r, _, _ in ratios)
    none = [(n, a, b) for n, r, a, b in ratios if r < NOTHING]
    text = f"{source} gain of one step from the cache: {shown}."
    if not none:
        return text + " Even the shortest of these texts gains."
    n, a, b = none[-1]
    reason = {
        "bandwidth": "it reads every weight once whether it brings one row or a few, and that is what takes the time",
        "launch": "starting the operations takes the time, and their number is the same for one row and for many",
        "compute": "its rows are too few to matter",
    }[a]
    named = f"{a}-bound" if a == b else f"{a}-bound without and {b}-bound with the cache"
    return f"{text} Up to {n:,} tokens there is no gain to speak of: the step is {named}; {reason}."
