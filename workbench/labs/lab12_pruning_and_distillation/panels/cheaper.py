"""The panel of pruning.cheaper: factors in tokens and in FLOPs, and the published ones computed again."""

from __future__ import annotations

from typing import Any

from workbench.labs.lab12_pruning_and_distillation.cheaper import EXPERIMENT, WAYS, Claim, claims, family_of
from workbench.panels import html, style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View

COLOURS = dict(zip(WAYS, (style.CACHE, style.COMPUTE, style.TARGET)))
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000)


class CheaperPanel(Panel):
    """Lab 12: how many times cheaper a distilled model is, by what is counted."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        family = family_of(**settings)
        made = {m.settings["measured"]: m for m in matching(self.made(settings, tuple(settings)), unit="x")}
        bars = [
            Bar(
                way,
                made[way].median if way in made else None,
                COLOURS[way],
                predicted=family.ratio(way),
                text=f"{family.ratio(way):.3g} x",
            )
            for way in WAYS
        ]
        rows = [_row(claim) for claim in claims()]
        return view(
            Bars(
                bars,
                Axis("times as cheap as training from nothing", "{:g}".format, "log", TICKS, room=(1.4, 3)),
                level=1.0,
            ),
            height=2.8,
            table=table(WAYS, {"what is counted": "{m}", "times cheaper": lambda way: f"{family.ratio(way):.3g}"}),
            caption="6 FLOPs for each parameter and token that is trained, 2 for the teacher's forward",
            words=_words(family.ratio(WAYS[0]), family.ratio(WAYS[1]), family.ratio(WAYS[2]), settings),
            extra=html.table(
                ["claim", "published", "computed", "verdict"], rows, "What was published (arXiv 2407.14679)"
            ),
        )


def _row(claim: Claim) -> list[str]:
    return [claim.words, claim.published, f"{claim.computed:.3g} ×", claim.verdict]


def _words(tokens: float, flops: float, parent: float, settings: dict[str, Any]) -> str:
    lines = [
        f"In tokens {tokens:.3g} times, in FLOPs {flops:.3g} times: a token of distillation is read by the"
        " teacher as well,"
        f" which costs 2 FLOPs for each of its {settings['parent_billions']:g} B parameters where the child's own"
        " costs 6.",
        f"With a share of the parent's training for each of {settings['children']} children it is {parent:.3g} times"
        + (
            ": more FLOPs than training the child alone. It pays where the parent exists anyway." if parent < 1 else "."
        ),
        "The smaller the child, the more of the cost is the teacher's.",
    ]
    return "\n".join(lines)
