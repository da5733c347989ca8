"""The panel of time.compile: an eager and a compiled step, and how many graphs a function becomes."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.time_compile import LIMIT, VOCABULARIES, why_no_compiler
from workbench.instruments.records import Measurement
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.view import View
from workbench.panels.words import spread_words

STEP_COLOURS = {"eager": style.INK, "compiled": style.TARGET}


class CompilePanel(Panel):
    """Eager against torch.compile, and graphs counted. one_graph=your cap_logits is counted beside ours."""

    experiment_name = "time.compile"

    def view(self, settings: dict[str, Any]) -> View:
        _, expected, limit = self.experiment.predict(self.ceilings(), **settings)[0]
        steps = [m for m in self.measurements if m.unit == "s"]
        graphs = [m for m in self.measurements if m.unit == "graphs"]
        ratio = next((m for m in self.measurements if m.unit == "ratio"), None)
        figure, (left, right) = style.new_figure(1, 2, height=3.6, width_ratios=[1, 1.25])
        _draw_steps(left, expected, steps, [m for m in self.record if m.unit == "s"])
        _draw_graphs(right, graphs)
        figure.subplots_adjust(left=0.09, right=0.985, top=0.9, bottom=0.12, wspace=0.75)
        alt = (
            f"Left: time of one decode step; predicted for the eager one, dashed, {style.milliseconds(expected)}"
            + "".join(f"; {m.settings['by']} measured, {style.milliseconds(m.median)}" for m in steps)
            + ". Right: graphs that torch.compile makes"
            + "".join(f"; {_name(m)}: {m.median:.0f}" for m in graphs)
            + ("." if graphs else ", counted when it runs.")
        )
        rows = [[f"step, {m.settings['by']}", spread_words(m), m.check] for m in steps]
        rows += [[_name(m), f"{m.median:.0f} graph{'s' * (m.median != 1)}", m.check] for m in graphs]
        return View(
            figure=figure,
            alt=alt,
            header=["what", "measured", "checked"],
            rows=rows,
            caption="The same as a table",
            words=_words(expected, limit, steps, graphs, ratio, self.bench.device),
        )


def _name(m: Measurement) -> str:
    if m.settings["example"] == "shapes":
        return m.settings["by"]
    return "your function" if m.settings["by"] == "yours" else f"with {m.settings['by']}"


def _draw_steps(axes: Axes, expected: float, steps: list[Measurement], record: list[Measurement]) -> None:
    axes.axhline(expected * 1e3, color=style.INK, label="eager, predicted", **style.PREDICTED)
    for x, m in enumerate(steps):
        colour, (low, high) = STEP_COLOURS[m.settings["by"]], m.spread
        axes.bar(x, m.median * 1e3, width=0.6, color=colour, alpha=0.85)
        bars = [[(m.median - low) * 1e3], [(high - m.median) * 1e3]]
        axes.errorbar([x], [m.median * 1e3], yerr=bars, fmt="none", ecolor=style.IDLE, capsize=5)
    for x, m in enumerate(record):
        axes.plot([x], [m.median * 1e3], color=style.IDLE, **style.RECORDED)
    names = [m.settings["by"] for m in steps] or ["eager", "compiled"]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    top = max([expected, *(m.spread[1] for m in steps), *(m.median for m in record)])
    axes.set_ylim(0, top * 1.35e3)
    time_plots.name(axes, title="one decode step (ms)")
    style.legend(axes, loc="upper right")


def _draw_graphs(axes: Axes, graphs: list[Measurement]) -> None:
    names = [_name(m) for m in graphs] or ["with if", "with torch.where"]
    for y, m in enumerate(graphs):
        colour = style.LEARNER if m.settings["by"] == "yours" else style.COMPUTE
        if m.settings["example"] == "shapes":
            colour = style.CACHE
        axes.barh(y, m.median, height=0.6, color=colour, alpha=0.85)
        style.write(axes, m.median + 0.08, y, f"{m.median:.0f}", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, max([m.median for m in graphs], default=1) + 0.6)
    axes.set_xticks(range(int(axes.get_xlim()[1]) + 1))
    time_plots.name(axes, title="graphs: one decision, and new shapes")


def _words(expected, limit, steps, graphs, ratio: Measurement | None, device: str) -> str:
    sentences = [f"Predicted for the eager step: {style.milliseconds(expected)}, {limit}-bound."]
    if ratio is not None:
        low, high = ratio.spread
        gained = (
            f"Compiled, the step runs {ratio.median:.2g} × as fast ({low:.2g} to {high:.2g} ×, pair by pair)"
        )
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
                f"A graph is made for the shapes it saw: {len(VOCABULARIES)} sizes make {m.median:.0f} graphs, unless a "
                "size is left open."
            )
        elif m.settings["by"] == "if":
            sentences.append(
                f"The function with if breaks into {m.median:.0f} graphs: whether a logit exceeds {LIMIT:g} is known "
                "only when it has been computed, so Python must look, and the compiler ends a graph there."
            )
        elif m.settings["by"] == "yours":
            sentences.append(f"Your function: {m.median:.0f} graph{'s' * (m.median != 1)}.")
    return "\n".join(sentences)
