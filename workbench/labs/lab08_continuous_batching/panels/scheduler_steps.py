"""The panel of serving.steps: what the scheduler decides, step by step: the queue, the rows of the step, blocks, who
is preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from workbench.labs.lab08_continuous_batching.inputs import Frame
from workbench.labs.lab08_continuous_batching.scheduler_steps import (
    BLOCK,
    EXPERIMENT,
    SCHEDULING,
    WORKLOAD,
    frames_for,
    recomputed,
    workload,
)
from workbench.panels import style
from workbench.panels.chart import Drawing, table, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import LOST, PALE, cell, empty, legend_above
from workbench.panels.view import View
from workbench.panels.words import listed
from workbench.serving.arrivals import Arrival

STATES = ("", "waits", "prompt", "computed again", "decode", "on the host", "no budget left", "padding")
COLOURS = dict(
    zip(STATES, ("#FFFFFF", "#D9DCE1", style.PREFILL, "#7FB4DB", style.DECODE, style.COMPUTE, "#F3D08A", LOST))
)
HEIGHT, BOX = style.TALLEST, (0.465, 0.22)  # inches of the figure, and of it a box of squares
MAX_NUMBERED = 18  # squares in a line that have room for a number each
HELD_BACK = {
    "block": "the blocks that were left: memory decides who runs",
    "slots": "the slots: memory is left, and nobody may use it",
    "budget": "the token budget: a larger one lets prompts in sooner, and makes steps longer",
    "group": "the group: in static batching nobody joins before all are done",
}


class SchedulerStepsPanel(PlayPanel):
    """Lab 08: the scheduler, step by step: queue, chunks, budget, blocks, who is preempted; with a Play button."""

    experiment = EXPERIMENT
    draws_records = False
    played = "shown_step"

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in (*WORKLOAD, *SCHEDULING)}
        frames, asked = frames_for(**knobs), workload(*(settings[name] for name in WORKLOAD))
        shown = min(settings["shown_step"], len(frames) - 1)
        states, frame = states_of(frames, asked), frames[shown]
        checks = [m.check for m in self.made(settings, knobs)]
        return view(
            Drawing(lambda axes: _draw_grid(axes, states, frames, asked, shown), _alt(frames, frame, shown, settings)),
            Drawing(lambda axes: _draw_rows(axes, states[:, shown], frame, settings)),
            Drawing(lambda axes: _draw_pool(axes, frame, settings["blocks"])),
            height=HEIGHT,
            boxes=[(0.125, 0.4, 0.86, 0.45), (0.02, 0.015, *BOX), (0.52, 0.015, *BOX)],
            table=table(
                enumerate(asked),
                {
                    "request": "{m[0]}",
                    "arrived": "{m[1].at_s:.0f}",
                    "prompt": "{m[1].prompt_tokens}",
                    "output": "{m[1].new_tokens}",
                    "priority": "{m[1].priority}",
                    "due": lambda row: f"{row[1].at_s + row[1].deadline_s:.0f}",
                    "state": lambda row: _state(states[row[0]], shown),
                    "this step": lambda row: _did(row[0], frame),
                    "computed": lambda row: frame.computed[row[0]] if row[0] in frame.blocks else "–",
                    "blocks": lambda row: frame.blocks.get(row[0], "–"),
                },
            ),
            caption=(
                f"step {frame.at}: {frame.rows + frame.padding_rows} rows of a budget of {settings['token_budget']}, "
                f"{sum(frame.blocks.values())} of {settings['blocks']} blocks held; times in steps"
            ),
            words=_words(frames, asked, frame, settings, checks),
        )


def states_of(frames: Sequence[Frame], asked: Sequence[Arrival]) -> np.ndarray:
    """[requests, steps] a number of STATES: what each request did in each step; 0 before it came and after its end."""
    states = np.zeros((len(asked), len(frames)), dtype=int)
    seen: Counter[int] = Counter()
    running: set[int] = set()
    for x, frame in enumerate(frames):
        running |= {*frame.admitted, *frame.swapped_in}
        running -= {*frame.preempted, *frame.swapped_out}
        states[list(running), x] = STATES.index("no budget left")
        states[list(frame.waiting), x] = STATES.index("waits")
        states[list(frame.swapped), x] = STATES.index("on the host")
        states[[request for request, _ in frame.padding], x] = STATES.index("padding")
        for request, start, count in frame.work:
            again = start < seen[request]
            state = "computed again" if again else "prompt" if start < asked[request].prompt_tokens else "decode"
            states[request, x] = STATES.index(state)
            seen[request] = max(seen[request], start + count)
        running -= set(frame.finished)
    return states


def _draw_grid(axes: Axes, states: np.ndarray, frames: Sequence[Frame], asked: Sequence[Arrival], shown: int) -> None:
    requests, steps = states.shape
    seen = states.copy()
    seen[:, shown + 1 :] = 0
    axes.grid(visible=False)
    colours: dict[str, Any] = {"cmap": ListedColormap([COLOURS[s] for s in STATES]), "vmin": 0, "vmax": len(STATES) - 1}
    axes.imshow(seen, aspect="auto", interpolation="nearest", **colours)
    for request in range(requests):
        edges = [0, *(np.flatnonzero(np.diff(seen[request])) + 1), steps]
        for begin, end in pairwise(edges):
            if state := STATES[seen[request, begin]]:
                first, last = frames[begin].at, frames[end - 1].at
                hover = f"request {request}: {state}, " + (
                    f"steps {first} to {last}" if last > first else f"step {first}"
                )
                cell(axes, begin - 0.5, request - 0.5, end - begin, 1, "none", hover=hover)
    axes.set_yticks(np.arange(-0.5, requests), minor=True)
    if steps <= 80:
        axes.set_xticks(np.arange(-0.5, steps), minor=True)
    axes.grid(visible=True, which="minor", color="#FFFFFF", linewidth=0.7)
    axes.tick_params(which="minor", length=0)
    gone = [(x, r) for x, f in enumerate(frames[: shown + 1]) for r in (*f.preempted, *f.swapped_out)]
    cross: dict[str, Any] = {"marker": "x", "linestyle": "", "markersize": 6, "markeredgewidth": 2, "zorder": 4}
    axes.plot([x for x, _ in gone], [r for _, r in gone], color=LOST, **cross)
    axes.add_patch(
        Rectangle((shown - 0.5, -0.5), 1, requests, fill=False, edgecolor=style.INK, linewidth=1.6, zorder=5)
    )
    names = [f"{r}: {a.prompt_tokens} + {a.new_tokens}" for r, a in enumerate(asked)]
    axes.set_yticks(range(requests), names, fontsize=10)
    ticks = [x for x, frame in enumerate(frames) if frame.at % (5 if steps <= 80 else 10) == 0]
    axes.set_xticks(ticks, [f"{frames[x].at}" for x in ticks], fontsize=10)
    preempted = Line2D([], [], color=LOST, label="is preempted", **cross)
    legend_above(axes, {state: COLOURS[state] for state in STATES[1:]}, preempted, columns=4)
    style.label(axes, x="step", title="request: prompt + output, in tokens")


def _squares(axes: Axes, squares: Sequence[tuple[str, str, str]], title: str) -> None:
    """A square for each (text, colour, hover name), line by line, as large as the box allows. Where
    there is no room for a text in each, the first of equal ones in a line has it."""
    empty(axes)
    tall = BOX[1] * HEIGHT / (BOX[0] * style.sheet()["figure.figsize"][0])
    columns = next(c for c in range(14, 200) if -(-len(squares) // c) <= int(c * tall))
    for at, (text, colour, hover) in enumerate(squares):
        y, x = divmod(at, columns)
        ink = "#FFFFFF" if colour in (style.PREFILL, style.DECODE, LOST) else style.INK
        is_written = columns <= MAX_NUMBERED or not x or squares[at - 1][0] != text
        written = text if is_written else ""
        cell(axes, x + 0.06, y + 0.06, 0.88, 0.88, colour, written, ink=ink, fontsize=10, hover=hover)
    axes.set(xlim=(0, columns), ylim=(columns * tall, 0))
    style.label(axes, title=title)


def _draw_rows(axes: Axes, doing: np.ndarray, frame: Frame, settings: dict[str, Any]) -> None:
    squares = []
    for request, _, count in frame.work:
        state, did = STATES[doing[request]], _did(request, frame)
        squares += [(f"{request}", COLOURS[state], f"request {request}: {state}, {did}")] * count
    for request, rows in frame.padding:
        squares += [(f"{request}", COLOURS["padding"], f"request {request}: padding")] * rows
    budget = settings["token_budget"] if settings["batching"] == "continuous" else len(squares)
    title = f"rows of step {frame.at}: {len(squares)}"
    title += f" of at most {budget}" if settings["batching"] == "continuous" else ", no budget"
    _squares(axes, [*squares, *[("", PALE, "a row that nobody takes")] * (budget - len(squares))], title)


def _draw_pool(axes: Axes, frame: Frame, blocks: int) -> None:
    squares = [
        (f"{request}", style.CACHE, f"request {request}: block {at + 1} of its {held}")
        for request, held in frame.blocks.items()
        for at in range(held)
    ]
    title = f"blocks of {BLOCK} tokens: {len(squares)} of {blocks}"
    _squares(axes, [*squares, *[("", PALE, "a free block")] * (blocks - len(squares))], title)


def _state(states: np.ndarray, shown: int) -> str:
    return STATES[states[shown]] or ("not here yet" if states[shown + 1 :].any() else "done")


def _did(request: int, frame: Frame) -> str:
    """What a request did in the step."""
    for _, start, count in (work for work in frame.work if work[0] == request):
        decodes = count == 1 and request in frame.written
        return "its next token" if decodes else f"tokens {start + 1} to {start + count}"
    return "is preempted" if request in frame.preempted or request in frame.swapped_out else "–"


def first_token_waits(frames: Sequence[Frame], asked: Sequence[Arrival]) -> list[float]:
    """Steps from each request's arrival to the end of the step that wrote its first token."""
    first: dict[int, int] = {}
    for frame in frames:
        for request in frame.written:
            first.setdefault(request, frame.at + 1)
    return [first[r] - one.at_s for r, one in enumerate(asked)]


