"""The panel of kernels.crossover: a step's time over the size of the model, by how its operations are started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.experiments.inputs import shape_of
from workbench.instruments.records import Measurement
from workbench.labs.lab10_kernels.crossover import (
    EAGER_LAUNCH_US,
    EXPERIMENT,
    Point,
    crossing,
    line,
    measured_models,
    predict_crossover,
    ways,
)
from workbench.models.config import readable_count
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, measured, predicted, recorded, table, view
from workbench.panels.chart import line as line_of
from workbench.panels.plots import card_title, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View

COLOURS = {
    "one operation at a time": style.LAUNCH,
    "fewer, larger operations": style.CACHE,
    "the same in a graph": style.TARGET,
    "bytes alone": style.IDLE,
}
RATIO = "plain ÷ fast"


class CrossoverPanel(Panel):
    """Lab 10: from launch-bound to bandwidth-bound over the size of the model; fewer launches, measured."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        given = {name: settings[name] for name in ("batch", "context")}
        lines = {
            way.name: line(settings["card"], way, **given)
            for way in ways(settings["card"], settings["eager_launch_us"])
        }
        here, ratios = self._ratios_here(settings), matching(self.measurements, unit="ratio")
        by_model = {m.settings["model"]: m for m in ratios}
        plain, fast = (lines[name] for name in ("one operation at a time", "fewer, larger operations"))

        def seconds(points: list[Point]) -> Callable[[int], str]:
            return lambda i: milliseconds(points[i].seconds)

        def of_model(text: Callable[[str], str], known: dict) -> Callable[[int], str]:
            return lambda i: text(plain[i].model) if plain[i].model in known else ""

        return view(
            _lines_chart(lines, card_title(settings["card"])),
            _ratios_chart(here, ratios, matching(self.record, unit="ratio")),
            height=4.3,
            width_ratios=[1.45, 1],
            table=table(
                range(len(plain)),
                {
                    "model": lambda i: plain[i].model,
                    "weights": lambda i: readable_count(plain[i].parameters),
                    **{f"{name}, predicted": seconds(points) for name, points in lines.items()},
                    "launches, plain and prepared": lambda i: f"{plain[i].launches:,} and {fast[i].launches:,}",
                    "plain ÷ prepared here, predicted": of_model(lambda model: f"{here[model]:.2f}", here),
                    "measured": of_model(lambda model: _spread(by_model[model]), by_model),
                },
            ),
            caption=(
                f"A step of {settings['batch']} × {settings['context']} tokens on {card_title(settings['card'])},"
                " predicted"
            ),
            words=self._words(lines, settings),
        )

    def _ratios_here(self, settings: dict[str, Any]) -> dict[str, float]:
        """What fewer operations should gain on this machine, by model."""
        steps, names = predict_crossover(self.ceilings(), **settings), measured_models(settings["largest"])
        plain, fast = steps[: len(names)], steps[len(names) :]
        return {name: a[1] / b[1] for name, a, b in zip(names, plain, fast)}

    def _words(self, lines: dict[str, list[Point]], settings: dict[str, Any]) -> str:
        card, sentences = card_title(settings["card"]), []
        for name, points in lines.items():
            if points[0].launch_s:
                at = crossing(points)
                place = f"at about {readable_count(round(at))} weights" if at else "beyond the shapes drawn"
                sentences.append(f"Predicted for {card}, {name}: launches and bytes take equally long {place}.")
        sentences.append(
            f"What a start costs from Python is the host's affair: {settings['eager_launch_us']:g} µs here (a GPU run"
            f" measures it; published for a plain model on an A100's host: {EAGER_LAUNCH_US:g} µs); the"
            f" {style.milliseconds(points_launch(lines))} in a graph is published, too. "
            + ("" if settings["eager_launch_us"] != EAGER_LAUNCH_US else "Move it and watch the crossing move.")
        )
        for m in matching(self.measurements, unit="ratio"):
            low, high = m.spread
            sentences.append(
                f"Here, {m.settings['model']}: {m.counts['plain']:.0f} operations became {m.counts['fast']:.0f}, and"
                f" the step {m.median:.2f} × as fast ({low:.2f} to {high:.2f}; predicted {m.predicted:.2f})."
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


def _spread(m: Measurement) -> str:
    return f"{m.median:.2f} ({m.spread[0]:.2f} to {m.spread[1]:.2f})"


def _lines_chart(lines: dict[str, list[Point]], card: str) -> Chart:
    """They lie apart on the left, where starting binds, and run together on the right, where bytes do; a diamond where
    launches and bytes take equally long."""
    series: list[Series] = []
    for name, points in lines.items():
        x, y = [p.parameters for p in points], [p.seconds for p in points]
        launches = bool(points[0].launch_s)
        look: dict[str, Any] = {} if launches else {"linestyle": (0, (1, 1.5))}
        series.append(predicted(name, zip(x, y), COLOURS[name], **look))
        at = crossing(points) if launches else None
        height = float(np.exp(np.interp(np.log(at), np.log(x), np.log(y)))) if at else 0.0
        diamond: dict[str, Any] = {"linestyle": "", "marker": "D", "markersize": 7, "zorder": 5}
        crossed = [(at, height)] if at else ()
        series.append(line_of(f"{name}, launches equal bytes", crossed, COLOURS[name], legend=False, **diamond))
    return Chart(
        *series,
        x=Axis(
            "weights of the model",
            lambda count: readable_count(round(count)),
            "log",
            [10.0**e for e in range(6, 12)],
            room=(1.5, 1.5),
        ),
        y=Axis("one step, predicted", milliseconds, "log", room=(1.8, 90)),
        title=f"predicted, {card}",
        legend="upper left",
    )


def _ratios_chart(here: dict[str, float], ratios: list[Measurement], archive: list[Measurement]) -> Chart:
    sizes = [shape_of(name).num_parameters() for name in here]
    return Chart(
        predicted("predicted", zip(sizes, here.values()), style.CACHE),
        recorded("", archive, "parameters", style.INK),
        measured("measured", ratios, "parameters", style.INK),
        x=Axis("weights of the model", readable_count, "log", sizes, room=(2, 2)),
        y=Axis("as fast, ×", scale="zero", room=(1, 1.6)),
        title="fewer operations, this machine",
        legend="upper right",
        also=lambda axes: axes.axhline(1, color=style.IDLE, linewidth=1),
    )
