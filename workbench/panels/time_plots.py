"""What the panels of lab 02 draw alike: measured lines with their spread, log axes, marked places."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.words import recorded_label

LIMIT_COLOURS = {"launch": style.IDLE, "bandwidth": style.WEIGHTS, "compute": style.COMPUTE}
REGIMES = {
    "launch": "launch-bound: starting the operations takes longer than what they do, so fewer bytes gain nothing",
    "bandwidth": "bandwidth-bound: reading weights and caches takes longest, so fewer bytes or more users a step help",
    "compute": "compute-bound: the arithmetic takes longest, so more users a step only wait longer",
}


def card_title(card: str) -> str:
    """A card by the name on its data sheet."""
    return PUBLISHED[card].name if card in PUBLISHED else card


def curve(
    axes: Axes,
    measured: Sequence[Measurement],
    x: Callable[[Measurement], float],
    *,
    colour: str,
    label: str,
    y: Callable[[float], float] = lambda seconds: seconds,
    recorded: bool = False,
) -> None:
    """A line through the medians; bars from the 10th to the 90th percentile where they were taken here."""
    at, middle = [x(m) for m in measured], [y(m.median) for m in measured]
    look = style.RECORDED if recorded else style.MEASURED
    name = f"{label}, {recorded_label(list(measured))}" if recorded else label
    axes.plot(at, middle, color=colour, label=name, zorder=3, **look)
    if recorded:
        return
    ends = [sorted((y(m.spread[0]), y(m.spread[1]))) for m in measured]
    bars = [[m - a for m, (a, _) in zip(middle, ends)], [b - m for m, (_, b) in zip(middle, ends)]]
    axes.errorbar(at, middle, yerr=bars, fmt="none", ecolor=colour, elinewidth=1.6, capsize=4, zorder=3)


def log_scale(axes: Axes, axis: str, values: Sequence[float], text: Callable[[float], str]) -> None:
    """A log axis around the values, with at most five ticks at 1, 2 and 5 (or at powers of ten)."""
    low, high = min(values) / 1.8, max(values) * 2.2
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    bases = (1, 2, 5) if last - first <= 3 else (1,)
    inside = [b * 10.0**e for e in range(first, last + 1) for b in bases if low <= b * 10.0**e <= high]
    if len(inside) > 5:
        inside = [t for t in inside if f"{t:e}"[0] == "1"]
    while len(inside) > 5:
        inside = inside[::2]
    style.log_ticks(axes, axis, inside, text=text)
    (axes.set_xlim if axis == "x" else axes.set_ylim)(low, high)


def name(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Name the axes and the plot. Where the title stands is said, not searched for, which saves a tenth of the
    drawing."""
    style.label(axes, x=x, y=y)
    axes.set_title("", loc="left", y=1.0)
    place = {"transform": axes.transAxes, "va": "bottom", "fontsize": style.sheet()["axes.titlesize"]}
    style.write(axes, 0.0, 1.03, title, **place)


def mark(axes: Axes, x: float, text: str, colour: str, *, height: float = 0.98) -> None:
    """A vertical line at x with its name (or none, "", where a plot beside it has it), where x lies inside the axis."""
    low, high = axes.get_xlim()
    if not low <= x <= high:
        return
    axes.axvline(x, color=colour, linewidth=1.4, linestyle=(0, (1, 2)), zorder=1)
    if not text:
        return
    right = math.log(x / low) > 0.6 * math.log(high / low)
    place = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 9}
    style.write(axes, x, height, f" {text} ", color=colour, ha="right" if right else "left", **place)


def rate(flop_per_s: float) -> str:
    """FLOP/s as people say them: 1.2e9 -> '1.2 GFLOP/s'."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flop_per_s >= factor:
            return f"{flop_per_s / factor:.3g} {unit}FLOP/s"
    return f"{flop_per_s:.3g} FLOP/s"


def short(number: float) -> str:
    """1234567 -> '1.23 M', for ticks."""
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def dollars(amount: float) -> str:
    """Three digits: '$0.0123', '$12.3', '$1,230'."""
    return f"${amount:,.0f}" if amount >= 1000 else f"${amount:.3g}"


def same_knobs(measured: Measurement, wanted: dict) -> bool:
    """Whether a measurement was taken with what the controls say now."""
    return all(measured.settings.get(name) == value for name, value in wanted.items())
