"""The panel of drafts.tree: the draft tree of a round, its mask, the branch that stays, and what the cache keeps of
it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from workbench.instruments.records import Measurement
from workbench.labs.lab06_speculative_sampling.panels.plots import COLOURS, KINDS
from workbench.labs.lab07_better_drafts.draft_tree import EXPERIMENT
from workbench.labs.lab07_better_drafts.panels.plots import title_of
from workbench.panels import html, style
from workbench.panels.chart import Drawing, table, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import LOST, PALE, cell, empty, write_centred, write_middle
from workbench.panels.stage import tell
from workbench.panels.view import View
from workbench.panels.words import listed

KNOBS = ("drafter", "branching", "texts", "prompt", "temperature", "new_tokens", "seed")
STAGES = ("drafted", "verified", "accepted")
KEPT, LOOKED, UNSEEN = "accepted", "rejected", "not verified"
LETTER = 6.1  # points: of text of fixed width
ROW_POINTS = 11.5  # that a name takes
PLACE_LETTERS = 12
MONO: dict[str, Any] = {"fontsize": 10, "fontfamily": "DejaVu Sans Mono"}


@dataclass(frozen=True)
class Tree:
    """A round's tree as the Measurement tells it."""

    tokens: list[str]
    parents: list[int]
    path: list[int]

    @cached_property
    def children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    def ancestors(self, node: int) -> list[int]:
        """Itself, and all above it."""
        above = []
        while node >= 0:
            above.append(node)
            node = self.parents[node]
        return above

    def fate(self, node: int) -> str:
        """Siblings are tried in order; those after the one that was kept, and what hangs below others, nobody looked
        at."""
        if node in self.path:
            return KEPT
        parent = self.parents[node]
        if parent >= 0 and parent not in self.path:
            return UNSEEN
        siblings = self.children[parent]
        kept = next((s for s in siblings if s in self.path), None)
        return LOOKED if kept is None or siblings.index(node) < siblings.index(kept) else UNSEEN

    def places(self) -> dict[int, tuple[float, float]]:
        """{node: (depth, height)}: leaves one below the other, a parent in the middle of its children; −1 is the
        text."""
        places: dict[int, tuple[float, float]] = {}
        free = 0

        def place(node: int, depth: int) -> float:
            nonlocal free
            below = [place(child, depth + 1) for child in self.children.get(node, ())]
            if below:
                y = (below[0] + below[-1]) / 2
            else:
                y, free = float(free), free + 1
            places[node] = (float(depth), y)
            return y

        place(-1, 0)
        return places


class TreePanel(PlayPanel):
    """Lab 07: the draft tree of each round, its mask and the branch that stays; with a Play button."""

    experiment = EXPERIMENT
    draws_records = False
    played = "shown_step"

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        at, stage = divmod(settings["shown_step"], len(STAGES))
        if at >= len(made):
            at, stage = len(made) - 1, len(STAGES) - 1
        m = made[at] if made else None
        tree = Tree(*(m.settings[name] for name in ("tokens", "parents", "path"))) if m else None

        def drawn(draw: Callable[..., None], words: str = "", waiting: str = "") -> Drawing:
            """What `draw` makes of the tree; before a run, empty axes."""

            def draw_now(axes: Axes) -> None:
                if tree is None:
                    empty(axes)
                    write_middle(axes, waiting)
                else:
                    draw(axes, tree, m, stage)

            return Drawing(draw_now, words)

        return view(
            drawn(_draw_tree, _alt(m, stage), "Run drafts and verifies"),
            drawn(_draw_mask),
            drawn(_draw_strip),
            height=style.TALLEST if tree else 2.6,
            boxes=[(0.01, 0.575, 0.98, 0.375), (0.115, 0.055, 0.38, 0.46), (0.55, 0.055, 0.435, 0.46)],
            table=table(
                made,
                {
                    "round": "{m.settings[round]}",
                    "nodes": "{m.counts[nodes]:.0f}",
                    "depth": "{m.counts[depth]:.0f}",
                    "accepted": "{m.counts[kept]:.0f}",
                    "of the first branch": "{m.counts[first_branch_kept]:.0f}",
                    "then": lambda m: html.token(m.settings["after"]),
                    "it is": lambda m: KINDS.get(m.settings["kind"], m.settings["kind"]),
                },
            ),
            caption=f"{title_of(settings['drafter'])}, temperature {settings['temperature']:g}"
            + ("" if made else "; Run writes the text"),
            words=_words(made, m, stage),
        )