def _alt(frames: Sequence[Frame], frame: Frame, shown: int, settings: dict[str, Any]) -> str:
    waiting = len(frame.waiting) + len(frame.swapped)
    return (
        f"A grid of {settings['requests']} requests by {len(frames)} steps, drawn up to step {frame.at}: who waits,"
        f" whose prompt is computed, who writes. In this step {len(frame.work)} texts bring {frame.rows} rows,"
        f" {waiting} wait, and {sum(frame.blocks.values())} of {settings['blocks']} blocks are held."
    )


def _numbers(requests: Sequence[int]) -> str:
    return ("request " if len(requests) == 1 else "requests ") + listed([f"{r}" for r in requests])


def _words(
    frames: Sequence[Frame], asked: Sequence[Arrival], frame: Frame, settings: dict[str, Any], checks: Sequence[str]
) -> str:
    sentences = [f"Step {frame.at}: " + " ".join(_decisions(frame, settings))]
    waits = first_token_waits(frames, asked)
    worst = max(range(len(waits)), key=waits.__getitem__)
    gone = sum(len(f.preempted) + len(f.swapped_out) for f in frames)
    whole = (
        f"All in all: {len(frames)} steps. A first token comes {sum(waits) / len(waits):.1f} steps after its request on"
        f" average, {waits[worst]:.0f} at most (request {worst})."
    )
    if gone:
        whole += f" {gone} times a sequence was preempted" + (
            f", and {recomputed(frames)} rows were computed twice."
            if settings["preemption"] == "recompute"
            else "; its keys and values went to the host and back, and no row was computed twice."
        )
    sentences.append(whole)
    reasons = Counter(next(k for k in HELD_BACK if k in f.held_back) for f in frames if f.held_back)
    if reasons:
        reason, times = reasons.most_common(1)[0]
        sentences.append(
            f"In {sum(reasons.values())} steps somebody was held back, in {times} of them by {HELD_BACK[reason]}."
        )
    else:
        sentences.append("Nobody is ever held back: whoever comes is let in at once.")
    sentences += [f"Run with the engine: {check}." for check in checks]
    return "\n".join(sentences)


