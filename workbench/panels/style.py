"""One visual language for all labs: what each colour and each line means, and figures that wear it.

Figures are matplotlib objects drawn with Agg. No pyplot, and the process-wide rcParams are neither read nor
written: a panel draws on its own thread, and a learner's `plt.style.use(...)` must not meet it half way.
"""

from __future__ import annotations

import functools
import io
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

FILE = Path(__file__).with_name("workbench.mplstyle")
WIDTH = 860  # of a picture on a page, in pixels of CSS
TALLEST = 5.4  # inches of a picture: with more, it is scaled down on a slide, and its letters are too small for a hall
LETTER = 0.56  # the width of a letter of DejaVu Sans, as a share of its size, on the average
_SVG_NAME = re.compile(r"\b([pmhiC])[0-9a-f]{10}\b")

# The same thing has the same colour everywhere (Okabe and Ito's palette: apart for every kind of colour sight).
WEIGHTS = "#0072B2"
CACHE = "#E69F00"
COMPUTE = "#CC79A7"
DRAFT = "#56B4E9"
TARGET = "#009E73"
PREFILL = WEIGHTS  # computing a prompt, and
DECODE = TARGET  # a token after another
LEARNER = "#D55E00"
IDLE = "#8A8F98"
LAUNCH = "#5D3A9B"  # starting operations: a launch, the dispatch of a call
INK = "#22272E"

PREDICTED: dict[str, Any] = {"linestyle": (0, (5, 3)), "linewidth": 2.0, "marker": ""}
MEASURED: dict[str, Any] = {"linestyle": "-", "linewidth": 2.0, "marker": "o", "markersize": 7}
RECORDED: dict[str, Any] = {
    "linestyle": ":",
    "linewidth": 1.2,
    "marker": "o",
    "markersize": 8,
    "markerfacecolor": "none",
}


@functools.cache
def sheet() -> dict[str, Any]:
    """The style file as a dictionary. Do not change it."""
    read: Any = mpl.rc_params_from_file(FILE, fail_on_error=True, use_default_template=False)
    return dict(read)


def new_figure(rows: int = 1, columns: int = 1, *, height: float | None = None, **subplots) -> tuple[Figure, list]:
    """A figure in the style with rows × columns axes, as (figure, flat list of axes). height in inches."""
    style = sheet()
    width, usual = style["figure.figsize"]
    figure = Figure(figsize=(width, height or usual), dpi=style["figure.dpi"], facecolor=style["figure.facecolor"])
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    for one in axes.flat:
        _dress(one)
    return figure, list(axes.flat)


def _dress(axes: Axes) -> None:
    style = sheet()
    axes.set_facecolor(style["axes.facecolor"])
    axes.set_axisbelow(True)
    axes.grid(visible=True, which="major", color=style["grid.color"], linewidth=style["grid.linewidth"], linestyle="-")
    for side, spine in axes.spines.items():
        spine.set(edgecolor=style["axes.edgecolor"], linewidth=style["axes.linewidth"])
        spine.set_visible(side in ("left", "bottom"))
    sides: tuple[Literal["x", "y"], ...] = ("x", "y")
    for axis in sides:
        axes.tick_params(
            axis=axis,
            which="both",
            color=style["axes.edgecolor"],
            labelcolor=style[f"{axis}tick.color"],
            labelsize=style[f"{axis}tick.labelsize"],
            labelfontfamily="DejaVu Sans",
        )


