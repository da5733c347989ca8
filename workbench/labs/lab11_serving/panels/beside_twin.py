"""The panel of server.beside_twin: mean TTFT and TPOT of two real processes beside those of their simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.beside_twin import EXPERIMENT
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, count, table, view
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, spread_words

KNOBS = ("link", "rate", "requests")
NAMES = {"ttft": "TTFT", "tpot": "TPOT"}
COLOURS = {"ttft": style.PREFILL, "tpot": style.DECODE}
LEFT_OUT = (
    "how long the messages between the two wait, blocks that the prefill engine holds until all is sent, and a machine"
    " that is busier in one run than in the other"
)


class BesideTwinPanel(Panel):
    """Lab 11: the twin with two pools beside two real processes."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        by = {m.settings["measured"]: m for m in made}
        return view(
            *(_bars(what, by.get(what)) for what in NAMES),
            height=3.6,
            boxes=[(0.2, 0.2, 0.265, 0.64), (0.69, 0.2, 0.265, 0.64)],
            table=table(
                made,
                {
                    "mean of the requests": lambda m: NAMES[m.settings["measured"]],
                    "measured": spread_words,
                    "predicted": lambda m: milliseconds(m.predicted),
                    "off by": lambda m: f"{m.predicted / m.counts['real_s'] - 1:+.1%}",
                    "replayed": count("replayed_s", milliseconds),
                    "replayed, off by": lambda m: f"{m.counts['replayed_s'] / m.counts['real_s'] - 1:+.1%}",
                },
            ),
            caption=f"A process that prefills and one that decodes, {settings['rate']:g} requests a second"
            + ("" if made else "; Run serves, then simulates"),
            words=_words(made),
        )


def _bars(what: str, m: Measurement | None) -> Bars:
    mean, replayed = (None, None) if m is None else (m.counts["real_s"], m.counts["replayed_s"])
    return Bars(
        [
            Bar("measured", mean, COLOURS[what], None if m is None else m.spread),  # as the twin's: means over the runs
            Bar("twin", None if m is None else m.predicted, style.IDLE),
            Bar("twin, replayed", replayed, style.IDLE),
        ],
        Axis(f"mean {NAMES[what]}", milliseconds, "zero", room=(1, 1.2)),
        empty="Run serves",
    )


def _words(made: Sequence[Measurement]) -> str:
    if not made:
        return (
            "The simulation has the same schedulers and block tables, and no model, so it can say what many devices"
            " would do. Is it right about the one arrangement that this machine can run, two processes?"
        )
    lines = [
        f"{NAMES[m.settings['measured']]}: {milliseconds(m.counts['real_s'])} on average, predicted"
        f" {milliseconds(m.predicted or 0)} ({(m.predicted or 0) / m.counts['real_s'] - 1:+.1%}); with the run's own"
        f" step times {m.counts['replayed_s'] / m.counts['real_s'] - 1:+.1%}."
        for m in made
    ]
    lines.append(beside_prediction(made, "The mean of a run", left_out=LEFT_OUT))
    lines.append(f"Verified: {made[0].check}.")
    return "\n".join(filter(None, lines))
