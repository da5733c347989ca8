"""What the panels of lab 04 draw alike: one colour and one mark for each variant, bars of bytes, words for designs."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from workbench.instruments.memory import readable_bytes
from workbench.panels import style

# A variant has one colour in all pictures; what is done to its cache (a form, a format) is a shade of it.
COLOURS = {
    "mha": style.CACHE,
    "gqa": style.DRAFT,
    "mqa": "#332288",
    "mla": style.COMPUTE,
    "hybrid": style.TARGET,
    "shared": style.IDLE,
    "mla re-expanded": "#8C3F6B",
    "mla kept expanded": "#E2A9CB",
    "int8": "#B57A00",
    "fp8": "#855A00",
    "int4": "#573B00",
    "yours": style.LEARNER,
}
MARKS = {
    "mha": "o",
    "gqa": "s",
    "mqa": "^",
    "mla": "D",
    "hybrid": "v",
    "shared": "P",
    "mla re-expanded": "X",
    "mla kept expanded": "d",
    "int8": "h",
    "fp8": "<",
    "int4": ">",
    "yours": "*",
}
PALE = "#E5E7EB"  # what is not there: places that are free, positions that are forgotten


def bars_of_bytes(axes: Axes, names: Sequence[str], labels: Sequence[str], values: Sequence[float]) -> None:
    """A horizontal bar each, in the colours of the ways, with its name and its bytes: the legend of a plot beside it."""
    at = range(len(names))
    top = max(values)
    axes.barh(at, values, height=0.36, color=[COLOURS[n] for n in names], zorder=3)
    for y, name, label, value in zip(at, names, labels, values):
        axes.plot(
            [0], [y - 0.36], marker=MARKS[name], markersize=6, color=COLOURS[name], clip_on=False, zorder=4
        )
        style.write(
            axes, 0.03 * top, y - 0.36, f"{label}: {readable_bytes(value)}", va="center", fontsize=9.5
        )
    axes.set_xlim(0, top * 1.02)
    axes.set_ylim(len(names) - 0.5, -0.75)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def apart(points: Sequence[tuple[float, float]], *, near: float, gap: float) -> list[float]:
    """Heights for labels beside points (x, y), all in shares of the axes: moved as little as keeps labels of points
    closer than `near` in x at least `gap` from each other."""
    placed: list[tuple[float, float, int]] = []
    for at in sorted(range(len(points)), key=lambda i: points[i][1]):
        x, y = points[at]
        below = [other for other_x, other, _ in placed if abs(other_x - x) < near]
        placed.append((x, max([y, *(other + gap for other in below)]), at))
    heights = {at: y for _, y, at in placed}
    return [heights[i] for i in range(len(points))]


def flop_words(flops: float) -> str:
    """4.31e9 -> '4.31 GFLOP'."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}FLOP"
    return f"{flops:.3g} FLOP"


def listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
