"""The panel of kernels.tiles: the grid of tiles, what one row keeps of them, and the bytes that have crossed the bus."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from workbench.experiments.kernel_tiles import (
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
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.smaller_knobs import PlayPanel
from workbench.panels.smaller_plots import PALE
from workbench.panels.speculate_plots import NOTE, empty
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View

KNOBS = ("tokens", "head_dim", "block_queries", "block_keys", "window", "seed")
SHAPE = ("tokens", "head_dim", "window", "seed")  # of which the kernel's result depends
COLOURS = {FULL: style.CACHE, MASKED: "#F5DCA8", SKIPPED: PALE}
WAITING = "#FFFFFF"


class TilesPanel(PlayPanel):
    """A tile of the loop at a time; Play lets it run. Drawn from the loop alone; Run holds it to softmax and to the kernel."""

    experiment_name = "kernels.tiles"
    draws_records = False
    played = "shown_step"

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in KNOBS}
        found = loop(**knobs, shown_row=settings["shown_row"])
        at = min(settings["shown_step"], len(found.steps) - 1)
        row = min(settings["shown_row"], settings["tokens"] - 1)
        figure, (grid, maxima, sums, moved) = style.new_figure(1, 4, height=4.9)
        grid.set_position([0.075, 0.105, 0.45, 0.79])
        maxima.set_position([0.605, 0.72, 0.375, 0.19])
        sums.set_position([0.605, 0.425, 0.375, 0.19])
        moved.set_position([0.605, 0.09, 0.375, 0.19])
        _draw_grid(grid, found, at, row, settings)
        _draw_row(maxima, sums, found, at, row, settings)
        _draw_bytes(moved, found.steps[at], settings)
        step = found.steps[at]
        return View(
            figure=figure,
            alt=_alt(found, at, row, settings),
            header=[
                "tile",
                "keys",
                "kind",
                "its largest score",
                "maximum m",
                "factor on the old sum",
                "sum l",
            ],
            rows=_rows(found, at, row, settings),
            caption=f"query {row}: what it keeps, tile by tile, up to tile {at} of {len(found.steps) - 1}",
            words=_words(found, step, at, row, settings, self._run_of(knobs)),
        )

    def _run_of(self, knobs: dict[str, Any]) -> list[Measurement]:
        """What was counted with what the controls say now. The kernel chooses its own tiles."""
        shape = {name: knobs[name] for name in SHAPE}
        return [
            m
            for m in self.measurements
            if same_knobs(m, shape if m.settings["counted"] == "kernel" else knobs)
        ]


def _draw_grid(axes: Axes, found: Loop, at: int, row: int, settings: dict[str, Any]) -> None:
    tall, wide, tokens = settings["block_queries"], settings["block_keys"], settings["tokens"]
    done = {(s.query_block, s.key_block) for s in found.steps[: at + 1]}
    for i, kinds in enumerate(found.kinds):
        for j, kind in enumerate(kinds):
            seen = kind == SKIPPED or (i, j) in done
            axes.add_patch(
                Rectangle((j * wide, i * tall), wide, tall, facecolor=COLOURS[kind] if seen else WAITING,
                          edgecolor="#9AA1AC", linewidth=0.7, zorder=3)
            )  # fmt: skip
    axes.plot([0, tokens], [0, tokens], color=style.INK, linewidth=0.9, zorder=5)
    axes.axhline(row + 0.5, color=style.LEARNER, linewidth=1.4, zorder=6)
    now = found.steps[at]
    axes.add_patch(
        Rectangle((now.key_block * wide, now.query_block * tall), wide, tall, facecolor="none",
                  edgecolor=style.INK, linewidth=2.6, zorder=7)
    )  # fmt: skip
    axes.set(xlim=(0, tokens), ylim=(tokens, 0), aspect="equal")
    axes.set_xticks(range(0, tokens + 1, tokens // 4))
    axes.set_yticks(range(0, tokens + 1, tokens // 4))
    axes.grid(visible=False)
    style.label(axes, x="key", y="query", title=f"tile {at} of {len(found.steps) - 1}: framed")
    handles = [
        Patch(facecolor=COLOURS[FULL], label="loaded"),
        Patch(facecolor=COLOURS[MASKED], label="loaded, masked in part"),
        Patch(facecolor=PALE, label="skipped"),
        Patch(facecolor=WAITING, edgecolor="#9AA1AC", label="to come"),
    ]
    box = axes.legend(handles=handles, loc="upper right", fontsize=8.5, frameon=True, framealpha=0.95)
    box.set_zorder(9)


def _seen(found: Loop, at: int, row: int, settings: dict[str, Any]) -> list[Step]:
    """The steps up to `at` in the followed row's block."""
    block = row // settings["block_queries"]
    return [s for s in found.steps[: at + 1] if s.query_block == block]


