"""The panel of pruning.cheaper: one factor, counted in three ways."""

from __future__ import annotations

from typing import Any

from workbench.labs.lab12_pruning.cheaper import BILLION, EXPERIMENT, WAYS, Family, claims
from workbench.panels import html, style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, table, view
from workbench.panels.view import View

COLOURS = dict(zip(WAYS, (style.IDLE, style.COMPUTE, style.TARGET)))


def family_of(settings: dict[str, Any]) -> Family:
    return Family(
        settings["parent_billions"] * BILLION,
        settings["child_billions"] * BILLION,
        settings["from_nothing_billions"] * BILLION,
        settings["distilled_billions"] * BILLION,
        settings["parent_billions_of_tokens"] * BILLION,
        settings["children"],
    )


class CheaperPanel(Panel):
    """Lab 12: how many times cheaper, by what is counted."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        family = family_of(settings)
        run = {m.settings["measured"]: m for m in self.measurements}
        bars = [
            Bar.of(way, run.get(way), COLOURS[way], predicted=family.ratio(way), text=f"{family.ratio(way):.3g} ×")
            for way in WAYS
        ]
        rows = [[one.words, one.published, f"{one.computed:.3g} ×", one.verdict] for one in claims()]
        return view(
            Bars(bars, Axis("times cheaper than from nothing", lambda x: f"{x:g} ×", "log", (0.1, 0.3, 1, 3, 10, 30, 100))),
            height=3.4,
            table=table(
                WAYS,
                {"counted": "{m}", "times cheaper": lambda way: f"{family.ratio(way):.3g}"},
            ),
            caption="A pruned and distilled model against the same size from nothing",
            words=_words(family),
            extra=html.table(["claim", "published", "computed", "verdict"], rows, "What was published (arXiv 2407.14679)"),
        )


def _words(family: Family) -> str:
    teacher = family.distilled_flops() / (6 * family.child * family.distilled_tokens)
    with_parent = family.ratio_with_parent()
    lines = [
        f"{family.token_ratio():.3g} times fewer tokens. Each of them costs {teacher:.3g} times as much, because the"
        f" teacher reads it as well: {family.flops_ratio():.3g} times fewer FLOPs.",
        "The larger the teacher beside the student, the further the two are apart.",
    ]
    if with_parent < 1:
        lines.append(
            f"Who has to train the parent first, for {family.children} children, pays {1 / with_parent:.3g} times what"
            " the child alone would have cost. Pruning is cheap for those who have a parent."
        )
    else:
        lines.append(f"With its share of the parent's training it is still {with_parent:.3g} times cheaper.")
    return "\n".join(lines)
