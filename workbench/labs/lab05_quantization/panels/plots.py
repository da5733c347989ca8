"""What the panels of lab 05 draw alike: one colour and one mark for each method, and a legend under the plots."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D

from workbench.panels import style

COLOURS = {
    "fp16": style.INK,
    "int8 weights": "#5B6472",
    "int8": "#B57A00",
    "rtn": style.IDLE,
    "gptq": style.WEIGHTS,
    "awq": style.TARGET,
    "nf4": style.DRAFT,
    "kquant": style.CACHE,
    "llm_int8": style.COMPUTE,
    "smoothquant": "#8C3F6B",
    "squeezellm": "#332288",
    "quip": "#7A4B00",
}
MARKS = {
    "fp16": "h",
    "int8 weights": "X",
    "int8": "p",
    "rtn": "o",
    "gptq": "s",
    "awq": "D",
    "nf4": "^",
    "kquant": "v",
    "llm_int8": "P",
    "smoothquant": "d",
    "squeezellm": "<",
    "quip": ">",
}
NOTE = "#4B5563"  # of words that stand where a picture will be


def legend_below(figure: Figure | SubFigure, names: Sequence[tuple[str, str]], *, columns: int) -> None:
    """[(method, its name)] as marks in a strip at the foot of the figure."""
    handles = [
        Line2D([], [], linestyle="", marker=MARKS[method], color=COLOURS[method], markersize=7, label=name)
        for method, name in names
    ]
    if not handles:
        return
    sheet = style.sheet()
    box = figure.legend(
        handles=handles,
        loc="lower center",
        ncols=columns,
        prop=FontProperties(family="DejaVu Sans", size=10),
        labelcolor=sheet["legend.labelcolor"],
        frameon=False,
        handletextpad=0.3,
        columnspacing=1.4,
        borderaxespad=0.2,
    )
    for text in box.get_texts():
        text.set_parse_math(False)
