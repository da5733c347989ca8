"""The panel of pruning.shapes: loss and step time of models that are narrower, shorter or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.experiments.inputs import plain, shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab12_pruning_and_distillation.shapes import EXPERIMENT, WHOLE, plans_of
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, measured, predicted, recorded, table, view
from workbench.panels.limits import limits_in_words
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.pruning import by_chance
from workbench.pruning.plans import KINDS

COLOURS = {"width": style.WEIGHTS, "depth": style.CACHE, "both": style.TARGET}
STARS = {"linestyle": "none", "marker": "*", "markersize": 13}
LEFT_OUT = "what the machine does beside starting operations and reading weights"


class ShapesPanel(Panel):
    """Lab 12: narrower or with fewer layers: loss and decode time by parameters."""

    experiment = EXPERIMENT
    left_out = {"step": LEFT_OUT}  # noqa: RUF012

    def view(self, settings: dict[str, Any]) -> View:
        run = self.made(plain(settings), ("model", "context", "passages"))
        losses, healed = (matching(run, measured=what) for what in ("loss", "healed"))
        steps = matching(run, measured="step", cached=settings["cached"])
        expected = self.experiment.predict(self.ceilings(), **settings)
        config = shape_of(settings["model"])
        kinds = [WHOLE, *(kind for kind, *_ in plans_of(config, by_chance(config, 0)))]
        curves = [
            predicted(f"{kind}, predicted", _of_kind(kind, kinds, expected), COLOURS[kind], legend=False)
            for kind in KINDS
        ]
        x = Axis("parameters, millions", "{:,.3g}".format)
        quality = Chart(
            *(_line(kind, losses) for kind in KINDS),
            *(recorded(kind, _with_whole(kind, matching(self.record, measured="loss")), _millions) for kind in KINDS),
            *(
                Series(f"{kind}, healed", [(_millions(m), m.median)], "measured", COLOURS[kind], look=STARS)
                for kind in HEALED_KINDS
                for m in matching(healed, kind=kind)
            ),
            x=x,
            y=Axis("loss, nats per token"),
            title="right after the cut" + (" (stars: healed)" if healed else ""),
            legend="upper right",
        )
        times = Chart(
            *curves,
            *(measured(kind, _with_whole(kind, steps), _millions, COLOURS[kind]) for kind in KINDS),
            *(recorded(kind, _with_whole(kind, matching(self.record, measured="step")), _millions) for kind in KINDS),
            x=x,
            y=Axis("time of a decode step", milliseconds, "zero"),
            title="a step at batch 1 (dashed: predicted)",
            legend="lower right" if steps else "",
        )
        return view(
            quality,
            times,
            height=4.6,
            table=_table(losses, steps, healed),
            caption="Cut by importance, nothing trained" + ("" if losses else "; Run cuts, scores and times"),
            words=_words(losses, steps, healed, expected),
        )


HEALED_KINDS = ("width", "depth")


def _millions(m: Measurement) -> float:
    return m.counts["parameters"] / 1e6


def _with_whole(kind: str, taken: Sequence[Measurement]) -> list[Measurement]:
    """Of a kind from the smallest to the whole model; nothing where none of the kind was taken."""
    of_kind = matching(taken, kind=kind)
    line = [*of_kind, *matching(taken, kind=WHOLE)] if of_kind else []
    return sorted(line, key=_millions)


def _line(kind: str, losses: Sequence[Measurement]) -> Series:
    return measured(kind, _with_whole(kind, losses), _millions, COLOURS[kind], spread=False)


def _of_kind(
    kind: str, kinds: Sequence[str], expected: Sequence[tuple[float, float, str]]
) -> list[tuple[float, float]]:
    points = [(x / 1e6, seconds) for one, (x, seconds, _) in zip(kinds, expected) if one in (kind, WHOLE)]
    return sorted(points) if len(points) > 1 else []


def _table(
    losses: Sequence[Measurement], steps: Sequence[Measurement], healed: Sequence[Measurement]
) -> tuple[list[str], list[list[str]]]:
    def of(taken: Sequence[Measurement], m: Measurement) -> Measurement | None:
        return next(iter(matching(taken, kind=m.settings["kind"], share=m.settings["share"])), None)

    def timed(text: Any) -> Any:
        return lambda m: text(step) if (step := of(steps, m)) else ""

    def heal(m: Measurement) -> str:
        near = [
            h
            for h in matching(healed, kind=m.settings["kind"])
            if abs(h.settings["share"] - m.settings["share"]) < 0.05
        ]
        return f"{near[0].median:.3f}" if near else ""

    return table(
        losses,
        {
            "cut in": "{m.settings[kind]}",
            "parameters": "{m.counts[parameters]:,.0f}",
            "layers": "{m.counts[layers]:.0f}",
            "channels": "{m.counts[channels]:.0f}",
            "neurons": "{m.counts[neurons]:.0f}",
            "bytes": lambda m: readable_bytes(m.counts["weight_bytes"]),
            "nats per token": "{m.median:.3f}",
            "healed": heal,
            "launches": timed(lambda s: f"{s.counts['launches']:.0f}"),
            "predicted": timed(lambda s: milliseconds(s.predicted)),
            "measured": timed(lambda s: milliseconds(s.median)),
            "of the whole": timed(
                lambda s: f"{s.counts['ratio']:.2f} ({s.counts['lowest_ratio']:.2f} to {s.counts['highest_ratio']:.2f})"
            ),
        },
    )


def _shape(m: Measurement) -> str:
    return "{layers:.0f} layers, {channels:.0f} channels, {neurons:.0f} neurons".format(**m.counts)


def _words(
    losses: Sequence[Measurement],
    steps: Sequence[Measurement],
    healed: Sequence[Measurement],
    expected: Sequence[tuple[float, float, str]],
) -> str:
    lines = []
    half = {m.settings["kind"]: m for m in matching(losses, share=0.5)}
    if half:
        said = [f"{m.median:.2f} by {kind}" for kind, m in half.items()]
        lines.append(f"At half of the parameters, before healing, nats per token: {', '.join(said)}.")
    now = {m.settings["kind"]: m for m in healed}
    if len(now) == len(HEALED_KINDS):
        said = [
            f"{m.median:.2f} by {kind} ({_shape(m)}; {m.counts['before']:.2f} right after the cut)"
            for kind, m in now.items()
        ]
        lines.append(
            f"Healed (the stars) models of half of the parameters have {' and '.join(said)}: the loss after a cut says"
            " little of the loss after healing."
        )
    timed = {m.settings["kind"]: m for m in matching(steps, share=0.5)}
    if {"width", "depth"} <= timed.keys():
        wide, deep = timed["width"], timed["depth"]
        lines.append(
            f"A step takes {wide.counts['ratio']:.2f} of the whole model's by width and {deep.counts['ratio']:.2f} by"
            f" depth, for as many bytes of weights: {wide.counts['launches']:.0f} operations are started against"
            f" {deep.counts['launches']:.0f}. The larger the matrices, the less that matters."
        )
    lines.append(f"By the prediction a step here is {limits_in_words(expected, 'parameter')}.")
    return "\n".join(lines)