def _text(token: str, most: int) -> str:
    shown = style.drawable(html.token(token))
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _draw_tree(axes: Axes, tree: Tree, m: Measurement, stage: int) -> None:
    empty(axes)
    places = tree.places()
    deepest = max(x for x, _ in places.values())
    lowest = max(y for _, y in places.values())
    wide = deepest + 2
    ends = (-0.1 * wide, deepest + 1 + 0.1 * wide)
    axes.set(xlim=ends, ylim=(max(lowest, 3) + 0.7, -0.7))
    room = int((_points(axes)[0] / (ends[1] - ends[0]) - 16) / LETTER)  # letters of a box
    for node, (x, y) in places.items():
        if node < 0:
            continue
        from_x, from_y = places[tree.parents[node]]
        kept = bool(stage) and tree.fate(node) == KEPT
        axes.plot(
            [from_x, x], [from_y, y], color=style.INK if kept else "#B6BCC6", linewidth=2.4 if kept else 1.0, zorder=1
        )
    for node, (x, y) in places.items():
        if node < 0:
            _box(axes, x, y, _text(m.settings["text"][-room:], room), face="#FFFFFF", edge=style.INK)
            continue
        fate = tree.fate(node) if stage else KEPT
        face = COLOURS["draft"] if fate == KEPT else "#FFFFFF"
        edge = {KEPT: COLOURS["draft"], LOOKED: LOST, UNSEEN: "#C7CCD4"}[fate]
        ink = "#6B7280" if fate == UNSEEN else style.INK
        share = f" {m.samples[node]:.0%}" if stage and fate != UNSEEN else ""
        hover = f"{html.token(tree.tokens[node])}: the target's probability {m.samples[node]:.3f}"
        hover += f", {fate}" if stage else ", drafted"
        text = _text(tree.tokens[node], room - len(share)) + share
        _box(axes, x, y, text, face=face, edge=edge, ink=ink, hover=hover)
    if stage:
        x, y = places[tree.path[-1] if tree.path else -1]
        kind = m.settings["kind"]
        colour, end = COLOURS.get(kind, style.TARGET), deepest + 1
        axes.plot([x, end], [y, y], color=colour, linewidth=2.0, linestyle=(0, (2, 2)), zorder=0)
        hover = f"{html.token(m.settings['after'])}: {KINDS.get(kind, kind)}"
        _box(axes, end, y, _text(m.settings["after"], room), face=colour, edge=colour, hover=hover)
        style.write(axes, end, y + 0.6, KINDS.get(kind, kind), ha="center", va="top")
    title = f"round {m.settings['round']}: {STAGES[stage]}"
    title += "; percent: the target's probability after the branch" if stage else f", {len(tree.tokens)} tokens"
    style.label(axes, title=title)


def _points(axes: Axes) -> tuple[float, float]:
    """Width and height of the axes in points."""
    box, dots = axes.get_window_extent(), axes.figure.dpi
    return 72 * box.width / dots, 72 * box.height / dots


def _box(
    axes: Axes, x: float, y: float, text: str, *, face: str, edge: str, ink: str = style.INK, hover: str = ""
) -> None:
    box = {"boxstyle": "round,pad=0.25", "facecolor": face, "edgecolor": edge, "linewidth": 1.3}
    tell(write_centred(axes, x, y, text, color=ink, zorder=3, bbox=box, **MONO), *([hover] if hover else []))


def mask_of(tree: Tree) -> np.ndarray:
    """[nodes + 1, nodes + 2] 1 where a row sees a column: columns are the text, its last token, then the nodes; rows
    the last token and the nodes."""
    n = len(tree.tokens)
    sees = np.zeros((n + 1, n + 2))
    sees[:, :2] = 1
    for node in range(n):
        sees[node + 1, [2 + a for a in tree.ancestors(node)]] = 1
    return sees


