"""What the panels of lab 07 draw alike: a legend of who wrote what, bars of times as fast, and words for ratios."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.speculate_plots import CHARACTER, COLOURS, FONT_SIZE, KINDS, LINE, LOST

TITLES = {
    "model": "draft model",
    "eagle": "EAGLE",
    "medusa": "Medusa",
    "lookahead": "lookahead",
    "ngram": "n-gram table",
    "phrases": "phrases",
    "prompt_lookup": "prompt lookup",
    "self-int4": "itself in 4 bits",
    "staged": "staged",
    "lookup, else model": "lookup, else model",
}


DYNAMIC = ", dynamic"


def title_of(name: str) -> str:
    """A draft as people call it, "…, dynamic" too; a model by its own name."""
    plain = name.removesuffix(DYNAMIC)
    return TITLES.get(plain, plain) + name[len(plain) :]


def who_legend(axes: Axes, counts: dict[str, int], names: dict[str, str] | None = None) -> None:
    """A line over a text drawn by `draw_text`: each kind on its colour, and how many tokens are of it. names: for kinds that
    are called something else here."""
    x = 0.04
    for kind, count in counts.items():
        text = f"{(names or KINDS).get(kind, KINDS[kind])}: {count}"
        wide = len(text) * CHARACTER
        axes.add_patch(Rectangle((x - 0.04, -1.1 * LINE), wide + 0.08, 0.84 * LINE, facecolor=COLOURS[kind], alpha=0.38,
                                 linewidth=0, clip_on=False))  # fmt: skip
        style.write(
            axes, x, -0.68 * LINE, text, fontsize=FONT_SIZE, va="center", fontfamily="DejaVu Sans Mono"
        )
        x += wide + 0.24


def speed_bar(
    axes: Axes,
    y: float,
    m: Measurement | None,
    recorded: Measurement | None = None,
    *,
    colour: str,
    height: float = 0.62,
) -> None:
    """Times as fast as plain decoding: a bar with its spread, dashed where predicted, hollow where recorded."""
    if m is not None:
        low, high = m.spread
        axes.barh(y, m.median, height=height, color=colour, zorder=3)
        axes.errorbar([m.median], [y], xerr=[[max(0, m.median - low)], [max(0, high - m.median)]], fmt="none",
                      ecolor=style.INK, elinewidth=1.3, capsize=3, zorder=4)  # fmt: skip
        if m.predicted is not None:
            axes.plot([m.predicted] * 2, [y - 0.6 * height, y + 0.6 * height], color=style.INK, zorder=5,
                      **(style.PREDICTED | {"linestyle": (0, (2, 1))}))  # fmt: skip
    if recorded is not None:
        axes.plot([recorded.median], [y], color=style.INK, zorder=6, **style.RECORDED)


def line_at_one(axes: Axes) -> None:
    """Left of it a draft loses."""
    axes.axvline(1, color=LOST, linewidth=1.6, zorder=2)


def times(m: Measurement) -> str:
    """'1.42 × (1.38 to 1.5)'; one sample has no spread."""
    low, high = m.spread
    return f"{m.median:.2f} ×" + (f" ({low:.2f} to {high:.2f})" if len(m.samples) > 1 else "")


def counted(words: Sequence[str]) -> dict[str, int]:
    """{word: how often}, in the order of their first appearance."""
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return found
