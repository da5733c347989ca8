"""The panel of cache.batch: sequences side by side, and the texts for which a cache gains nothing."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.cache_batches import predict_gain
from workbench.instruments.costs import Prediction
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.cache_words import limits_in_words, time_axis
from workbench.panels.view import View
from workbench.panels.words import recorded_label, spread_words

Gain = list[tuple[int, Prediction, Prediction]]
COLOURS = {"recompute": style.COMPUTE, "contiguous": style.CACHE}
NOTHING = 1.1  # times faster; less is no gain to speak of


class CacheBatchPanel(Panel):
    """Time a token against the batch, and time of a step with and without a cache against the text."""

    experiment_name = "cache.batch"

    def view(self, settings: dict[str, Any]) -> View:
        predicted = self.experiment.predict(self.ceilings(), **settings)
        gain = predict_gain(self.ceilings(), **settings)
        figure, (left, right) = style.new_figure(1, 2, height=3.7)
        _draw_batch(left, predicted, self.measurements, self.record)
        _draw_gain(right, gain, self.measurements)
        figure.subplots_adjust(left=0.1, right=0.985, top=0.9, bottom=0.15, wspace=0.3)
        return View(
            figure=figure,
            alt=_alt(predicted, gain, self.measurements),
            header=["", "measured (p10 to p90)", "predicted", "a token", "limit"],
            rows=_rows(predicted, gain, self.measurements),
            caption="Steps" if self.measurements else "Predicted; Run measures",
            words=_words(predicted, gain, self.measurements),
        )


def _part(measurements: list[Measurement], part: str, way: str) -> list[Measurement]:
    return [m for m in measurements if m.settings["part"] == part and m.settings["way"] == way]


def _draw_batch(
    axes: Axes, predicted: list[tuple], made: list[Measurement], record: list[Measurement]
) -> None:
    axes.plot([b for b, _, _ in predicted], [s / b * 1e3 for b, s, _ in predicted], color=style.INK,
              label="predicted", **style.PREDICTED)  # fmt: skip
    every = [s / b for b, s, _ in predicted]
    for found, label, colour, look in (
        (
            _part(record, "batch", "together"),
            recorded_label(record) if record else "",
            style.IDLE,
            style.RECORDED,
        ),
        (_part(made, "batch", "together"), "measured, together", style.CACHE, style.MEASURED),
    ):
        if found:
            points = [(m.settings["batch"], m.median / m.settings["batch"]) for m in found]
            axes.plot(*zip(*((b, s * 1e3) for b, s in points)), color=colour, label=label, zorder=3, **look)
            every += [s for _, s in points]
    alone = _part(made, "batch", "one by one")
    if alone:
        axes.axhline(alone[0].median * 1e3, color=style.TARGET, linewidth=1.8, label="measured, one by one")
        every.append(alone[0].median)
    time_axis(axes, every, above=2.6)
    style.log_ticks(
        axes,
        "x",
        sorted({b for b, _, _ in predicted} | {m.settings["batch"] for m in made if "batch" in m.settings}),
    )
    style.label(axes, x="sequences in the batch", y="time a token", title="sequences side by side")
    style.legend(axes, loc="upper right")


def _draw_gain(axes: Axes, gain: Gain, made: list[Measurement]) -> None:
    every = []
    for way, at, name in (("recompute", 1, "without a cache"), ("contiguous", 2, "with the cache")):
        points = [(step[0], step[at].seconds * 1e3) for step in gain]
        axes.plot(*zip(*points), color=COLOURS[way], **style.PREDICTED)
        found = [(m.settings["length"], m.median * 1e3) for m in _part(made, "gain", way)]
        if found:
            axes.plot(*zip(*found), color=COLOURS[way], zorder=3, **style.MEASURED)
        every += [ms / 1e3 for _, ms in points + found]
        x = max(n for n, _ in points)
        top = max(ms for n, ms in points + found if n == x)
        style.write(axes, x, top * 1.3, name, ha="right", va="bottom", fontsize=11)
    time_axis(axes, every, above=2.6)
    style.log_ticks(axes, "x", [step[0] for step in gain])
    style.label(axes, x="text length (tokens)", y="time of one step", title="one step (dashed: predicted)")


def _rows(predicted: list[tuple], gain: Gain, made: list[Measurement]) -> list[list[str]]:
    if not made:
        rows = [
            [f"batch of {b:,}", "", style.milliseconds(s), style.milliseconds(s / b), limit]
            for b, s, limit in predicted
        ]
        for length, *steps in gain:
            for name, step in zip(("without", "with"), steps):
                rows.append(
                    [f"text of {length:,}, {name}", "", style.milliseconds(step.seconds), "", step.limit]
                )
        return rows
    return [
        [_name(m), spread_words(m), style.milliseconds(m.predicted),
         style.milliseconds(m.median / m.settings["batch"]) if "batch" in m.settings else "", m.limit or ""]
        for m in made
    ]  # fmt: skip


def _name(m: Measurement) -> str:
    if m.settings["part"] == "batch":
        return "one by one" if m.settings["way"] == "one by one" else f"batch of {m.settings['batch']:,}"
    name = "without" if m.settings["way"] == "recompute" else "with"
    what = "text" if m.settings["part"] == "gain" else "first token, prompt"
    return f"{what} of {m.settings['length']:,}, {name}"


def _alt(predicted: list[tuple], gain: Gain, made: list[Measurement]) -> str:
    (a, sa, _), (b, sb, _) = predicted[0], predicted[-1]
    text = (
        f"Left: time a token against the batch, predicted {style.milliseconds(sa / a)} alone and "
        f"{style.milliseconds(sb / b)} in a batch of {b:,}. Right: one step without and with a cache against the text."
    )
    together = _part(made, "batch", "together")
    if together:
        last = together[-1]
        size = last.settings["batch"]
        text += f" Measured: {style.milliseconds(last.median / size)} a token in a batch of {size:,}."
    return text


def _words(predicted: list[tuple], gain: Gain, made: list[Measurement]) -> str:
    lines = [
        f"Predicted, side by side: {limits_in_words(predicted, 'a batch of')}. All sequences share one reading of the "
        f"weights, so a token takes {predicted[0][1] * predicted[-1][0] / predicted[-1][1]:.1f} × less time in a batch of "
        f"{predicted[-1][0]:,}; each keeps a cache of its own."
    ]
    alone, together = _part(made, "batch", "one by one"), _part(made, "batch", "together")
    if alone and together:
        last = together[-1]
        a_token = last.median / last.settings["batch"]
        lines.append(
            f"Measured: {style.milliseconds(alone[0].median)} a token one by one, {style.milliseconds(a_token)} in a batch "
            f"of {last.settings['batch']:,}, {alone[0].median / a_token:.1f} × less; {last.check}."
        )
    lines.append(_gain_words(gain, made))
    first = _part(made, "first token", "contiguous")
    if first:
        lines.append(
            f"When only one token is asked, the cache gains nothing: the prompt's {first[0].settings['length']:,} rows are "
            f"new either way ({first[0].counts['ratio']:.2f} × measured)."
        )
    return "\n".join(lines)


def _gain_words(gain: Gain, made: list[Measurement]) -> str:
    """Up to which length nothing is gained, and which limit both steps have there."""
    ratios = [
        (n, without.seconds / cached.seconds, without.limit, cached.limit) for n, without, cached in gain
    ]
    source = "Predicted"
    measured = _part(made, "gain", "contiguous")
    if measured:
        by_length = {m.settings["length"]: m.counts["ratio"] for m in measured}
        limits = {
            m.settings["length"]: (m.settings["way"], m.limit) for m in made if m.settings["part"] == "gain"
        }
        without = {m.settings["length"]: m.limit for m in _part(made, "gain", "recompute")}
        ratios = [(n, r, without[n], limits[n][1]) for n, r in by_length.items()]
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
