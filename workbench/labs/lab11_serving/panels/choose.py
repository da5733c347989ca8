"""The panel of server.choose: all configurations by the twin, and the best of them on the machine."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.choose import EXPERIMENT, GOALS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, count, measured, number, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View
from workbench.panels.words import beside_prediction

KNOBS = ("goal", "weights", "requests")
AXES = {"latency": "mean latency, s", "throughput": "tokens a second", "cost": "GB·s for 1,000 tokens"}
LEFT_OUT = "how fast this machine is at another moment, and texts that a draft guesses better or worse"
SHOWN = 12  # of the twin's best, in the table


class ChoosePanel(Panel):
    """Lab 11: choosing a configuration by the twin, and checking it."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        twin, machine = matching(made, measured="twin"), matching(made, measured="machine")
        goal = settings["goal"]
        return view(
            Chart(
                Series("by the twin", [(m.counts["place"], m.median) for m in twin], "line", style.INK, look=_DOTS),
                measured("on the machine", machine, lambda m: m.counts["place"], style.TARGET, linestyle=""),
                x=Axis("place by the twin; 1: the best"),
                y=Axis(AXES[goal], number, "zero", room=(1, 1.25)),
                legend="upper right" if goal == "throughput" else "upper left",
                empty="Run simulates, then checks",
            ),
            height=4.0,
            table=table(
                [*machine, *twin[:SHOWN]],
                {
                    "by": "{m.settings[measured]}",
                    "place": count("place", "{:.0f}"),
                    "configuration": "{m.settings[configuration]}",
                    GOALS[goal]: lambda m: number(m.median),
                    "predicted": lambda m: "–" if m.predicted is None else number(m.predicted),
                    "worse than the best measured": count("worse_than_best", "{:.1%}"),
                },
            ),
            caption=f"Configurations for {goal}, {settings['requests']} requests" + ("" if made else "; Run chooses"),
            words=_words(twin, machine, goal),
        )


_DOTS: dict[str, Any] = {"marker": ".", "markersize": 7, "linewidth": 1.0, "linestyle": "--"}


def _words(twin: list[Measurement], machine: list[Measurement], goal: str) -> str:
    if not twin:
        return (
            "More requests at a time share each step and wait for each other; fewer bits hold less memory and take"
            " more arithmetic. The twin tries every combination in the time in which the machine tries one."
        )
    best = twin[0]
    lines = [f"Of {len(twin)} configurations the twin's best for {goal} is: {best.settings['configuration']}."]
    first = next((m for m in machine if m.counts["place"] == 1), None)
    if first is not None:
        fastest = min(machine, key=lambda m: m.counts["worse_than_best"])
        lines.append(
            f"On the machine it has {number(first.median)} {first.unit},"
            f" {first.counts['worse_than_best']:.1%} worse than the best that was measured"
            f" ({fastest.settings['configuration']})."
        )
    default = next((m for m in machine if m.counts["is_default"]), None)
    if first is not None and default is not None:
        ratio = default.median / first.median
        lines.append(f"The server's default has {ratio:.2f} times that.")
    if machine:
        ratios = sorted(m.median / m.predicted for m in machine if m.predicted)
        lines.append(
            beside_prediction(machine, "The measured", left_out=LEFT_OUT)
            if machine[0].unit == "s"
            else f"Measured over predicted: {ratios[0]:.2f} to {ratios[-1]:.2f}. Not predicted: {LEFT_OUT}."
        )
    return "\n".join(filter(None, lines))
