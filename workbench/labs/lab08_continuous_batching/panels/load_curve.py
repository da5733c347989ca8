"""The panel of serving.load: the latency–throughput curve of a server with its knee, and how many requests are in
time."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab08_continuous_batching.load_curve import EXPERIMENT, KINDS, load_point, window_of
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import MISSING, Axis, Chart, Series, count, line, number, table, view
from workbench.panels.plots import card_title, matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.serving.metrics import LoadPoint, goodput, knee

KNOBS = ("shape", "card", "load", "requests", "max_running", "token_budget", "seed")
COLOURS = {"continuous": style.TARGET, "static": style.IDLE}
GOOD = 0.9  # so many requests must be in time


class LoadPanel(Panel):
    """Lab 08: latency against throughput at growing rates, the knee, and goodput; simulated on a card's data sheet."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        curves = {how: matching(made, batching=how) for how in KINDS}
        limits = {name: settings[name] for name in ("ttft_limit", "tpot_limit")}
        every = {how: [load_point(m, **limits) for m in curve] for how, curve in curves.items()}
        points = {how: known for how, some in every.items() if (known := [p for p in some if p is not None])}
        return view(
            _curve_chart(points),
            _share_chart(points, settings),
            height=4.0,
            boxes=[(0.135, 0.145, 0.38, 0.72), (0.66, 0.145, 0.32, 0.72)],
            table=table(
                [m for curve in curves.values() for m in curve],
                {
                    "batching": "{m.settings[batching]}",
                    "arrive/s": lambda m: number(m.settings["rate_per_s"]),
                    "done/s": count("done_per_s", number),
                    "tokens/s": count("tokens_per_s", "{:,.0f}"),
                    "running": count("running", "{:.1f}"),
                    "in the system": count("in_system", "{:.1f}"),
                    "mean latency": count("latency_mean_s", milliseconds),
                    "TTFT p50": count("ttft_p50_s", milliseconds),
                    "TTFT p90": count("ttft_p90_s", milliseconds),
                    "TPOT p90": count("tpot_p90_s", milliseconds),
                    "in time": lambda m: f"{p.attainment:.0%}" if (p := load_point(m, **limits)) else MISSING,
                },
            ),
            caption=(
                f"{settings['shape']} on {card_title(settings['card'])}, simulated: {settings['requests']} requests of"
                f" the {settings['load']} workload at each rate"
            )
            + ("" if made else "; Run simulates"),
            words=_words(points, curves, settings),
        )


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
        y=Axis("mean latency", milliseconds, "log", room=(1.8, 4)),
        legend="upper right",
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
        x=Axis("arrivals a second", scale="zero", room=(1, 1.05)),
        y=Axis("in time", lambda share: f"{share:.0%}", ticks=[0, 0.25, 0.5, 0.75, 1.0], limits=(-0.03, 1.05)),
        title=f"within {limits}",
        marks=[
            (goodput(curve, GOOD), "goodput", COLOURS[how], 0.3 - 0.09 * at)
            for at, (how, curve) in enumerate(points.items())
            if goodput(curve, GOOD)
        ],
        also=lambda axes: axes.axhline(GOOD, color=style.IDLE, linewidth=1.4, linestyle=(0, (1, 2)), zorder=1),
        empty="",
    )


def _words(points: dict[str, list[LoadPoint]], curves: dict[str, list[Measurement]], settings: dict[str, Any]) -> str:
    silent = [m for curve in curves.values() for m in curve if "done_per_s" not in m.counts]
    lines = []
    if silent:
        lines.append(
            f"At {len(silent)} of the rates no request was done while others came: they have no throughput here (–);"
            " more requests would tell."
        )
    if not points:
        return "\n".join(lines) or (
            "While few requests come, one that comes is served at once, and more of them share each step nearly for"
            " nothing: throughput grows, latency hardly. Where no step has room left a queue grows, and latency without"
            " throughput."
        )
    for how, curve in points.items():
        if len(curve) < 2:  # a point has no knee
            continue
        turn, last = knee(curve), curve[-1]
        good = goodput(curve, GOOD)
        lines.append(
            f"{how.capitalize()}: the knee is at {number(turn.throughput_per_s)} requests a second, where a second of"
            f" latency still buys most throughput; mean latency there {milliseconds(turn.latency_s)},"
            f" {turn.latency_s / curve[0].latency_s:.1f} times that at {number(curve[0].rate_per_s)}. Goodput,"
            f" {GOOD:.0%} of the requests in time: "
            + (f"up to {number(good)} a second." if good else "at no rate that was tried.")
        )
        highest = curves[how][-1]
        came = highest.counts["came_per_s"]
        if "done_per_s" in highest.counts and last.throughput_per_s < 0.8 * came:
            lines.append(
                f"Of {number(came)} that come a second at the highest rate {number(last.throughput_per_s)} are done:"
                " the queue grows as long as requests come, and latencies there only say how many came."
            )
    fastest = max((m for curve in curves.values() for m in curve), key=lambda m: m.settings["rate_per_s"])
    begin, end = window_of(fastest.settings["arrival_s"])
    if end - begin < settings["ttft_limit"]:
        lines.append(
            f"At the highest rate requests come for {milliseconds(end - begin)}, less than the TTFT that is allowed:"
            " nobody can be late there. More requests tell what such limits cost."
        )
    if len(points) == 2 and all(len(curve) > 1 for curve in points.values()):
        most = {how: max(p.throughput_per_s for p in curve) for how, curve in points.items()}
        padding = max(m.counts["padding_share"] for m in curves["static"])
        lines.append(
            f"At most {number(most['continuous'])} requests a second against {number(most['static'])} in static groups,"
            f" in which up to {padding:.0%} of the rows are padding."
        )
    lines.append(f"Verified at each rate: {curves[next(iter(points))][-1].check}.")
    return "\n".join(lines)
