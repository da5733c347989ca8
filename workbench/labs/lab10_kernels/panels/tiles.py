"""The panel of kernels.tiles: the grid of tiles, what one row keeps of them, and the bytes that have crossed the
bus."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab10_kernels.tiles import (
    EXPERIMENT,
    FULL,
    MASKED,
    SKIPPED,
    Loop,
    Step,
    loop,
    predicted_bytes,
    predicted_tiles,
    standard_bytes,
)
from workbench.panels import style
from workbench.panels.chart import Axis, Bar, Bars, Chart, Drawing, Series, line, table, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import PALE, cell, legend_above, same_knobs
from workbench.panels.view import View

KNOBS = ("tokens", "head_dim", "block_queries", "block_keys", "window", "seed")
SHAPE = ("tokens", "head_dim", "window", "seed")  # of which the kernel's result depends
COLOURS = {FULL: style.CACHE, MASKED: "#F5DCA8", SKIPPED: PALE}
WAITING = "#FFFFFF"


class TilesPanel(PlayPanel):
    """Lab 10: FlashAttention's tiles over a causal grid, the maximum and sum of one row, bytes; with a Play button."""

    experiment = EXPERIMENT
    draws_records = False
    played = "shown_step"

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in KNOBS}
        walk = loop(**knobs, shown_row=settings["shown_row"])
        at = min(settings["shown_step"], len(walk.steps) - 1)
        row = min(settings["shown_row"], settings["tokens"] - 1)
        seen = _seen(walk, at, row, settings)
        wide = settings["block_keys"]
        columns = {
            "tile": lambda s: walk.steps.index(s),
            "keys": lambda s: f"{s.key_block * wide} … {s.key_block * wide + wide - 1}",
            "kind": "{m.kind}",
            "its largest score": lambda s: f"{max(s.followed.seen):.3f}" if s.followed.seen else "none seen",
            "maximum m": "{m.followed.maximum:.3f}",
            "factor on the old sum": "{m.followed.factor:.4f}",
            "sum l": "{m.followed.sum:.3f}",
        }
        return view(
            Drawing(lambda axes: _draw_grid(axes, walk, at, row, settings), _alt(walk, at, row, settings)),
            *_row_charts(walk, at, row, settings),
            _bytes_bars(walk.steps[at], settings),
            height=5.2,
            boxes=[
                (0.1, 0.11, 0.435, 0.74),
                (0.64, 0.7, 0.345, 0.175),
                (0.64, 0.42, 0.345, 0.175),
                (0.695, 0.09, 0.255, 0.175),
            ],
            table=table(seen, columns) if seen else (list(columns), [["–", "", "its block has not begun", *[""] * 4]]),
            caption=f"query {row}: what it keeps, tile by tile, up to tile {at} of {len(walk.steps) - 1}",
            words=_words(walk, walk.steps[at], at, row, settings, self._run_of(knobs)),
        )

    def _run_of(self, knobs: dict[str, Any]) -> list[Measurement]:
        """What was counted with what the controls say now. The kernel chooses its own tiles."""
        shape = {name: knobs[name] for name in SHAPE}
        return [m for m in self.measurements if same_knobs(m, shape if m.settings["counted"] == "kernel" else knobs)]


