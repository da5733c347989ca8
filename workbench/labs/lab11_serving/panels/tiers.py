"""The panel of server.tiers: time to the first token of a prompt that comes again, by where its blocks are."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.tiers import EXPERIMENT, SOURCES
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, Series, count, measured, number, predicted, table, view
from workbench.panels.style import milliseconds
from workbench.panels.view import View

KNOBS = ("longest", "points", "link_mb_per_s", "link_ms")
COLOURS = {"computed": style.PREFILL, "host": style.CACHE, "disk": style.LAUNCH, "link": style.LEARNER}
NAMES = {"computed": "computed again", "host": "from host memory", "disk": "from disk", "link": "over the link"}
NEAR = 0.25  # of the predicted saving


class TiersPanel(Panel):
    """Lab 11: an evicted prefix, loaded or computed again."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        by_source = {source: [m for m in made if m.settings["measured"] == source] for source in SOURCES}
        link = f"{settings['link_mb_per_s']:g} MB/s after {settings['link_ms']:g} ms"
        return view(
            _chart(by_source),
            height=4.2,
            table=table(
                made,
                {
                    "where it is": lambda m: NAMES[m.settings["measured"]],
                    "tokens": count("tokens", "{:,.0f}"),
                    "TTFT": lambda m: milliseconds(m.median),
                    "predicted": lambda m: milliseconds(m.predicted or 0.0),
                    "of it loading": count("load_s", milliseconds),
                    "saved": count("saved_s", milliseconds),
                    "saved, predicted": count("predicted_saved_s", milliseconds),
                    "pays from": _from,
                },
            ),
            caption=f"A prompt asked for a second time after its blocks were evicted; the link: {link}"
            + ("" if made else "; Run asks"),
            words=_words(by_source, link),
        )


def _chart(by_source: dict[str, list[Measurement]]) -> Chart:
    series: list[Series] = []
    for source, made in by_source.items():
        points = [(float(m.counts["tokens"]), m.predicted or 0.0) for m in made]
        series.append(measured(NAMES[source], made, "tokens", COLOURS[source]))
        series.append(predicted(f"{NAMES[source]}, predicted", points, COLOURS[source], legend=False))
    at = by_source["link"][-1].counts.get("break_even_tokens") if by_source["link"] else None
    return Chart(
        *series,
        x=Axis("tokens that come again", scale="log", ticks=VALUES),
        y=Axis("time to first token", milliseconds, "log", room=(1.8, 6)),
        marks=[] if at is None else [(at, f"the link pays from {at:,.0f}", COLOURS["link"], 0.04)],
        title="solid: measured; dashed: predicted from other prompts",
        legend="upper left",
        legend_columns=2,
    )


def _from(m: Measurement) -> str:
    if m.settings["measured"] == "computed":
        return ""
    tokens = m.counts.get("break_even_tokens")
    return "never here" if tokens is None else f"{tokens:,.0f} tokens"


def _words(by_source: dict[str, list[Measurement]], link: str) -> str:
    if not by_source["computed"]:
        return (
            "A block that is evicted from the pool is copied to a tier below it. When its prompt comes again it is"
            " loaded where that takes less time than a prefill: n tokens of b bytes over a bandwidth of W take"
            " c + n b / W, and a prefill n t. Below W = b / t loading never pays."
        )
    last = {source: made[-1] for source, made in by_source.items() if made}
    longest = last["computed"]
    lines = [
        f"Computing {longest.counts['tokens']:,.0f} tokens again takes {milliseconds(longest.median)}. A tier is worth"
        f" loading from at more than {longest.counts['least_bytes_per_s'] / 1e6:,.3g} MB/s here, once the prompt is"
        " long enough to pay for what a load takes however short it is."
    ]
    for source, m in last.items():
        if source == "computed":
            continue
        c = m.counts
        saved, said = c["saved_s"], c["predicted_saved_s"]
        where = "the link (" + link + ")" if source == "link" else NAMES[source].removeprefix("from ")
        if saved <= 0:
            lines.append(f"From {where}, at {number(c['bytes_per_s'] / 1e6)} MB/s, nothing is gained: compute.")
            continue
        near = "as predicted" if abs(saved - said) <= NEAR * abs(said) else f"and {milliseconds(said)} were predicted"
        lines.append(
            f"From {where}, at {number(c['bytes_per_s'] / 1e6)} MB/s, {milliseconds(saved)} of it are saved, {near};"
            + (
                f" loading pays from {_from(m)} on."
                if "break_even_tokens" in c
                else " but predicted is that it never pays."
            )
        )
    lines.append(f"Verified at each length: {longest.check}.")
    return "\n".join(lines)
