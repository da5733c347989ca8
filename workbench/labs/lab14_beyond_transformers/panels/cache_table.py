"""The panel of beyond.cache_table: bytes that public models keep of one text, and what was published of them."""

from __future__ import annotations

from typing import Any

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab14_beyond_transformers.cache_table import (
    CLAIMS,
    EXPERIMENT,
    JAMBA,
    Claim,
    Kept,
    by_formula,
    judged,
    shapes,
)
from workbench.panels import html, style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, table, view
from workbench.panels.view import View
from workbench.panels.words import listed

TICKS = tuple(1024.0**power * times for power in (1, 2, 3) for times in (1, 32))  # bytes


class CacheTablePanel(Panel):
    """Lab 14: the cache of one long text in public models, and the claims about it."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        context, bits = settings["context"], settings["bits"]
        now = {m.settings["model"]: m for m in self.made({**settings, "measured": "cache"}, (*settings, "measured"))}
        claimed = {
            (m.settings["model"], m.settings["context"]): m
            for m in self.measurements
            if m.settings["measured"] == "claim"
        }
        formula = {name: by_formula(name, bits) for name in shapes()}
        bars = Bars(
            [_bar(name, kept, context, now.get(name)) for name, kept in formula.items()],
            Axis("bytes of one text, keys and values with states", _binary, "log", TICKS, room=(4, 300)),
            title=f"{context:,} tokens, keys and values in {bits} bits (dashed: formula)",
        )
        rows = [_claim_row(claim, claimed.get((claim.model, claim.context))) for claim in CLAIMS]
        return view(
            bars,
            height=5.4,
            table=table(
                formula.items(),
                {
                    "model": "{m[0]}",
                    "layers that attend": lambda m: f"{len(shapes()[m[0]].kv_layers)}",
                    "layers with a state": lambda m: f"{len(shapes()[m[0]].state_layers)}",
                    "bytes per token": lambda m: f"{m[1].per_token:,.0f}",
                    "states": lambda m: readable_bytes(m[1].states),
                    "by formula, GB": lambda m: readable_bytes(m[1].at(context)),
                    "by formula, GiB": lambda m: _binary(m[1].at(context)),
                    "as a cache says": lambda m: f"{now[m[0]].median:,.0f} bytes" if m[0] in now else "",
                },
            ),
            caption=f"At {context:,} tokens" + ("" if now else ", by the formula; Run asks real caches"),
            words=_words(context, formula, now),
            extra=html.table(list(_CLAIM_HEAD), rows, "What was published, at its own context and in 16 bits"),
        )


def _binary(value: float) -> str:
    return readable_bytes(value, binary=True)


def _bar(name: str, kept: Kept, context: int, m: Measurement | None) -> Bar:
    size = kept.at(context)
    colour = style.TARGET if shapes()[name].state_layers else style.CACHE
    return Bar.of(name, m, colour, predicted=size, text=f"{_binary(size)} = {readable_bytes(size)}")


_CLAIM_HEAD = ("model", "tokens", "published", "counted", "the claim is", "source")


def _claim_row(claim: Claim, m: Measurement | None) -> list[str]:
    size = by_formula(claim.model, 16).at(claim.context) if m is None else m.median
    verdict, both = judged(claim, size), f"{_binary(size)} = {readable_bytes(size)}"
    word = verdict.word + (f", in {verdict.unit}" if verdict.word != "wrong" else "")
    return [claim.model, f"{claim.context:,}", claim.published, both, word, claim.source]


def _words(context: int, formula: dict[str, Kept], now: dict[str, Measurement]) -> str:
    jamba, full = formula[JAMBA], formula["llama-2-7b"]
    keys = jamba.per_token * context
    verdicts = [judged(claim, by_formula(claim.model, 16).at(claim.context)) for claim in CLAIMS]
    counted = [f"{sum(v.word == word for v in verdicts)} {word}" for word in ("right", "rounded", "wrong")]
    lines = [
        f"{JAMBA} keeps {_binary(jamba.at(context))} where llama-2-7b keeps {_binary(full.at(context))}"
        f" ({full.at(context) / jamba.at(context):.3g} ×): 4 of its 32 layers attend, with 8 key-value heads in place"
        f" of 32. Its 28 states are {readable_bytes(jamba.states)} at any length,"
        f" {jamba.states / (jamba.states + keys):.2g} of the whole here.",
        f"A model of states alone keeps the same at every length: mamba-130m"
        f" {readable_bytes(formula['mamba-130m'].states)}, mamba2-130m"
        f" {readable_bytes(formula['mamba2-130m'].states)}: 128 values a channel in place of 16.",
        f"Of {len(CLAIMS)} published numbers {listed(counted)}. What papers call GB here is mostly GiB, 1.07 GB:"
        " 7 % more. The table says which is meant.",
    ]
    lines += [f"{claim.model}, published as {claim.published}: {claim.note}." for claim in CLAIMS if claim.note]
    if now:
        same = sum(m.median == m.predicted for m in now.values())
        lines.append(f"Real caches say what the formula says for {same} of {len(now)} models asked, to the byte.")
    return "\n".join(lines)
