"""The panel of serving.timelines: static and continuous batching beside each other, a row for each slot, time along x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.experiments.serve_inputs import Segment, ragged
from workbench.experiments.serve_timelines import BATCHING, expected
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.smaller_knobs import PlayPanel
from workbench.panels.smaller_plots import PALE
from workbench.panels.speculate_plots import NOTE
from workbench.panels.style import milliseconds
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, recorded_label
from workbench.serving.arrivals import Arrival

KNOBS = ("requests", "slots", "longest_output", "tail", "longest_prompt", "seed")
COLOURS = {"prompt": style.WEIGHTS, "decode": style.TARGET, "padding": style.LEARNER, "empty": PALE}
PLAY_STEPS, PLAY_MS = 2, 250  # a picture of the Play button
NAMED = 0.035  # of the width: a shorter run of steps has no number in it


@dataclass(frozen=True)
class Line:
    """One side of the picture. ends: of each step, in seconds where they were measured, else in steps."""

    batching: str
    segments: list[Segment]
    ends: list[float]
    rows: int
    padding_rows: int
    measured: Measurement | None

    @property
    def steps(self) -> int:
        return len(self.ends)

    def at(self, step: float) -> float:
        return float(np.interp(step, range(self.steps + 1), [0.0, *self.ends]))

    def share(self, kind: str, slots: int) -> float:
        """Of all slots in all steps, those in which this was computed."""
        return sum(end - begin for _, _, k, begin, end in self.segments if k == kind) / slots / self.steps


class TimelinesPanel(PlayPanel):
    """Before a run the steps that follow from the lengths alone; after it the same steps as long as they took."""

    experiment_name = "serving.timelines"
    played = "shown_step"

    def _build(self, values: dict[str, Any]) -> None:
        super()._build(values)
        self.play.step, self.play.interval = PLAY_STEPS, PLAY_MS

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in KNOBS}
        asked = ragged(**{name: value for name, value in knobs.items() if name != "slots"})
        measured = {m.settings["measured"]: m for m in self.measurements if same_knobs(m, knobs)}
        timed = all(how in measured for how in BATCHING)
        lines = [
            _line(how, asked, settings["slots"], measured.get(how) if timed else None) for how in BATCHING
        ]
        shown, end = settings["shown_step"], max(line.ends[-1] for line in lines)
        recorded = [m for m in self.record if same_knobs(m, knobs) and m.settings["measured"] in BATCHING]
        figure, axes = style.new_figure(2, 2, height=4.9, height_ratios=[3.4, 1])
        for at, (line, axis) in enumerate(zip(lines, axes)):
            axis.set_position([0.055 + 0.485 * at, 0.37, 0.45, 0.5])
            _draw_line(axis, line, settings["slots"], shown, end, timed)
        axes[3].remove()
        axes[2].set_position([0.115, 0.1, 0.87, 0.13])
        _draw_ends(axes[2], lines, recorded, timed)
        _legend(axes[0])
        return View(
            figure=figure,
            alt=_alt(lines, settings, timed),
            header=["batching", "steps", "rows", "padding", "slots busy", "seconds", "predicted", "tokens/s",
                    "TTFT mean", "p90", "end-to-end mean", "p90"],
            rows=[_row(line, settings["slots"]) for line in lines],
            caption=f"{settings['requests']} requests, {settings['slots']} slots, outputs of up to "
            f"{settings['longest_output']} tokens, {settings['tail']}"
            + ("" if timed else "; from the lengths alone, no model was run: Run measures"),
            words=_words(lines, asked, settings, measured.get("speed-up") if timed else None),
        )  # fmt: skip


def _line(how: str, asked: Sequence[Arrival], slots: int, m: Measurement | None) -> Line:
    if m is not None:
        told, counts = [tuple(one) for one in m.settings["segments"]], m.counts
        return Line(how, told, m.settings["ends_s"], int(counts["rows"]), int(counts["padding_rows"]), m)
    e = expected(asked, how, slots)
    return Line(
        how, e.segments, [float(step) for step in range(1, e.steps + 1)], e.rows, e.padding_rows, None
    )


def _draw_line(axes: Axes, line: Line, slots: int, shown: int, end: float, timed: bool) -> None:
    step = min(shown, line.steps)
    now = line.at(step)
    axes.grid(visible=False)
    axes.barh(range(slots), now, height=0.8, color=COLOURS["empty"], zorder=1)
    for kind in ("prompt", "decode", "padding"):
        runs = [(slot, request, line.at(a), line.at(min(b, step))) for slot, request, k, a, b in line.segments
                if k == kind and a < step]  # fmt: skip
        axes.barh([r[0] for r in runs], [b - a for *_, a, b in runs], left=[a for *_, a, _ in runs], height=0.8,
                  color=COLOURS[kind], edgecolor=style.sheet()["axes.facecolor"], linewidth=0.5, zorder=2)  # fmt: skip
        if kind == "decode":
            for slot, request, a, b in runs:
                if b - a > NAMED * end:
                    style.write(axes, (a + b) / 2, slot, f"{request}", ha="center", va="center", fontsize=8,
                                color="#FFFFFF", zorder=3)  # fmt: skip
    axes.set(xlim=(0, 1.02 * end), ylim=(slots - 0.4, -0.6), yticks=range(0, slots, 1 if slots <= 8 else 4))
    if step < line.steps:
        axes.axvline(now, color=style.INK, linewidth=1.2, zorder=4)
    done = f"{line.steps} steps" if step == line.steps else f"step {step} of {line.steps}"
    took = f", {milliseconds(now)}" if timed else ""
    first = line.batching == BATCHING[0]
    title = f"{line.batching}: {done}{took}"
    style.label(axes, x="seconds" if timed else "steps", y="slot" if first else "", title=title)


def _draw_ends(axes: Axes, lines: Sequence[Line], recorded: Sequence[Measurement], timed: bool) -> None:
    """When all requests were done: measured, predicted, recorded."""
    for y, line in enumerate(lines):
        m = line.measured
        if m is None:
            axes.barh(y, line.ends[-1], height=0.5, color=style.IDLE, zorder=2)
            continue
        low, high = m.spread
        axes.plot([low, high], [y, y], color=style.INK, linewidth=1.6, zorder=3)
        axes.plot([m.median], [y], marker="o", markersize=7, color=style.INK, linestyle="", zorder=4,
                  label="measured" if y == 0 else None)  # fmt: skip
        if m.predicted is not None:
            axes.plot([m.predicted] * 2, [y - 0.34, y + 0.34], color=style.INK, linestyle=(0, (2, 1.5)), linewidth=2,
                      zorder=3, label="predicted by the cost model" if y == 0 else None)  # fmt: skip
    for m in recorded if timed else ():
        first = m is recorded[0]
        axes.plot([m.median], [BATCHING.index(m.settings["measured"])], color=style.INK, zorder=5,
                  **{**style.RECORDED, "linestyle": ""}, label=recorded_label(list(recorded)) if first else None)  # fmt: skip
    axes.set_yticks(range(len(lines)), [line.batching for line in lines])
    axes.set(ylim=(1.6, -0.6), xlim=(0, None))
    axes.grid(visible=False, axis="y")
    style.label(axes, x="all requests done after … " + ("seconds" if timed else "steps"))
    style.legend(axes, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=3, borderaxespad=0.0)


def _legend(axes: Axes) -> None:
    place = {"transform": axes.figure.transFigure, "va": "center", "fontsize": 10}
    x = 0.055
    for kind, colour in COLOURS.items():
        axes.figure.text(x, 0.955, "■", color=colour, fontsize=13, va="center", fontfamily="DejaVu Sans")
        style.write(axes, x + 0.02, 0.955, kind, **place)
        x += 0.05 + 0.0115 * len(kind)
    style.write(axes, x, 0.955, "numbers: requests, in the order of arrival", color=NOTE, **place)


def _row(line: Line, slots: int) -> list[str]:
    shares = f"{line.share('prompt', slots) + line.share('decode', slots):.0%}"
    first = [line.batching, f"{line.steps}", f"{line.rows:,}", f"{line.padding_rows / line.rows:.0%}", shares]
    m = line.measured
    if m is None:
        return [*first, *["–"] * 7]
    c = m.counts
    times = (c[name] for name in ("ttft_mean_s", "ttft_p90_s", "latency_mean_s", "latency_p90_s"))
    predicted = "–" if m.predicted is None else milliseconds(m.predicted)
    return [*first, milliseconds(m.median), predicted, f"{c['tokens_per_s']:,.0f}", *map(milliseconds, times)]


def _took(line: Line) -> str:
    return milliseconds(line.measured.median)


def _alt(lines: Sequence[Line], settings: dict[str, Any], timed: bool) -> str:
    static, continuous = lines
    shown = settings["shown_step"]
    cut = f" Shown up to step {shown}." if shown < max(line.steps for line in lines) else ""
    took = (
        f"Static batching takes {_took(static)}, continuous {_took(continuous)}."
        if timed
        else "Nothing is measured yet."
    )
    return (
        f"Two timelines of {settings['slots']} slots. Static batching: {static.steps} steps, "
        f"{static.padding_rows / static.rows:.0%} of the rows are padding. Continuous: {continuous.steps} steps, a slot is taken "
        f"again as soon as its text is done. {took}{cut}"
    )


def _words(
    lines: Sequence[Line], asked: Sequence[Arrival], settings: dict[str, Any], ratio: Measurement | None
) -> str:
    static, continuous = lines
    slots, outputs = settings["slots"], [a.new_tokens for a in asked]
    promised = static.steps / continuous.steps
    mean, longest = sum(outputs) / len(outputs), max(outputs)
    told = [
        f"Static: a group ends with its longest output. Outputs are {mean:.0f} tokens on average and {longest} at most, so "
        f"{static.padding_rows / static.rows:.0%} of {static.rows:,} rows are padding. Continuous: a slot that is free is taken "
        f"in the next step, no row is padding, and {continuous.steps} steps do instead of {static.steps}: "
        f"{promised:.2f} times as fast, if every step took as long."
    ]
    if len(asked) <= slots:
        told.append("There is one group, and a slot for everyone: nobody waits for a place. Both take as many steps, those of the "
                    "longest output; continuous batching saves the padded rows alone.")  # fmt: skip
    elif continuous.steps == longest:
        told.append(
            f"Continuous batching ends with its longest request of {longest} tokens: no more slots would make it faster."
        )
    elif promised < 1.2:
        told.append("The outputs are nearly of one length: whoever waits for the slowest does not wait long, and little can be "
                    "gained.")  # fmt: skip
    else:
        busy = continuous.share("decode", slots) + continuous.share("prompt", slots)
        told.append(
            f"The slots are busy for {busy:.0%} of the time, and not to the end: the last ones run out of requests."
        )
    if ratio is not None:
        told.append(f"Measured: {ratio.median:.2f} times as fast. " + _why(ratio.median, promised))
        told.append(beside_prediction([line.measured for line in lines]))
        told.append(f"Verified: {ratio.check}.")
    return "\n".join(told)


def _why(measured: float, promised: float) -> str:
    if measured > 1.1 * promised:
        return "More than the steps say: its steps are also smaller, because no row in them is padding."
    if measured < 0.9 * promised:
        return "Less than the steps say: its steps take longer than static ones, most of which decode a few rows."
    return "That is what the steps say: a step reads all weights, and takes nearly as long with few rows as with many."
