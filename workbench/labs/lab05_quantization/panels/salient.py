"""The panel of quantize.salient: the loss against the share of channels kept, by what they are chosen by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workbench.experiments.inputs import plain
from workbench.instruments.records import Measurement
from workbench.labs.lab05_quantization.outliers import ORIGINAL, PLANTED
from workbench.labs.lab05_quantization.salient import ACTIVATION, EXPERIMENT, RANDOM, SHARES, WAYS, WEIGHT
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, number, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View

KNOBS = ("model", "bits", "group", "channels", "factor", "context", "passages")
COLOURS = {ACTIVATION: style.LEARNER, WEIGHT: style.WEIGHTS, RANDOM: style.IDLE}


class SalientPanel(Panel):
    """Lab 05: 0.1, 1 and 3 % of the channels kept in 16 bits, chosen by activation, by weight or at random."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(plain(settings), KNOBS)
        kept = matching(made, measured="kept")
        return view(
            *(_chart(made, weights, settings) for weights in (ORIGINAL, PLANTED)),
            height=3.8,
            table=table(
                [*matching(made, measured="rtn"), *kept],
                {
                    "weights": lambda m: m.settings["weights"],
                    "kept": lambda m: (
                        f"{m.settings['share']:.1%} {m.settings['way']}" if "way" in m.settings else "none"
                    ),
                    "channels kept": "{m.counts[kept_channels]:,.0f} of {m.counts[channels]:,.0f}",
                    "bits per weight": "{m.counts[bits_per_weight]:.3f}",
                    "perplexity": lambda m: f"{math.exp(m.median):.2f}",
                    "nats per token above float32": lambda m: (
                        f"{m.counts['excess']:+.4f} ± {m.counts['excess_standard_error']:.4f}"
                    ),
                    "of RTN's excess, gone": lambda m: (
                        f"{m.counts['recovered']:.1%} ± {m.counts['recovered_standard_error']:.1%}"
                        if "recovered" in m.counts
                        else ""
                    ),
                },
            ),
            caption=f"{settings['bits']} bits in groups of {settings['group']}, some columns kept in 16 bits"
            + ("" if kept else "; Run measures"),
            words=_words(settings, made),
        )


def _chart(made: Sequence[Measurement], weights: str, settings: dict[str, Any]) -> Chart:
    kept = matching(made, measured="kept", weights=weights)
    rtn = matching(made, measured="rtn", weights=weights)
    return Chart(
        *(
            Series(
                way, [(m.settings["share"], m.counts["excess"]) for m in matching(kept, way=way)], "measured", colour
            )
            for way, colour in COLOURS.items()
        ),
        x=Axis("share of channels kept", lambda share: f"{share:.1%}", "log", ticks=SHARES, limits=(6e-4, 5e-2)),
        y=Axis("nats per token above float32", number, "zero", room=(1, 1.8)),
        levels=[(m.counts["excess"], "RTN, none kept", style.INK) for m in rtn if kept],
        title=(
            "the model as it is"
            if weights == ORIGINAL
            else f"{settings['channels']} outliers of {settings['factor']:g} ×"
        ),
        legend="upper right" if kept else "",
    )


def _words(settings: dict[str, Any], made: Sequence[Measurement]) -> str:
    lines = [
        f"All weights are rounded to {settings['bits']} bits; then some input channels of each linear get their columns"
        f" back in 16 bits. On the right {settings['channels']} channels behind every norm are {settings['factor']:g}"
        " times larger and the columns that read them as many times smaller: planted, and the function is the same."
    ]
    for weights in (ORIGINAL, PLANTED):
        kept = {m.settings["way"]: m for m in matching(made, measured="kept", weights=weights, share=SHARES[1])}
        rtn = matching(made, measured="rtn", weights=weights)
        if len(kept) < len(WAYS) or not rtn:
            return "\n".join(lines) if made else "\n".join([*lines, "Run measures both models."])
        gone = ", ".join(f"{way} {m.counts['recovered']:.0%}" for way, m in kept.items())
        m = kept[ACTIVATION]
        lines.append(
            f"Planted, RTN loses {rtn[0].counts['excess']:.3f} nats per token. Of that 1 % of the channels"
            f" ({m.counts['kept_channels']:,.0f} of {m.counts['channels']:,.0f}) takes away: {gone}. Among them are"
            f" {m.counts['planted_kept']:.0%} of the planted ones, if chosen by activation"
            f" ({kept[WEIGHT].counts['planted_kept']:.0%} by weight)."
            if weights == PLANTED
            else f"As it is, RTN loses {rtn[0].counts['excess']:.3f} nats per token. Of that 1 % of the channels takes"
            f" away: {gone}."
        )
    return "\n".join(lines)
