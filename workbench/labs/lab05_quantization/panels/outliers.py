"""The panel of quantize.outliers: the channels as they are and planted, and what every method loses on either model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab05_quantization.outliers import (
    EXPERIMENT,
    ORIGINAL,
    PLANTED,
    REFERENCE,
    SELECTIONS,
    SMOOTHED,
    TITLES,
)
from workbench.labs.lab05_quantization.panels.plots import COLOURS, MARKS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Drawing, line, table, view
from workbench.panels.plots import matching, write_middle
from workbench.panels.view import View
from workbench.panels.words import listed, recorded_label

KNOBS = ("channels", "factor", "group", "threshold", "alpha", "context", "passages")
LOOKS: dict[str, dict[str, Any]] = {
    ORIGINAL: {"colour": style.IDLE, "marker": "o"},
    PLANTED: {"colour": style.LEARNER, "marker": "^"},
    SMOOTHED: {"colour": COLOURS["smoothquant"], "marker": MARKS["smoothquant"]},
}
LINEAR_TO = 0.01  # nats: the axis is linear up to here, logarithmic from here
BREAKS = 0.05  # nats per token that outliers add, from which a method is said to break
TICKS = (-0.01, 0, 0.01, 0.1, 1.0, 10.0)

Losses = dict[tuple[str, str], Measurement]  # by method and weights


class OutliersPanel(Panel):
    """Lab 05: outlier channels planted: what breaks, and what LLM.int8(), SmoothQuant and AWQ rescue."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        shown, live = (made, True) if made else (self.record, False)
        losses, recorded = _losses(made), _losses(self.record)
        either = losses or recorded
        parts = [
            f"{TITLES[name]} {m.counts['excess']:+.3f} on the {weights} model"
            for (name, weights), m in either.items()
            if name in TITLES
        ]
        alt_text = "Dots of held-out loss above float32, a line a method. " + (
            f"{'Measured' if live else 'Recorded'}, nats per token: {'; '.join(parts)}."
            if parts
            else "Nothing measured yet."
        )
        methods = SELECTIONS[settings["methods"]]
        return view(
            _channels_chart(_channels(shown), settings, live),
            Drawing(lambda axes: _draw_dots(axes, methods, losses, recorded), alt_text),
            height=4.8,
            boxes=[(0.11, 0.15, 0.28, 0.74), (0.66, 0.15, 0.32, 0.74)],
            table=table(
                [name for name in TITLES if (name, ORIGINAL) in either],
                {
                    "method": lambda name: TITLES[name],
                    "bits per weight": lambda name: f"{_last(either, name).counts['bits_per_weight']:.2f}",
                    "original, above float32": lambda name: _above(either[name, ORIGINAL]),
                    "planted, above float32": lambda name: _above(either.get((name, PLANTED))),
                    "in 16 bits": lambda name: _in_16_bits(_last(either, name)),
                },
            ),
            caption="Nats a token of held-out text, ± standard error" + ("" if live else "; recorded"),
            words=_words(settings, shown, either, live),
        )


def _losses(taken: Sequence[Measurement]) -> Losses:
    return {(m.settings["method"], m.settings["weights"]): m for m in matching(taken, measured="loss")}


def _channels(taken: Sequence[Measurement]) -> dict[str, Measurement]:
    return {m.settings["weights"]: m for m in matching(taken, measured="channels")}


def _channels_chart(channels: dict[str, Measurement], settings: dict[str, Any], live: bool) -> Chart:
    """The largest input of each channel, the largest channels first, with the threshold as a line."""
    linear = next((m.settings["linear"].split(".") for m in channels.values()), None)
    where = f", layer {linear[1]}, before {linear[-1]}" if linear else ""
    threshold = settings["threshold"]
    look = {"linestyle": "", "markersize": 5} | ({} if live else {"markerfacecolor": "none"})
    width = max((len(m.samples) for m in channels.values()), default=1)
    smallest = min((size for m in channels.values() for size in m.samples), default=1.0)
    places = [2**e for e in range(14) if 2**e <= width]

    def draw_threshold(axes: Axes) -> None:
        if channels:
            axes.axhline(threshold, color=COLOURS["llm_int8"], linewidth=1.4, linestyle=(0, (1, 2)), zorder=2)
            text = f"threshold {threshold:g}"
            style.write(axes, width * 1.1, threshold * 1.06, text, ha="right", va="bottom", fontsize=10)

    return Chart(
        *(
            line(
                weights,
                [(i, max(size, 1e-6)) for i, size in enumerate(sorted(m.samples, reverse=True), start=1)],
                **(LOOKS[weights] | look),
            )
            for weights, m in channels.items()
        ),
        x=Axis("channels, the largest first", scale="log", ticks=places if len(places) < 8 else places[::2]),
        y=Axis("largest |x|", scale="log", room=(2, 8), limits=(max(smallest, 1e-3) / 2, None)),
        title=f"inputs{where}",
        legend="upper right",
        also=draw_threshold,
        empty="Run looks at every channel",
    )


