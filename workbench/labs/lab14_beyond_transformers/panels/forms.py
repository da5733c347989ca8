"""The panel of beyond.forms: FLOPs, sequential steps and times of the forms of one scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab14_beyond_transformers.forms import EXPERIMENT, LONGEST_DIRECT, RECURRENT, Form, forms_of
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, table, view
from workbench.panels.plots import flop_words, matching, short
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import spread_words

SHOWN = ("kind", "length", "chunk")
OFF = 1.25  # a factor of counted to predicted FLOPs that is explained
FLOP_TICKS, STEP_TICKS = (1e4, 1e6, 1e8, 1e10), (1, 10, 100, 1000)
TIME_TICKS = (1e-6, 1e-4, 1e-2, 1.0, 100.0)  # seconds
LINES = {"convolution (FFT)": "convolution\n(FFT)", "convolution (definition)": "convolution\n(definition)"}


class FormsPanel(Panel):
    """Lab 14: one scan in its equal forms."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        forms = forms_of(*(settings[name] for name in SHOWN))
        flops, times = ({m.settings["form"]: m for m in self._of(settings, what)} for what in ("flops", "time"))
        record = {m.settings["form"]: m for m in matching(self.record, measured="time", **_shown(settings))}
        names = [LINES.get(form.name, form.name) for form in forms]
        parts = (
            Bars(
                [_flops_bar(name, form, flops.get(form.name)) for name, form in zip(names, forms)],
                Axis("dashed: by formula", short, "log", FLOP_TICKS, room=(3, 60)),
                title="FLOPs",
            ),
            Bars(
                [Bar(name, form.steps, style.LAUNCH, text=f"{form.steps:,}") for name, form in zip(names, forms)],
                Axis("steps", short, "log", STEP_TICKS, room=(2, 30)),
                title="sequential steps",
                names=False,
            ),
            Bars(
                [_time_bar(name, times.get(form.name), record.get(form.name)) for name, form in zip(names, forms)],
                Axis("time", milliseconds, "log", TIME_TICKS, room=(3, 60)),
                title="time, float32",
                names=False,
            ),
        )
        return view(
            *parts,
            height=3.6,
            width_ratios=[1.15, 0.85, 1],
            table=table(
                forms,
                {
                    "form": "{m.name}",
                    "FLOPs by formula": "{m.flops:,}",
                    "FLOPs counted": lambda form: _count(flops, form, "flops"),
                    "sequential steps": "{m.steps:,}",
                    "longest chain of operations": lambda form: _count(flops, form, "chain"),
                    "operations": lambda form: _count(flops, form, "operations"),
                    "time": lambda form: spread_words(times.get(form.name)),
                    "difference in float64": lambda form: (
                        f"{flops[form.name].counts['difference']:.1g}" if form.name in flops else ""
                    ),
                },
            ),
            caption=f"{settings['kind']}, {settings['length']:,} tokens"
            + ("" if flops else ", by formula; Run counts and times"),
            words=_words(settings, forms, flops, times),
        )

    def _of(self, settings: dict[str, Any], what: str) -> list[Measurement]:
        return self.made({**settings, "measured": what}, (*SHOWN, "measured"))


def _shown(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in SHOWN}


def _flops_bar(name: str, form: Form, m: Measurement | None) -> Bar:
    shown = flop_words(form.flops if m is None else m.median)
    return Bar.of(name, m, style.COMPUTE, predicted=form.flops, text=shown)


def _time_bar(name: str, m: Measurement | None, record: Measurement | None) -> Bar:
    return Bar.of(name, m, style.TARGET, record, text="" if m is None else milliseconds(m.median))


def _count(flops: Mapping[str, Measurement], form: Form, name: str) -> str:
    return f"{flops[form.name].counts[name]:,.0f}" if form.name in flops else ""


def _words(
    settings: dict[str, Any], forms: Sequence[Form], flops: Mapping[str, Measurement], times: Mapping[str, Measurement]
) -> str:
    first, length = forms[0], settings["length"]
    cheapest, shortest = min(forms, key=lambda form: form.flops), min(forms, key=lambda form: form.steps)
    lines = [
        f"Equal results, other costs. The recurrence takes {flop_words(first.flops)} in {first.steps:,} steps that wait"
        f" for each other; {shortest.name} takes {shortest.flops / first.flops:.3g} × the FLOPs in {shortest.steps:,}."
        + ("" if cheapest.name == RECURRENT else f" The fewest FLOPs has {cheapest.name}."),
        "A machine with many units is busy only with work that does not wait. So a prompt goes through a form of few"
        " steps, and decode, which has one token, through the recurrence.",
    ]
    if missing := [form.name for form in forms if not form.runs(length)]:
        lines.append(f"Not run here: {missing[0]}, beyond {LONGEST_DIRECT} tokens (T² numbers a channel).")
    if len(times) > 1 and RECURRENT in times:
        fastest = min(times.values(), key=lambda m: m.median)
        slow, rows = times[RECURRENT], times[RECURRENT].counts
        ahead = f"{fastest.settings['form']} is fastest, {slow.median / fastest.median:.3g} × as fast as the recurrence"
        lines.append(
            f"Measured, {ahead if fastest is not slow else 'the recurrence is fastest'}. Why: the recurrence is"
            f" {rows['operations']:,.0f} operations of {1e6 * slow.median / rows['operations']:.2g} µs for"
            f" {flop_words(rows['flops'] / rows['operations'])} each: starting one costs more than its arithmetic, and"
            " every step starts several. A form of few steps starts few."
        )
    if flops:
        worst = max(m.counts["difference"] for m in flops.values())
        lines.append(f"In float64 all forms agree within {worst:.1g} of the largest value.")
    for name, m in flops.items():
        assert m.predicted is not None, "FLOPs have a formula"
        if m.median > OFF * m.predicted:
            lines.append(
                f"The {name} form computes {m.median / m.predicted:.2g} × the formula's FLOPs: it makes the discrete"
                " system anew at every token, and torch multiplies complex numbers whole where only a real part is"
                " needed."
            )
    return "\n".join(lines)