def _draw_row(maxima: Axes, sums: Axes, found: Loop, at: int, row: int, settings: dict[str, Any]) -> None:
    block = row // settings["block_queries"]
    every = [s for s in found.steps if s.query_block == block]
    steps = _seen(found, at, row, settings)
    keys = [s.key_block for s in steps]
    for axes in (maxima, sums):
        first, last = every[0].key_block, every[-1].key_block
        axes.set_xlim(first - 0.5, last + 0.5)
        axes.set_xticks(range(first, last + 1, 1 + (last - first) // 8))
        axes.tick_params(labelsize=8.5)
    values = [s.row.maximum for s in every if s.row.seen]
    span = max(values) - min(s for e in every for s in e.row.seen)
    maxima.set_ylim(min(s for e in every for s in e.row.seen) - 0.1 * span, max(values) + 0.15 * span)
    sums.set_ylim(0, 1.15 * max(s.row.sum for s in every))
    for s in steps:
        maxima.plot(
            [s.key_block] * len(s.row.seen), s.row.seen, ".", color=style.IDLE, markersize=3, zorder=2
        )
    maxima.plot(keys, [s.row.maximum for s in steps], color=style.LEARNER, **style.MEASURED)
    sums.plot(keys, [s.row.sum for s in steps], color=style.TARGET, **style.MEASURED)
    style.label(maxima, y="score", title=f"query {row}: its scores, the maximum m")
    style.label(sums, x="key block", y="l", title="sum l of exp(score − m)")
    if not steps:
        for axes in (maxima, sums):
            style.write(
                axes, 0.5, 0.5, "its block has not begun", transform=axes.transAxes, ha="center", color=NOTE
            )


def _draw_bytes(axes: Axes, step: Step, settings: dict[str, Any]) -> None:
    empty(axes)
    shape = {name: settings[name] for name in ("tokens", "head_dim")}
    blocks = {name: settings[name] for name in ("block_queries", "block_keys", "window")}
    whole, standard = predicted_bytes(**shape, **blocks), standard_bytes(**shape)
    now = step.bytes_read + step.bytes_written
    axes.barh(0, now, height=0.55, color=style.CACHE, zorder=3)
    axes.plot(
        [whole, whole],
        [-0.38, 0.38],
        color=style.INK,
        zorder=4,
        **(style.PREDICTED | {"linestyle": (0, (2, 1))}),
    )
    axes.barh(1, standard, height=0.55, color=style.COMPUTE, zorder=3)
    widest = max(standard, whole)
    told = (
        f"tiles: {readable_bytes(now)} of {readable_bytes(whole)}",
        f"whole matrices: {readable_bytes(standard)}",
    )
    for y, words in enumerate(told):
        style.write(axes, 0.012 * widest, y - 0.42, words, va="center", fontsize=9.5)
    axes.set(xlim=(0, 1.03 * widest), ylim=(1.45, -0.75))
    style.label(axes, title="bytes over the bus, one head, 16 bits")


def _rows(found: Loop, at: int, row: int, settings: dict[str, Any]) -> list[list[str]]:
    wide = settings["block_keys"]
    rows = []
    for s in _seen(found, at, row, settings):
        first = s.key_block * wide
        largest = f"{max(s.row.seen):.3f}" if s.row.seen else "none seen"
        rows.append([f"{found.steps.index(s)}", f"{first} … {first + wide - 1}", s.kind, largest, f"{s.row.maximum:.3f}",
                     f"{s.row.factor:.4f}", f"{s.row.sum:.3f}"])  # fmt: skip
    return rows or [["–", "", "its block has not begun", "", "", "", ""]]


def _alt(found: Loop, at: int, row: int, settings: dict[str, Any]) -> str:
    step = found.steps[at]
    text = (
        f"A grid of {len(found.kinds)} by {len(found.kinds[0])} tiles over {settings['tokens']} queries and keys. Tile {at} of "
        f"{len(found.steps) - 1} is under way: query block {step.query_block}, key block {step.key_block}, {step.kind}. "
        f"{found.count(SKIPPED)} tiles are never loaded, {found.count(MASKED)} are masked in part, {found.count(FULL)} count "
        f"whole. So far {readable_bytes(step.bytes_read)} were read and {readable_bytes(step.bytes_written)} written."
    )
    steps = _seen(found, at, row, settings)
    if steps:
        last = steps[-1].row
        text += f" Query {row} has the maximum {last.maximum:.3f} and the sum {last.sum:.3f}."
    return text


def _words(
    found: Loop, step: Step, at: int, row: int, settings: dict[str, Any], made: list[Measurement]
) -> str:
    shape = {name: settings[name] for name in ("tokens", "head_dim")}
    blocks = {name: settings[name] for name in ("block_queries", "block_keys", "window")}
    tiles = predicted_tiles(
        settings["tokens"], *(blocks[n] for n in ("block_queries", "block_keys", "window"))
    )
    standard = standard_bytes(**shape)
    grid = len(found.kinds) * len(found.kinds[0])
    lines = [
        f"{tiles} of {grid} tiles are loaded; {found.count(SKIPPED)} hold nothing that a query may look at. The queries of a "
        "block stay on the chip while keys and values pass by, and a row keeps three things: the largest score, the sum, "
        "and an output that is not divided yet."
    ]
    steps = _seen(found, at, row, settings)
    if steps and steps[-1] is step and len(steps) > 1:
        before, now = steps[-2].row, step.row
        what = "has a larger score" if now.factor < 1 else "has no larger score"
        lines.append(
            f"This tile {what} than query {row} had seen ({before.maximum:.3f}, now {now.maximum:.3f}): what it had summed is "
            f"multiplied by exp(old − new) = {now.factor:.4f}, and the tile's own {len(now.seen)} terms are added: "
            f"{before.sum:.3f} × {now.factor:.4f} + {now.sum - before.sum * now.factor:.3f} = {now.sum:.3f}."
        )
    lines.append(
        f"With tiles {readable_bytes(found.bytes)} cross the bus, with whole matrices {readable_bytes(standard)}: "
        f"{standard / found.bytes:.2g} × as many. Matrices grow with S², and so do the keys and values that each block of "
        f"queries reads again, but only by 1 / {settings['block_queries']} of a row each: larger blocks, fewer bytes."
    )
    lines += [f"Of this run: {m.check}." for m in made if m.settings["counted"] != "bytes"]
    return "\n".join(lines)
