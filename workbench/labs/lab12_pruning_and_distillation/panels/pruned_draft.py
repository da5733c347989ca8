"""The panel of pruning.pruned_draft: what each draft's acceptance and step predict by length, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.experiments.inputs import plain
from workbench.instruments.records import Measurement
from workbench.labs.lab12_pruning_and_distillation.pruned_draft import (
    EXPERIMENT,
    FROM_NOTHING,
    GOAL_ALPHA,
    LENGTHS,
    PRUNED,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Chart, Series, line, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View

COLOURS = {FROM_NOTHING: style.DRAFT, PRUNED: style.TARGET}
STARS = {"linestyle": "none", "marker": "*", "markersize": 13}


class PrunedDraftPanel(Panel):
    """Lab 12: drafts from nothing and from the target: acceptance, cost and speed."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        run = matching(self.measurements, **plain({"model": settings["model"]}))
        alphas = matching(run, measured="alpha")
        speeds = matching(run, measured="speed", draft_length=settings["draft_length"])
        old = {m.settings["draft"]: m for m in matching(self.record, measured="alpha")}
        now = {m.settings["draft"]: m for m in alphas}
        bars = Bars(
            [
                Bar.of(name, now.get(name), COLOURS.get(name, style.INK), old.get(name))
                for name in dict.fromkeys([*now, *old])
            ],
            Axis("acceptance α, temperature 1", limits=(0, 1)),
            level=GOAL_ALPHA,
            fewest=2,
        )
        chart = Chart(
            *(
                line(
                    name, [(n, m.counts[f"speedup_{n}"]) for n in LENGTHS], COLOURS.get(name, style.INK), linestyle="--"
                )
                for name, m in now.items()
            ),
            *(
                Series(
                    f"{m.settings['draft']}, measured on code",
                    [(m.settings["draft_length"], m.median)],
                    "measured",
                    COLOURS.get(m.settings["draft"], style.INK),
                    [m.spread],
                    look=STARS,
                )
                for m in speeds
            ),
            x=Axis("drafted tokens per round", ticks=LENGTHS),
            y=Axis("times as fast as without a draft"),
            levels=[(1.0, "no gain", style.LEARNER)] if now else [],
            title="by α and a step's cost (dashed), and measured",
            legend="lower left" if now else "",
        )
        return view(
            bars,
            chart,
            height=4.2,
            width_ratios=[1, 1.4],
            table=_table(alphas, speeds),
            caption="α over held-out text; steps timed in turns" + ("" if run else "; Run measures"),
            words=_words(now, speeds),
        )


def _table(alphas: Sequence[Measurement], speeds: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    speed = {m.settings["draft"]: m for m in speeds}

    def timed(text: str) -> Any:
        return lambda m: text.format(m=speed[m.settings["draft"]]) if m.settings["draft"] in speed else ""

    return table(
        alphas,
        {
            "draft": "{m.settings[draft]}",
            "parameters": "{m.counts[parameters]:,.0f}",
            "α": "{m.median:.3f}",
            "same best token": "{m.counts[agreement]:.3f}",
            "a step, in steps of the target": lambda m: (
                f"{m.counts['step_cost']:.2f} ({m.counts['lowest_step_cost']:.2f} to"
                f" {m.counts['highest_step_cost']:.2f})"
            ),
            "best length": lambda m: f"{_best(m)}",
            "times as fast there": lambda m: f"{m.counts[f'speedup_{_best(m)}']:.2f}",
            "drafted per round": timed("{m.settings[draft_length]}"),
            "tokens per round": timed("{m.counts[tokens_per_round]:.2f}"),
            "measured on code": timed("{m.median:.2f}"),
        },
    )


def _best(m: Measurement) -> int:
    return max(LENGTHS, key=lambda length: m.counts[f"speedup_{length}"])


def _words(now: dict[str, Measurement], speeds: Sequence[Measurement]) -> str:
    lines = []
    for name, m in now.items():
        length = _best(m)
        lines.append(
            f"{name}: {m.counts['parameters'] / 1e6:.2f} M parameters, α = {m.median:.3f}"
            f" ({'at least' if m.median >= GOAL_ALPHA else 'below'} {GOAL_ALPHA:.2f}), a step of"
            f" {m.counts['step_cost']:.2f} target steps. By these a length of {length} would be best,"
            f" {m.counts[f'speedup_{length}']:.2f} times as fast."
        )
    for m in speeds:
        lines.append(
            f"{m.settings['draft']} on held-out code, {m.settings['draft_length']} drafted tokens: {m.median:.2f}"
            " times as"
            f" fast as without ({m.counts['tokens_per_round']:.2f} tokens per round)."
        )
    if speeds:
        lines.append(
            "Theorem 3.8 takes a pass over K + 1 rows to last no longer than a step, and drawing and accepting to cost"
            " nothing. Both take time here, and that is what is missing below the dashed line (lab 07 counts it)."
        )
    if not lines:
        lines.append("Two drafts of the same target, one trained from nothing and one cut from it. Which agrees more?")
    return "\n".join(lines)
