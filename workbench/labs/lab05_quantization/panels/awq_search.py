"""The panel of quantize.awq_search: the error against α for every group of linears, and the scales that were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from workbench.experiments import Setting
from workbench.instruments.records import Measurement
from workbench.labs.lab05_quantization.awq_search import CHANNEL_VALUES, EXPERIMENT
from workbench.labs.lab05_quantization.panels.plots import COLOURS
from workbench.panels import style
from workbench.panels.chart import Axis, Chart, Drawing, Series, line, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import matching, nothing
from workbench.panels.view import View
from workbench.panels.words import listed

LINEARS = ("q, k, v", "o", "gate, up", "down")
LINES = {"q, k, v": style.WEIGHTS, "o": style.CACHE, "gate, up": style.COMPUTE, "down": style.TARGET}
MARKS = {"q, k, v": "o", "o": "s", "gate, up": "^", "down": "D"}
FAR = 100  # where channels are so far apart, their losses need a log axis
OTHER = (style.IDLE, "v")  # linears of other shapes


class AWQSearchPanel(KnobPanel):
    """Lab 05: how AWQ searches its scales: output error against α, and what the scale does to each channel.

    search=my_search: your curve is drawn beside ours.
    """

    experiment = EXPERIMENT
    draws_records = False
    knobs = (
        Setting("linears", "gate, up", "choice", choices=LINEARS, help="whose channels are shown"),
        Setting("channels", 16, "int", 4, 32, help="how many, those with the largest inputs"),
    )

    def view(self, settings: dict[str, Any]) -> View:
        knobs = self.knob_settings
        made = self.made(settings, ("planted", "layer", "bits", "group", "grid"))
        searches, yours = matching(made, measured="search"), matching(made, measured="yours")
        chosen = {
            m.settings["what"]: np.array(m.samples)
            for m in matching(made, measured="channel", linears=knobs["linears"])
        }
        is_whole = set(chosen) == set(CHANNEL_VALUES)
        order = np.argsort(chosen["input"])[::-1][: knobs["channels"]] if is_whole else np.array([], int)
        scales = chosen["scale"][order] if len(order) else order
        alt_text = f"Bars of the scales of {len(order)} channels of {knobs['linears']} and of what they lose"
        alt_text += f": scales {scales.min():.2f} to {scales.max():.2f}." if len(order) else "."
        return view(
            _curves(searches, yours, settings),
            Drawing(lambda axes: _draw_scales(axes, chosen, order, knobs), alt_text),
            Drawing(lambda axes: _draw_losses(axes, chosen, order)),
            height=5.0,
            boxes=[(0.12, 0.115, 0.35, 0.8), (0.615, 0.60, 0.37, 0.32), (0.615, 0.115, 0.37, 0.34)],
            table=table(
                searches,
                {
                    "linears": "{m.settings[linears]}",
                    "α": "{m.counts[alpha]:.2f}",
                    "error, rounded as it is": "{m.counts[error_rtn]:.3e}",
                    "scaled": "{m.counts[error]:.3e}",
                    "ranges narrowed too": "{m.counts[error_clipped]:.3e}",
                    "left of RTN's": "{m.counts[share_of_rtn]:.2f}",
                    "scales from": "{m.counts[smallest_scale]:.2f}",
                    "to": "{m.counts[largest_scale]:.2f}",
                    "folded": lambda m: "yes" if m.counts["is_folded"] else "no, divided when it comes",
                },
            ),
            caption=(
                f"Layer {settings['layer']}, {settings['bits']} bits, groups of {settings['group']}; errors of the "
                "outputs, relative"
            )
            + ("" if searches else "; Run searches"),
            words="\n".join([_words(searches, knobs, chosen, order), *_your_words(yours)]),
        )


def _shares(m: Measurement, rtn: float) -> list[tuple[float, float]]:
    """(α, error as a share of RTN's)."""
    return [(i / m.settings["grid"], error / rtn if rtn else 1.0) for i, error in enumerate(m.samples)]


def _curves(searches: Sequence[Measurement], yours: Sequence[Measurement], settings: dict[str, Any]) -> Chart:
    series: list[Series] = []
    for m in searches:
        name = m.settings["linears"]
        colour, mark = LINES.get(name, OTHER[0]), MARKS.get(name, OTHER[1])
        best = [(m.counts["alpha"], m.counts["share_of_rtn"])]
        look = {"linestyle": "", "marker": mark, "markersize": 8, "zorder": 4}
        series += [
            line(name, _shares(m, m.samples[0]), colour, zorder=3),
            line(f"{name}, best", best, colour, legend=False, **look),
        ]
    stars = {"linestyle": "", "marker": "*", "markersize": 5, "zorder": 5}
    for index, m in enumerate(yours):
        beside = [s.samples[0] for s in searches if s.settings["linears"] == m.settings["linears"]]
        shares = _shares(m, beside[0]) if beside else ()  # without RTN's error there is no share of it
        series.append(line("yours", shares, style.LEARNER, legend=not index, **stars))
    low = min((m.counts["share_of_rtn"] for m in searches), default=0.0)
    top = min(2.0, max([1.0, *(y for one in series for _, y in one.points)]))
    room = top - low

    def rtn(axes: Axes) -> None:
        if searches:
            axes.axhline(1, color=style.INK, linewidth=1.2, linestyle=(0, (1, 2)), zorder=2)
            style.write(axes, 0.99, 1 - 0.012 * room, "RTN", fontsize=10, ha="right", va="top")

    return Chart(
        *series,
        x=Axis("α, in s = (mean |x|)^α", limits=(-0.03, 1.0)),
        y=Axis(
            "output error, share of RTN's", lambda share: f"{share:.2f}", limits=(low - 0.1 * room, top + 0.25 * room)
        ),
        title=f"layer {settings['layer']}, {settings['bits']} bits",
        legend="upper left",
        legend_columns=2,
        also=rtn,
        empty="Run searches α",
    )


def _draw_scales(axes: Axes, chosen: dict[str, np.ndarray], order: np.ndarray, knobs: dict[str, Any]) -> None:
    style.label(axes, y="scale s", title=f"{knobs['linears']}: {knobs['channels']} channels")
    if not len(order):
        nothing(axes, "Run finds the scales")
        return
    at, s = np.arange(len(order)), chosen["scale"][order]
    axes.bar(at, s - 1, bottom=1, width=0.66, color=COLOURS["awq"], zorder=3)
    axes.axhline(1, color=style.INK, linewidth=0.9, zorder=2)
    _channel_axis(axes, order)
    room = max(0.05, float(s.max()) - 1)
    axes.set_ylim(min(1 - 0.1 * room, 0.97 * s.min()), 1 + 1.12 * room)


def _draw_losses(axes: Axes, chosen: dict[str, np.ndarray], order: np.ndarray) -> None:
    style.label(axes, x="channel", y="lost, of the output", title="what rounding its column loses")
    if not len(order):
        nothing(axes, "Run rounds with and without them")
        return
    at = np.arange(len(order))
    before, after = chosen["lost"][order], chosen["lost_scaled"][order]
    axes.bar(at - 0.2, before, width=0.38, color=style.IDLE, label="RTN", zorder=3)
    axes.bar(at + 0.2, after, width=0.38, color=COLOURS["awq"], label="scaled", zorder=3)
    _channel_axis(axes, order)
    both = np.concatenate([before, after])
    low, high = both[both > 0].min(initial=1.0), both.max(initial=1e-12)
    if high > FAR * low:
        ticks = [10.0**e for e in range(-12, 6) if low / 3 < 10.0**e < 20 * high]
        style.log_ticks(axes, "y", ticks[:: max(1, len(ticks) // 4)], text=_percent)
        axes.set_ylim(low / 3, 20 * high)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _percent(v)))
        axes.set_ylim(0, 1.3 * high)
    style.legend(axes, loc="upper right", ncols=2, handlelength=1.0, columnspacing=1.2)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _channel_axis(axes: Axes, order: np.ndarray) -> None:
    axes.set_xlim(-0.7, len(order) - 0.3)
    axes.set_xticks(range(len(order)), labels=[str(c) for c in order])
    axes.tick_params(axis="x", labelsize=10, labelrotation=0 if len(order) <= 12 else 90)
    axes.grid(visible=False, axis="x")


def _words(searches: Sequence[Measurement], knobs: dict[str, Any], chosen: dict, order: np.ndarray) -> str:
    if not searches:
        return (
            "At α = 0 nothing is scaled: RTN. The larger α, the more a channel with large inputs is scaled up before it"
            " is rounded, and the more its group's range is stretched for all others. Run tries every α on calibration"
            " text."
        )
    parts = [
        f"{m.settings['linears']} {m.counts['alpha']:.2f} ({m.counts['share_of_rtn']:.2f} of RTN's error)"
        for m in searches
    ]
    lines = [f"The best α: {listed(parts)}."]
    clipped = [f"{m.counts['error_clipped'] / m.counts['error_rtn']:.2f}" for m in searches if m.counts["error_rtn"]]
    if clipped:
        lines.append(
            f"With ranges narrowed as well, {listed(clipped)} of RTN's error is left: two remedies, and which of them"
            " does more depends on how far channels differ."
        )
    if len(order):
        before, after = chosen["lost"], chosen["lost_scaled"]
        share = len(order) / len(before)
        lines.append(
            f"The {len(order)} channels of {knobs['linears']} with the largest inputs are {share:.1%} of all; rounded"
            f" as they are, their columns lose {before[order].sum() / before.sum():.1%} of what all columns lose,"
            f" scaled {after[order].sum() / after.sum():.1%}. Their scales are {chosen['scale'][order].min():.2f} to"
            f" {chosen['scale'][order].max():.2f}; all others together lose {_change(before, after, order)}."
        )
    unfolded = [m.settings["linears"] for m in searches if not m.counts["is_folded"]]
    if unfolded:
        lines.append(
            f"For {listed(unfolded)} nothing before it can be divided by s, so its inputs are divided when they come."
        )
    return "\n".join(lines)


def _your_words(yours: Sequence[Measurement]) -> list[str]:
    return [f"Yours, {m.settings['linears']}: α {m.counts['alpha']:.2f}; {m.check.partition(': ')[2]}." for m in yours]


def _change(before: np.ndarray, after: np.ndarray, order: np.ndarray) -> str:
    """Of the channels that are not shown: '3.1% more than before'."""
    rest = np.ones(len(before), bool)
    rest[order] = False
    change = after[rest].sum() / before[rest].sum() - 1 if before[rest].sum() else 0.0
    return f"{abs(change):.1%} {'more' if change > 0 else 'less'} than before"
