"""The panel of paging.blocks: the pool, the tables that point into it, and what the last step copied, found and
evicted."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from workbench.experiments.inputs import shape_of
from workbench.instruments.memory import readable_bytes
from workbench.labs.lab09_paged_attention.block_pool import EXPERIMENT, block_bytes
from workbench.labs.lab09_paged_attention.scene import Step, scene
from workbench.panels import style
from workbench.panels.chart import Drawing, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import LOST, NOTE, PALE, cell, empty, write_centred
from workbench.panels.view import View
from workbench.panels.words import listed

KNOBS = (
    "block_size",
    "num_blocks",
    "prefix",
    "prompt_tokens",
    "samples",
    "new_tokens",
    "common_tokens",
    "other_tokens",
    "seed",
)
FREE, IDLE, ONCE, SHARED = "free", "idle", "held once", "shared"
STATES = {FREE: "#FFFFFF", IDLE: "#C3C7CE", ONCE: style.CACHE, SHARED: "#8A5A00"}
FOUND, EVICTED = style.TARGET, LOST  # frames of blocks that the step found or took
IN_A_ROW = 16  # blocks of the pool
NUMBERED = 0.5  # width of an entry that has room for its number, in blocks
FIRST_TABLE = 1.7  # height of the first table below the pool, in blocks


class BlockPoolPanel(PlayPanel):
    """Lab 09: who holds which block: the pool, tables with arrows, sharing, copies, eviction; with a Play button."""

    experiment = EXPERIMENT
    draws_records = False
    played = "shown_step"

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in KNOBS}
        steps = scene(vocab_size=shape_of(settings["model"]).vocab_size, **knobs)
        at = min(settings["shown_step"], len(steps) - 1)
        step, size = steps[at], settings["block_size"]
        title = f"step {at} of {len(steps) - 1}: a pool of {settings['num_blocks']} blocks of {size} tokens"
        checks = {m.settings["step"]: m.check for m in self.made(settings, KNOBS)}
        return view(
            Drawing(lambda axes: _draw(axes, step, size, title), _alt(step, at, len(steps), size)),
            height=5.4,
            boxes=[(0.01, 0.01, 0.98, 0.91)],
            table=(["who", "tokens", "blocks", "of them shared", "full to"], _rows(step, size)),
            caption=f"step {at} of {len(steps) - 1}",
            words=_words(step, steps[: at + 1], checks.get(at), block_bytes(settings["model"], size)),
        )


def state_of(step: Step, block: int) -> str:
    held = step.references[block]
    return SHARED if held > 1 else ONCE if held else IDLE if block in step.idle else FREE


def _found(step: Step, size: int) -> set[int]:
    return {block for name, tokens in step.found.items() for block in step.tables[name][: tokens // size]}


def _place(block: int) -> tuple[float, float]:
    """Left upper corner of a block of the pool."""
    return 1.02 * (block % IN_A_ROW), 1.35 * (block // IN_A_ROW)


def _draw(axes: Axes, step: Step, size: int, title: str) -> None:
    empty(axes)
    style.label(axes, title=title)
    box = axes.get_window_extent()
    across = 1.02 * IN_A_ROW + 1.7
    axes.set(xlim=(-1.5, across - 1.5), ylim=(across * box.height / box.width - 1.5, -1.5))
    _draw_legend(axes)
    framed = dict.fromkeys(_found(step, size), FOUND) | dict.fromkeys(step.evicted, EVICTED)
    for block in range(len(step.references)):
        x, y = _place(block)
        _draw_block(axes, x, y, step, block, size, framed.get(block))
    for source, target in step.copies:
        _draw_copy(axes, source, target)
    below = _place(len(step.references) - 1)[1] + FIRST_TABLE
    for row, (name, table) in enumerate(step.tables.items()):
        _draw_table(axes, below + 1.0 + 0.95 * row, name, table, step, {t for _, t in step.copies} | set(framed))
    if not step.tables:
        style.write(axes, 0, below + 1.4, "no text holds a block", color=NOTE)


def _draw_block(axes: Axes, x: float, y: float, step: Step, block: int, size: int, frame: str | None) -> None:
    state = state_of(step, block)
    full = step.fill[block] / size
    cell(axes, x, y, 0.94, 0.94, PALE if state != FREE else "#FFFFFF")
    cell(axes, x, y, 0.94 * full, 0.94, STATES[state])
    for token in range(1, size):
        axes.plot([x + 0.94 * token / size] * 2, [y, y + 0.94], color="#FFFFFF", linewidth=0.5, zorder=4)
    look: dict[str, Any] = {
        "edgecolor": frame or "#9AA1AC",
        "linewidth": 2.6 if frame else 0.8,
        "zorder": 6 if frame else 5,
    }
    cell(axes, x, y, 0.94, 0.94, "none", hover=_name_of(step, block, size), **look)
    ink = "#FFFFFF" if state == SHARED else style.INK
    write_centred(axes, x + 0.47, y + 0.36, f"{block}", fontsize=10, color=ink, zorder=7)
    if step.references[block] > 1:
        write_centred(axes, x + 0.47, y + 0.74, f"{step.references[block]} ×", fontsize=10, color=ink, zorder=7)


def _name_of(step: Step, block: int, size: int) -> str:
    """The hover name of a block: its state, who holds it, and its tokens."""
    text, fill = f"block {block}: {state_of(step, block)}", step.fill[block]
    holders = [name for name, table in step.tables.items() if block in table]
    if holders:
        held = len(holders)
        text += f" by {listed(holders)}, {held} reference{'s' * (held != 1)}"
    return text + (f", {fill} of {size} tokens" if state_of(step, block) != FREE else "")


def _draw_copy(axes: Axes, source: int, target: int) -> None:
    (from_x, from_y), (to_x, to_y) = _place(source), _place(target)
    bend = -0.35 if to_x > from_x else 0.35
    axes.add_patch(
        FancyArrowPatch(
            (from_x + 0.47, from_y),
            (to_x + 0.47, to_y),
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=13,
            color=style.INK,
            linewidth=1.6,
            zorder=8,
        )
    )


def _draw_table(axes: Axes, y: float, name: str, table, step: Step, marked: set[int]) -> None:
    """The table of one text; a line from each entry to its block, dark where others hold it too."""
    wide = min(0.8, 1.02 * IN_A_ROW / max(1, len(table)))
    style.write(axes, -0.2, y + 0.3, name, ha="right", va="center", fontsize=10.5)
    for at, block in enumerate(table):
        x, shared = wide * at, step.references[block] > 1
        # white first, so that lines of others pass behind it
        hover = f"{name}: entry {at} of its table is block {block}, {step.references[block]} ×"
        for face, alpha in (("#FFFFFF", 1), (STATES[state_of(step, block)], 0.5)):
            cell(axes, x, y, 0.94 * wide, 0.6, face, alpha=alpha, zorder=5, hover=hover)
        if wide > NUMBERED:
            write_centred(axes, x + 0.47 * wide, y + 0.31, f"{block}", zorder=7, fontsize=10)
        to_x, to_y = _place(block)
        look: dict[str, Any] = {
            "color": STATES[SHARED] if shared else style.CACHE,
            "linewidth": 1.3 if shared else 0.9,
            "alpha": 0.75,
        }
        if block in marked:
            look = {"color": style.INK, "linewidth": 1.6, "alpha": 1.0}
        axes.plot([x + 0.47 * wide, to_x + 0.47], [y, to_y + 0.98], zorder=2, **look)
        axes.plot([to_x + 0.47], [to_y + 1.0], marker="^", markersize=4, zorder=4, **(look | {"linewidth": 0}))
    look = {"bbox": {"facecolor": style.sheet()["axes.facecolor"], "linewidth": 0, "pad": 1}, "color": NOTE}
    text = f"{step.lengths[name]} tokens"
    style.write(axes, wide * len(table) + 0.15, y + 0.31, text, va="center", fontsize=10, zorder=5, **look)


def _draw_legend(axes: Axes) -> None:
    x = 0.0
    marks = [(state, colour, "#9AA1AC") for state, colour in STATES.items()]
    marks += [("found again", "none", FOUND), ("evicted", "none", EVICTED)]
    for text, face, edge in marks:
        cell(axes, x, -1.36, 0.36, 0.36, face, edgecolor=edge, linewidth=2.2 if face == "none" else 0.8, zorder=4)
        style.write(axes, x + 0.5, -1.17, text, va="center", fontsize=10)
        x += 1.05 + 0.15 * len(text)
    axes.annotate(
        "", (x + 0.7, -1.17), (x, -1.17), arrowprops={"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.6}
    )
    style.write(axes, x + 0.85, -1.17, "copied", va="center", fontsize=10)


def _rows(step: Step, size: int) -> list[list[str]]:
    texts = [
        [
            name,
            f"{step.lengths[name]}",
            " ".join(map(str, table)),
            " ".join(str(block) for block in table if step.references[block] > 1),
            " ".join(str(min(size, step.lengths[name] - at * size)) for at in range(len(table))),
        ]
        for name, table in step.tables.items()
    ]
    pool = []
    for state in (SHARED, ONCE, IDLE, FREE):
        blocks = [block for block in range(len(step.references)) if state_of(step, block) == state]
        fill = "" if state == FREE else " ".join(str(step.fill[block]) for block in blocks)
        pool.append([f"pool: {state}", f"{sum(step.fill[b] for b in blocks)}", " ".join(map(str, blocks)), "", fill])
    return texts + pool


def _alt(step: Step, at: int, count: int, size: int) -> str:
    tables = "; ".join(f"{name}: {' '.join(map(str, table))}" for name, table in step.tables.items())
    return (
        f"Step {at} of {count - 1}: {step.words} Block tables, with a line from each entry to its block in the pool: "
        f"{tables or 'none'}. Of {len(step.references)} blocks of {size} tokens {step.shared} are shared, "
        f"{step.held - step.shared} held once, {len(step.idle)} idle and {step.free} free."
    )


def _words(step: Step, so_far: tuple[Step, ...], check: str | None, per_block: int) -> str:
    saved = step.unshared - step.held
    copies = sum(len(past.copies) for past in so_far)
    tokens_found = sum(sum(past.found.values()) for past in so_far)
    lines = [
        step.words,
        (
            f"The texts hold {step.held} block{'s' * (step.held != 1)}, {step.shared} of them shared; alone each they"
            f" would hold {step.unshared}. Sharing saves {saved} block{'s' * (saved != 1)},"
            f" {readable_bytes(saved * per_block, binary=True)} ({saved * per_block:,} bytes) of keys and values."
        ),
        (
            f"So far: {copies} cop{'ies' if copies != 1 else 'y'}, {tokens_found} prompt tokens found again,"
            f" {step.evictions} evicted."
        ),
    ]
    if check:
        lines.append(f"With the model: {check}.")
    return "\n".join(lines)