def label(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Name the axes (with units) and the plot, as plain text: a dollar sign is a dollar sign."""
    style = sheet()
    plain: dict[str, Any] = {"parse_math": False, "fontfamily": "DejaVu Sans"}
    axes.set_xlabel(
        wrapped(axes, x, style["axes.labelsize"]),
        color=style["axes.labelcolor"],
        fontsize=style["axes.labelsize"],
        **plain,
    )
    axes.set_ylabel(y, color=style["axes.labelcolor"], fontsize=style["axes.labelsize"], **plain)
    axes.set_title(
        wrapped(axes, title, style["axes.titlesize"]),
        loc="left",
        color=style["text.color"],
        fontsize=style["axes.titlesize"],
        fontweight="normal",
        **plain,
    )


def wrapped(axes: Axes, text: str, size: float) -> str:
    """The text in as many lines as it takes beside or under these axes, in letters of `size` points."""
    figure: Any = axes.figure
    inches = axes.get_position().width * figure.get_size_inches()[0]
    return textwrap.fill(text, max(12, int(inches / (LETTER * size / 72)))) if text else ""


def legend(axes: Axes, **place) -> None:
    """The legend, if anything has a label. loc: matplotlib's, or "above" for a place over a plot without a title."""
    if not axes.get_legend_handles_labels()[0]:
        return
    if place.get("loc") == "above":
        place |= {"loc": "lower left", "bbox_to_anchor": (0, 1.01), "borderaxespad": 0}
    style = sheet()
    box = axes.legend(
        prop=FontProperties(family="DejaVu Sans", size=style["legend.fontsize"]),
        labelcolor=style["legend.labelcolor"],
        facecolor=style["legend.facecolor"],
        edgecolor=style["legend.edgecolor"],
        framealpha=style["legend.framealpha"],
        frameon=True,
        fancybox=False,
        shadow=False,
        **place,
    )
    for text in box.get_texts():
        text.set_parse_math(False)


def log_ticks(axes: Axes, axis: str, values: Sequence[float], text=lambda v: f"{v:,.0f}") -> None:
    """A log axis with ticks exactly at `values`, written out as people read them."""
    getattr(axes, f"set_{axis}scale")("log", base=2 if axis == "x" else 10)
    chosen = getattr(axes, f"{axis}axis")
    chosen.set_major_locator(FixedLocator(list(values)))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def write(axes: Axes, x: float, y: float, text: str, **look) -> Text:
    """Plain text at a place: never mathematics, whatever characters it holds."""
    look = {"color": sheet()["text.color"], "fontsize": 10, "fontfamily": "DejaVu Sans", **look}
    return axes.text(x, y, drawable(text), parse_math=False, **look)


@functools.cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap())


def drawable(text: str) -> str:
    """The text with each character that the font lacks spelled out, as \\u4e2d."""
    known = _glyphs()
    return "".join(c if c == "\n" or ord(c) in known else c.encode("unicode_escape").decode() for c in text)


def lay_out(figure: Figure) -> None:
    """Lay the figure out now, and not again with every drawing of it: that takes as long as the drawing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes, with two pixels for each of a page on which it is `WIDTH` wide."""
    lay_out(figure)
    out = io.BytesIO()
    how: dict[str, Any] = {"metadata": {"Software": None}, "pil_kwargs": {"compress_level": 6}}
    dpi = 2 * WIDTH / figure.get_figwidth()
    figure.canvas.print_figure(out, format="png", dpi=dpi, facecolor=figure.get_facecolor(), **how)
    return out.getvalue()


def svg(figure: Figure) -> bytes:
    """The figure as SVG bytes: half of a PNG's, drawn in half the time, and sharp at any size. Letters are outlines, so
    the page needs no font. The same figure gives the same bytes: names that are drawn by chance are numbered."""
    lay_out(figure)
    out = io.StringIO()
    figure.canvas.print_figure(
        out, format="svg", facecolor=figure.get_facecolor(), metadata={"Date": None, "Creator": None}
    )
    numbers: dict[str, str] = {}
    text = _SVG_NAME.sub(lambda name: numbers.setdefault(name[0], f"{name[1]}n{len(numbers)}"), out.getvalue())
    return text.encode()


def milliseconds(seconds: float) -> str:
    """0.00123 -> '1.23 ms'; 12.3 -> '12.3 s'; three digits, the unit that suits."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 1:
            value = seconds * factor
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"
