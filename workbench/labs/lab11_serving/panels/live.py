"""The panel of server.live: requests as rows of a timeline, the queue, the blocks, tokens a second and latencies."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.live import EXPERIMENT
from workbench.panels import plots, style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Drawing, Series, count, line, number, table, view
from workbench.panels.style import milliseconds
from workbench.panels.view import View

KNOBS = ("seconds", "max_running", "burst", "ttft_slo", "gap_slo")
COLOURS = {"waits": style.CACHE, "prefill": style.PREFILL, "decode": style.DECODE}
SHOWN = 14  # looks, in the table


class LivePanel(Panel):
    """Lab 11: a running server, live."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        last = made[-1] if made else None
        return view(
            Drawing(lambda axes: _timeline(axes, last), _spoken(last)),
            _state(made),
            _latency(last, settings),
            height=style.TALLEST,
            boxes=[(0.1, 0.5, 0.88, 0.42), (0.1, 0.1, 0.37, 0.28), (0.62, 0.1, 0.36, 0.28)],
            table=table(
                made[:: max(1, -(-len(made) // SHOWN))],
                {
                    "after": lambda m: f"{m.counts['now_s']:.1f} s",
                    "came": count("came", "{:.0f}"),
                    "waiting": count("waiting", "{:.0f}"),
                    "running": count("running", "{:.0f}"),
                    "done": count("done", "{:.0f}"),
                    "blocks": lambda m: f"{m.counts['blocks_used']:.0f} of {m.counts['blocks']:.0f}",
                    "tokens/s": lambda m: number(m.median),
                    "TTFT p50": count("ttft_p50_s", milliseconds),
                    "TTFT p99": count("ttft_p99_s", milliseconds),
                    "longest gaps, p99": count("gap_p99_s", milliseconds),
                },
            ),
            caption=f"A server with {settings['max_running']} places, a burst of {settings['burst']:g} times its load"
            + ("" if made else "; Run begins"),
            words=_words(last, made, settings),
        )


def _bars(row: list[float], now: float) -> list[tuple[str, float, float]]:
    """(what, from, to) of a request until now."""
    came, begun, first, last, _, done = row
    bars = [("waits", came, begun if begun >= 0 else now)]
    if begun >= 0:
        bars.append(("prefill", begun, first if first >= 0 else now))
    if first >= 0:
        bars.append(("decode", first, last if done else now))
    return bars


def _timeline(axes: Axes, m: Measurement | None) -> None:
    plots.name(axes, x="s since the first request", y="requests", title="")
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    plots.legend_above(axes, COLOURS, left=0.09)
    if m is None:
        plots.nothing(axes, "Run begins")
        return
    rows, now = m.settings["rows"], m.counts["now_s"]
    for y, row in enumerate(rows):
        for what, begin, end in _bars(row, now):
            plots.cell(
                axes, begin, y - 0.4, max(0.0, end - begin), 0.8, COLOURS[what], hover=f"{what}, {end - begin:.3f} s"
            )
    axes.set_xlim(min(row[0] for row in rows) - 0.01, now + 0.01)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _spoken(m: Measurement | None) -> str:
    if m is None:
        return "A timeline with a row for each request; nothing has come yet."
    c = m.counts
    return (
        f"A timeline with a row for each of the newest {len(m.settings['rows'])} requests, {c['now_s']:.1f} s after the"
        f" first: {c['waiting']:.0f} wait, {c['running']:.0f} run, {c['done']:.0f} are done."
    )


def _state(made: list[Measurement]) -> Chart:
    def along(key: str) -> list[tuple[float, float]]:
        return [(m.counts["now_s"], m.counts[key]) for m in made]

    blocks = [(m.counts["now_s"], 100 * m.counts["blocks_used"] / m.counts["blocks"]) for m in made]
    speed = [(m.counts["now_s"], m.median / 10) for m in made]
    return Chart(
        Series("waiting", along("waiting"), "line", COLOURS["waits"]),
        Series("running", along("running"), "line", style.INK),
        line("blocks, %", blocks, style.IDLE, linestyle=":"),
        line("tokens/s ÷ 10", speed, style.DECODE, linewidth=1.2),
        x=Axis("s"),
        y=Axis("", number, "zero", room=(1, 1.9)),
        legend="upper left",
        legend_columns=2,
        empty="",
    )


def _latency(m: Measurement | None, settings: dict[str, Any]) -> Chart:
    rows = [] if m is None else m.settings["rows"]
    dots: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 5}
    return Chart(
        line("TTFT", [(row[0], row[2] - row[0]) for row in rows if row[2] >= 0], style.PREFILL, **dots),
        line("longest gap", [(row[0], row[4]) for row in rows if row[4] > 0], style.DECODE, **dots),
        x=Axis("came after, s"),
        y=Axis("", milliseconds, "log", room=(1.8, 25)),
        levels=[(settings["ttft_slo"], "TTFT SLO", style.PREFILL), (settings["gap_slo"], "gap SLO", style.DECODE)]
        if rows
        else [],
        legend="upper left",
        legend_columns=2,
        empty="",
    )


def _words(last: Measurement | None, made: list[Measurement], settings: dict[str, Any]) -> str:
    if last is None:
        return (
            "A row is a request: it waits until a place is free, its prompt is computed, and then its tokens come. The"
            " gaps between them stay short; what a burst lengthens is the wait."
        )
    c = last.counts
    lines = [
        f"{c['came']:.0f} of {c['requests']:.0f} requests have come, {c['done']:.0f} are done, with"
        f" {c['tokens']:,.0f} tokens."
    ]
    longest = max(made, key=lambda m: m.counts["waiting"])
    lines.append(
        f"At most {longest.counts['waiting']:.0f} were waiting, after {longest.counts['now_s']:.1f} s, and"
        f" {max(m.counts['running'] for m in made):.0f} running at a time, of {settings['max_running']} places."
    )
    if "ttft_p99_s" in c:
        lines.append(
            f"TTFT: {milliseconds(c['ttft_p50_s'])} at the median, {milliseconds(c['ttft_p99_s'])} at p99"
            + (f"; longest gaps at p99 {milliseconds(c['gap_p99_s'])}." if "gap_p99_s" in c else ".")
        )
    lines.append(f"Verified: {last.check}.")
    return "\n".join(lines)
