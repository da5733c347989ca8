"""What the panels of speculation draw alike: a colour for who wrote each token, and text in those colours."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from workbench.panels import html, style
from workbench.panels.plots import NOTE, cell, empty

KINDS = {
    "draft": "drafted and accepted",
    "other": "by the other draft",
    "correction": "correction",
    "bonus": "bonus",
    "plain": "without a draft",
    "jump": "forced by the grammar",
}
COLOURS = {
    "draft": style.DRAFT,
    "other": style.WEIGHTS,  # where two drafts take turns
    "correction": style.COMPUTE,
    "bonus": style.TARGET,
    "plain": style.IDLE,
    "jump": style.CACHE,
}
FONT_SIZE = 10.36  # a letter is 13 whole pixels of a PNG, and as wide in an SVG
CHARACTER = 0.602 * FONT_SIZE / 72  # inches: DejaVu Sans Mono
LINE = 1.6 * FONT_SIZE / 72

Parts = Sequence[tuple[str, str]]  # (text, kind) of each token; "" for the prompt


def coloured_html(parts: Parts, caption: str) -> str:
    """The text, each token on the colour of its kind, in a box that scrolls."""
    spans = []
    for text, kind in parts:
        css = "opacity:.6" if not kind else f"background:{COLOURS[kind]}55;border-bottom:2px solid {COLOURS[kind]}"
        spans.append((text, css))
    return html.running_text(spans, caption)


def draw_text(axes: Axes, parts: Parts, *, lines: int, bold_from: int | None = None) -> None:
    """The end of the text, as many lines as there are, each token on the colour of its kind. bold_from: the part from
    which on it is framed, what the last round wrote."""
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    columns = int(box.width / CHARACTER)
    runs = _laid_out(parts, columns, lines)
    empty(axes)
    axes.set(xlim=(0, box.width), ylim=(lines * LINE, 0))
    for line, column, text, index in runs:
        kind, x, y = parts[index][1], column * CHARACTER, (line + 0.5) * LINE
        if kind:
            new, wide = bold_from is not None and index >= bold_from, len(text) * CHARACTER
            hover = f"{html.token(parts[index][0])}: {KINDS[kind]}"
            cell(axes, x, y - 0.42 * LINE, wide, 0.84 * LINE, COLOURS[kind], alpha=0.38, zorder=1, hover=hover)
            under = style.INK if new else COLOURS[kind]
            cell(axes, x, y + 0.36 * LINE, wide, (0.13 if new else 0.06) * LINE, under, zorder=1)
        mono(axes, x, y, text, color=style.INK if kind else NOTE, clip_on=True)


def _laid_out(parts: Parts, columns: int, lines: int) -> list[tuple[int, int, str, int]]:
    """(line, column, text, part) of each run of the last `lines` lines."""
    line = column = 0
    runs: list[tuple[int, int, str, int]] = []
    for index, (text, _) in enumerate(parts):
        for at, piece in enumerate(html.visible(text, keep="\n").split("\n")):
            if at:
                runs.append((line, column, "⏎", index))
                line, column = line + 1, 0
            while piece:
                room = columns - 1 - column
                if room <= 0:
                    line, column, room = line + 1, 0, columns - 1
                runs.append((line, column, piece[:room], index))
                column += len(piece[:room])
                piece = piece[room:]
    first = max(0, line + 1 - lines)
    return [(at - first, column, text, index) for at, column, text, index in runs if at >= first]


def mono(axes: Axes, x: float, y: float, text: str, **look) -> None:
    """Text of fixed width from x on, in the size of the texts."""
    style.write(axes, x, y, text, fontsize=FONT_SIZE, va="center", fontfamily="DejaVu Sans Mono", **look)


def behind(axes: Axes, x: float, text: str, colour: str) -> None:
    """The colour behind a word of a legend over a text."""
    wide = len(text) * CHARACTER + 0.08
    cell(axes, x - 0.04, -1.1 * LINE, wide, 0.84 * LINE, colour, alpha=0.38, clip_on=False, zorder=1)


def kinds_legend(axes: Axes, kinds: Sequence[str]) -> None:
    """A line of coloured words over text drawn by `draw_text`: which colour is which."""
    x = 0.04
    for kind in kinds:
        behind(axes, x, KINDS[kind], COLOURS[kind])
        mono(axes, x, -0.68 * LINE, KINDS[kind])
        x += len(KINDS[kind]) * CHARACTER + 0.24
