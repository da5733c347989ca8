"""The panel of server.replicas: tokens per second and prefix hits, by who decides which engine is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.replicas import CONTENDERS, EXPERIMENT, NEW_TOKENS, WIDE
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, count, number, table, view
from workbench.panels.style import milliseconds
from workbench.panels.view import View

KNOBS = ("documents", "asked", "document_tokens")
NAMES = {
    "round_robin": "2, in turns",
    "least_loaded": "2, least loaded",
    "prefix": "2, by prefix",
    WIDE: "1, twice as wide",
}
COLOURS = {"round_robin": style.LEARNER, "least_loaded": style.CACHE, "prefix": style.TARGET, WIDE: style.PREFILL}


class ReplicasPanel(Panel):
    """Lab 11: several engines behind a router, or one that is wider."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = {m.settings["measured"]: m for m in self.made(settings, KNOBS)}
        return view(
            Bars(
                [_speed(name, made.get(name)) for name in CONTENDERS],
                Axis("tokens/s", number, "zero", room=(1, 1.15)),
                title="answers",
            ),
            Bars(
                [_hits(name, made.get(name)) for name in CONTENDERS],
                Axis("of the prompts' tokens", "{:.0%}".format, ticks=(0, 0.5, 1), limits=(0.0, 1.05)),
                title="hits (dashed: limit)",
                names=False,
                empty="",
            ),
            height=3.8,
            boxes=[(0.2, 0.18, 0.42, 0.7), (0.68, 0.18, 0.3, 0.7)],
            table=table(
                made.values(),
                {
                    "engines, and who chooses": lambda m: NAMES[m.settings["measured"]],
                    "tokens/s": count("tokens_per_s", number),
                    "all answered after": lambda m: milliseconds(m.median),
                    "as fast as in turns": count("as_fast_as_in_turns", "{:.2f} ×"),
                    "prompt tokens": count("prompt_tokens", "{:,.0f}"),
                    "hits": count("hit_tokens", "{:,.0f}"),
                    "at most": count("max_hit_tokens", "{:,.0f}"),
                    "questions on the first": count("on_replica_0", "{:.0f}"),
                    "on the second": count("on_replica_1", "{:.0f}"),
                },
            ),
            caption=f"{settings['asked']} questions about each of {settings['documents']} documents"
            + ("" if made else "; Run starts the engines"),
            words=_words(made),
        )


def _speed(name: str, m: Measurement | None) -> Bar:
    if m is None:
        return Bar(NAMES[name], None, COLOURS[name])
    tokens = m.counts["tokens_per_s"] * m.median
    low, high = (tokens / seconds for seconds in reversed(m.spread))
    return Bar(NAMES[name], m.counts["tokens_per_s"], COLOURS[name], (low, high))


def _hits(name: str, m: Measurement | None) -> Bar:
    if m is None:
        return Bar(NAMES[name], None, COLOURS[name])
    hits, at_most = (m.counts[key] / m.counts["prompt_tokens"] for key in ("hit_tokens", "max_hit_tokens"))
    return Bar(NAMES[name], hits, COLOURS[name], predicted=at_most)


def _words(made: Mapping[str, Measurement]) -> str:
    if not made:
        return (
            f"Every answer has {NEW_TOKENS} tokens, and its question is short beside the document. Two engines have a"
            " prefix cache each: who is sent to the other one finds nothing of what the first has computed. One engine"
            " with both cores has one cache, and every step waits for both of its threads."
        )
    lines = [
        f"{NAMES[name].capitalize()}: {m.counts['tokens_per_s']:,.0f} tokens/s, {m.counts['hit_tokens']:,.0f} of"
        f" {m.counts['prompt_tokens']:,.0f} prompt tokens from a cache (at most {m.counts['max_hit_tokens']:,.0f})."
        for name, m in made.items()
    ]
    if "prefix" in made:
        lines.append(
            f"By prefix they are done {made['prefix'].counts['as_fast_as_in_turns']:.2f} times as fast as in turns"
            + (f", the wider one {made[WIDE].counts['as_fast_as_in_turns']:.2f} times." if WIDE in made else ".")
        )
    lines.append(f"Verified: {next(iter(made.values())).check}.")
    return "\n".join(lines)
