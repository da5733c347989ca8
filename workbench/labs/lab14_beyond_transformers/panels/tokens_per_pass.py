"""The panel of beyond.tokens_per_pass: nats per token against tokens per pass, and how many texts parse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab14_beyond_transformers.tokens_per_pass import (
    EXPERIMENT,
    GOAL_NATS,
    GOAL_POINTS,
    GOAL_TOKENS_PER_PASS,
    SAMPLED,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Chart, Series, recorded, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View
from workbench.panels.words import listed

SCORED = {"uniform": style.IDLE, "confidence": style.TARGET, "entropy-bound": style.WEIGHTS}
WRITES = {**SCORED, "remasking": style.COMPUTE, "twin": style.DRAFT}


class TokensPerPassPanel(Panel):
    """Lab 14: what several tokens a pass cost: nats per token of each sampler, and the share of texts that parse."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        made, size = self.measurements, settings["block_size"]
        scored, old = of_blocks(made, size), of_blocks(self.record, size)
        twin = first_of(made, measured="twin")
        goal = twin or first_of(self.record, measured="twin")
        chart = Chart(
            *(_line(name, scored) for name in SCORED),
            recorded("", old, lambda m: m.counts["tokens_per_pass"], linestyle=""),
            x=Axis("tokens per pass", "{:g}".format, "log", (1, 2, 4, 8, 16)),
            y=Axis("nats per token", "{:.2f}".format, room=(1.03, 1.03)),
            levels=_levels(goal),
            legend="above",
            legend_columns=2,
        )
        return view(
            chart,
            self._bars(settings),
            height=4.6,
            width_ratios=[1.35, 1],
            table=table([m for m in made if m.settings["measured"] != "difference"], _columns(twin)),
            caption=f"Drawn: blocks of {size}" + ("" if made else "; Run scores held-out text, then writes"),
            words=_words(made, scored, twin),
        )

    def _bars(self, settings: dict[str, Any]) -> Bars:
        """Of the texts of the last run, in the blocks and passes it had."""
        bars = []
        for name in (*SAMPLED, "twin"):
            m, old = (first_of(some, measured="parsing", sampler=name) for some in (self.measurements, self.record))
            spread = (m.counts["low"], m.counts["high"]) if m else None
            bars.append(Bar.of(name, m, WRITES[name], old, spread=spread))
        one = first_of(self.measurements, measured="parsing") or first_of(self.record, measured="parsing")
        passes = one.settings["passes"] if one else settings["passes"]
        title = f"texts that parse, {passes} passes a block"
        return Bars(bars, Axis("share", "{:.0%}".format, limits=(0, 1), ticks=(0, 0.5, 1)), title)


def first_of(measurements: Sequence[Measurement], **settings: Any) -> Measurement | None:
    return next(iter(matching(measurements, **settings)), None)


def of_blocks(measurements: Sequence[Measurement], size: int) -> list[Measurement]:
    """The nats of samplers in blocks of this size; of a model with one block, those of the whole canvas."""
    scored = matching(measurements, measured="nats")
    sizes = {m.settings["block_size"] for m in scored}
    return [m for m in scored if m.settings["block_size"] == (size if size in sizes else max(sizes))]


def _line(name: str, scored: Sequence[Measurement]) -> Series:
    """The points of a sampler, with bars of one standard error."""
    of_sampler = sorted(matching(scored, sampler=name), key=lambda m: m.counts["tokens_per_pass"])
    points = [(m.counts["tokens_per_pass"], m.median) for m in of_sampler]
    errors = [m.counts["standard_error"] for m in of_sampler]
    ends = [(y - error, y + error) for (_, y), error in zip(points, errors)]
    return Series(name, points, "measured", SCORED[name], ends)


def _levels(twin: Measurement | None) -> list[tuple[float, str, str]]:
    if twin is None:
        return []
    return [
        (twin.median, "twin, token by token", style.INK),
        (twin.median + GOAL_NATS, f"twin + {GOAL_NATS:g}", style.LEARNER),
    ]


