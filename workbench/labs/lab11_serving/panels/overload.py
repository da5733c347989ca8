"""The panel of server.overload: who has a first token in time, and who is refused, with admission and without."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.overload import ADMITTED, ALL, BELOW, EXPERIMENT, MODES
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, count, line, number, table, view
from workbench.panels.style import milliseconds
from workbench.panels.view import View

KNOBS = ("seconds", "max_running", "overload", "ttft_slo", "tpot_slo")
COLOURS = {BELOW: style.IDLE, ADMITTED: style.TARGET, ALL: style.LEARNER}
NAMES = {BELOW: "below the knee", ADMITTED: "admission on", ALL: "admission off"}
BINS = 8


class OverloadPanel(Panel):
    """Lab 11: goodput of an overloaded server, with admission control and without."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = {m.settings["measured"]: m for m in self.made(settings, KNOBS)}
        return view(
            _first_tokens(made, settings),
            _goodput(made),
            height=4.2,
            boxes=[(0.12, 0.15, 0.38, 0.72), (0.62, 0.15, 0.36, 0.72)],
            table=table(
                made.values(),
                {
                    "admission": lambda m: NAMES[m.settings["measured"]],
                    "arrive/s": count("rate_per_s", number),
                    "requests": count("requests", "{:.0f}"),
                    "answered": count("answered", "{:.0f}"),
                    "refused": count("refused", "{:.0f}"),
                    "good": count("good", "{:.0f}"),
                    "good/s": count("good_per_s", number),
                    "TTFT p50": count("ttft_p50_s", milliseconds),
                    "TTFT p99": count("ttft_p99_s", milliseconds),
                    "refused after, p50": count("refusal_p50_s", milliseconds),
                    "refused after, p99": count("refusal_p99_s", milliseconds),
                    "tokens of an answer": count("output_tokens_mean", "{:.1f}"),
                    "tokens that a refused one asked for": count("refused_tokens_mean", "{:.1f}"),
                },
            ),
            caption=f"{settings['overload']:g} times what the server can answer, for {settings['seconds']:g} s"
            + ("" if made else "; Run sends it"),
            words=_words(made, settings),
        )


def _first_tokens(made: dict[str, Measurement], settings: dict[str, Any]) -> Chart:
    dots: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 4, "alpha": 0.7}
    series = [
        line(
            NAMES[mode],
            [(due, ttft) for due, ttft, _ in made[mode].settings["requests"] if ttft > 0],
            COLOURS[mode],
            **dots,
        )
        for mode in MODES
        if mode in made
    ]
    return Chart(
        *series,
        x=Axis("due, s", scale="zero"),
        y=Axis("TTFT", milliseconds, "log", room=(1.8, 8)),
        levels=[(settings["ttft_slo"], "objective", style.INK)] if made else [],
        title="each dot an answer",
        legend="upper left",
        legend_columns=2,
    )


def bins(m: Measurement, seconds: float) -> list[tuple[float, float]]:
    """(middle, good requests a second) by the time when they were due."""
    width = seconds / BINS
    counted = [0] * BINS
    for due, _, good in m.settings["requests"]:
        counted[min(BINS - 1, int(due / width))] += good
    return [((at + 0.5) * width, n / width) for at, n in enumerate(counted)]


def _goodput(made: dict[str, Measurement]) -> Chart:
    return Chart(
        *(
            Series(
                NAMES[mode],
                bins(made[mode], max(due for due, *_ in made[mode].settings["requests"])),
                "measured",
                COLOURS[mode],
            )
            for mode in MODES
            if mode in made
        ),
        x=Axis("due, s", scale="zero"),
        y=Axis("requests a second", scale="zero", room=(1, 1.2)),
        title="good, by when they were due",
        empty="",
    )


def _words(made: dict[str, Measurement], settings: dict[str, Any]) -> str:
    if not made:
        return (
            "Beyond its knee a server cannot answer everybody. Without admission control the queue grows, and soon"
            " every first token comes too late: all the work is done, and nobody is served in time."
        )
    lines = []
    for mode, m in made.items():
        c = m.counts
        lines.append(
            f"{NAMES[mode].capitalize()}: of {c['requests']:.0f} requests {c['good']:.0f} are good,"
            f" {number(c['good_per_s'])} a second, and {c['refused']:.0f} are refused"
            + (f", half of them within {milliseconds(c['refusal_p50_s'])}" if c["refused"] else "")
            + f"; TTFT p99 of the answers {milliseconds(c['ttft_p99_s'])}."
        )
    if ADMITTED in made and BELOW in made:
        share = made[ADMITTED].counts["good_per_s"] / max(made[BELOW].counts["good_per_s"], 1e-9)
        lines.append(f"With admission goodput is {share:.2f} times what it is below the knee.")
    lines.append(f"Verified: {list(made.values())[-1].check}.")
    return "\n".join(lines)
