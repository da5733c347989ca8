"""The panel of server.knee: latencies and goodput against the rate, predicted beside measured."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.knee import EXPERIMENT
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, count, number, predicted, table, view
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction
from workbench.serving.metrics import LoadPoint, knee

KNOBS = ("requests", "max_running", "ttft_slo", "tpot_slo")
LEFT_OUT = "the server's event loop, the clients beside it, and requests that come in the middle of a step"


class KneePanel(Panel):
    """Lab 11: the rate at which a running server begins to queue."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        return view(
            _latencies(made, settings),
            _goodput(made),
            height=4.0,
            boxes=[(0.12, 0.15, 0.4, 0.7), (0.62, 0.15, 0.36, 0.7)],
            table=table(
                made,
                {
                    "arrive/s": count("rate_per_s", number),
                    "done/s": count("done_per_s", number),
                    "TTFT p50": count("ttft_p50_s", milliseconds),
                    "predicted": count("simulated_ttft_p50_s", milliseconds),
                    "TTFT p99": count("ttft_p99_s", milliseconds),
                    "p99 predicted": count("simulated_ttft_p99_s", milliseconds),
                    "TPOT p50": count("tpot_p50_s", milliseconds),
                    "TPOT predicted": count("simulated_tpot_p50_s", milliseconds),
                    "good/s": count("good_per_s", number),
                    "good/s predicted": count("simulated_good_per_s", number),
                },
            ),
            caption=f"{settings['requests']} requests at each rate, {settings['max_running']} at a time"
            + ("" if made else "; Run sends them"),
            words=_words(made, settings),
        )


def _along(made: list[Measurement], key: str) -> list[tuple[float, float]]:
    return [(m.counts["rate_per_s"], m.counts[key]) for m in made]


def _latencies(made: list[Measurement], settings: dict[str, Any]) -> Chart:
    series = []
    for name, key, colour in (
        ("TTFT p99", "ttft_p99_s", style.LEARNER),
        ("TTFT p50", "ttft_p50_s", style.PREFILL),
        ("TPOT p50", "tpot_p50_s", style.DECODE),
    ):
        series.append(Series(name, _along(made, key), "measured", colour))
        series.append(predicted(f"{name}, predicted", _along(made, f"simulated_{key}"), colour, legend=False))
    return Chart(
        *series,
        x=Axis("arrivals a second", scale="zero"),
        y=Axis("time", milliseconds, "log", room=(1.8, 12)),
        levels=[(settings["ttft_slo"], "TTFT objective", style.IDLE)] if made else [],
        title="solid: measured; dashed: the twin",
        legend="upper left",
        legend_columns=2,
    )


def _goodput(made: list[Measurement]) -> Chart:
    return Chart(
        Series("offered", [(m.counts["rate_per_s"],) * 2 for m in made], "line", style.IDLE),
        Series("good", _along(made, "good_per_s"), "measured", style.TARGET),
        predicted("good, predicted", _along(made, "simulated_good_per_s"), style.TARGET),
        x=Axis("arrivals a second", scale="zero"),
        y=Axis("requests a second", scale="zero", room=(1, 1.35)),
        title="goodput",
        legend="upper left",
        empty="",
    )


def _words(made: list[Measurement], settings: dict[str, Any]) -> str:
    if not made:
        return (
            "While the server keeps up, a first token takes a step or two. At some rate a queue begins to grow, and"
            " from there on the wait depends on how long the requests keep coming."
        )
    lines = []
    if len(made) > 1:
        turn = knee(
            [LoadPoint(m.counts["rate_per_s"], m.counts["done_per_s"], m.counts["latency_mean_s"]) for m in made]
        )
        best = max(made, key=lambda m: m.counts["good_per_s"])
        c = best.counts
        lines.append(
            f"The knee is at {number(turn.rate_per_s)} requests a second, of the"
            f" {number(c['capacity_per_s'])} that are answered when all are there at once. Goodput is highest at"
            f" {number(c['rate_per_s'])} a second: {number(c['good_per_s'])} meet a TTFT of"
            f" {milliseconds(settings['ttft_slo'])} and a TPOT of {milliseconds(settings['tpot_slo'])}."
        )
        lines.append(
            f"TTFT p99 rises from {milliseconds(made[0].counts['ttft_p99_s'])} to"
            f" {milliseconds(made[-1].counts['ttft_p99_s'])}, TPOT from {milliseconds(made[0].counts['tpot_p50_s'])} to"
            f" {milliseconds(made[-1].counts['tpot_p50_s'])}: a step that more share takes longer, and a queue"
            " longer still."
        )
    lines.append(beside_prediction(made, "The median TTFT", left_out=LEFT_OUT))
    lines.append(f"Verified at each rate: {made[-1].check}.")
    return "\n".join(filter(None, lines))