def _columns(twin: Measurement | None) -> dict[str, Any]:
    def where(unit: str, text: Callable[[Measurement], str]) -> Callable[[Measurement], str]:
        return lambda m: text(m) if m.unit == unit else ""

    above = (lambda m: f"{m.median - twin.median:+.3f}") if twin else (lambda m: "")
    return {
        "what": lambda m: {"twin": "the twin's loss", "bound": "bound"}.get(
            m.settings["measured"], m.settings.get("words", "")
        ),
        "block": lambda m: f"{m.settings.get('block_size', '')}",
        "tokens per pass": lambda m: f"{m.counts['tokens_per_pass']:.2f}",
        "nats per token": where("nats/token", "{0.median:.3f}".format),
        "± standard error": where("nats/token", lambda m: f"{m.counts.get('standard_error', 0):.3f}"),
        "above the twin": where("nats/token", above),
        "texts that parse": where("share", lambda m: f"{m.counts['parsed']:.0f} of {m.counts['sampled']:.0f}"),
        "share": where("share", "{0.median:.1%}".format),
        "95 % interval": where("share", lambda m: f"{m.counts['low']:.1%} to {m.counts['high']:.1%}"),
    }


def within_goal(scored: Sequence[Measurement], twin: Measurement) -> list[Measurement]:
    """Those of at least 2 tokens per pass, within 0.25 nats of the twin; most tokens first."""
    near = [
        m for m in scored if m.counts["tokens_per_pass"] >= GOAL_TOKENS_PER_PASS and m.median - twin.median <= GOAL_NATS
    ]
    return sorted(near, key=lambda m: -m.counts["tokens_per_pass"])


def _words(made: Sequence[Measurement], scored: Sequence[Measurement], twin: Measurement | None) -> str:
    lines = []
    if not made:
        lines.append(
            "Tokens of one pass are drawn without seeing each other, so lines rise with the tokens per pass; the bound"
            " (NELBO) is the mean over all orders, one token per pass. Lower right is better. The goal:"
            f" {GOAL_TOKENS_PER_PASS} tokens per pass no more than {GOAL_NATS:g} nats above the autoregressive twin."
        )
    if twin and scored:
        near = within_goal(scored, twin)
        places = [
            f"{m.settings['words']} ({m.counts['tokens_per_pass']:.2f} tokens per pass, {m.median - twin.median:+.2f})"
            for m in near
        ]
        size = scored[0].settings["block_size"]
        rest = f"{GOAL_TOKENS_PER_PASS} tokens per pass or more, within {GOAL_NATS:g} nats of the twin's"
        rest += f" {twin.median:.3f}"
        lines.append(f"In blocks of {size}, {rest}: {listed(places) if places else 'none of the points'}.")
    bounds = matching(made, measured="bound")
    if bounds and twin:
        each = [f"{m.median:.3f} in blocks of {m.settings['block_size']}" for m in bounds]
        lines.append(f"The bound, one token per pass in any order: {listed(each)}; the twin {twin.median:.3f}.")
    lines += _difference_words(first_of(made, measured="difference"))
    shares = matching(made, measured="parsing")
    if shares:
        each = [f"{m.settings['sampler']} {m.median:.0%} ({_ends(m)})" for m in shares]
        lines.append(f"Texts that parse, each share with its 95 % interval (Wilson): {listed(each)}.")
    if made:
        lines.append(
            "Nats judge the true text, which no sampler chose; parsing judges what it writes. Points of uniform are a"
            " bound, those of confidence and entropy-bound are exact. One model, one seed of training."
        )
    return "\n".join(lines)


def _ends(m: Measurement) -> str:
    return f"{m.counts['low']:.0%} to {m.counts['high']:.0%}"


def _difference_words(m: Measurement | None) -> list[str]:
    if m is None:
        return []
    c, points = m.counts, 100 * m.median
    if c["low"] > 0 and points >= GOAL_POINTS:
        verdict = f"that is the goal of {GOAL_POINTS}, and the interval leaves 0 out"
    elif c["low"] <= 0 <= c["high"]:
        verdict = "the interval holds 0, so more texts would have to tell them apart"
    else:
        verdict = f"the goal is +{GOAL_POINTS}"
    return [
        f"At equal passes, confidence minus uniform: {points:+.1f} points of texts that parse (95 %:"
        f" {100 * c['low']:+.1f} to {100 * c['high']:+.1f}, paired over {c['sampled']:.0f} texts:"
        f" {c['only_confidence']:.0f} parse with confidence alone, {c['only_uniform']:.0f} with uniform alone);"
        f" {verdict}."
    ]
