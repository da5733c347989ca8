"""The panel of drafts.threshold: how the length of the draft moves along a text, and what that does to the speed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from workbench.instruments.records import Measurement
from workbench.labs.lab07_better_drafts.draft_threshold import EXPERIMENT, kinds_of
from workbench.labs.lab07_better_drafts.inputs import LENGTHS
from workbench.labs.lab07_better_drafts.panels.plots import times, title_of
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Chart, count, line, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View
from workbench.panels.words import recorded_label

KNOBS = ("drafter", "prompts", "new_tokens", "temperature")
COLOURS = {"2": "#B9BEC7", "4": style.IDLE, "8": "#4B5563", "threshold": style.COMPUTE, "dynamic": style.TARGET}
NAMES = {"2": "K = 2", "4": "K = 4", "8": "K = 8", "threshold": "threshold", "dynamic": "dynamic"}
MOVING = ("threshold", "dynamic")
OVER = 6  # rounds that the speed over the text is a mean of
LOSES = 0.98


class ThresholdPanel(Panel):
    """Lab 07: the moving threshold and the dynamic K along a text, and where a fixed K loses."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        kinds, tokens = kinds_of(settings["texts"]), settings["new_tokens"]
        made = self.made(settings, KNOBS)
        record = matching(self.record, drafter=settings["drafter"])
        by_kind, beside = (
            {kind: {m.settings["policy"]: m for m in matching(taken, texts=kind)} for kind in kinds}
            for taken in (made, record)
        )
        deepest = max((max(m.settings["drafted"]) for m in made if m.settings["policy"] in MOVING), default=1)
        most = max((y for policies in by_kind.values() for m in policies.values() for _, y in _speed(m)), default=1)
        rows = (
            lambda kind, first: _threshold_chart(by_kind[kind].get("threshold"), kind, tokens, is_first=first),
            lambda kind, first: _lengths_chart(by_kind[kind], kind, tokens, deepest, is_first=first),
            lambda kind, first: _speed_chart(by_kind[kind], kind, tokens, most, is_first=first),
            lambda kind, first: _ratio_bars(by_kind[kind], beside[kind], is_first=first),
        )
        return view(
            *(row(kind, kind == kinds[0]) for row in rows for kind in kinds),
            columns=len(kinds),
            height=style.TALLEST,
            height_ratios=[0.6, 0.8, 0.8, 1.3],
            table=table(
                made,
                {
                    "text, policy": lambda m: f"{m.settings['texts']}, {NAMES[m.settings['policy']]}",
                    "drafted a round": "{m.counts[drafted_per_round]:.2f}",
                    "accepted": count("kept_share", "{:.0%}"),
                    "tokens a pass": "{m.counts[tokens_per_round]:.2f}",
                    "rounds without a draft": "{m.counts[plain_rounds_share]:.0%}",
                    "times as fast": times,
                },
            ),
            caption=f"{title_of(settings['drafter'])}, temperature {settings['temperature']:g}"
            + f". Drafted 0: a plain step; a pass: the mean of {OVER} rounds; colours as in the bars"
            + ("" if made else "; Run measures"),
            words=_words(kinds, made, record),
        )


def _positions(m: Measurement) -> list[int]:
    """Tokens written when each round began."""
    return list(itertools.accumulate(m.settings["emitted"], initial=1))[:-1]


def _along(tokens: int, name: str = "") -> Axis:
    return Axis(name, limits=(0, tokens))


def _threshold_chart(m: Measurement | None, kind: str, tokens: int, *, is_first: bool) -> Chart:
    moving = m.settings["threshold"] if m else []  # the last round has none where nothing was left to draft
    points = zip(_positions(m), moving) if m else ()
    return Chart(
        line("threshold", points, COLOURS["threshold"], drawstyle="steps-post", linewidth=1.6),
        x=_along(tokens),
        y=Axis("", shown=is_first, ticks=[0, 0.5, 1], limits=(0, 1)),
        title=f"{kind}: threshold",
    )


def _lengths_chart(policies: dict[str, Measurement], kind: str, tokens: int, deepest: int, *, is_first: bool) -> Chart:
    """Depth of each round's proposal."""
    steps = {
        name: [*zip(_positions(m), m.settings["drafted"]), (tokens, m.settings["drafted"][-1])]
        for name in MOVING
        if (m := policies.get(name))
    }
    return Chart(
        *(
            line(f"{kind}, {NAMES[name]}", points, COLOURS[name], drawstyle="steps-post", linewidth=1.5)
            for name, points in steps.items()
        ),
        x=_along(tokens),
        y=Axis("tokens", shown=is_first, limits=(-0.4, 1.05 * deepest)),
        title="drafted in each round" if is_first else "",
        empty="",
    )


def _speed(m: Measurement) -> list[tuple[int, float]]:
    """Tokens a pass of the target, a moving mean."""
    emitted = np.array(m.settings["emitted"], dtype=float)
    over = min(OVER, len(emitted))
    mean = np.convolve(emitted, np.ones(over) / over, mode="valid")
    return list(zip(_positions(m)[over - 1 :], mean.tolist()))


def _speed_chart(policies: dict[str, Measurement], kind: str, tokens: int, most: float, *, is_first: bool) -> Chart:
    return Chart(
        *(
            line(f"{kind}, {NAMES[name]}", _speed(policies[name]), COLOURS[name], linewidth=1.6)
            for name in ("4", *MOVING)
            if name in policies
        ),
        x=_along(tokens, "tokens written"),
        y=Axis("tokens", shown=is_first, limits=(0, 1.05 * most)),
        title="tokens a pass of the target" if is_first else "",
        also=lambda axes: axes.axhline(1, color=style.INK, linewidth=0.8, linestyle=":"),
        empty="",
    )


def _ratio_bars(policies: dict[str, Measurement], beside: dict[str, Measurement], *, is_first: bool) -> Bars:
    bars = [Bar.of(NAMES[name], policies.get(name), COLOURS[name], beside.get(name)) for name in LENGTHS]
    longest = max([1.3, *(value for bar in bars for value in bar.values())])
    title = "left of the line: slower" if is_first else ""
    return Bars(bars, Axis("times as fast", limits=(0, 1.06 * longest)), title, names=is_first, level=1, empty="")


def _words(kinds: list[str], made: list[Measurement], record: list[Measurement]) -> str:
    if not made:
        archive = f"\nRecorded beside it: {recorded_label(record)}." if record else ""
        return (
            "A fixed K drafts as much where it is always wrong as where it is always right. A threshold stops when the"
            " draft is no longer sure; a dynamic K takes what measured best, and nothing where everything loses."
            + archive
        )
    lines = []
    for kind in kinds:
        of_kind = {m.settings["policy"]: m for m in made if m.settings["texts"] == kind}
        if not of_kind:
            continue
        best = max(of_kind.values(), key=lambda m: m.median)
        losers = [NAMES[name] for name, m in of_kind.items() if m.median < LOSES]
        text = f"{kind}: {NAMES[best.settings['policy']]} is best, {best.median:.2f} × plain decoding"
        text += f"; {', '.join(losers)} lose{'s' * (len(losers) == 1)}." if losers else "; none loses."
        dynamic = of_kind.get("dynamic")
        if dynamic is not None:
            off = dynamic.counts["plain_rounds_share"]
            text += (
                f" The dynamic one went without a draft in {off:.0%} of the rounds and is at {dynamic.median:.2f} ×."
            )
        lines.append(text)
    return "\n".join(lines)
