"""The panel of pruning.drop_layer: by how much the loss rises without each layer, and without several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.experiments.inputs import plain
from workbench.instruments.records import Measurement
from workbench.labs.lab12_pruning_and_distillation.drop_layer import EXPERIMENT, ONE_BY_ONE, TOGETHER
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Bar, Bars, Chart, line, measured, number, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View
from workbench.panels.words import listed
from workbench.pruning import rank_correlation

COLOURS = {TOGETHER: style.CACHE, ONE_BY_ONE: style.TARGET}


class DropLayerPanel(Panel):
    """Lab 12: the loss without each layer, and without several of them."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        run = self.made(plain(settings), ("model", "context", "passages"))
        single, old = (matching(taken, measured="one layer") for taken in (run, self.record))
        several = matching(run, measured="several")
        before = {m.settings["layer"]: m for m in old}
        now = {m.settings["layer"]: m for m in single}
        bars = Bars(
            [_bar(layer, now.get(layer), before.get(layer)) for layer in sorted({*now, *before})],
            Axis("increase of the loss, nats per token", number, "zero"),
            title="without one layer",
        )
        whole = matching(run, measured="whole")
        ways = [measured(way, matching(several, way=way), _count, COLOURS[way], y=_above(whole)) for way in COLOURS]
        sums = [(m.counts["layers"], _sum(m, whole)) for m in matching(several, way=TOGETHER) if whole]
        chart = Chart(
            line("sum of the single increases", sums, style.INK, linestyle="--"),
            *ways,
            x=Axis("layers left out", number, ticks=VALUES),
            y=Axis("increase, nats per token", number, "zero"),
            title="without several",
            legend="upper left",
        )
        return view(
            bars,
            chart,
            height=4.2,
            table=table(
                [*single, *several],
                {
                    "left out": lambda m: _dropped(m),
                    "nats per token": "{m.median:.3f}",
                    "increase": lambda m: _increase(m),
                    "sum of single increases": lambda m: f"{_sum(m, whole):.3f}" if m.predicted is not None else "",
                    "block influence": lambda m: (
                        f"{m.counts['block_influence']:.3f}" if "block_influence" in m.counts else ""
                    ),
                },
            ),
            caption="Layers are skipped, weights stay" + ("" if single else "; Run measures"),
            words=_words(single, several, whole),
        )


def _bar(layer: int, m: Measurement | None, record: Measurement | None) -> Bar:
    value = None if m is None else m.counts["increase"]
    error = 0.0 if m is None else m.counts["increase_standard_error"]
    spread = None if value is None else (value - error, value + error)
    old = None if record is None else record.counts["increase"]
    return Bar(f"layer {layer}", value, style.WEIGHTS, spread, recorded=old)


def _count(m: Measurement) -> float:
    return m.counts["layers"]


def _above(whole: Sequence[Measurement]) -> Any:
    return lambda m, value: value - (whole[0].median if whole else 0)


def _sum(m: Measurement, whole: Sequence[Measurement]) -> float:
    assert m.predicted is not None
    return m.predicted - (whole[0].median if whole else 0)


def _dropped(m: Measurement) -> str:
    if m.settings["measured"] == "one layer":
        return f"{m.settings['layer']}"
    return f"{listed([str(layer) for layer in m.settings['dropped']])} ({m.settings['way']})"


def _increase(m: Measurement) -> str:
    return f"{m.counts['increase']:+.3f} ± {m.counts['increase_standard_error']:.3f}"


def _words(single: Sequence[Measurement], several: Sequence[Measurement], whole: Sequence[Measurement]) -> str:
    if not (single and whole):
        return (
            "Each layer adds something to the residual stream, so any one of them can be skipped and the rest"
            " still fits."
            " Guess which can be missed best before Run."
        )
    ordered = sorted(single, key=lambda m: m.counts["increase"])
    smallest, largest = ordered[0], ordered[-1]
    lines = [
        f"The whole model has {whole[0].median:.2f} nats per token. The least is layer {smallest.settings['layer']}"
        f" ({_increase(smallest)}), the most layer {largest.settings['layer']} ({_increase(largest)})."
    ]
    if len(single) > 2:
        both = [torch.tensor([m.counts[name] for m in single]) for name in ("block_influence", "increase")]
        lines.append(
            f"Block influence, 1 − cos of what comes in and what goes out, orders the {len(single)} layers as the loss"
            f" does to a rank correlation of {rank_correlation(*both):.2f}. It takes one pass for all of them."
        )
    for m in matching(several, way=TOGETHER)[-1:]:
        lines.append(
            f"Without {_count(m):.0f} layers the single increases add up to {_sum(m, whole):.2f}, and measured are"
            f" {m.counts['increase']:.2f}: "
            + (
                "the layers do part of one another's work, and where one is gone the other is missed more."
                if m.counts["increase"] > _sum(m, whole)
                else "here they hardly depend on one another."
            )
        )
    together, greedy = (matching(several, way=way)[-1:] for way in (TOGETHER, ONE_BY_ONE))
    if together and greedy:
        gain = together[0].counts["increase"] - greedy[0].counts["increase"]
        lines.append(
            "Measured again after each cut (SLEB), "
            + (
                "the same layers go."
                if not gain
                else f"{listed([str(n) for n in greedy[0].settings['dropped']])} go, and {gain:.2f} nats less are lost."
            )
        )
    return "\n".join(lines)
