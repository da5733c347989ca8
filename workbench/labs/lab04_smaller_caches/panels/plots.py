"""What the panels of lab 04 draw alike: one colour and one mark for each variant, bars of bytes, words for designs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    "int8 as codes": "#A3A32E",
    "fp8 as codes": "#73741B",
    "int4 as codes": "#45460E",
    "mha native": "#3D6E8F",
    "int8 native": "#2E8B7A",
    "int4 native": "#14483F",
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
    "int8 as codes": "H",
    "fp8 as codes": "8",
    "int4 as codes": "p",
    "mha native": "$o$",
    "int8 native": "$8$",
    "int4 native": "$4$",
    "yours": "*",
}


def bars_of_ways(
    axes: Axes,
    names: Sequence[str],
    labels: Sequence[str],
    values: Sequence[float],
    title: str,
    text: Callable[[float], str] = readable_bytes,
) -> None:
    """A horizontal bar each, in the colours of the ways, with its name and its value: the legend of a plot beside
    it."""
    at = range(len(names))
    top = max(values)
    axes.barh(at, values, height=0.36, color=[COLOURS[n] for n in names], zorder=3)
    for y, name, label, value in zip(at, names, labels, values):
        axes.plot([0], [y - 0.36], marker=MARKS[name], markersize=6, color=COLOURS[name], clip_on=False, zorder=4)
        style.write(axes, 0.03 * top, y - 0.36, f"{label}: {text(value)}", va="center", fontsize=10)
    axes.set_xlim(0, top * 1.02)
    axes.set_ylim(len(names) - 0.5, -0.75)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    style.label(axes, title=title)


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
