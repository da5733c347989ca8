"""The panel of drafts.speed: every draft on every kind of text, predicted, measured and recorded, and where it loses."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.draft_speed import FREE
from workbench.experiments.speculate_inputs import PROMPT_SETS
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.drafts_plots import DYNAMIC, line_at_one, speed_bar, times, title_of
from workbench.panels.smaller_plots import listed
from workbench.panels.speculate_plots import NOTE
from workbench.panels.view import View
from workbench.panels.words import recorded_label

LOSES = 0.98
ROW = 0.27  # inches a bar


class SpeedPanel(Panel):
    """Bars of times as fast as plain decoding, a column for each kind of text."""

    experiment_name = "drafts.speed"

    def view(self, settings: dict[str, Any]) -> View:
        kinds = list(PROMPT_SETS) if settings["texts"] == "all" else [settings["texts"]]
        made = [m for m in self.measurements if m.settings["texts"] in kinds]
        record = [m for m in self.record if m.settings["texts"] in kinds]
        names = list(dict.fromkeys(m.settings["drafter"] for m in (*made, *record)))
        height = 1.35 + ROW * max(6, len(names))
        figure, axes = style.new_figure(1, len(kinds), height=height)
        figure.subplots_adjust(
            left=0.215, right=0.985, top=1 - 0.36 / height, bottom=0.62 / height, wspace=0.09
        )
        for each, kind in zip(axes, kinds):
            _draw(each, kind, names, made, record, first=each is axes[0])
        return View(
            figure=figure,
            alt=_alt(made or record),
            header=["text, draft", "times as fast", "predicted", "tokens a pass", "kept", "draft, of a step",
                    "verify, of a step"],
            rows=[_row(m) for m in made],
            caption="every text is that of plain greedy decoding, token for token" if made else "Run measures",
            words=_words(kinds, made, record),
        )  # fmt: skip


def colour_of(name: str) -> str:
    """By what a draft is: a table or copy (free), a network, or one that may switch itself off."""
    if name.endswith(DYNAMIC):
        return style.TARGET
    return "#9CC9E3" if name in FREE else style.DRAFT


def _of(name: str, kind: str, found: list[Measurement]) -> Measurement | None:
    return next((m for m in found if m.settings["drafter"] == name and m.settings["texts"] == kind), None)


def _draw(axes: Axes, kind: str, names: list[str], made, record, *, first: bool) -> None:
    for y, name in enumerate(names):
        speed_bar(
            axes, y, _of(name, kind, made), _of(name, kind, record), colour=colour_of(name), height=0.66
        )
    line_at_one(axes)
    ends = [
        v
        for m in (*made, *record)
        if m.settings["texts"] == kind
        for v in (m.median, m.spread[1], m.predicted or 0)
    ]
    axes.set(xlim=(0, 1.07 * max([1.6, *ends])), ylim=(max(len(names), 6) - 0.4, -0.6))
    labels = [
        title_of(name.removesuffix(DYNAMIC)) + (DYNAMIC if name.endswith(DYNAMIC) else "") for name in names
    ]
    axes.set_yticks(range(len(names)), labels if first else [""] * len(names), fontsize=9)
    axes.grid(visible=False, axis="y")
    style.label(axes, x="times as fast" if first else "", title=kind)
    if not names:
        style.write(
            axes, 0.5, 0.5, "Run measures", transform=axes.transAxes, ha="center", va="center", color=NOTE
        )


def _row(m: Measurement) -> list[str]:
    c = m.counts
    return [
        f"{m.settings['texts']}, {title_of(m.settings['drafter'])}",
        times(m),
        f"{m.predicted:.2f} ×",
        f"{c['tokens_per_round']:.2f}",
        f"{c['acceptance_rate']:.0%}",
        f"{c['draft_s_per_plain_step']:.2f}",
        f"{c['verify_s_per_plain_step']:.2f}",
    ]


def _alt(found: list[Measurement]) -> str:
    told = "; ".join(f"{m.settings['texts']}, {m.settings['drafter']}: {m.median:.2f}" for m in found)
    return "Bars: how many times as fast as plain decoding each draft is on each kind of text. " + (
        f"{told}." if told else "Nothing measured yet."
    )


def _words(kinds: list[str], made: list[Measurement], record: list[Measurement]) -> str:
    told = f"Hollow: {recorded_label(record)}." if record else ""
    if not made:
        return f"Bars are measured here, dashes predicted from the parts; left of the line a draft loses. {told}".rstrip()
    lines = []
    for kind in kinds:
        of_kind = [m for m in made if m.settings["texts"] == kind]
        if not of_kind:
            continue
        best = max(of_kind, key=lambda m: m.median)
        losers = [title_of(m.settings["drafter"]) for m in of_kind if m.median < LOSES]
        lines.append(
            f"{kind}: {title_of(best.settings['drafter'])} is best, {times(best)}, predicted {best.predicted:.2f} ×"
            + (f"; {listed(losers)} lose{'s' * (len(losers) == 1)}." if losers else "; none loses.")
        )
    ratios = [m.counts["measured_to_predicted"] for m in made]
    lines.append(f"Measured over predicted: {min(ratios):.2f} to {max(ratios):.2f}. {told}".rstrip())
    return "\n".join(lines)
