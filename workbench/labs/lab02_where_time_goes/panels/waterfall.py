"""The panel of time.waterfall: a step, and its parts one after the other, until they add up to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import shape_of
from workbench.experiments.steps import decode_step
from workbench.instruments.dispatch import dispatch_at, kinds_of
from workbench.instruments.records import Measurement
from workbench.labs.lab02_where_time_goes.waterfall import EXPERIMENT, PARTS, parts_of
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Drawing, view
from workbench.panels.plots import PALE, name
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import gaps, listed, spread_words

COLOURS = {
    "bytes": style.WEIGHTS,
    "arithmetic": style.COMPUTE,
    "dispatch": style.LAUNCH,
    "Python": "#A88FCB",
    "idle": style.IDLE,
    "not explained": PALE,
}
MEANS = {
    "bytes": "weights and keys on their way from memory or cache",
    "arithmetic": "products where multiplying takes longer than reading",
    "dispatch": "calling the operations, as measured with nothing in them",
    "Python": "the model's code between its calls of torch",
    "idle": "the step's thread did not run: it waited, or others had the core",
    "not explained": "what the same calls in a bare loop take beside the prediction",
}
LEFT_OUT = {
    "": "waiting, and that real operations are smaller than those of the ceilings; the waterfall shows how much"
}
SURE = 0.15  # of the step: a part not explained that is no larger is within what a machine varies
STEP = "the step"


class WaterfallPanel(Panel):
    """Lab 02: where one decode step's time goes: bytes, arithmetic, dispatch, Python, idle, adding up to it."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        asked = {name: settings[name] for name in ("batch", "context", "weights")}
        costs, expected = decode_step(self.ceilings(), settings["model"], **asked)
        made = {m.settings["part"]: m for m in self.measurements}
        measured = {part: made[part].median for part in PARTS if part in made}
        parts = measured or parts_of(expected)
        step = made.get("step")
        old = {m.settings["part"]: m for m in self.record}
        rows = [
            [
                part,
                milliseconds(parts_of(expected)[part]) if part in parts_of(expected) else "",
                milliseconds(measured[part]) if part in measured else "",
                f"{measured[part] / step.median:.0%}" if part in measured and step else "",
                milliseconds(old[part].median) if part in old else "",
                MEANS[part],
            ]
            for part in PARTS
        ]
        whole = ["step, measured", milliseconds(expected.seconds), spread_words(step), "100%" if step else ""]
        rows.append([*whole, milliseconds(old["step"].median) if "step" in old else "", "all of them"])
        header = ["part", "predicted", "here", "of the step", "recorded", "what it is"]
        title = "adds up to what was measured" if measured else "as predicted"
        return view(
            Drawing(partial(_draw, parts=parts, step=step, old=old.get("step"), title=title), _alt(parts, step), title),
            table=(header, rows),
            caption=f"One decode step of {_name(settings['model'])}, {_asked(settings)}"
            + ("" if step else "; Run measures it"),
            words=[
                f"Predicted for {_asked(settings)}: {milliseconds(expected.seconds)}, of it"
                f" {_kinds(self.ceilings(), costs, expected.python_s)}.",
                *_words(measured, step),
                *gaps([step] if step else [], LEFT_OUT),
            ],
        )


def _words(measured: Mapping[str, float], step: Measurement | None) -> list[str]:
    if step is None or len(measured) < len(PARTS):
        return []
    largest = max(measured, key=lambda part: measured[part])
    off = measured["not explained"] / step.median
    said = [
        f"Measured for {_asked(step.settings)}. The largest part is {largest}, {measured[largest] / step.median:.0%}."
    ]
    if abs(off) <= SURE:
        return [*said, f"Not explained: {off:.0%} of the step, within what a machine varies from run to run."]
    why = "more than predicted" if off > 0 else "less than predicted: bytes came faster than at the ceilings"
    return [*said, f"Not explained: {off:.0%} of the step, {why}, or the machine was busy; run again."]


def _asked(settings: Mapping[str, Any]) -> str:
    count = settings["batch"]
    return f"{count} sequence{'s' * (count > 1)} of {settings['context']:,} tokens"


def _kinds(ceilings, costs, python_s: float) -> str:
    """How many calls of each kind the step has, and what one takes."""
    calls: dict[str, int] = {}
    for operation in costs.operations:
        for kind, count in kinds_of(operation).items():
            calls[kind] = calls.get(kind, 0) + count
    counted = {kind: count for kind, count in calls.items() if count}
    if not ceilings.dispatch:
        each = milliseconds(ceilings.launch_s)
        return f"{sum(counted.values()):,} calls at {each} ({listed([f'{n:,} {kind}' for kind, n in counted.items()])})"
    at = dispatch_at(ceilings.dispatch, costs.company.layer_bytes)
    each_kind = [f"{n:,} {kind} at {milliseconds(getattr(at, f'{kind}_s'))}" for kind, n in counted.items()]
    calls_said = f"{sum(counted.values()):,} calls: {listed(each_kind)}, and {milliseconds(at.step_s)} once"
    return f"{calls_said}; beside them {milliseconds(python_s)} of Python"


def _name(model: Any) -> str:
    return model if isinstance(model, str) else getattr(model, "name", "") or f"{shape_of(model).num_layers} layers"


def _draw(
    axes: Axes, parts: Mapping[str, float], step: Measurement | None, old: Measurement | None, title: str
) -> None:
    """The parts under each other, each from where the one before it ends; below them the step."""
    name(axes, title=title)
    ends, at = [], 0.0
    for y, (part, seconds) in enumerate(parts.items()):
        axes.barh(y, seconds, left=at, height=0.62, color=COLOURS[part], zorder=3, edgecolor=style.INK, linewidth=0.6)
        axes.plot([at + seconds] * 2, [y, y + 1], color=style.INK, linewidth=0.8, zorder=2)
        at += seconds
        ends.append(max(at, at - seconds))
        style.write(axes, ends[-1], y, f"  {milliseconds(seconds)}", va="center", fontsize=10, zorder=6)
    whole = step.median if step else at
    axes.barh(len(parts), whole, height=0.62, color=style.INK, alpha=0.85, zorder=3)
    style.write(axes, whole, len(parts), f"  {milliseconds(whole)}", va="center", fontsize=10, zorder=6)
    if old is not None:
        axes.plot([old.median], [len(parts)], color=style.INK, zorder=6, **style.RECORDED)
    axes.set_yticks(range(len(parts) + 1), [*parts, STEP], fontsize=10)
    axes.set_ylim(len(parts) + 0.6, -0.6)
    axes.grid(visible=False, axis="y")
    Axis("", milliseconds, "zero", room=(1, 1.15)).draw(axes, "x", [*ends, whole, *([old.median] if old else [])])


def _alt(parts: Mapping[str, float], step: Measurement | None) -> str:
    said = "; ".join(f"{part} {milliseconds(seconds)}" for part, seconds in parts.items())
    whole = f"measured {milliseconds(step.median)}" if step else f"predicted {milliseconds(sum(parts.values()))}"
    return f"A waterfall of one decode step, {whole}: {said}."
