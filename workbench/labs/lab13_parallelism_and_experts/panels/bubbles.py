"""The panel of parallel.bubbles: idle share and seconds of a step by its groups, and the stages' ticks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.contract import Setting
from workbench.experiments.inputs import plain
from workbench.instruments.records import Measurement
from workbench.labs.lab13_parallelism_and_experts.bubbles import EXPERIMENT, KINDS, STAGES, groups_for
from workbench.panels import style
from workbench.panels.chart import VALUES, Axis, Chart, Drawing, Series, measured, predicted, recorded, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import PALE, cell, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.parallel import bubble

LEFT_OUT = "two stages at work share the memory's bandwidth, and a group's hidden states travel"
DOTS = {"linestyle": "none", "marker": "o", "markersize": 8}
MAX_STAGES, MAX_GROUPS = 8, 16  # of the drawing


class BubblesPanel(KnobPanel):
    """Lab 13: the bubble of a pipeline, counted and timed."""

    experiment = EXPERIMENT
    knobs = (
        Setting("stages", 4, "int", 1, MAX_STAGES, help="of the drawn pipeline"),
        Setting("groups", 4, "int", 1, MAX_GROUPS, help="of the drawn step"),
    )
    knobs_words = "what is drawn, by the formula:"
    left_out = {"step": LEFT_OUT}  # noqa: RUF012

    def view(self, settings: dict[str, Any]) -> View:
        wanted = plain({"model": settings["model"]}) | {k: settings[k] for k in ("kind", "sequences")}
        run, old = (matching(taken, **wanted) for taken in (self.measurements, self.record))
        steps, idle = (matching(run, measured=what) for what in ("step", "idle"))
        alone = matching(run, measured="alone")
        every = groups_for(settings["sequences"])
        shares = Chart(
            predicted("(p−1)/(m+p−1)", [(float(m), bubble(STAGES, m)) for m in every], style.IDLE),
            Series("counted", [(m.settings["groups"], m.median) for m in idle], "measured", style.IDLE, look=DOTS),
            x=Axis("groups of a step", "{:.0f}".format, "log", every),
            y=Axis("share of the stages' ticks without work", "{:.0%}".format, "zero"),
            title=f"{STAGES} stages: the bubble",
            legend="upper right",
        )
        times = Chart(
            predicted("from one group alone", [(m.settings["groups"], m.predicted) for m in steps], style.COMPUTE),
            measured("two stages", steps, "groups", style.COMPUTE),
            recorded("two stages", matching(old, measured="step"), "groups"),
            x=Axis("groups of a step", "{:.0f}".format, "log", VALUES),
            y=Axis("a step", milliseconds, "zero"),
            title=f"{settings['sequences']} sequences, {settings['kind']}",
            levels=[(m.median, "one process, one thread", style.INK) for m in alone],
            legend="" if not steps else "upper left" if settings["kind"] == "decode" else "lower right",
        )
        knobs = self.knob_settings
        return view(
            shares,
            times,
            Drawing(functools.partial(_draw, knobs["stages"], knobs["groups"]), _drawn_words(**knobs)),
            height=4.4,
            table=table(
                steps,
                {
                    "groups": "{m.settings[groups]}",
                    "bubble": lambda m: f"{bubble(STAGES, m.settings['groups']):.1%}",
                    "counted": lambda m: _counted(idle, m),
                    "one group alone": lambda m: milliseconds(m.counts["group_alone_s"]),
                    "predicted": lambda m: milliseconds(m.predicted),
                    "measured": lambda m: milliseconds(m.median),
                    "measured / predicted": lambda m: f"{m.median / m.predicted:.2f}",
                },
            ),
            caption=f"{KINDS[settings['kind']]} new tokens of each sequence, one thread for each stage"
            + ("" if steps else "; Run counts and times"),
            words=_words(settings, alone, steps),
        )


def _counted(idle: Sequence[Measurement], step: Measurement) -> str:
    share = next((m.median for m in matching(idle, groups=step.settings["groups"])), None)
    return "–" if share is None else f"{share:.1%}"


def _off(m: Measurement) -> float:
    """How far a measured time is from its prediction, as a share of it."""
    return abs(m.median / m.predicted - 1) if m.predicted else 0.0


def _draw(stages: int, groups: int, axes: Axes) -> None:
    ticks = groups + stages - 1
    for stage in range(stages):
        for tick in range(ticks):
            group = tick - stage
            works = 0 <= group < groups
            text = f"{group + 1}" if works and ticks <= 12 else ""
            what = f"group {group + 1}" if works else "idle"
            colour = style.COMPUTE if works else PALE
            cell(
                axes, tick + 0.04, stage - 0.42, 0.92, 0.84, colour, text, ink="#FFFFFF", hover=f"stage {stage}: {what}"
            )
    axes.grid(visible=False)
    axes.set(xlim=(0, ticks), ylim=(stages - 0.4, -0.6), yticks=range(stages))
    style.label(axes, x="ticks", y="stage", title=f"idle {bubble(stages, groups):.0%} of {stages} × {ticks} ticks")


def _drawn_words(stages: int, groups: int) -> str:
    idle = stages * (stages - 1)
    ticks = groups + stages - 1
    return f"A grid of {stages} stages and {ticks} ticks, of whose {stages * ticks} cells {idle} are idle."


def _words(settings: dict[str, Any], alone: Sequence[Measurement], steps: Sequence[Measurement]) -> str:
    lines = []
    if alone and steps:
        best = min(steps, key=lambda m: m.median)
        ratio = alone[0].median / best.median
        lines.append(
            f"Fastest with {best.settings['groups']} group(s): {milliseconds(best.median)}, {ratio:.2f} times as fast"
            f" as one"
            " process of one thread."
        )
        one, last = steps[0], steps[-1]
        if len(steps) > 1:
            halves = one.counts["group_alone_s"] / last.counts["group_alone_s"]
            parts = last.settings["groups"]
            lines.append(
                f"A group of 1/{parts} of the sequences takes 1/{halves:.1f} of the time alone: "
                + (
                    "arithmetic limits, and groups divide it."
                    if halves > parts / 2
                    else "each group reads all weights of its stage, so that groups add reading."
                )
            )
        far = max(steps, key=_off)
        lines.append(f"Predictions are within {_off(far):.0%} (farthest: {far.settings['groups']} group(s)).")
    else:
        lines.append("Guess before Run: does a step of prompts gain by groups, and does a step of decoding?")
    lines.append(
        "A decode step of one sequence is one group: of p stages p − 1 are idle at any time, 75 % of four. In a"
        " server other"
        " sequences fill the stages, each in a step of its own."
    )
    return "\n".join(lines)