def _draw_grid(axes: Axes, walk: Loop, at: int, row: int, settings: dict[str, Any]) -> None:
    tall, wide, tokens = settings["block_queries"], settings["block_keys"], settings["tokens"]
    done = {(s.query_block, s.key_block) for s in walk.steps[: at + 1]}
    for i, kinds in enumerate(walk.kinds):
        for j, kind in enumerate(kinds):
            seen = kind == SKIPPED or (i, j) in done
            face = COLOURS[kind] if seen else WAITING
            hover = f"{kind}: queries {i * tall} to {(i + 1) * tall - 1}, keys {j * wide} to {(j + 1) * wide - 1}"
            hover += "" if seen else ", to come"
            cell(axes, j * wide, i * tall, wide, tall, face, edgecolor="#9AA1AC", linewidth=0.7, hover=hover)
    axes.plot([0, tokens], [0, tokens], color=style.INK, linewidth=0.9, zorder=5)
    axes.axhline(row + 0.5, color=style.LEARNER, linewidth=1.4, zorder=6)
    now = walk.steps[at]
    frame: dict[str, Any] = {"edgecolor": style.INK, "linewidth": 2.6, "zorder": 7}
    cell(axes, now.key_block * wide, now.query_block * tall, wide, tall, "none", **frame)
    axes.set(xlim=(0, tokens), ylim=(tokens, 0), aspect="equal")
    axes.set_xticks(range(0, tokens + 1, tokens // 4))
    axes.set_yticks(range(0, tokens + 1, tokens // 4))
    axes.grid(visible=False)
    style.label(axes, x="key", y="query", title=f"tile {at} of {len(walk.steps) - 1}: framed")
    names = {"loaded": COLOURS[FULL], "loaded, masked in part": COLOURS[MASKED], "skipped": PALE, "to come": WAITING}
    legend_above(axes, names, columns=4)


def _seen(walk: Loop, at: int, row: int, settings: dict[str, Any]) -> list[Step]:
    """The steps up to `at` in the followed row's block."""
    block = row // settings["block_queries"]
    return [s for s in walk.steps[: at + 1] if s.query_block == block]


def _row_charts(walk: Loop, at: int, row: int, settings: dict[str, Any]) -> list[Chart]:
    """What the followed row keeps, block of keys by block of keys: the maximum of its scores, and their sum."""
    every = _seen(walk, len(walk.steps) - 1, row, settings)
    steps = _seen(walk, at, row, settings)
    first, last = every[0].key_block, every[-1].key_block
    ticks = range(first, last + 1, 1 + (last - first) // 8)
    scores = [(s.key_block, score) for s in steps for score in s.followed.seen]
    maxima = [s.followed.maximum for s in every if s.followed.seen]
    lowest = min(score for s in every for score in s.followed.seen)
    span = max(maxima) - lowest
    dots: dict[str, Any] = {"linestyle": "", "marker": ".", "markersize": 3}
    waits: dict[str, Any] = {"empty": "its block has not begun", "also": lambda axes: axes.tick_params(labelsize=10)}
    ends = (first - 0.5, last + 0.5)
    return [
        Chart(
            line("scores", scores, style.IDLE, **dots),
            Series("maximum m", [(s.key_block, s.followed.maximum) for s in steps], "measured", style.LEARNER),
            x=Axis("", ticks=ticks, limits=ends),
            y=Axis("score", limits=(lowest - 0.1 * span, max(maxima) + 0.15 * span)),
            title=f"query {row}: scores, maximum m",
            **waits,
        ),
        Chart(
            Series("sum l", [(s.key_block, s.followed.sum) for s in steps], "measured", style.TARGET),
            x=Axis("key block", ticks=ticks, limits=ends),
            y=Axis("l", limits=(0, 1.15 * max(s.followed.sum for s in every))),
            title="sum l of exp(score − m)",
            **waits,
        ),
    ]


def _bytes_bars(step: Step, settings: dict[str, Any]) -> Bars:
    shape = {name: settings[name] for name in ("tokens", "head_dim")}
    blocks = {name: settings[name] for name in ("block_queries", "block_keys", "window")}
    whole, standard = predicted_bytes(**shape, **blocks), standard_bytes(**shape)
    now = step.bytes_read + step.bytes_written
    return Bars(
        [
            Bar("tiles", now, style.CACHE, predicted=whole, text=f"{readable_bytes(now)} of {readable_bytes(whole)}"),
            Bar("whole\nmatrices", standard, style.COMPUTE, text=readable_bytes(standard)),
        ],
        Axis("", readable_bytes, "zero", room=(1, 1.75)),
        "bytes over the bus",
        height=0.55,
        size=10,
    )


def _alt(walk: Loop, at: int, row: int, settings: dict[str, Any]) -> str:
    step = walk.steps[at]
    text = (
        f"A grid of {len(walk.kinds)} by {len(walk.kinds[0])} tiles over {settings['tokens']} queries and keys. Tile"
        f" {at} of {len(walk.steps) - 1} is under way: query block {step.query_block}, key block {step.key_block},"
        f" {step.kind}. {walk.count(SKIPPED)} tiles are never loaded, {walk.count(MASKED)} are masked in part,"
        f" {walk.count(FULL)} count whole. So far {readable_bytes(step.bytes_read)} were read and"
        f" {readable_bytes(step.bytes_written)} written."
    )
    steps = _seen(walk, at, row, settings)
    if steps:
        last = steps[-1].followed
        text += f" Query {row} has the maximum {last.maximum:.3f} and the sum {last.sum:.3f}."
    return text


def _words(walk: Loop, step: Step, at: int, row: int, settings: dict[str, Any], made: list[Measurement]) -> str:
    shape = {name: settings[name] for name in ("tokens", "head_dim")}
    blocks = {name: settings[name] for name in ("block_queries", "block_keys", "window")}
    tiles = predicted_tiles(settings["tokens"], *(blocks[n] for n in ("block_queries", "block_keys", "window")))
    standard = standard_bytes(**shape)
    grid = len(walk.kinds) * len(walk.kinds[0])
    lines = [
        f"{tiles} of {grid} tiles are loaded; {walk.count(SKIPPED)} hold nothing that a query may look at. The queries"
        " of a block stay on the chip while keys and values pass by, and a row keeps three things: the largest score,"
        " the sum, and an output that is not divided yet."
    ]
    steps = _seen(walk, at, row, settings)
    if steps and steps[-1] is step and len(steps) > 1:
        before, now = steps[-2].followed, step.followed
        what = "has a larger score" if now.factor < 1 else "has no larger score"
        lines.append(
            f"This tile {what} than query {row} had seen ({before.maximum:.3f}, now {now.maximum:.3f}): what it had"
            f" summed is multiplied by exp(old − new) = {now.factor:.4f}, and the tile's own {len(now.seen)} terms are"
            f" added: {before.sum:.3f} × {now.factor:.4f} + {now.sum - before.sum * now.factor:.3f} = {now.sum:.3f}."
        )
    lines.append(
        f"With tiles {readable_bytes(walk.bytes)} cross the bus, with whole matrices {readable_bytes(standard)}:"
        f" {standard / walk.bytes:.2g} × as many. Matrices grow with S², and so do the keys and values that each block"
        f" of queries reads again, but only by 1 / {settings['block_queries']} of a row each: larger blocks, fewer"
        " bytes."
    )
    lines += [f"Of this run: {m.check}." for m in made if m.settings["counted"] != "bytes"]
    return "\n".join(lines)