def _draw_dots(axes: Axes, names: Sequence[str], losses: Losses, recorded: Losses) -> None:
    """A line a method, from what it loses on the model as it is to what it loses on the planted one."""
    note = " (hollow: recorded)" if recorded else ""
    style.label(axes, x="nats per token above float32", title=f"original and planted{note}")
    axes.set_yticks(range(len(names)), labels=[TITLES[name] for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    if not losses and not recorded:
        axes.set_xticks([])
        write_middle(axes, "Run quantizes both models")
        return
    axes.set_xscale("symlog", linthresh=LINEAR_TO, linscale=0.6)
    for y, name in enumerate(names):
        for found, live in ((recorded, False), (losses, True)):
            pair = [(w, found[name, w]) for w in (ORIGINAL, PLANTED) if (name, w) in found]
            if len(pair) == 2 and live:
                ends = [m.counts["excess"] for _, m in pair]
                axes.plot(ends, [y, y], color=style.sheet()["grid.color"], linewidth=3, zorder=2)
            for weights, m in pair:
                look = LOOKS[weights] | ({} if live else {"markerfacecolor": "none", "markersize": 10})
                look = {"color": look["colour"], **{k: v for k, v in look.items() if k != "colour"}, "zorder": 4}
                error = [m.counts["excess_standard_error"]] if live else None
                axes.errorbar([m.counts["excess"]], [y], xerr=error, linestyle="", capsize=3, **look)
        both = losses or recorded
        if (name, PLANTED) in both:
            excess = both[name, PLANTED].counts["excess"]
            text = f"{excess:+.4f}" if abs(excess) < 0.1 else f"{excess:+.2f}"
            style.write(axes, max(excess, 0), y - 0.2, text, fontsize=10, ha="center", va="bottom")
    largest = max(m.counts["excess"] for m in (*losses.values(), *recorded.values()))
    axes.set_xlim(-0.02, max(4 * largest, 0.1))
    axes.set_xticks([t for t in TICKS if t <= 4 * largest], labels=[f"{t:g}" for t in TICKS if t <= 4 * largest])
    axes.minorticks_off()
    axes.axvline(0, color=style.INK, linewidth=0.9, zorder=1)


def _above(m: Measurement | None) -> str:
    return f"{m.counts['excess']:+.4f} ± {m.counts['excess_standard_error']:.4f}" if m else ""


def _last(losses: Losses, name: str) -> Measurement:
    """Of the planted model, where it was measured."""
    return losses.get((name, PLANTED)) or losses[name, ORIGINAL]


def _in_16_bits(m: Measurement) -> str:
    share = m.counts.get("share_in_16_bits")
    return "" if share is None else f"{share:.1%} of the weights"


def _words(settings: dict[str, Any], shown: Sequence[Measurement], losses: Losses, live: bool) -> str:
    lines = [
        f"{settings['channels']} channels behind every norm are made {settings['factor']:g} times larger, and the"
        " columns that read them as many times smaller: planted, in a model that has no outliers of its own. It"
        " computes the same."
    ]
    if not shown:
        return "\n".join([*lines, "Run quantizes the model as it is and the planted one."])
    if not live:
        lines.append(f"What is drawn was {recorded_label(shown)}.")
    lines += _channel_words(_channels(shown))
    pairs = {
        name: (losses[name, ORIGINAL], losses[name, PLANTED])
        for name in TITLES
        if (name, PLANTED) in losses and (name, ORIGINAL) in losses
    }
    if (REFERENCE, PLANTED) in losses:
        perplexity = losses[REFERENCE, PLANTED].counts["perplexity"]
        lines.append(f"Perplexity in {REFERENCE}: {perplexity:.3f}, planted or not.")
    if pairs:
        lines += _verdicts(pairs)
    return "\n".join(lines)


def _channel_words(channels: dict[str, Measurement]) -> list[str]:
    if len(channels) < 3:
        return []
    original, planted, smoothed = (channels[w].counts for w in (ORIGINAL, PLANTED, SMOOTHED))
    return [
        f"The largest input channel is {original['largest_to_median']:.1f} times the median one in the model as it is, "
        f"{planted['largest_to_median']:.0f} times once planted, {smoothed['largest_to_median']:.1f} times after "
        f"SmoothQuant. Above the threshold: {original['channels_above_threshold']} of these channels, then "
        f"{planted['channels_above_threshold']}. Not planted, and above it all the same: "
        f"{original['share_above_threshold_elsewhere']:.0%} of the inputs of o and down, which stand behind no norm."
    ]


def _verdicts(pairs: dict[str, tuple[Measurement, Measurement]]) -> list[str]:
    """Which methods the outliers break, and which they do not."""
    added = {name: p.counts["excess"] - o.counts["excess"] for name, (o, p) in pairs.items()}
    broken = [f"{TITLES[name]} ({more:+.3f} nats)" for name, more in added.items() if more > BREAKS]
    held = [f"{TITLES[name]} ({more:+.4f})" for name, more in added.items() if more <= BREAKS]
    lines = []
    if broken:
        lines.append(
            f"Broken by the outliers: {listed(broken)}. Where inputs are rounded, the outlier of a token takes all"
            " steps for itself; where weights are rounded in groups, the small columns round to nothing, and just"
            " these meet large inputs."
        )
    if held:
        lines.append(f"Not broken, by less than {BREAKS:g} nats: {listed(held)}.")
    return lines
