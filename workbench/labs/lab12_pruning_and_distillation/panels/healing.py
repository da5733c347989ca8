"""The panel of pruning.healing: held-out loss against tokens or FLOPs, of kept runs and of one that is begun here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workbench.experiments.contract import Setting
from workbench.instruments.records import Measurement
from workbench.labs.lab12_pruning_and_distillation.healing import (
    BY_CHANCE,
    BY_TEXT,
    DRAFT,
    DRAFT_TAUGHT,
    EXPERIMENT,
    GOAL_RATIO,
    NOTHING,
    TAUGHT,
    WIDTH,
    ahead,
    recorded_at,
    saved,
)
from workbench.panels import style
from workbench.panels.chart import Axis, Chart, Series, measured, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import flop_words, matching, short
from workbench.panels.view import View
from workbench.pruning.curves import Curve, healing_curves
from workbench.pruning.recipes import HEALING_RECIPES

NAMES = {
    WIDTH: "width, by its parent",
    "stdlib-5m-depth": "depth, by its parent",
    BY_TEXT: "width, by the text",
    BY_CHANCE: "width cut at random, by its parent",
    NOTHING: "the same shape from nothing",
    TAUGHT: "the same shape from nothing, by the parent",
    DRAFT: "a draft, by its parent",
    DRAFT_TAUGHT: "the draft's shape from nothing, by the parent",
}
COLOURS = {
    WIDTH: style.WEIGHTS,
    "stdlib-5m-depth": style.CACHE,
    BY_TEXT: style.COMPUTE,
    BY_CHANCE: style.IDLE,
    NOTHING: style.INK,
    TAUGHT: style.TARGET,
    DRAFT: style.DRAFT,
    DRAFT_TAUGHT: style.LAUNCH,
}
AXES = {"tokens": "tokens read", "FLOPs": "FLOPs, teacher and scores included"}


class HealingPanel(KnobPanel):
    """Lab 12: healing curves against tokens and against FLOPs."""

    experiment = EXPERIMENT
    draws_records = False
    knobs = (Setting("against", "tokens", "choice", choices=tuple(AXES), help="what a run has spent so far"),)

    def view(self, settings: dict[str, Any]) -> View:
        against, curves = self.knob_settings["against"], [one for one in healing_curves() if one.seed == 0]
        live = matching(self.measurements, measured="live", run=settings["recipe"])
        count = "tokens" if against == "tokens" else "flops"
        chart = Chart(
            *(_kept(curve, count) for curve in curves),
            measured(f"{settings['recipe']}, begun here", live, lambda m: m.counts[count], style.LEARNER, spread=False),
            x=Axis(AXES[against], short, "log"),
            y=Axis("held-out loss, nats per token"),
            title="each run to its end; hollow: kept with the models",
            legend="upper right",
        )
        return view(
            chart,
            height=5.0,
            table=_table(curves),
            caption="16 held-out passages of 512 tokens; at step 0 a model is cut and nothing more"
            + ("" if live else ". Run begins one of the runs here"),
            words=_words(curves, live),
        )


def _kept(curve: Curve, count: str) -> Series:
    points = [(float(getattr(point, count)), point.nats_per_token) for point in curve.points if getattr(point, count)]
    look = {"linestyle": "-", "marker": "o", "markersize": 4, "markerfacecolor": "none", "linewidth": 1.6}
    return Series(NAMES[curve.name], points, "line", COLOURS[curve.name], look=look)


def _table(curves: Sequence[Curve]) -> tuple[list[str], list[list[str]]]:
    baseline = next((one for one in curves if one.name == NOTHING), None)

    def against(curve: Curve, which: str) -> str:
        alike = HEALING_RECIPES[curve.name].config == HEALING_RECIPES[NOTHING].config
        if baseline is None or curve.name == NOTHING or not alike:
            return ""
        saving = saved(curve, baseline)
        return f"{'' if saving.reached else 'more than '}{getattr(saving, which):.1f}"

    return table(
        curves,
        {
            "run": lambda c: NAMES[c.name],
            "model": "{m.name}",
            "parameters": lambda c: f"{HEALING_RECIPES[c.name].config.num_parameters():,}",
            "after the cut": lambda c: f"{c.points[0].nats_per_token:.3f}",
            "at the end": lambda c: f"{c.last.nats_per_token:.3f}",
            "all held-out text": "{m.nats_per_token:.3f}",
            "tokens": lambda c: f"{c.last.tokens:,}",
            "FLOPs": lambda c: flop_words(c.last.flops),
            "× tokens from nothing": lambda c: against(c, "tokens"),
            "× FLOPs from nothing": lambda c: against(c, "flops"),
        },
    )


def _words(curves: Sequence[Curve], live: Sequence[Measurement]) -> str:
    by = {curve.name: curve for curve in curves}
    lines = []
    if WIDTH in by and NOTHING in by:
        saving = saved(by[WIDTH], by[NOTHING])
        more = "" if saving.reached else "more than "
        lines.append(
            f"To the loss that the narrower model has after {by[WIDTH].last.tokens / 1e6:.1f} M tokens the same"
            " shape needs"
            f" {more}{saving.tokens:.1f} times as many tokens from nothing (the goal was {GOAL_RATIO}), and"
            f" {more}{saving.flops:.1f} times the FLOPs: the teacher's forward costs more than half of the"
            " student's"
            " training here, being twice as large."
        )
    every = healing_curves()
    for name, other, words in (
        (WIDTH, BY_CHANCE, "cut by importance, ahead of a cut at random"),
        (WIDTH, BY_TEXT, "the parent's distributions, ahead of the text alone"),
        (WIDTH, TAUGHT, "the cut, ahead of the same teacher without one"),
        (DRAFT, DRAFT_TAUGHT, "the draft's cut, ahead of the same teacher without one"),
    ):
        nats = ahead(every, name, other)
        if nats:
            said = [f"{value:+.3f} (seed {seed})" for seed, value in nats.items()]
            lines.append(f"By how many nats per token, {words}: {', '.join(said)}.")
    if live:
        last = live[-1]
        there = recorded_at(every, last.settings["run"], last.settings["step"])
        lines.append(
            f"Begun here: {last.median:.3f} at step {last.settings['step']}"
            + (f"; the run that made {last.settings['run']} had {there:.3f} there." if math.isfinite(there) else ".")
        )
    lines.append(
        "A rate that stays high hides what was learned until it comes down: compare ends with ends. Published"
        " (Minitron,"
        " arXiv 2407.14679): up to 40 times fewer tokens, from 15 B parameters to 8 B and 4 B."
    )
    return "\n".join(lines)
