"""The panel of serving.timelines: static and continuous batching beside each other, a row for each slot, time along
x."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab08_continuous_batching.inputs import Segment, ragged
from workbench.labs.lab08_continuous_batching.timelines import BATCHING, EXPERIMENT, expected
from workbench.panels import style
from workbench.panels.chart import Axis, Bar, Bars, Drawing, number, table, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import PALE, legend_above, same_knobs, write_centred
from workbench.panels.stage import tell
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction
from workbench.serving.arrivals import Arrival

KNOBS = ("requests", "slots", "longest_output", "tail", "longest_prompt", "seed")
COLOURS = {"prompt": style.PREFILL, "decode": style.DECODE, "padding": style.LEARNER, "empty": PALE}
PLAY_STEPS, PLAY_MS = 2, 250  # a picture of the Play button
A_DIGIT = 0.027  # of the width: a run of steps has its number in it only where the digits have room


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

    def done(self, now: float) -> int:
        """Steps that have ended by then."""
        return bisect_right(self.ends, now)

    def busy(self, slots: int) -> float:
        """Of all slots in all steps, those in which a prompt was computed or a token decoded."""
        steps = sum(end - begin for _, _, kind, begin, end in self.segments if kind in ("prompt", "decode"))
        return steps / slots / self.steps


class TimelinesPanel(PlayPanel):
    """Lab 08: static and continuous batching side by side, slot by slot, from real runs; with a Play button."""

    experiment = EXPERIMENT
    played = "shown_step"

    def _build(self, values: dict[str, Any]) -> None:
        super()._build(values)
        self.play.step, self.play.interval = PLAY_STEPS, PLAY_MS

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in KNOBS}
        asked = ragged(**{name: value for name, value in knobs.items() if name != "slots"})
        measured = {m.settings["measured"]: m for m in self.made(settings, KNOBS)}
        timed = all(how in measured for how in BATCHING)
        lines = [_line(how, asked, settings["slots"], measured.get(how) if timed else None) for how in BATCHING]
        now, end = shown_until(lines, settings["shown_step"]), max(line.ends[-1] for line in lines)
        recorded = {m.settings["measured"]: m for m in self.record if timed and same_knobs(m, knobs)}
        ends = Bars(
            [
                Bar.of(line.batching, line.measured, style.IDLE, recorded.get(line.batching))
                if timed
                else Bar(line.batching, line.ends[-1], style.IDLE)
                for line in lines
            ],
            Axis(
                "all requests done after … " + ("(dashed: by the cost model)" if timed else "steps"),
                milliseconds if timed else number,
                "zero",
            ),
            height=0.5,
        )

        def with_legend(line: Line, axes: Axes) -> None:
            _draw_line(axes, line, settings["slots"], now, end, timed)
            if line is lines[0]:
                _legend(axes)

        return view(
            *(Drawing(functools.partial(with_legend, line)) for line in lines),
            ends,
            height=4.9,
            boxes=[(0.07, 0.37, 0.42, 0.48), (0.54, 0.37, 0.42, 0.48), (0.14, 0.1, 0.82, 0.15)],
            alt=f"{_alt(lines, settings, now, timed)} {ends.alt()}",
            table=table(
                lines,
                {
                    "batching": "{m.batching}",
                    "steps": "{m.steps}",
                    "rows": "{m.rows:,}",
                    "padding": lambda line: f"{line.padding_rows / line.rows:.0%}",
                    "slots busy": lambda line: f"{line.busy(settings['slots']):.0%}",
                    "seconds": _measured(lambda m: milliseconds(m.median)),
                    "predicted": _measured(lambda m: "–" if m.predicted is None else milliseconds(m.predicted)),
                    "tokens/s": _measured(lambda m: f"{m.counts['tokens_per_s']:,.0f}"),
                    "TTFT mean": _measured(lambda m: milliseconds(m.counts["ttft_mean_s"])),
                    "TTFT p90": _measured(lambda m: milliseconds(m.counts["ttft_p90_s"])),
                    "end-to-end mean": _measured(lambda m: milliseconds(m.counts["latency_mean_s"])),
                    "end-to-end p90": _measured(lambda m: milliseconds(m.counts["latency_p90_s"])),
                },
            ),
            caption=(
                f"{settings['requests']} requests, {settings['slots']} slots, outputs of up to "
                f"{settings['longest_output']} tokens, {settings['tail']}"
            )
            + ("" if timed else "; from the lengths alone, no model was run: Run measures"),
            words=_words(lines, asked, settings, measured.get("speed-up") if timed else None),
        )


def _line(how: str, asked: Sequence[Arrival], slots: int, m: Measurement | None) -> Line:
    if m is not None:
        segments, counts = [tuple(segment) for segment in m.settings["segments"]], m.counts
        return Line(how, segments, m.settings["ends_s"], int(counts["rows"]), int(counts["padding_rows"]), m)
    e = expected(asked, how, slots)
    return Line(how, e.segments, [float(step) for step in range(1, e.steps + 1)], e.rows, e.padding_rows, None)


def shown_until(lines: Sequence[Line], step: int) -> float:
    """One moment for both, in seconds where they were measured: the end of that step of the line with more steps. So
    both clocks run alike, and who is done first is seen to be."""
    slower = max(lines, key=lambda line: line.steps)
    return slower.at(step) if step < slower.steps else max(line.ends[-1] for line in lines)


def _draw_line(axes: Axes, line: Line, slots: int, until: float, end: float, timed: bool) -> None:
    now, step = min(until, line.ends[-1]), line.done(until)
    axes.grid(visible=False)
    axes.barh(range(slots), now, height=0.8, color=COLOURS["empty"], zorder=1)
    for kind in ("prompt", "decode", "padding"):
        runs = [
            (slot, request, line.at(a), min(line.at(b), now))
            for slot, request, k, a, b in line.segments
            if k == kind and line.at(a) < now
        ]
        look = {"color": COLOURS[kind], "edgecolor": style.sheet()["axes.facecolor"], "linewidth": 0.5, "zorder": 2}
        begins, widths = [a for *_, a, _ in runs], [b - a for *_, a, b in runs]
        bars = axes.barh([slot for slot, *_ in runs], widths, left=begins, height=0.8, **look)
        for bar, (slot, request, *_) in zip(bars, runs):
            tell(bar, f"slot {slot}, request {request}: {kind}")
        if kind == "decode":
            for slot, request, a, b in runs:
                if b - a > (0.4 + len(f"{request}")) * A_DIGIT * end:
                    write_centred(axes, (a + b) / 2, slot, f"{request}", fontsize=10, color="#FFFFFF", zorder=3)
    axes.set(xlim=(0, 1.02 * end), ylim=(slots - 0.4, -0.6), yticks=range(0, slots, 1 if slots <= 8 else 4))
    if step < line.steps:
        axes.axvline(now, color=style.INK, linewidth=1.2, zorder=4)
    done = f"all {line.steps} steps" if step == line.steps else f"step {step} of {line.steps}"
    took = f", {milliseconds(now)}" if timed else ""
    first = line.batching == BATCHING[0]
    title = f"{line.batching}: {done}{took}"
    style.label(axes, x="seconds" if timed else "steps", y="slot" if first else "", title=title)


def _legend(axes: Axes) -> None:
    legend_above(axes, COLOURS | {"numbers: requests, as they arrive": "none"}, left=0.045)


def _measured(text: Callable[[Measurement], str]) -> Callable[[Line], str]:
    """A cell about a measured line; a dash where none is."""
    return lambda line: "–" if line.measured is None else text(line.measured)


def _took(line: Line) -> str:
    assert line.measured is not None
    return milliseconds(line.measured.median)


def _alt(lines: Sequence[Line], settings: dict[str, Any], until: float, timed: bool) -> str:
    static, continuous = lines
    shown = f"{milliseconds(until)}: " if timed else ""
    shown += " and ".join(f"step {line.done(until)} of {line.batching}" for line in lines)
    cut = f" Shown up to {shown} batching." if until < max(line.ends[-1] for line in lines) else ""
    took = (
        f"Static batching takes {_took(static)}, continuous {_took(continuous)}."
        if timed
        else "Nothing is measured yet."
    )
    return (
        f"Two timelines of {settings['slots']} slots. Static batching: {static.steps} steps,"
        f" {static.padding_rows / static.rows:.0%} of the rows are padding. Continuous: {continuous.steps} steps, a"
        f" slot is taken again as soon as its text is done. {took}{cut}"
    )


def _words(lines: Sequence[Line], asked: Sequence[Arrival], settings: dict[str, Any], ratio: Measurement | None) -> str:
    static, continuous = lines
    slots, outputs = settings["slots"], [a.new_tokens for a in asked]
    promised = static.steps / continuous.steps
    mean, longest = sum(outputs) / len(outputs), max(outputs)
    sentences = [
        f"Static: a group ends with its longest output. Outputs are {mean:.0f} tokens on average and {longest} at most,"
        f" so {static.padding_rows / static.rows:.0%} of {static.rows:,} rows are padding. Continuous: a slot that is"
        f" free is taken in the next step, no row is padding, and {continuous.steps} steps do instead of"
        f" {static.steps}: {promised:.2f} times as fast, if every step took as long."
    ]
    if len(asked) <= slots:
        sentences.append(
            "There is one group, and a slot for everyone: nobody waits for a place. Both take as many steps, those of"
            " the longest output; continuous batching saves the padded rows alone."
        )
    elif continuous.steps == longest:
        sentences.append(
            f"Continuous batching ends with its longest request of {longest} tokens: no more slots would make it"
            " faster."
        )
    elif promised < 1.2:
        sentences.append(
            "The outputs are nearly of one length: whoever waits for the slowest does not wait long, and little can be "
            "gained."
        )
    else:
        busy = continuous.busy(slots)
        sentences.append(
            f"The slots are busy for {busy:.0%} of the time, and not to the end: the last ones run out of requests."
        )
    if ratio is not None:
        sentences.append(f"Measured: {ratio.median:.2f} times as fast. " + _why(ratio.median, promised))
        sentences.append(beside_prediction([line.measured for line in lines if line.measured is not None]))
        sentences.append(f"Verified: {ratio.check}.")
    return "\n".join(sentences)


def _why(measured: float, promised: float) -> str:
    if measured > 1.1 * promised:
        return "More than the steps say: its steps are also smaller, because no row in them is padding."
    if measured < 0.9 * promised:
        return "Less than the steps say: its steps take longer than static ones, most of which decode a few rows."
    return "That is what the steps say: a step reads all weights, and takes nearly as long with few rows as with many."
