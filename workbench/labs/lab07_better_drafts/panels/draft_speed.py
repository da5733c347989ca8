"""The panel of drafts.speed: every draft on every kind of text, predicted, measured and recorded, and where it
loses."""

from __future__ import annotations

from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab07_better_drafts.draft_speed import EXPERIMENT, FREE, kinds_of
from workbench.labs.lab07_better_drafts.panels.plots import DYNAMIC, times, title_of
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, count, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View
from workbench.panels.words import listed, recorded_label

LOSES = 0.98
ROW = 0.27  # inches a bar


class SpeedPanel(Panel):
    """Lab 07: every draft on every kind of text, predicted, measured and recorded."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        kinds = kinds_of(settings["texts"])
        made = [m for m in self.measurements if m.settings["texts"] in kinds]
        record = [m for m in self.record if m.settings["texts"] in kinds]
        names = list(dict.fromkeys(m.settings["drafter"] for m in (*made, *record)))
        height = min(1.35 + ROW * max(6, len(names)), style.TALLEST)
        return view(
            *(_bars(kind, names, made, record, is_first=kind == kinds[0]) for kind in kinds),
            height=height,
            table=table(
                made,
                {
                    "text, draft": lambda m: f"{m.settings['texts']}, {title_of(m.settings['drafter'])}",
                    "times as fast": times,
                    "predicted": "{m.predicted:.2f} ×",
                    "tokens a pass": "{m.counts[tokens_per_round]:.2f}",
                    "accepted": count("acceptance_rate", "{:.0%}"),
                    "draft, of a step": "{m.counts[draft_s_per_plain_step]:.2f}",
                    "verify, of a step": "{m.counts[verify_s_per_plain_step]:.2f}",
                },
            ),
            caption="every text is that of plain greedy decoding, token for token" if made else "Run measures",
            words=_words(kinds, made, record),
        )


def colour_of(name: str) -> str:
    """By what a draft is: a table or copy (free), a network, or one that may switch itself off."""
    if name.endswith(DYNAMIC):
        return style.TARGET
    return "#9CC9E3" if name in FREE else style.DRAFT


def _bars(kind: str, names: list[str], made, record, *, is_first: bool) -> Bars:
    taken, archive = (
        {m.settings["drafter"]: m for m in matching(measurements, texts=kind)} for measurements in (made, record)
    )
    bars = [Bar.of(title_of(name), taken.get(name), colour_of(name), archive.get(name)) for name in names]
    longest = max([1.6, *(value for bar in bars for value in bar.values())])
    axis = Axis("times as fast", limits=(0, 1.07 * longest))
    return Bars(bars, axis, kind, names=is_first, height=0.66, level=1, size=10, fewest=6)


def _words(kinds: list[str], made: list[Measurement], record: list[Measurement]) -> str:
    note = f"Hollow: {recorded_label(record)}." if record else ""
    if not made:
        return (
            f"Bars are measured here, dashes predicted from the parts; left of the line a draft loses. {note}".rstrip()
        )
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
    lines.append(f"Measured over predicted: {min(ratios):.2f} to {max(ratios):.2f}. {note}".rstrip())
    return "\n".join(lines)
