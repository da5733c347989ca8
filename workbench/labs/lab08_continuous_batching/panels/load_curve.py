"""The panel of serving.load: the latency–throughput curve of a server with its knee, and how many requests are in
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab08_continuous_batching.load_curve import EXPERIMENT
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, line, table, view
from workbench.panels.plots import card_title, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.serving.metrics import LoadPoint, goodput, knee
from workbench.serving.settings import BATCHING

KNOBS = ("shape", "card", "load", "requests", "max_running", "token_budget", "seed")
COLOURS = {"continuous": style.TARGET, "static": style.LEARNER}
GOOD = 0.9  # so many requests must be in time


class LoadPanel(Panel):
    """Lab 08: latency against throughput at growing rates, the knee, and goodput; simulated on a card's data sheet."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        curves = {how: matching(made, batching=how) for how in BATCHING}
        points = {how: [_point(m, settings) for m in curve] for how, curve in curves.items() if curve}
        return view(
            _curve_chart(points),
            _share_chart(points, settings),
            height=4.0,
            boxes=[(0.085, 0.145, 0.43, 0.72), (0.62, 0.145, 0.36, 0.72)],
            table=table(
                [(m, _point(m, settings)) for curve in curves.values() for m in curve],
                {
                    "batching": "{m[0].settings[batching]}",
                    "arrive/s": "{m[1].rate_per_s:.3g}",
                    "done/s": "{m[0].counts[done_per_s]:.3g}",
                    "tokens/s": "{m[0].counts[tokens_per_s]:,.0f}",
                    "running": "{m[0].counts[running]:.1f}",
                    "in the system": "{m[0].counts[in_system]:.1f}",
                    "mean latency": _seconds("latency_mean_s"),
                    "TTFT p50": _seconds("ttft_p50_s"),
                    "TTFT p90": _seconds("ttft_p90_s"),
                    "TPOT p90": _seconds("tpot_p90_s"),
                    "in time": "{m[1].attainment:.0%}",
                },
            ),
            caption=(
                f"{settings['shape']} on {card_title(settings['card'])}, simulated: {settings['requests']} requests of"
                f" the {settings['load']} workload at each rate"
            )
            + ("" if made else "; Run simulates"),
            words=_words(points, curves, settings),
        )


def _point(m: Measurement, settings: dict[str, Any]) -> LoadPoint:
    """Latency is the mean; in time is who is within both limits; who got no token is not."""
    both = list(zip(m.settings["ttft_s"], m.settings["tpot_s"]))
    good = sum(a is not None and a <= settings["ttft_limit"] and b <= settings["tpot_limit"] for a, b in both)
    c = m.counts
    return LoadPoint(m.settings["rate_per_s"], c["done_per_s"], c["latency_mean_s"], good / len(both))


def _seconds(count: str) -> Callable[[tuple], str]:
    """A cell with one of the counts as a time."""
    return lambda row: milliseconds(row[0].counts[count])


def _curve_chart(points: dict[str, list[LoadPoint]]) -> Chart:
    series = []
    ring: dict[str, Any] = {
        "linestyle": "",
        "marker": "o",
        "markersize": 15,
        "markerfacecolor": "none",
        "markeredgewidth": 1.8,
    }
    for how, curve in points.items():
        turn = knee(curve)
        at = [(turn.throughput_per_s, turn.latency_s)]
        along = [(p.throughput_per_s, p.latency_s) for p in curve]
        series += [
            Series(how, along, "measured", COLOURS[how]),
            line(f"{how}, knee", at, legend=False, zorder=4, **ring),
        ]
    return Chart(
        *series,
        x=Axis("requests done a second", scale="zero"),
        y=Axis("mean latency", milliseconds, "log"),
        title="each point a rate; ringed: the knee",
        empty="Run simulates",
    )


def _share_chart(points: dict[str, list[LoadPoint]], settings: dict[str, Any]) -> Chart:
    limits = f"TTFT {milliseconds(settings['ttft_limit'])}, TPOT {milliseconds(settings['tpot_limit'])}"
    return Chart(
        *(
            Series(how, [(p.rate_per_s, p.attainment) for p in curve], "measured", COLOURS[how])
            for how, curve in points.items()
        ),
        x=Axis("requests that arrive a second", scale="zero", room=(1, 1.05)),
        y=Axis("in time", lambda share: f"{share:.0%}", ticks=[0, 0.25, 0.5, 0.75, 1.0], limits=(-0.03, 1.05)),
        title=f"within {limits}",
        legend="center left",
        marks=[
            (goodput(curve, GOOD), "goodput", COLOURS[how], 0.3 - 0.09 * at)
            for at, (how, curve) in enumerate(points.items())
            if goodput(curve, GOOD)
        ],
        also=lambda axes: axes.axhline(GOOD, color=style.IDLE, linewidth=1.4, linestyle=(0, (1, 2)), zorder=1),
        empty="",
    )


def _words(points: dict[str, list[LoadPoint]], curves: dict[str, list[Measurement]], settings: dict[str, Any]) -> str:
    if not points:
        return (
            "While few requests come, one that comes is served at once, and more of them share each step nearly for"
            " nothing: throughput grows, latency hardly. Where no step has room left a queue grows, and latency without"
            " throughput."
        )
    lines = []
    for how, curve in points.items():
        turn, last = knee(curve), curve[-1]
        good = goodput(curve, GOOD)
        lines.append(
            f"{how.capitalize()}: the knee is at {turn.throughput_per_s:.3g} requests a second, where a second of"
            f" latency still buys most throughput; mean latency there {milliseconds(turn.latency_s)},"
            f" {turn.latency_s / curve[0].latency_s:.1f} times that at {curve[0].rate_per_s:.3g}. Goodput, {GOOD:.0%}"
            " of the requests in time: " + (f"up to {good:.3g} a second." if good else "at no rate that was tried.")
        )
        came = curves[how][-1].counts["came_per_s"]
        if last.throughput_per_s < 0.8 * came:
            lines.append(
                f"Of {came:.3g} that come a second at the highest rate {last.throughput_per_s:.3g} are done: the queue "
                "grows as long as requests come, and latencies there only say how many came."
            )
    if len(points) == 2 and all(len(curve) > 1 for curve in points.values()):
        most = {how: max(p.throughput_per_s for p in curve) for how, curve in points.items()}
        padding = max(m.counts["padding_share"] for m in curves["static"])
        lines.append(
            f"At most {most['continuous']:.3g} requests a second against {most['static']:.3g} in static groups, in"
            f" which up to {padding:.0%} of the rows are padding."
        )
    lines.append(f"Verified at each rate: {curves[next(iter(points))][-1].check}.")
    return "\n".join(lines)
