"""The panel of serving.load: the latency–throughput curve of a server with its knee, and how many requests are in time."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.speculate_plots import NOTE
from workbench.panels.style import milliseconds
from workbench.panels.time_plots import card_title, log_scale, mark, name, same_knobs
from workbench.panels.view import View
from workbench.serving.metrics import LoadPoint, goodput, knee
from workbench.serving.scheduler import BATCHING

KNOBS = ("shape", "card", "load", "requests", "max_running", "token_budget", "seed")
COLOURS = {"continuous": style.TARGET, "static": style.LEARNER}
GOOD = 0.9  # so many requests must be in time


class LoadPanel(Panel):
    """Rates from idle to beyond what the server can do. The limits of TTFT and TPOT only decide what counts as in time."""

    experiment_name = "serving.load"
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = [m for m in self.measurements if same_knobs(m, {k: settings[k] for k in KNOBS})]
        curves = {how: [m for m in made if m.settings["batching"] == how] for how in BATCHING}
        points = {how: [_point(m, settings) for m in found] for how, found in curves.items() if found}
        figure, (curve, share) = style.new_figure(1, 2, height=4.0)
        curve.set_position([0.085, 0.145, 0.43, 0.72])
        share.set_position([0.62, 0.145, 0.36, 0.72])
        _draw_curve(curve, points)
        _draw_shares(share, points, settings)
        return View(
            figure=figure,
            alt=_alt(points, settings),
            header=["batching", "arrive/s", "done/s", "tokens/s", "running", "in the system", "mean latency", "TTFT p50",
                    "TTFT p90", "TPOT p90", "in time"],
            rows=[_row(m, _point(m, settings)) for found in curves.values() for m in found],
            caption=f"{settings['shape']} on {card_title(settings['card'])}, simulated: {settings['requests']} requests of the "
            f"{settings['load']} workload at each rate" + ("" if made else "; Run simulates"),
            words=_words(points, curves, settings),
        )  # fmt: skip


def _point(m: Measurement, settings: dict[str, Any]) -> LoadPoint:
    """Latency is the mean; in time is who is within both limits."""
    both = list(zip(m.settings["ttft_s"], m.settings["tpot_s"]))
    good = sum(a <= settings["ttft_limit"] and b <= settings["tpot_limit"] for a, b in both)
    c = m.counts
    return LoadPoint(m.settings["rate_per_s"], c["done_per_s"], c["latency_mean_s"], good / len(both))


def _draw_curve(axes: Axes, points: dict[str, list[LoadPoint]]) -> None:
    for how, found in points.items():
        axes.plot([p.throughput_per_s for p in found], [p.latency_s for p in found], color=COLOURS[how], label=how,
                  zorder=3, **style.MEASURED)  # fmt: skip
        turn = knee(found)
        axes.plot([turn.throughput_per_s], [turn.latency_s], marker="o", markersize=15, markerfacecolor="none",
                  markeredgecolor=style.INK, markeredgewidth=1.8, linestyle="", zorder=4)  # fmt: skip
    name(axes, x="requests done a second", y="mean latency", title="each point a rate; ringed: the knee")
    if not points:
        style.write(axes, 0.5, 0.5, "Run simulates", transform=axes.transAxes, ha="center", color=NOTE)
        axes.set(xticks=[], yticks=[])
        return
    axes.set_xlim(0, 1.08 * max(p.throughput_per_s for found in points.values() for p in found))
    log_scale(axes, "y", [p.latency_s for found in points.values() for p in found], milliseconds)


def _draw_shares(axes: Axes, points: dict[str, list[LoadPoint]], settings: dict[str, Any]) -> None:
    axes.axhline(GOOD, color=style.IDLE, linewidth=1.4, linestyle=(0, (1, 2)), zorder=1)
    for how, found in points.items():
        axes.plot(
            [p.rate_per_s for p in found],
            [p.attainment for p in found],
            color=COLOURS[how],
            label=how,
            zorder=3,
            **style.MEASURED,
        )
    most = max((p.rate_per_s for found in points.values() for p in found), default=1.0)
    axes.set(ylim=(-0.03, 1.05), yticks=[0, 0.25, 0.5, 0.75, 1.0], xlim=(0.001, 1.05 * most))
    axes.set_yticklabels([f"{y:.0%}" for y in (0, 0.25, 0.5, 0.75, 1.0)])
    for at, (how, found) in enumerate(points.items()):
        if goodput(found, GOOD):
            mark(axes, goodput(found, GOOD), "goodput", COLOURS[how], height=0.3 - 0.09 * at)
    limits = f"TTFT {milliseconds(settings['ttft_limit'])}, TPOT {milliseconds(settings['tpot_limit'])}"
    name(axes, x="requests that arrive a second", y="in time", title=f"within {limits}")
    style.legend(axes, loc="center left")


def _row(m: Measurement, point: LoadPoint) -> list[str]:
    c = m.counts
    times = (c[key] for key in ("latency_mean_s", "ttft_p50_s", "ttft_p90_s", "tpot_p90_s"))
    return [m.settings["batching"], f"{point.rate_per_s:.3g}", f"{c['done_per_s']:.3g}", f"{c['tokens_per_s']:,.0f}",
            f"{c['running']:.1f}", f"{c['in_system']:.1f}", *map(milliseconds, times), f"{point.attainment:.0%}"]  # fmt: skip


def _alt(points: dict[str, list[LoadPoint]], settings: dict[str, Any]) -> str:
    if not points:
        return "Mean latency against throughput, and the share of requests in time against their rate. Nothing is simulated yet."
    told = [
        f"{how}: latency {milliseconds(found[0].latency_s)} at {found[0].rate_per_s:.3g} requests a second, "
        f"{milliseconds(found[-1].latency_s)} at {found[-1].rate_per_s:.3g}"
        for how, found in points.items()
    ]
    return f"Mean latency against throughput for {settings['shape']} on {card_title(settings['card'])}. {'; '.join(told)}."


def _words(
    points: dict[str, list[LoadPoint]], curves: dict[str, list[Measurement]], settings: dict[str, Any]
) -> str:
    if not points:
        return ("While few requests come, one that comes is served at once, and more of them share each step nearly for nothing: "
                "throughput grows, latency hardly. Where no step has room left a queue grows, and latency without throughput.")  # fmt: skip
    told = []
    for how, found in points.items():
        turn, last = knee(found), found[-1]
        good = goodput(found, GOOD)
        told.append(
            f"{how.capitalize()}: the knee is at {turn.throughput_per_s:.3g} requests a second, where a second of latency still buys most "
            f"throughput; mean latency there {milliseconds(turn.latency_s)}, {turn.latency_s / found[0].latency_s:.1f} times that "
            f"at {found[0].rate_per_s:.3g}. Goodput, {GOOD:.0%} of the requests in time: "
            + (f"up to {good:.3g} a second." if good else "at no rate that was tried.")
        )
        came = curves[how][-1].counts["came_per_s"]
        if last.throughput_per_s < 0.8 * came:
            told.append(f"Of {came:.3g} that come a second at the highest rate {last.throughput_per_s:.3g} are done: the queue "
                        "grows as long as requests come, and latencies there only say how many came.")  # fmt: skip
    if len(points) == 2 and all(len(found) > 1 for found in points.values()):
        most = {how: max(p.throughput_per_s for p in found) for how, found in points.items()}
        padding = max(m.counts["padding_share"] for m in curves["static"])
        told.append(f"At most {most['continuous']:.3g} requests a second against {most['static']:.3g} in static groups, in which up "
                    f"to {padding:.0%} of the rows are padding.")  # fmt: skip
    told.append(f"Verified at each rate: {curves[next(iter(points))][-1].check}.")
    return "\n".join(told)
