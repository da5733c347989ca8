"""The panel of time.launch: half the bytes, for models of growing size. The third regime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.experiments.inputs import shape_of
from workbench.experiments.steps import DTYPES, decode_step
from workbench.instruments.costs import predict
from workbench.instruments.device import PUBLISHED
from workbench.labs.lab02_where_time_goes.launch import EXPERIMENT, NO_GAIN, predict_launch, rungs
from workbench.models.config import readable_count
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, measured, predicted, recorded, table, view
from workbench.panels.plots import FORMAT_COLOURS, card_title, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import spread_words

UNSURE = 2.0  # p90 over p10 of the paired ratios: beyond it something else used the machine
COLOURS = {weights: FORMAT_COLOURS[weights] for weights in ("float32", "bfloat16")}


class LaunchPanel(Panel):
    """Lab 02: half the bytes, for models of growing size: where the step only waits for its own operations."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        card, names = settings["card"], rungs(settings["largest"])
        here = _by_weights(predict_launch(self.ceilings(), **settings), len(names))
        there = _by_weights(predict_launch(PUBLISHED[card], **settings), len(names))
        steps, archive = matching(self.measurements, unit="s"), matching(self.record, unit="s")
        sizes = [shape_of(name).num_parameters() for name in names]
        dotted: dict[str, Any] = {"linestyle": (0, (1, 1.5))}
        chart = Chart(
            *(
                series
                for weights, colour in COLOURS.items()
                for series in (
                    predicted(f"{weights}, predicted here", here[weights], colour),
                    predicted(f"{weights}, predicted, {card_title(card)}", there[weights], colour, **dotted),
                    recorded(weights, matching(archive, weights=weights), "parameters", colour),
                    measured(f"{weights}, measured", matching(steps, weights=weights), "parameters", colour),
                )
            ),
            x=Axis("weights of the model (parameters)", readable_count, "log", sizes, room=(2, 2)),
            y=Axis("time of one decode step", milliseconds, "log"),
            legend="upper left",
        )
        taken = {(m.settings["model"], m.settings["weights"]): m for m in steps}
        return view(
            chart,
            table=table(
                [
                    (name, weights, taken.get((name, weights)), here[weights][i], there[weights][i])
                    for i, name in enumerate(names)
                    for weights in COLOURS
                ],
                {
                    "model": "{m[0]}",
                    "weights": "{m[1]}",
                    "measured step": lambda row: spread_words(row[2]),
                    "predicted here": lambda row: milliseconds(row[3][1]),
                    "limit here": "{m[3][2]}",
                    "predicted there": lambda row: milliseconds(row[4][1]),
                    "limit there": "{m[4][2]}",
                },
            ),
            caption=f"Here, and on {card_title(card)}" + ("" if steps else "; Run measures this machine"),
            words=self._words(settings, names, here, there),
        )

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
        costs, captured = decode_step(PUBLISHED[card], names[-1], **_last(settings))
        eager = predict(costs, PUBLISHED[card], "bfloat16", eager=True)
        bound = [n for n, p in zip(names, there["bfloat16"]) if p[2] == "launch"]
        each = [milliseconds(s or 0) for s in (PUBLISHED[card].launch_s, PUBLISHED[card].eager_launch_s)]
        sentences.append(
            f"On {card_title(card)} the step of {names[-1]} starts {costs.launches:,} operations: replayed as a"
            f" captured graph, at {each[0]} each, it takes {milliseconds(captured.seconds)}; started from Python, at"
            f" {each[1]} each, {milliseconds(eager.seconds)}. "
            + (f"Launch-bound in a graph: {', '.join(bound)}. " if bound else "")
            + "What helps here is fewer operations (fusion) and cheaper starts (CUDA graphs), not fewer bytes."
        )
        return "\n".join(sentences)


def _last(settings: dict[str, Any]) -> dict[str, Any]:
    return {"batch": 1, "context": settings["context"], "weights": "bfloat16"}


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


def _by_weights(points: Sequence[tuple], count: int) -> dict[str, Sequence[tuple]]:
    return {weights: points[i * count : (i + 1) * count] for i, weights in enumerate(DTYPES)}