def _decisions(frame: Frame, settings: dict[str, Any]) -> list[str]:
    decodes = [r for r, _, count in frame.work if r in frame.written and count == 1]
    prefills = [(r, count) for r, _, count in frame.work if r not in decodes]
    sentences = []
    if decodes:
        sentences.append(
            f"{_numbers(decodes)} {'bring a row each and get' if len(decodes) > 1 else 'brings a row and gets'} a"
            " token."
        )
    for request, count in prefills:
        more = " and gets its first token from them" if request in frame.written else ", a part of its text"
        sentences.append(f"request {request} brings {count} tokens{more}.")
    if frame.padding_rows:
        sentences.append(f"{frame.padding_rows} rows are padding.")
    if frame.admitted:
        sentences.append(f"{_numbers(frame.admitted)} {'are' if len(frame.admitted) > 1 else 'is'} let in.")
    if frame.preempted:
        sentences.append(
            f"{_numbers(frame.preempted)}: no block was left; all blocks are given back, and computed again later."
        )
    if frame.swapped_out:
        sentences.append(f"{_numbers(frame.swapped_out)}: no block was left; keys and values are moved to the host.")
    if frame.swapped_in:
        sentences.append(f"{_numbers(frame.swapped_in)}: back from the host.")
    if frame.finished:
        sentences.append(f"{_numbers(frame.finished)}: done, and the blocks are free.")
    if frame.held_back:
        sentences.append(
            f"Next in line is request {(frame.swapped or frame.waiting)[0]}, and waits: {frame.held_back}."
        )
    return [one[0].upper() + one[1:] if at else one for at, one in enumerate(sentences)]
