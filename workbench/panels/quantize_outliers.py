"""The panel of quantize.outliers: the channels as they are and planted, and what every method loses on either model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.experiments.quantize_outliers import (
    ORIGINAL,
    PLANTED,
    REFERENCE,
    SELECTIONS,
    SMOOTHED,
    TITLES,
)
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.quantize_plots import COLOURS, MARKS, NOTE
from workbench.panels.smaller_plots import listed
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View
from workbench.panels.words import recorded_label

KNOBS = ("channels", "factor", "group", "threshold", "alpha", "context", "passages")
LOOKS = {
    ORIGINAL: {"color": style.IDLE, "marker": "o"},
    PLANTED: {"color": style.LEARNER, "marker": "^"},
    SMOOTHED: {"color": COLOURS["smoothquant"], "marker": MARKS["smoothquant"]},
}
LINEAR_TO = 0.01  # nats: the axis is linear up to here, logarithmic from here
BREAKS = 0.05  # nats a token that outliers add, from which a method is said to break
TICKS = (-0.01, 0, 0.01, 0.1, 1.0, 10.0)

Losses = dict[tuple[str, str], Measurement]  # by method and weights


class OutliersPanel(Panel):
    """Inputs by channel, and held-out loss above float32 by method: the model as it is against the planted one."""

    experiment_name = "quantize.outliers"

    def view(self, settings: dict[str, Any]) -> View:
        made = [m for m in self.measurements if same_knobs(m, {key: settings[key] for key in KNOBS})]
        shown, live = (made, True) if made else (self.record, False)
        losses, recorded = _losses(made), _losses(self.record)
        figure, (channels, dots) = style.new_figure(1, 2, height=4.8)
        channels.set_position([0.09, 0.12, 0.29, 0.8])
        dots.set_position([0.605, 0.12, 0.38, 0.8])
        _draw_channels(channels, shown, settings["threshold"], live)
        _draw_dots(dots, SELECTIONS[settings["methods"]], losses, recorded, self.record)
        either = losses or recorded
        return View(
            figure=figure,
            alt=_alt(settings, either, live),
            header=[
                "method",
                "bits a weight",
                "original, above float32",
                "planted, above float32",
                "in 16 bits",
            ],
            rows=[_row(name, either) for name in TITLES if (name, ORIGINAL) in either],
            caption="Nats a token of held-out text, ± standard error" + ("" if live else "; recorded"),
            words=_words(settings, shown, either, live),
        )


def _losses(taken: Sequence[Measurement]) -> Losses:
    return {
        (m.settings["method"], m.settings["weights"]): m for m in taken if m.settings["measured"] == "loss"
    }


def _channels(taken: Sequence[Measurement]) -> dict[str, Measurement]:
    return {m.settings["weights"]: m for m in taken if m.settings["measured"] == "channels"}


def _nothing(axes: Axes, text: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    style.write(axes, 0.5, 0.5, text, color=NOTE, transform=axes.transAxes, ha="center", va="center")


def _draw_channels(axes: Axes, taken: Sequence[Measurement], threshold: float, live: bool) -> None:
    """The largest input of each channel, the largest channels first, with the threshold as a line."""
    found = _channels(taken)
    linear = next(iter(found.values())).settings["linear"].split(".") if found else None
    where = f", layer {linear[1]}, before {linear[-1]}" if linear else ""
    style.label(axes, x="channels, the largest first", y="largest |x|", title=f"inputs{where}")
    if not found:
        _nothing(axes, "Run looks at every channel")
        return
    every = np.concatenate([m.samples for m in found.values()])
    for weights, m in found.items():
        sizes = np.sort(m.samples)[::-1]
        face = {} if live else {"markerfacecolor": "none"}
        axes.plot(np.arange(1, len(sizes) + 1), np.maximum(sizes, 1e-6), linestyle="", markersize=5,
                  label=weights, **LOOKS[weights], **face)  # fmt: skip
    width = len(next(iter(found.values())).samples)
    places = [2**e for e in range(14) if 2**e <= width]
    style.log_ticks(axes, "x", places if len(places) < 8 else places[::2])
    axes.set_xlim(0.8, width * 1.2)
    low, high = max(float(every.min()), 1e-3) / 2, float(every.max()) * 8
    style.log_ticks(
        axes, "y", [10.0**e for e in range(-3, 6) if low <= 10.0**e <= high], text=lambda v: f"{v:g}"
    )
    axes.set_ylim(low, high)
    axes.axhline(threshold, color=COLOURS["llm_int8"], linewidth=1.4, linestyle=(0, (1, 2)), zorder=2)
    style.write(
        axes, width * 1.1, threshold * 1.06, f"threshold {threshold:g}", ha="right", va="bottom", fontsize=9
    )
    style.legend(axes, loc="upper right", handletextpad=0.3)


def _draw_dots(axes: Axes, names: Sequence[str], losses: Losses, recorded: Losses, record) -> None:
    """A line a method, from what it loses on the model as it is to what it loses on the planted one."""
    note = f" (hollow: {recorded_label(record)})" if recorded else ""
    style.label(axes, x="nats a token above float32", title=f"original and planted{note}")
    axes.set_yticks(range(len(names)), labels=[TITLES[name] for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    if not losses and not recorded:
        axes.set_xticks([])
        style.write(
            axes, 0.5, 0.5, "Run quantizes both models", color=NOTE, transform=axes.transAxes, ha="center"
        )
        return
    axes.set_xscale("symlog", linthresh=LINEAR_TO, linscale=0.6)
    for y, name in enumerate(names):
        for found, live in ((recorded, False), (losses, True)):
            pair = [(w, found[name, w]) for w in (ORIGINAL, PLANTED) if (name, w) in found]
            if len(pair) == 2 and live:
                ends = [m.counts["excess"] for _, m in pair]
                axes.plot(ends, [y, y], color=style.sheet()["grid.color"], linewidth=3, zorder=2)
            for weights, m in pair:
                look = (
                    LOOKS[weights] if live else LOOKS[weights] | {"markerfacecolor": "none", "markersize": 10}
                )
                axes.errorbar([m.counts["excess"]], [y], xerr=[m.counts["excess_standard_error"]] if live else None,
                              linestyle="", capsize=3, zorder=4, **look)  # fmt: skip
        both = losses or recorded
        if (name, PLANTED) in both:
            excess = both[name, PLANTED].counts["excess"]
            style.write(
                axes,
                max(excess, 0),
                y - 0.2,
                f"{excess:+.4f}" if abs(excess) < 0.1 else f"{excess:+.2f}",
                fontsize=8.5,
                ha="center",
                va="bottom",
            )
    largest = max(m.counts["excess"] for m in (*losses.values(), *recorded.values()))
    axes.set_xlim(-0.02, max(4 * largest, 0.1))
    axes.set_xticks(
        [t for t in TICKS if t <= 4 * largest], labels=[f"{t:g}" for t in TICKS if t <= 4 * largest]
    )
    axes.minorticks_off()
    axes.axvline(0, color=style.INK, linewidth=0.9, zorder=1)


def _above(m: Measurement) -> str:
    return f"{m.counts['excess']:+.4f} ± {m.counts['excess_standard_error']:.4f}"


def _row(name: str, losses: Losses) -> list[str]:
    original, planted = losses[name, ORIGINAL], losses.get((name, PLANTED))
    counts = (planted or original).counts
    share = counts.get("share_in_16_bits")
    return [
        TITLES[name],
        f"{counts['bits_per_weight']:.2f}",
        _above(original),
        _above(planted) if planted else "",
        "" if share is None else f"{share:.1%} of the weights",
    ]


def _alt(settings: dict[str, Any], losses: Losses, live: bool) -> str:
    head = (
        f"Largest input of each channel, with {settings['channels']} outlier channels planted {settings['factor']:g} "
        "times larger and without; beside it dots of held-out loss above float32, a line a method. "
    )
    parts = [
        f"{TITLES[name]} {m.counts['excess']:+.3f} on the {weights} model"
        for (name, weights), m in losses.items()
        if name in TITLES
    ]
    if not parts:
        return head + "Nothing measured yet."
    return head + f"{'Measured' if live else 'Recorded'}, nats a token: {'; '.join(parts)}."


def _words(settings: dict[str, Any], shown: Sequence[Measurement], losses: Losses, live: bool) -> str:
    lines = [
        f"{settings['channels']} channels behind every norm are made {settings['factor']:g} times larger, and the columns "
        "that read them as many times smaller: planted, in a model that has no outliers of its own. It computes the same."
    ]
    if not shown:
        return "\n".join([*lines, "Run quantizes the model as it is and the planted one."])
    if not live:
        lines.append(f"What is drawn was {recorded_label(list(shown))}.")
    lines += _channel_words(_channels(shown))
    pairs = {
        name: (losses[name, ORIGINAL], losses[name, PLANTED])
        for name in TITLES
        if (name, PLANTED) in losses and (name, ORIGINAL) in losses
    }
    if pairs:
        lines.append(
            f"Perplexity in {REFERENCE}: {losses[REFERENCE, PLANTED].counts['perplexity']:.3f}, planted or not."
        )
        lines += _verdicts(pairs)
    return "\n".join(lines)


def _channel_words(found: dict[str, Measurement]) -> list[str]:
    if len(found) < 3:
        return []
    original, planted, smoothed = (found[w].counts for w in (ORIGINAL, PLANTED, SMOOTHED))
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
            f"Broken by the outliers: {listed(broken)}. Where inputs are rounded, the outlier of a token takes all steps for "
            "itself; where weights are rounded in groups, the small columns round to nothing, and just these meet large inputs."
        )
    if held:
        lines.append(f"Not broken, by less than {BREAKS:g} nats: {listed(held)}.")
    return lines
