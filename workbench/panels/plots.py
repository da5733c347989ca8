"""What panels draw alike: marked places, cells, words in a picture; what they pick; and words for quantities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.transforms import ScaledTranslation

from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.stage import tell

LIMIT_COLOURS = {"launch": style.LAUNCH, "bandwidth": style.WEIGHTS, "compute": style.COMPUTE}
# of weights: the fewer bits, the paler
FORMAT_COLOURS = {"float32": style.INK, "bfloat16": style.WEIGHTS, "int8": "#6E9CC0", "int4": "#B5CBDD"}
REGIMES = {
    "launch": "launch-bound: starting the operations takes longer than what they do, so fewer bytes gain nothing",
    "bandwidth": "bandwidth-bound: reading weights and caches takes longest, so fewer bytes or more users a step help",
    "compute": "compute-bound: the arithmetic takes longest, so more users a step only wait longer",
}


def card_title(card: str) -> str:
    """A card by the name on its data sheet."""
    return PUBLISHED[card].name if card in PUBLISHED else card


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Numbers 1, 2 and 5 times powers of ten from low to high, fewer where there would be more than `most`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for bases in ((1, 2, 5), (1, 3), (1,)):
        inside = [b * 10.0**e for e in range(first, last + 1) for b in bases if low <= b * 10.0**e <= high]
        if len(inside) <= most:
            return inside
    return inside[:: 1 + (len(inside) - 1) // most]


def name(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Name the axes and the plot. Where the title stands is said, not searched for, which saves a tenth of the
    drawing."""
    style.label(axes, x=x, y=y)
    axes.set_title("", loc="left", y=1.0)
    above = axes.transAxes + ScaledTranslation(0, 6 / 72, axes.figure.dpi_scale_trans)
    size = style.sheet()["axes.titlesize"]
    style.write(axes, 0.0, 1.0, style.wrapped(axes, title, size), transform=above, va="bottom", fontsize=size)


def mark(axes: Axes, x: float, text: str, colour: str, *, height: float = 0.98) -> None:
    """A vertical line at x with its name (or none, "", where a plot beside it has it), where x lies inside the axis."""
    low, high = axes.get_xlim()
    if not low <= x <= high:
        return
    axes.axvline(x, color=colour, linewidth=1.4, linestyle=(0, (1, 2)), zorder=1)
    if not text:
        return
    right = axes.transAxes.inverted().transform(axes.transData.transform((x, high)))[0] > 0.6
    place = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 10}
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
    return all(_same(measured.settings.get(name), value) for name, value in wanted.items())


def _same(a: object, b: object) -> bool:
    """A page's slider adds up its steps: 0.05 + 2 · 0.05 is not 0.15 to the last bit."""
    return math.isclose(a, b) if isinstance(a, float) and isinstance(b, float) else a == b


PALE = "#E5E7EB"  # what is not there: places that are free, positions that are forgotten


def flop_words(flops: float) -> str:
    """4.31e9 -> '4.31 GFLOP'."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}FLOP"
    return f"{flops:.3g} FLOP"


def matching(measurements: Sequence[Measurement], *, unit: str | None = None, **settings: object) -> list[Measurement]:
    """Those in that unit, taken with these settings."""
    return [m for m in measurements if (unit is None or m.unit == unit) and same_knobs(m, settings)]


def write_centred(axes: Axes, x: float, y: float, text: str, **look) -> Text:
    """Plain text around a place."""
    return style.write(axes, x, y, text, ha="center", va="center", **look)


def cell(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    text: str = "",
    *,
    ink: str = style.INK,
    hover: str = "",
    **look: Any,
) -> None:
    """A rectangle from its lower corner, with a text in its middle. hover: its name under the pointer. look: of the
    patch and of the font."""
    font = {name: look.pop(name) for name in ("fontsize", "fontfamily") if name in look}
    look = {"linewidth": 0, "zorder": 3, **look}
    patch = Rectangle((x, y), width, height, facecolor=colour, **look)
    tell(patch, *([hover] if hover else []))
    axes.add_patch(patch)
    if text:
        write_centred(axes, x + width / 2, y + height / 2, text, color=ink, zorder=look["zorder"] + 1, **font)


def write_middle(axes: Axes, text: str) -> None:
    """Words in the middle of a picture that has nothing else to show yet."""
    write_centred(axes, 0.5, 0.5, text, color=NOTE, transform=axes.transAxes)


def nothing(axes: Axes, text: str) -> None:
    """Axes without ticks, with words in the middle."""
    axes.set(xticks=[], yticks=[])
    write_middle(axes, text)


NOTE = "#4B5563"  # of words beside a picture
FRAME = "#9AA1AC"  # of a square, where its colour is pale
LOST = style.LEARNER  # a rejection, and where a draft loses


def legend_above(axes: Axes, colours: Mapping[str, str], *others: Artist, left: float = 0.02, columns: int = 8) -> None:
    """{name: colour} of what the whole figure shows, as squares in its upper edge; others: marks that have a label."""
    handles = [
        Patch(facecolor=colour, edgecolor="none" if colour == "none" else FRAME, linewidth=0.5, label=name)
        for name, colour in colours.items()
    ]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (left, 1.0), "ncols": columns, "borderaxespad": 0.3}
    look: dict[str, Any] = {
        "frameon": False,
        "handlelength": 1.0 if colours else 1.8,
        "handleheight": 1.0,
        "handletextpad": 0.4,
        "columnspacing": 1.2,
    }
    font = FontProperties(family="DejaVu Sans", size=style.sheet()["legend.fontsize"])
    box = axes.figure.legend(handles=[*handles, *others], prop=font, **place, **look)
    for text in box.get_texts():
        text.set(parse_math=False, color=style.sheet()["legend.labelcolor"])


def empty(axes: Axes) -> None:
    """No frame, no ticks: nothing to show yet."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
