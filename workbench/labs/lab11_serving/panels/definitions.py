"""The panel of server.definitions: one run by six definitions, side by side."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.definitions import DUE, EXPERIMENT, PERCENTS, SENT, TOOLS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import MISSING, Axis, Bar, Bars, count, number, table, view
from workbench.panels.style import milliseconds
from workbench.panels.view import View

KNOBS = ("draft", "requests", "max_running", "load", "ttft_slo", "tpot_slo")
COLUMNS = {"TTFT, mean": "ttft_s", "TPOT, mean": "tpot_s", "ITL, mean": "itl_s"}
INFINITE = "∞"


class DefinitionsPanel(Panel):
    """Lab 11: one recording under the definitions of six tools; failures, and coordinated omission."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        by_name = {m.settings["measured"]: m for m in made}
        parts = [
            Bars(
                [_bar(tool, by_name.get(tool), key) for tool in TOOLS],
                Axis(ticks=(), text=milliseconds),
                title=title,
                names=not at % 3,
            )
            for at, (title, key) in enumerate(COLUMNS.items())
        ]
        parts.append(
            Bars(
                [_bar(tool, by_name.get(tool), "good_per_s") for tool in TOOLS],
                Axis("requests a second", number),
                title="goodput",
            )
        )
        parts.append(
            Bars(
                [
                    Bar(f"p{p}, {'due' if name == DUE else 'send'}", _of(by_name.get(name), f"p{p}_s"), colour)
                    for p in PERCENTS
                    for name, colour in ((DUE, style.LEARNER), (SENT, style.IDLE))
                ],
                Axis("latency under a cap", milliseconds),
                title="from due, from send",
            )
        )
        return view(
            *parts,
            height=style.TALLEST,
            boxes=[
                (0.155, 0.58, 0.21, 0.33),
                (0.415, 0.58, 0.21, 0.33),
                (0.675, 0.58, 0.22, 0.33),
                (0.155, 0.1, 0.29, 0.33),
                (0.585, 0.1, 0.31, 0.33),
            ],
            table=table(
                made,
                {
                    "by": "{m.settings[measured]}",
                    "requests": count("requests", "{:.0f}"),
                    "failed": count("failed", "{:.0f}"),
                    "TTFT, mean": lambda m: _mean(m, "ttft_s"),
                    "TPOT, mean": count("tpot_s", milliseconds),
                    "ITL, mean": count("itl_s", milliseconds),
                    "latency, mean": lambda m: _mean(m, "latency_s"),
                    "good": count("good", "{:.0f}"),
                    "latency p50": count("p50_s", milliseconds),
                    "latency p99": count("p99_s", milliseconds),
                },
            ),
            caption=(
                f"One run of {settings['requests']} requests at {settings['load']:g} times what the server can answer"
            )
            + ("" if made else "; Run sends them"),
            words=_words(by_name, settings),
        )


def _of(m: Measurement | None, key: str) -> float | None:
    return None if m is None else m.counts.get(key)


SHOWN_AS = {"vllm_bench": "vLLM bench", "vllm_metrics": "vLLM /metrics"}


def _bar(tool: str, m: Measurement | None, key: str) -> Bar:
    colour = style.TARGET if tool == "ours" else style.WEIGHTS
    value = _of(m, key)
    text = "" if m is None or value is not None else INFINITE if _counts_failures(m, key) else "has none"
    return Bar(SHOWN_AS.get(tool, tool), value, colour, text=text)


def _counts_failures(m: Measurement, key: str) -> bool:
    """A mean over requests of which some are infinitely slow."""
    return bool(m.settings["failures_count"] and m.counts.get("failed") and key in ("ttft_s", "latency_s"))


def _mean(m: Measurement, key: str) -> str:
    return milliseconds(m.counts[key]) if key in m.counts else INFINITE if _counts_failures(m, key) else MISSING


def _words(by_name: dict[str, Measurement], settings: dict[str, Any]) -> str:
    tools = [by_name[tool] for tool in TOOLS if tool in by_name]
    if not tools:
        return (
            "TTFT, TPOT, ITL and goodput are words that every tool uses, and each means something else by them. The"
            " same bytes at the same times give different numbers."
        )
    lines = []
    for name, key in (("TPOT", "tpot_s"), ("ITL", "itl_s")):
        values = {m.settings["measured"]: m.counts[key] for m in tools if key in m.counts}
        if len(values) > 1:
            low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            lines.append(
                f"{name} of the same run: {milliseconds(values[low])} by {SHOWN_AS.get(low, low)},"
                f" {milliseconds(values[high])} by {SHOWN_AS.get(high, high)},"
                f" {values[high] / values[low]:.2f} times as much."
            )
    first = tools[0].counts
    lines.append(
        f"{first['failed']:.0f} requests were refused. With them a mean has no end, so ours is {INFINITE}; the others"
        " leave them out."
        if first["failed"] and tools[0].settings["failures_count"]
        else f"{first['failed']:.0f} requests failed, as ours counts."
    )
    if DUE in by_name and SENT in by_name:
        due, sent = by_name[DUE].median, by_name[SENT].median
        lines.append(
            f"Under a cap of {settings['max_running']} at a time the median latency is {milliseconds(sent)} from the"
            f" send and {milliseconds(due)} from when the request was due, {due / sent:.2f} times as much: coordinated"
            " omission."
        )
    lines.append(f"Verified: {tools[0].check}.")
    return "\n".join(lines)
