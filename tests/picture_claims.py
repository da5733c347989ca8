"""What every picture claims: no text is cut or lies on another, none is too small for a hall, no legend hides a curve.

assert picture_problems(figure) == []
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

# A picture is as wide as the page: 848 pixels in a window of 1280 beside JupyterLab's file browser.
PAGE = 848  # CSS pixels
MIN_PIXELS = 16  # of a letter's size there
MIN_PROJECTED = 24  # with the projector switch, in a window of 1280
MIN_SLIDE = 24  # on a slide of 1920 × 1080, where the picture of a live panel has this room:
SLIDE = (1245, 933)  # CSS pixels
EDGE = 1.5  # pixels of the figure that a letter may reach beyond it
OVERLAP = 0.12  # of the smaller text's area
REACH = 0.05  # of a text's area, over another plot


def picture_problems(figure: Figure) -> list[str]:
    """What is wrong with a figure, in words; [] where nothing is."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = sorted(_texts(figure, canvas), key=lambda one: one[1].x0)
    problems = [
        *_small(figure, texts),
        *_cut(figure, texts),
        *_overlapping(texts, figure.dpi),
        *_in_another_plot(figure, texts),
        *_hidden(figure, canvas),
        *_on_points(figure, canvas),
    ]
    return sorted(set(problems))


def cut_or_small(figure: Figure) -> list[str]:
    """Of these what no measured value decides: where points lie, legends and names may meet them, and no test of
    a live run can hold that."""
    known = ("is cut", "lies in another plot")
    return [one for one in picture_problems(figure) if one.endswith(known) or " points, below " in one]


def _texts(figure: Figure, canvas: FigureCanvasAgg) -> Iterator[tuple[Text, Bbox]]:
    """Texts that are drawn, and where. A tick outside its axis is kept by matplotlib, and not drawn."""
    renderer: Any = canvas.get_renderer()
    outside = {id(text) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in _outside(axis)}
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_text().strip() and text.get_visible() and id(text) not in outside:
            box = text.get_window_extent(renderer)
            if box.width > 0 and box.height > 0:
                yield text, box


def _outside(axis: Axis) -> Iterator[Text]:
    low, high = sorted(axis.get_view_interval())
    edge = 1e-9 * (high - low)
    for tick in (*axis.majorTicks, *axis.minorTicks):
        if not low - edge <= tick.get_loc() <= high + edge or not axis.axes.get_visible():
            yield from (tick.label1, tick.label2)


def _small(figure: Figure, texts: list[tuple[Text, Bbox]]) -> Iterator[str]:
    wide, high = figure.get_size_inches()
    on_slide = min(SLIDE[0] / wide, SLIDE[1] / high)  # pixels of an inch
    smallest = 72 * max(MIN_PIXELS / (PAGE / wide), MIN_PROJECTED / (1280 / wide), MIN_SLIDE / on_slide)
    for text, _ in texts:
        if text.get_fontsize() < smallest - 0.05:
            yield f"{_name(text)} is {text.get_fontsize():.1f} points, below {smallest:.1f}"


def _cut(figure: Figure, texts: list[tuple[Text, Bbox]]) -> Iterator[str]:
    whole = figure.bbox
    for text, box in texts:
        if box.x0 < -EDGE or box.y0 < -EDGE or box.x1 > whole.x1 + EDGE or box.y1 > whole.y1 + EDGE:
            yield f"{_name(text)} is cut"


def _overlapping(texts: list[tuple[Text, Bbox]], dpi: float) -> Iterator[str]:
    for (one, a), (other, b) in combinations(texts, 2):
        width = min(a.x1, b.x1) - max(a.x0, b.x0)
        height = min(a.y1, b.y1) - max(a.y0, b.y0)
        letter = 0.25 * min(one.get_fontsize(), other.get_fontsize()) * dpi / 72
        if (
            width > letter
            and height > letter
            and width * height > OVERLAP * min(a.width * a.height, b.width * b.height)
        ):
            yield f"{_name(one)} and {_name(other)} overlap"


def _hidden(figure: Figure, canvas: FigureCanvasAgg) -> Iterator[str]:
    """Points of curves under the legend of their axes."""
    renderer: Any = canvas.get_renderer()
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is None or not legend.get_visible():
            continue
        box = legend.get_window_extent(renderer)
        for line in axes.lines:
            if line.get_label() == "_nolegend_" or (line.get_label().startswith("_") and len(line.get_xdata()) <= 2):
                continue  # the ends of a spread; a level, a mark
            points = line.get_transform().transform(line.get_xydata())
            points = points[np.isfinite(points).all(axis=1)]
            inside = (
                (points[:, 0] > box.x0) & (points[:, 0] < box.x1) & (points[:, 1] > box.y0) & (points[:, 1] < box.y1)
            )
            if inside.any():
                yield f"the legend covers {int(inside.sum())} points of {line.get_label()!r}"


def _in_another_plot(figure: Figure, texts: list[tuple[Text, Bbox]]) -> Iterator[str]:
    """Names of one plot that reach over the axes of its neighbour."""
    for axes in figure.axes:
        if axes.get_visible():
            own = {id(text) for text in axes.findobj(Text)}
            for text, box in texts:
                inside = Bbox.intersection(box, axes.get_window_extent())
                if id(text) not in own and inside and inside.width * inside.height > REACH * box.width * box.height:
                    yield f"{_name(text)} lies in another plot"


def _on_points(figure: Figure, canvas: FigureCanvasAgg) -> Iterator[str]:
    """What is written over measured points of its plot."""
    renderer: Any = canvas.get_renderer()
    for axes in figure.axes:
        texts = [text for text in axes.texts if text.get_visible() and text.get_text().strip()]
        for line in axes.lines:
            if line.get_marker() in ("", " ", "None", "|", None):
                continue
            points = line.get_transform().transform(line.get_xydata())
            for text in texts:
                box = text.get_window_extent(renderer)
                if any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for x, y in points):
                    yield f"{_name(text)} is written over points of {line.get_label()!r}"


def _name(text: Text) -> str:
    return repr(text.get_text()[:40])
