"""The panel of pruning.importance: the increase of the loss without each piece, against its score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.experiments.contract import Setting
from workbench.experiments.inputs import plain
from workbench.instruments.records import Measurement
from workbench.labs.lab12_pruning_and_distillation.importance import EXPERIMENT, GOAL, GROUPED, SCORES
from workbench.panels import style
from workbench.panels.chart import Axis, Chart, Series, number, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import matching
from workbench.panels.view import View

AXES = {
    ("neurons", "activations"): "score: mean ‖input of down‖ · ‖column‖ / ‖stream‖",
    ("layers", "activations"): "score: block influence",
    ("kv_groups", "activations"): "score: ‖what the heads add‖ / ‖stream‖",
    ("channels", "activations"): "score: Σ over the norms of mean |output|",
}
TITLES = {
    "neurons": "each group of neurons",
    "layers": "each layer",
    "kv_groups": "each group of query heads with its KV head",
    "channels": "each group of channels",
}
BY_WEIGHTS = "score: norm of the weights"
DOTS = {"linestyle": "none", "marker": "o", "markersize": 7}
NOISE = 2  # standard errors within which an increase is none


class ImportancePanel(KnobPanel):
    """Lab 12: measured loss after each piece is cut, against its score."""

    experiment = EXPERIMENT
    knobs = (Setting("score", SCORES[0], "choice", choices=SCORES, help="by activations on text, or by weights alone"),)

    def view(self, settings: dict[str, Any]) -> View:
        score, part = self.knob_settings["score"], settings["part"]
        wanted = {"part": part, **({"layer": settings["layer"]} if part == "neurons" else {})}
        run = matching(self.measurements, **plain({"model": settings["model"]}), **wanted)
        pieces, old = (matching(taken, measured="piece", part=part, score=score) for taken in (run, self.record))
        chart = Chart(
            _dots("measured", pieces, style.TARGET),
            _dots("recorded", old, style.IDLE),
            x=Axis(AXES[part, score] if score == SCORES[0] else BY_WEIGHTS, number),
            y=Axis("increase of the loss, nats per token", number),
            title=TITLES[part],
            levels=[(0.0, "no increase", style.IDLE)] if pieces or old else [],
            legend="upper left" if old else "",
        )
        return view(
            chart,
            height=4.6,
            table=table(
                pieces,
                {
                    "left out": "{m.settings[piece]}",
                    f"score by {score}": lambda m: number(m.counts["score"]),
                    "increase, nats per token": lambda m: f"{m.median:+.4f} ± {m.counts['standard_error']:.4f}",
                },
            ),
            caption=_caption(settings, pieces),
            words=_words(part, pieces, matching(run, measured="rank")),
        )


def _dots(kind: str, pieces: Sequence[Measurement], colour: str) -> Series:
    points = [(m.counts["score"], m.median) for m in pieces]
    errors = [(m.median - m.counts["standard_error"], m.median + m.counts["standard_error"]) for m in pieces]
    return Series(kind, points, kind, colour, errors if kind == "measured" else (), look=DOTS)


def _caption(settings: dict[str, Any], pieces: Sequence[Measurement]) -> str:
    text = f"Scores from {settings['sequences']} × {settings['length']} tokens of training text, losses of"
    text += f" {settings['passages']} × {settings['context']} held-out tokens"
    return text + ("; ends of a line: a standard error" if pieces else "; Run measures")


def _words(part: str, pieces: Sequence[Measurement], ranks: Sequence[Measurement]) -> str:
    if not pieces:
        return (
            "Every point will be one piece: how high its score is, and by how much the loss rises without it. A score"
            " that"
            " knows nothing gives a cloud. Guess before Run."
        )
    lines = []
    by = {m.settings["score"]: m for m in ranks}
    if by:
        first = next(iter(by.values()))
        said = [f"{m.median:.2f} by {kind}" for kind, m in by.items()]
        lines.append(
            f"Rank correlation of score and increase over {first.counts['pieces']:.0f} pieces: {' and '.join(said)}."
            f" Scores that know nothing stay within ± {2 * first.counts['by_chance']:.2f} nineteen times in twenty."
        )
        if SCORES[0] in by:
            reached = by[SCORES[0]].median >= GOAL
            lines.append(
                f"That is {'at least' if reached else 'less than'} {GOAL}: such a score"
                f" {'orders these pieces well enough to cut by' if reached else 'is a weak guide for these pieces'}."
            )
    worst = max(pieces, key=lambda m: m.median)
    best = min(pieces, key=lambda m: m.median)
    lines.append(
        f"Highest increase: {worst.settings['piece']} ({worst.median:+.3f}); lowest: {best.settings['piece']}"
        f" ({best.median:+.3f}), of {pieces[0].counts['whole']:.2f} nats per token."
    )
    quiet = sum(abs(m.median) < NOISE * m.counts["standard_error"] for m in pieces)
    if quiet:
        lines.append(f"{quiet} of {len(pieces)} increases are within {NOISE} standard errors of nothing.")
    if part in GROUPED:
        lines.append("A group is cut as one: the increases of its members one by one do not add up to its own.")
    return "\n".join(lines)
