"""The panel of drafts.grammar: a guided text, the tokens that no model was asked for, and the calls that are left."""

from __future__ import annotations

import functools
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab06_speculative_sampling.panels.plots import COLOURS, LINE, coloured_html, draw_text
from workbench.labs.lab07_better_drafts.draft_grammar import EXPERIMENT, JUMPS, SOURCES
from workbench.labs.lab07_better_drafts.panels.plots import counted, who_legend
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Drawing, table, view
from workbench.panels.plots import NOTE, empty, matching, write_centred
from workbench.panels.view import View
from workbench.panels.words import spread_words

KNOBS = ("grammar", "prompt", "temperature", "max_new_tokens", "seed")
LINES = 3
HEIGHT = 5.0
ASKED = {"plain": "the model was asked"}
TITLES = {"never": "no jump", "tokens": "jump: one token legal (exact)", "text": "jump: one text legal"}


class GrammarPanel(Panel):
    """Lab 07: a text that a grammar guides, and how many of its tokens needed the model."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        source = settings["source"].strip() or SOURCES[settings["grammar"]]
        made = {m.settings["jump"]: m for m in matching(self.made(settings, KNOBS), asked=source)}
        counts = "; ".join(
            f"{TITLES[jump]}: {m.counts['tokens']:.0f} tokens, {m.counts['calls']:.0f} calls"
            for jump, m in made.items()
        )
        alt_text = "A guided text in three ways, with the tokens that the grammar forced in colour. "
        high = LINES * LINE / HEIGHT
        boxes = [(0.03, 0.985 - (row + 1) * (high + 0.085), 0.955, high) for row in range(len(JUMPS))]
        return view(
            *(Drawing(functools.partial(_draw_text, jump=jump, m=made.get(jump))) for jump in JUMPS),
            Drawing(lambda axes: _draw_calls(axes, made), alt_text + (counts or "Not written yet.")),
            height=HEIGHT,
            boxes=[*boxes, (0.29, 0.115, 0.69, 0.175)],
            table=table(
                made.values(),
                {
                    "": lambda m: TITLES[m.settings["jump"]],
                    "tokens": "{m.counts[tokens]:.0f}",
                    "forced": "{m.counts[jumped]:.0f}",
                    "calls of the model": "{m.counts[calls]:.0f}",
                    "tokens a call": lambda m: f"{m.counts['tokens'] / m.counts['calls']:.2f}",
                    "whole request": spread_words,
                },
            ),
            caption=source[:200] + ("" if made else "; Run writes it"),
            words=_words(made),
            extra="".join(
                coloured_html([("", ""), *((t, k) for t, k in m.settings["pieces"])], f"{TITLES[jump]}:")
                for jump, m in made.items()
            ),
        )


def _draw_text(axes: Axes, jump: str, m: Measurement | None) -> None:
    if m is None:
        empty(axes)
        style.write(axes, 0, 0.5, f"{TITLES[jump]}: Run writes it", transform=axes.transAxes, color=NOTE)
        return
    draw_text(axes, [(text, kind) for text, kind in m.settings["pieces"]], lines=LINES)
    kinds = counted([kind for _, kind in m.settings["pieces"]])
    who_legend(axes, {kind: kinds[kind] for kind in ("plain", "jump") if kind in kinds}, ASKED)
    style.write(axes, 0.995, 1.0 + 0.68 / LINES, TITLES[jump], transform=axes.transAxes, va="center", ha="right")


def _draw_calls(axes: Axes, made: dict[str, Measurement]) -> None:
    for y, jump in enumerate(JUMPS):
        if jump in made:
            c = made[jump].counts
            axes.barh(y, c["calls"], height=0.6, color=COLOURS["plain"], zorder=3)
            axes.barh(y, c["jumped"], left=c["calls"], height=0.6, color=COLOURS["jump"], zorder=3)
            write_centred(axes, c["calls"] / 2, y, f"{c['calls']:.0f}", color="#FFFFFF", zorder=5)
    axes.set_yticks(
        range(len(JUMPS)), [TITLES[jump].removeprefix("jump: ").removesuffix(" (exact)") for jump in JUMPS], fontsize=10
    )
    axes.set_ylim(len(JUMPS) - 0.4, -0.6)
    axes.set_xlim(0, max([10, *(m.counts["tokens"] * 1.02 for m in made.values())]))
    axes.grid(visible=False, axis="y")
    style.label(axes, x="tokens (grey: model asked, orange: forced)")


def _words(made: dict[str, Measurement]) -> str:
    if len(made) < len(JUMPS):
        return (
            "A grammar forbids tokens; what it leaves is renormalized. Where it leaves one, no model has to be asked."
            " Nearly always there are several ways to cut the one legal text into tokens, so jumping by text asks far"
            " less often, and no longer lets the model choose the cut."
        )
    c = {jump: m.counts for jump, m in made.items()}
    lines = [
        (
            f"Of {c['never']['tokens']:.0f} tokens {c['tokens']['jumped']:.0f} were the only legal one: "
            f"{c['tokens']['calls']:.0f} calls instead of {c['never']['calls']:.0f}, and the distribution is untouched "
            f"({made['tokens'].check})."
        ),
        (
            f"By text it is {c['text']['calls']:.0f} calls for {c['text']['tokens']:.0f} tokens: {made['text'].check}."
            " The forced characters are the same in any case; how they are cut into tokens is not, and the model reads"
            " tokens."
        ),
    ]
    return "\n".join(lines)
