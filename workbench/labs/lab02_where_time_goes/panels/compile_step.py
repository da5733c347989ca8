"""The panel of time.compile: an eager and a compiled step, and how many graphs a function becomes."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab02_where_time_goes.compile_step import EXPERIMENT, LIMIT, VOCABULARIES, why_no_compiler
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, view
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import spread_words

STEP_COLOURS = {"eager": style.INK, "compiled": style.TARGET}


class CompilePanel(Panel):
    """Lab 02: eager against torch.compile, graph breaks, new shapes. one_graph=your cap_logits beside ours."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        _, expected, limit = self.experiment.predict(self.ceilings(), **settings)[0]
        steps, graphs = (matching(self.measurements, unit=unit) for unit in ("s", "graphs"))
        ratio = next(iter(matching(self.measurements, unit="ratio")), None)
        archive = {m.settings["by"]: m for m in matching(self.record, unit="s")}
        taken = {m.settings["by"]: m for m in steps}
        promised = {"eager": {"predicted": expected}}
        times = Bars(
            [
                Bar.of(by, taken.get(by), colour, archive.get(by), **promised.get(by, {}))
                for by, colour in STEP_COLOURS.items()
            ],
            Axis("", milliseconds, "zero", room=(1, 1.2)),
            "one decode step (dashed: predicted)",
        )
        counted = Bars(
            [Bar(_name(m), m.median, _colour(m), text=f"{m.median:.0f}") for m in graphs]
            or [Bar("with if", None, style.COMPUTE), Bar("with torch.where", None, style.COMPUTE)],
            Axis("", scale="zero", ticks=range(1 + int(max([m.median for m in graphs], default=1))), room=(1, 1.3)),
            "graphs of a function",
            empty="Run counts",
        )
        rows = [[f"step, {m.settings['by']}", spread_words(m), m.check] for m in steps]
        rows += [[_name(m), f"{m.median:.0f} graph{'s' * (m.median != 1)}", m.check] for m in graphs]
        return view(
            times,
            counted,
            height=3.6,
            width_ratios=[1, 1.25],
            table=(["what", "measured", "checked"], rows),
            caption="The same as a table",
            words=_words(expected, limit, steps, graphs, ratio, self.bench.device),
        )


def _name(m: Measurement) -> str:
    if m.settings["example"] == "shapes":
        return m.settings["by"]
    return "your function" if m.settings["by"] == "yours" else f"with {m.settings['by']}"


def _colour(m: Measurement) -> str:
    if m.settings["example"] == "shapes":
        return style.CACHE
    return style.LEARNER if m.settings["by"] == "yours" else style.COMPUTE


def _words(expected, limit, steps, graphs, ratio: Measurement | None, device: str) -> str:
    sentences = [f"Predicted for the eager step: {style.milliseconds(expected)}, {limit}-bound."]
    if ratio is not None:
        low, high = ratio.spread
        gained = f"Compiled, the step runs {ratio.median:.2g} × as fast ({low:.2g} to {high:.2g} ×, pair by pair)"
        if ratio.median > 1.05:
            gained += ": fewer operations start, and what lies between two products stays in registers."
        else:
            gained += (
                ": no gain here. The eager step joins its operations by hand already and reads packed weights; a "
                "compiler can only take away what is left between them."
            )
        sentences.append(gained)
    elif why_no_compiler(device):
        sentences.append(why_no_compiler(device) + ".")
    for m in graphs:
        if m.settings["example"] == "shapes" and m.settings["by"].startswith("every"):
            sentences.append(
                f"A graph is made for the shapes it saw: {len(VOCABULARIES)} sizes make {m.median:.0f} graphs, unless a"
                " size is left open."
            )
        elif m.settings["by"] == "if":
            sentences.append(
                f"The function with if breaks into {m.median:.0f} graphs: whether a logit exceeds {LIMIT:g} is known "
                "only when it has been computed, so Python must look, and the compiler ends a graph there."
            )
        elif m.settings["by"] == "yours":
            sentences.append(f"Your function: {m.median:.0f} graph{'s' * (m.median != 1)}.")
    return "\n".join(sentences)
