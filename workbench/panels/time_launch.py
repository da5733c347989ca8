"""The panel of time.launch: half the bytes, for models of growing size. The third regime."""

from __future__ import annotations

import statistics
from typing import Any

from workbench.experiments.inputs import shape_of
from workbench.experiments.time_steps import DTYPES, decode_step
from workbench.experiments.where_time_goes import NO_GAIN, predict_launch, rungs
from workbench.instruments.device import PUBLISHED
from workbench.instruments.records import Measurement
from workbench.models.config import readable_count
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.time_plots import card_title, curve, log_scale
from workbench.panels.view import View
from workbench.panels.words import spread_words

UNSURE = 2.0  # p90 over p10 of the paired ratios: beyond it something else used the machine
COLOURS = {"float32": style.WEIGHTS, "bfloat16": style.DRAFT}


class LaunchPanel(Panel):
    """Step time against the number of weights, in float32 and in bfloat16, here and predicted for a card."""

    experiment_name = "time.launch"

    def view(self, settings: dict[str, Any]) -> View:
        card, names = settings["card"], rungs(settings["largest"])
        here = _by_weights(predict_launch(self.ceilings(), **settings), len(names))
        there = _by_weights(predict_launch(PUBLISHED[card], **settings), len(names))
        measured, record = _steps(self.measurements), _steps(self.record)
        figure, (axes,) = style.new_figure()
        for weights, colour in COLOURS.items():
            for points, look, place in (
                (here, style.PREDICTED, "predicted here"),
                (there, {**style.PREDICTED, "linestyle": (0, (1, 1.5))}, f"predicted, {card_title(card)}"),
            ):
                x, seconds = [p[0] for p in points[weights]], [p[1] for p in points[weights]]
                axes.plot(x, seconds, color=colour, label=f"{weights}, {place}", **look)
            for some, recorded in ((record, True), (measured, False)):
                own = [m for m in some if m.settings["weights"] == weights]
                if own:
                    label = weights if recorded else f"{weights}, measured"
                    curve(axes, own, _parameters, colour=colour, label=label, recorded=recorded)
        every = [s for points in (here, there) for some in points.values() for _, s, _ in some]
        every += [v for m in measured + record for v in (m.median, *m.spread)]
        sizes = [shape_of(name).num_parameters() for name in names]
        style.log_ticks(axes, "x", sizes, text=readable_count)
        axes.set_xlim(min(sizes) / 2, max(sizes) * 2)
        log_scale(axes, "y", every, style.milliseconds)
        time_plots.name(axes, x="weights of the model (parameters)", y="time of one decode step")
        style.legend(axes, loc="upper left")
        figure.subplots_adjust(left=0.115, right=0.985, top=0.965, bottom=0.145)
        return View(
            figure=figure,
            alt=_alt(names, here, there, card, measured),
            header=["model", "weights", "measured step", "predicted here", "limit here", "predicted there",
                    "limit there"],
            rows=[
                _row(name, weights, here[weights][i], there[weights][i], measured)
                for i, name in enumerate(names)
                for weights in COLOURS
            ],
            caption=f"Here, and on {card_title(card)}" + ("" if measured else "; Run measures this machine"),
            words=self._words(settings, names, here, there),
        )  # fmt: skip

    def _words(self, settings: dict, names: tuple, here: dict, there: dict) -> str:
        card, sentences = settings["card"], []
        ratios = {m.settings["model"]: m for m in self.measurements if m.unit == "ratio"}
        for i, name in enumerate(names):
            expected = here["float32"][i][1] / here["bfloat16"][i][1]
            text = f"{name}: half the bytes make the step {expected:.2g} × as fast by prediction"
            limit = here["bfloat16"][i][2]
            if name in ratios:
                gained, (low, high) = ratios[name].median, ratios[name].spread
                text += f", {gained:.2g} × as measured ({low:.2g} to {high:.2g} ×). "
                text += _regime(gained, low, high, limit)
            else:
                text += f"; in bfloat16 it is {limit}-bound."
            sentences.append(text)
        launches = [
            decode_step(PUBLISHED[card], n, batch=1, context=settings["context"], weights="bfloat16")[
                0
            ].launches
            for n in names
        ]
        bound = [n for n, p in zip(names, there["bfloat16"]) if p[2] == "launch"]
        start = PUBLISHED[card].launch_s
        sentences.append(
            f"On {card_title(card)} the step of {names[-1]} starts {launches[-1]:,} operations: at "
            f"{style.milliseconds(start)} each, replayed as one graph, {style.milliseconds(launches[-1] * start)}. "
            + (f"Launch-bound there: {', '.join(bound)}. " if bound else "")
            + "Without a graph a launch costs several times that. What helps here is fewer operations (fusion) and "
            "cheaper starts (CUDA graphs), not fewer bytes."
        )
        return "\n".join(sentences)


def _regime(gained: float, low: float, high: float, limit: str) -> str:
    """What a measured ratio of float32 over bfloat16 says, if it says anything."""
    if high > UNSURE * low and low < NO_GAIN < high:
        return "The pairs differ too much to say; run again when nothing else runs."
    if gained >= NO_GAIN:
        return "The bytes bind: bandwidth-bound." if gained > 1.6 else "The bytes bind in part."
    if limit == "compute":
        return "No gain: the arithmetic binds, not the bytes."
    return (
        "No gain: launch-bound. The step is a fixed number of operations, each costs a start however little it "
        "does, and half as many bytes in each change nothing."
    )


def _by_weights(points: list[tuple], count: int) -> dict[str, list[tuple]]:
    return {weights: points[i * count : (i + 1) * count] for i, weights in enumerate(DTYPES)}


def _steps(measurements: list[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.unit == "s"]


def _parameters(m: Measurement) -> int:
    return m.settings["parameters"]


def _row(name: str, weights: str, here: tuple, there: tuple, measured: list[Measurement]) -> list[str]:
    wanted = (name, weights)
    m = next((m for m in measured if (m.settings["model"], m.settings["weights"]) == wanted), None)
    found = [name, weights, spread_words(m) if m else ""]
    return [*found, style.milliseconds(here[1]), here[2], style.milliseconds(there[1]), there[2]]


def _alt(names: tuple, here: dict, there: dict, card: str, measured: list[Measurement]) -> str:
    text = (
        f"Time of one decode step against the number of weights, both axes logarithmic, for {', '.join(names)}. "
        f"Predicted in float32 and bfloat16: {style.milliseconds(here['float32'][0][1])} and "
        f"{style.milliseconds(here['bfloat16'][0][1])} for the smallest here, "
        f"{style.milliseconds(there['bfloat16'][-1][1])} in bfloat16 for the largest on {card_title(card)}."
    )
    if measured:
        middle = statistics.median(m.median for m in measured)
        text += f" Measured, solid, around {style.milliseconds(middle)}."
    return text
