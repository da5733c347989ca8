"""The panel of time.phases: what a token costs in a prompt and in decode."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab01_naive_generation.step_time import text_lengths
from workbench.labs.lab02_where_time_goes.phases import EXPERIMENT, predicted_phases
from workbench.labs.lab02_where_time_goes.roofline import ridge
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, measured, predicted, recorded, table, view
from workbench.panels.plots import REGIMES, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, spread_words

COLOURS = {"prefill": style.PREFILL, "decode": style.DECODE}
NAMES = {"prefill": "prefill, all at once", "decode": "decode, one by one"}


class PhasesPanel(Panel):
    """Lab 02: what a token costs as one of a prompt and as one that is written."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        ceilings, weights = self.ceilings(), settings["weights"]
        lengths = text_lengths(settings["max_tokens"], settings["points"])
        expected = {n: predicted_phases(ceilings, settings["model"], n, weights) for n in lengths}
        timed, archive = matching(self.measurements, unit="s/token"), matching(self.record, unit="s/token")
        chart = Chart(
            *(
                series
                for phase, colour in COLOURS.items()
                for series in (
                    predicted(
                        f"{NAMES[phase]}, predicted",
                        [(n, expected[n][phase].seconds_per_token) for n in lengths],
                        colour,
                    ),
                    recorded(NAMES[phase], matching(archive, phase=phase), "tokens", colour),
                    measured(f"{NAMES[phase]}, measured", matching(timed, phase=phase), "tokens", colour),
                )
            ),
            x=Axis("tokens", scale="log", ticks=VALUES),
            y=Axis("time of one token", milliseconds, "log"),
            legend="above",
            legend_columns=2,
        )
        taken = {(m.settings["tokens"], m.settings["phase"]): m for m in timed}
        return view(
            chart,
            table=table(
                [(n, phase, expected[n][phase]) for n in lengths for phase in COLOURS],
                {
                    "tokens": "{m[0]:,}",
                    "phase": "{m[1]}",
                    "measured, a token": lambda row: spread_words(taken.get(row[:2])),
                    "predicted": lambda row: milliseconds(row[2].seconds_per_token),
                    "FLOPs per byte": "{m[2].intensity:.3g}",
                    "limit": "{m[2].limit}",
                },
            ),
            caption="The same as a table" if timed else "Predicted; Run measures",
            words=_words(ridge(ceilings, weights), lengths, expected, timed),
        )


def _words(corner: float, lengths: list[int], predicted: dict, measured: list[Measurement]) -> str:
    last = predicted[lengths[-1]]
    sentences = [f"Predicted at {lengths[-1]:,} tokens, with the ridge at {corner:.3g} FLOPs per byte:"]
    for phase, p in last.items():
        sentences.append(f"{phase}, {p.intensity:.3g} FLOPs per byte, is {REGIMES[p.limit]}.")
    times = last["decode"].seconds_per_token / last["prefill"].seconds_per_token
    sentences.append(f"A token of the prompt costs 1/{times:.3g} of a token that is written.")
    pairs = {(m.settings["tokens"], m.settings["phase"]): m.median for m in measured}
    both = sorted({n for n, _ in pairs if {(n, "prefill"), (n, "decode")} <= pairs.keys()})
    if both:
        ratio = pairs[both[-1], "decode"] / pairs[both[-1], "prefill"]
        sentences.append(f"Measured at {both[-1]:,} tokens: 1/{ratio:.3g}, with the same rows and the same result.")
        sentences.append(beside_prediction(measured))
    return "\n".join(sentences)