def _draw_mask(axes: Axes, tree: Tree, _: Measurement, stage: int) -> None:
    sees = mask_of(tree)
    if stage:
        for node in tree.path:
            sees[node + 1] *= 2
    axes.grid(visible=False)
    axes.imshow(sees, cmap=ListedColormap(["#FFFFFF", "#C7CCD4", COLOURS["draft"]]), vmin=0, vmax=2, aspect="auto")
    rows, columns = sees.shape
    axes.set_xticks(np.arange(-0.5, columns), minor=True)
    axes.set_yticks(np.arange(-0.5, rows), minor=True)
    axes.tick_params(which="both", length=0)
    axes.grid(visible=True, which="minor", color="#FFFFFF", linewidth=0.8)
    names = ["the text", "its last token", *(html.token(token) for token in tree.tokens)]
    for row in range(rows):
        seen = listed([names[column] for column in np.flatnonzero(sees[row])])
        cell(axes, -0.5, row - 0.5, columns, 1, "none", hover=f"{names[row + 1]} sees {seen}")
    axes.set_xticks([])
    axes.set_ylim(rows - 0.5, -1.5)  # as high as the strip beside it
    every = max(1, math.ceil(ROW_POINTS * (rows + 1) / _points(axes)[1]))
    shown = [_text(name, 6) for name in ["last", *tree.tokens]][::every]
    axes.set_yticks(range(0, rows, every), shown, parse_math=False, **MONO)
    style.label(axes, x="text, last token, nodes", title="tree mask: who sees whom")


def _draw_strip(axes: Axes, tree: Tree, m: Measurement, stage: int) -> None:
    """The cache, a row a place: what the pass wrote, and what is kept of it, moved together."""
    empty(axes)
    n = len(tree.tokens)
    known = [(f"…{m.settings['known']:,}", style.CACHE), ("last", style.CACHE)]
    before = [(tree.tokens[node], COLOURS["draft"] if not stage or node in tree.path else PALE) for node in range(n)]
    axes.set(xlim=(0, 2.6), ylim=(n + 0.5, -1.5))
    _cells(axes, 0.0, [*known, *before])
    if stage == 2:
        _cells(axes, 1.6, [*known, *((tree.tokens[node], COLOURS["draft"]) for node in tree.path)])
        for place, node in enumerate(tree.path):
            axes.plot([1.02, 1.58], [1 + node, 1 + place], color=style.INK, linewidth=1.2, zorder=4)
    style.label(axes, title="cache: the pass" + (", then what is kept" if stage == 2 else ""))


def _cells(axes: Axes, x: float, cells: Sequence[tuple[str, str]]) -> None:
    """A column of places, the first one row above the mask."""
    low, high = sorted(axes.get_ylim())
    is_written = _points(axes)[1] / (high - low) >= ROW_POINTS
    for place, (text, colour) in enumerate(cells):
        written = _text(text, PLACE_LETTERS) if is_written else ""
        cell(
            axes, x, place - 1.45, 1, 0.9, colour, written, hover=f"place {place}: {html.token(text)}", zorder=2, **MONO
        )


def _alt(m: Measurement | None, stage: int) -> str:
    if m is None:
        return "A tree of drafted tokens, its mask, and places in the cache. Nothing is drafted yet."
    branch = "".join(html.token(m.settings["tokens"][node]) for node in m.settings["path"])
    outcome = f"The branch {branch or '(none)'} was accepted, then {html.token(m.settings['after'])}." if stage else ""
    return (
        f"Round {m.settings['round']}: a tree of {m.counts['nodes']:.0f} tokens, {m.counts['depth']:.0f} deep, beside"
        f" it the mask, in which each sees the text, the branch above it and itself. {outcome}"
    ).rstrip()


def _words(made: Sequence[Measurement], m: Measurement | None, stage: int) -> str:
    if m is None:
        return (
            "A chain bets on one continuation; a tree on several at once. All its nodes go through the target in one"
            " pass: a mask lets each see the text and the branch above it, and nothing else."
        )
    c = m.counts
    n = int(c["nodes"])
    if stage == 0:
        now = (
            f"{n} drafted tokens and the last one of the text are one pass of {c['rows']:.0f} rows. Two tokens of the"
            " same depth have the same position and do not see each other."
        )
    elif stage == 1:
        more = c["kept"] - c["first_branch_kept"]
        now = f"{c['kept']:.0f} of {n} accepted, along one branch; then one token of the target's own. "
        now += (
            f"The first branch alone would have given {c['first_branch_kept']:.0f}."
            if more
            else "The first branch alone would have given as many."
        )
    else:
        now = (
            f"Of {c['rows']:.0f} places written {1 + c['kept']:.0f} stay. Their keys and values move together, as if"
            " they had come one after the other; positions were counted along the branch, so nothing in them changes."
        )
    kept, first = (sum(m.counts[name] for m in made) for name in ("kept", "first_branch_kept"))
    return (
        f"{now}\nIn {len(made)} rounds {kept:.0f} tokens of the trees were accepted, {first:.0f} of their first"
        f" branches. Of this round: {m.check}."
    )
