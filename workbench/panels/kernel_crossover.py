"""The panel of kernels.crossover: a step's time over the size of the model, by how its operations are started."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.experiments.inputs import shape_of
from workbench.experiments.kernel_crossover import (
    EAGER_LAUNCH_S,
    Point,
    crossing,
    line,
    measured_models,
    predict_crossover,
    ways,
)
from workbench.instruments.records import Measurement
from workbench.models.config import readable_count
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.time_plots import card_title, curve, log_scale
from workbench.panels.view import View

COLOURS = {
    "one operation at a time": style.LEARNER,
    "fewer, larger operations": style.CACHE,
    "the same in a graph": style.TARGET,
    "bytes alone": style.IDLE,
}
RATIO = "plain ÷ fast"


class CrossoverPanel(Panel):
    """Left: predicted on a card, by way of starting. Right: here, what fewer operations gain, by size."""

    experiment_name = "kernels.crossover"

    def view(self, settings: dict[str, Any]) -> View:
        given = {name: settings[name] for name in ("batch", "context")}
        lines = {
            way.name: line(settings["card"], way, **given)
            for way in ways(settings["card"], settings["eager_launch_us"])
        }
        here = self._ratios_here(settings)
        figure, (left, right) = style.new_figure(1, 2, height=4.3, width_ratios=[1.45, 1])
        _draw_lines(left, lines, settings["card"])
        _draw_ratios(right, here, _ratios(self.measurements), _ratios(self.record))
        figure.subplots_adjust(left=0.1, right=0.985, top=0.88, bottom=0.145, wspace=0.3)
        return View(
            figure=figure,
            alt=_alt(lines, settings),
            header=["model", "weights", *(f"{name}, predicted" for name in lines), "launches, plain and prepared",
                    "plain ÷ prepared here, predicted", "measured"],
            rows=_rows(lines, here, _ratios(self.measurements)),
            caption=f"A step of {settings['batch']} × {settings['context']} tokens on {card_title(settings['card'])}, predicted",
            words=self._words(lines, settings),
        )  # fmt: skip

    def _ratios_here(self, settings: dict[str, Any]) -> dict[str, float]:
        """What fewer operations should gain on this machine, by model."""
        found, names = predict_crossover(self.ceilings(), **settings), measured_models(settings["largest"])
        plain, fast = found[: len(names)], found[len(names) :]
        return {name: a[1] / b[1] for name, a, b in zip(names, plain, fast)}

    def _words(self, lines: dict[str, list[Point]], settings: dict[str, Any]) -> str:
        card, sentences = card_title(settings["card"]), []
        for name, points in lines.items():
            if points[0].launch_s:
                at = crossing(points)
                place = f"at about {readable_count(round(at))} weights" if at else "beyond the shapes drawn"
                sentences.append(
                    f"Predicted for {card}, {name}: launches and bytes take equally long {place}."
                )
        sentences.append(
            f"What a start costs without a graph, {settings['eager_launch_us']:g} µs here, is an assumption (a GPU run measures "
            f"it); the {style.milliseconds(points_launch(lines))} in a graph is published. "
            + (
                ""
                if settings["eager_launch_us"] != EAGER_LAUNCH_S * 1e6
                else "Move it and watch the crossing move."
            )
        )
        for m in _ratios(self.measurements):
            low, high = m.spread
            sentences.append(
                f"Here, {m.settings['model']}: {m.counts['plain']:.0f} operations became {m.counts['fast']:.0f}, and the step "
                f"{m.median:.2f} × as fast ({low:.2f} to {high:.2f}; predicted {m.predicted:.2f})."
            )
        if not self.measurements:
            sentences.append("On a card: not yet measured. Run measures this machine.")
        elif not str(self.bench.device).startswith("cuda"):
            sentences.append("On a card: not yet measured, all on the left is predicted.")
        return "\n".join(sentences)


def points_launch(lines: dict[str, list[Point]]) -> float:
    """What one start costs in the graph."""
    first = lines["the same in a graph"][0]
    return first.launch_s / first.launches


def _ratios(measurements: list[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.unit == "ratio"]


def _draw_lines(axes: Axes, lines: dict[str, list[Point]], card: str) -> None:
    for name, points in lines.items():
        x, y = [p.parameters for p in points], [p.seconds for p in points]
        look = style.PREDICTED if points[0].launch_s else {**style.PREDICTED, "linestyle": (0, (1, 1.5))}
        axes.plot(x, y, color=COLOURS[name], label=name, **look)
        at = crossing(points) if points[0].launch_s else None
        if at:
            height = np.exp(np.interp(np.log(at), np.log(x), np.log(y)))
            axes.plot([at], [height], "D", color=COLOURS[name], markersize=7, zorder=5)
    every = [p for points in lines.values() for p in points]
    sizes = [10.0**e for e in range(6, 12)]
    log_scale(axes, "y", [p.seconds for p in every], style.milliseconds)
    axes.set_ylim(top=40 * axes.get_ylim()[1])  # room for the legend
    style.log_ticks(axes, "x", sizes, text=lambda value: readable_count(round(value)))
    axes.set_xlim(min(p.parameters for p in every) / 1.5, max(p.parameters for p in every) * 1.5)
    time_plots.name(
        axes, x="weights of the model", y="one step, predicted", title=f"predicted, {card_title(card)}"
    )
    style.legend(axes, loc="upper left")


def _draw_ratios(
    axes: Axes, here: dict[str, float], measured: list[Measurement], record: list[Measurement]
) -> None:
    sizes = [shape_of(name).num_parameters() for name in here]
    axes.plot(sizes, list(here.values()), color=style.CACHE, label="predicted", **style.PREDICTED)
    for some, recorded in ((record, True), (measured, False)):
        if some:
            curve(
                axes,
                some,
                lambda m: m.settings["parameters"],
                colour=style.INK,
                label="measured",
                recorded=recorded,
            )
    style.log_ticks(axes, "x", sizes, text=readable_count)
    axes.set_xlim(min(sizes) / 2, max(sizes) * 2)
    axes.axhline(1, color=style.IDLE, linewidth=1)
    top = max([*here.values(), *(m.median for m in measured), *(m.median for m in record)])
    axes.set_ylim(0, 1.6 * top)
    time_plots.name(axes, x="weights of the model", y="as fast, ×", title="fewer operations, this machine")
    style.legend(axes, loc="upper right")


def _rows(
    lines: dict[str, list[Point]], here: dict[str, float], measured: list[Measurement]
) -> list[list[str]]:
    by_model = {m.settings["model"]: m for m in measured}
    plain, fast = (lines[name] for name in ("one operation at a time", "fewer, larger operations"))
    rows = []
    for i, point in enumerate(plain):
        m = by_model.get(point.model)
        rows.append(
            [point.model, readable_count(point.parameters),
             *(style.milliseconds(points[i].seconds) for points in lines.values()),
             f"{point.launches:,} and {fast[i].launches:,}",
             f"{here[point.model]:.2f}" if point.model in here else "",
             f"{m.median:.2f} ({m.spread[0]:.2f} to {m.spread[1]:.2f})" if m else ""]
        )  # fmt: skip
    return rows


def _alt(lines: dict[str, list[Point]], settings: dict[str, Any]) -> str:
    first, last = (
        ", ".join(f"{name} {style.milliseconds(points[at].seconds)}" for name, points in lines.items())
        for at in (0, -1)
    )
    smallest, largest = (lines["bytes alone"][at].model for at in (0, -1))
    return (
        f"Predicted time of one decode step against the weights of the model, on {card_title(settings['card'])}, log axes. "
        f"{smallest}: {first}. {largest}: {last}. The lines lie apart on the left, where starting binds, and run together on "
        "the right, where bytes do. Beside it: how much faster fewer operations make a step on this machine."
    )
