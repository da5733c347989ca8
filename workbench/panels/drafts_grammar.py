"""The panel of drafts.grammar: a guided text, the tokens that no model was asked for, and the calls that are left."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.draft_grammar import JUMPS, SOURCES
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.drafts_plots import counted, who_legend
from workbench.panels.speculate_plots import COLOURS, LINE, NOTE, coloured_html, draw_text, empty
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View
from workbench.panels.words import spread_words

KNOBS = ("grammar", "prompt", "temperature", "max_new_tokens", "seed")
LINES = 3
HEIGHT = 5.0
ASKED = {"plain": "the model was asked"}
TITLES = {"never": "no jump", "tokens": "jump: one token legal (exact)", "text": "jump: one text legal"}


class GrammarPanel(Panel):
    """The text of each way to jump, forced tokens in colour, and how often the model was asked."""

    experiment_name = "drafts.grammar"
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        source = settings["source"].strip() or SOURCES[settings["grammar"]]
        made = {
            m.settings["jump"]: m for m in self.measurements
            if same_knobs(m, {k: settings[k] for k in KNOBS}) and m.settings["asked"] == source
        }  # fmt: skip
        figure, axes = style.new_figure(4, 1, height=HEIGHT)
        high = LINES * LINE / HEIGHT
        for row, (each, jump) in enumerate(zip(axes, JUMPS)):
            each.set_position([0.03, 0.985 - (row + 1) * (high + 0.085), 0.955, high])
            _draw_text(each, jump, made.get(jump))
        axes[3].set_position([0.255, 0.115, 0.73, 0.175])
        _draw_calls(axes[3], made)
        return View(
            figure=figure,
            alt=_alt(made),
            header=["", "tokens", "forced", "calls of the model", "tokens a call", "whole request"],
            rows=[_row(m) for m in made.values()],
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
    style.write(
        axes, 0.995, 1.0 + 0.68 / LINES, TITLES[jump], transform=axes.transAxes, va="center", ha="right"
    )


def _draw_calls(axes: Axes, made: dict[str, Measurement]) -> None:
    for y, jump in enumerate(JUMPS):
        if jump in made:
            c = made[jump].counts
            axes.barh(y, c["calls"], height=0.6, color=COLOURS["plain"], zorder=3)
            axes.barh(y, c["jumped"], left=c["calls"], height=0.6, color=COLOURS["jump"], zorder=3)
            style.write(
                axes,
                c["calls"] / 2,
                y,
                f"{c['calls']:.0f}",
                ha="center",
                va="center",
                color="#FFFFFF",
                zorder=5,
            )
    axes.set_yticks(range(len(JUMPS)), [TITLES[jump] for jump in JUMPS], fontsize=9)
    axes.set_ylim(len(JUMPS) - 0.4, -0.6)
    axes.set_xlim(0, max([10, *(m.counts["tokens"] * 1.02 for m in made.values())]))
    axes.grid(visible=False, axis="y")
    style.label(axes, x="tokens; grey: the model was asked, orange: the grammar forced them")


def _row(m: Measurement) -> list[str]:
    c = m.counts
    return [
        TITLES[m.settings["jump"]],
        f"{c['tokens']:.0f}",
        f"{c['jumped']:.0f}",
        f"{c['calls']:.0f}",
        f"{c['tokens'] / c['calls']:.2f}",
        spread_words(m),
    ]


def _alt(made: dict[str, Measurement]) -> str:
    told = "; ".join(
        f"{TITLES[jump]}: {m.counts['tokens']:.0f} tokens, {m.counts['calls']:.0f} calls"
        for jump, m in made.items()
    )
    return "A guided text in three ways, with the tokens that the grammar forced in colour. " + (
        told or "Not written yet."
    )


def _words(made: dict[str, Measurement]) -> str:
    if len(made) < len(JUMPS):
        return (
            "A grammar forbids tokens; what it leaves is renormalized. Where it leaves one, no model has to be asked. "
            "Nearly always there are several ways to cut the one legal text into tokens, so jumping by text asks far less "
            "often, and no longer lets the model choose the cut."
        )
    c = {jump: m.counts for jump, m in made.items()}
    lines = [
        f"Of {c['never']['tokens']:.0f} tokens {c['tokens']['jumped']:.0f} were the only legal one: "
        f"{c['tokens']['calls']:.0f} calls instead of {c['never']['calls']:.0f}, and the law is untouched "
        f"({made['tokens'].check}).",
        f"By text it is {c['text']['calls']:.0f} calls for {c['text']['tokens']:.0f} tokens: "
        f"{made['text'].check}. The forced characters are the same in any case; how they are cut into tokens is not, and "
        "the model reads tokens.",
    ]
    return "\n".join(lines)
