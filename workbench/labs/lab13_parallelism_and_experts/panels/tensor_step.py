"""The panel of parallel.tensor_step: a step on one process and on two, and the two ranks of one step in time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.contract import Setting
from workbench.experiments.inputs import plain
from workbench.instruments.records import Measurement
from workbench.labs.lab13_parallelism_and_experts.tensor_step import BACKENDS, EXPERIMENT, ONE, RANKS
from workbench.panels import style
from workbench.panels.chart import Axis, Bar, Bars, Drawing, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import PALE, cell, legend_above, matching, nothing
from workbench.panels.style import milliseconds
from workbench.panels.view import View

NAMES = {ONE: "one process, two threads", "shm": "two processes, shared memory", "gloo": "two processes, sockets"}
COLOURS = {ONE: style.COMPUTE, "shm": style.CACHE, "gloo": style.LAUNCH}
KINDS = {"computes": style.COMPUTE, "all-reduce": style.CACHE, "messages": style.DRAFT}
MESSAGES = ("tell", "hear", "gather")
GOAL = 0.9  # of one process's speed
LEFT_OUT = (
    "what begins a step on the second process, the halves of a core's shared units, and over sockets calls that wait"
    " until"
    " a core is free for the thread that serves them"
)


class TensorStepPanel(KnobPanel):
    """Lab 13: tensor parallelism on two cores, beside two threads."""

    experiment = EXPERIMENT
    knobs = (
        Setting("backend", BACKENDS[0], "choice", choices=BACKENDS, help="whose step is drawn"),
        Setting("until", 100, "int", 5, 100, unit="%", step=5, help="of the step: what has happened by then"),
    )
    left_out = {"step": LEFT_OUT, "speed": LEFT_OUT, "trace": LEFT_OUT}  # noqa: RUF012

    def view(self, settings: dict[str, Any]) -> View:
        wanted = plain({"model": settings["model"]}) | {"cached": settings["cached"]}
        run, old = (matching(taken, **wanted) for taken in (self.measurements, self.record))
        before = self.experiment.predict(self.ceilings(), **settings)
        bars = []
        for (way, name), (_, seconds, _) in zip(NAMES.items(), before):
            live, kept = (next(iter(matching(taken, measured="step", way=way)), None) for taken in (run, old))
            bar = Bar.of(name, live, COLOURS[way], kept)
            bars.append(
                bar if live is not None else Bar(name, None, COLOURS[way], predicted=seconds, recorded=bar.recorded)
            )
        knobs = self.knob_settings
        trace = next(iter(matching(run, measured="trace", way=knobs["backend"])), None)
        return view(
            Bars(bars, Axis("a decode step", milliseconds, "zero"), title="batch 1, two cores"),
            Drawing(functools.partial(_draw, trace, knobs), _drawn_words(trace, knobs)),
            height=4.4,
            table=_table(run),
            caption=f"{settings['cached']} tokens cached, float32"
            + ("; dashed: predicted" if run else "; dashed: predicted, with typical α and β; Run measures"),
            words=_words(run),
        )


def _shown(span: Sequence[Any]) -> str:
    return "all-reduce" if span[1] == "all_reduce" else "messages"


def _draw(trace: Measurement | None, knobs: dict[str, Any], axes: Axes) -> None:
    if trace is None:
        nothing(axes, "Run draws a step's ranks in time")
        return
    spans = trace.settings["spans"]
    whole = next(end for _, operation, _, end in spans if operation == "step")
    now = whole * knobs["until"] / 100
    for rank in range(RANKS):
        cell(axes, 0, rank - 0.35, whole, 0.7, PALE)
        cell(axes, 0, rank - 0.35, now, 0.7, KINDS["computes"], hover=f"rank {rank} computes")
        for span in spans:
            of_rank, operation, begin, end = span
            end = min(end, now)
            if of_rank == rank and operation != "step" and end > begin:
                took = milliseconds(span[3] - begin)
                cell(
                    axes,
                    begin,
                    rank - 0.35,
                    end - begin,
                    0.7,
                    KINDS[_shown(span)],
                    hover=f"rank {rank}: {operation}, {took}",
                )
    axes.grid(visible=False)
    axes.set(xlim=(0, 1.02 * whole), ylim=(RANKS - 0.4, -0.6), yticks=range(RANKS))
    axes.set_yticklabels([f"rank {rank}" for rank in range(RANKS)])
    style.label(axes, x=f"seconds of one step, {NAMES[knobs['backend']].split(', ')[1]}")
    legend_above(axes, KINDS, left=0.56)


def _drawn_words(trace: Measurement | None, knobs: dict[str, Any]) -> str:
    if trace is None:
        return "Two lanes, one for each rank, empty until a step is measured."
    spans = trace.settings["spans"]
    whole = next(end for _, operation, _, end in spans if operation == "step")
    shares = []
    for rank in range(RANKS):
        busy = sum(end - begin for r, operation, begin, end in spans if r == rank and operation != "step")
        shares.append(f"rank {rank} is {busy / whole:.0%} of the time in collectives")
    return f"A step of {milliseconds(whole)} in two lanes: {' and '.join(shares)}; shown to {knobs['until']} %."


def _table(run: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    speed = {m.settings["way"]: m for m in matching(run, measured="speed")}

    def of(text: Any) -> Any:
        return lambda m: text(speed[m.settings["way"]]) if m.settings["way"] in speed else "–"

    return table(
        matching(run, measured="step"),
        {
            "": lambda m: NAMES[m.settings["way"]],
            "median": lambda m: milliseconds(m.median),
            "mean": lambda m: milliseconds(m.counts["mean_s"]),
            "predicted": lambda m: milliseconds(m.predicted),
            "times one process's speed": of(lambda s: f"{s.median:.2f} ({s.spread[0]:.2f} to {s.spread[1]:.2f})"),
            "predicted from it": of(lambda s: f"{s.predicted:.2f}"),
            "all-reduces": of(lambda s: f"{s.counts['all_reduces']:.0f}"),
        },
    )


def _words(run: Sequence[Measurement]) -> str:
    speed = {m.settings["way"]: m for m in matching(run, measured="speed")}
    lines = []
    for backend, m in speed.items():
        reached = "at least" if m.median >= GOAL else "less than"
        lines.append(
            f"{NAMES[backend].capitalize()}: {m.median:.2f} times the speed of one process ({reached} {GOAL}); with"
            f" what its"
            f" {m.counts['all_reduces']:.0f} all-reduces take, {m.predicted:.2f} were predicted."
        )
    trace = {m.settings["way"]: m for m in matching(run, measured="trace")}
    if len(trace) == len(BACKENDS):
        shared, sockets = (trace[b] for b in BACKENDS)
        lines.append(
            f"In the steps that are drawn rank 0 was in collectives for {milliseconds(shared.median)} through shared"
            f" memory"
            f" and for {milliseconds(sockets.median)} over sockets."
        )
    if run:
        lines.append(
            "Both ways use two cores and read every weight once. So two processes can be no faster here: they pay"
            " when a"
            " model has no room on one device, or when each device brings a memory of its own."
        )
        lines.append(f"Verified: {run[0].check}.")
    else:
        lines.append(
            "Two all-reduces a layer, and each has to wait for the slower rank. Guess before Run what is left."
        )
    return "\n".join(lines)
