"""The panel of server.pools: goodput over the share of the devices that prefill, and of every arrangement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.pools import EXPERIMENT, KINDS, WORKLOADS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Chart, Series, count, number, predicted, table, view
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View

KNOBS = ("workload", "ttft_slo", "tpot_slo", "link", "requests")
FIRST, CHUNKED, DISAGGREGATED = KINDS
COLOURS = {FIRST: style.LEARNER, CHUNKED: style.DECODE, DISAGGREGATED: style.PREFILL}


class PoolsPanel(Panel):
    """Lab 11: prefill and decode on different devices, or on the same."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        return view(
            _over_the_ratio(made),
            Bars(
                [
                    Bar.of(m.settings["arrangement"], m, COLOURS[m.settings["measured"]], text=_gain(m, made))
                    for m in made
                ]
                or [Bar(kind, None, COLOURS[kind]) for kind in KINDS],
                Axis("good requests/s per device", number, "zero", room=(1, 1.35)),
                title="all arrangements (dashed: prefill alone)",
                empty="Run simulates",
            ),
            height=4.6,
            boxes=[(0.09, 0.14, 0.36, 0.74), (0.62, 0.14, 0.36, 0.74)],
            table=table(
                made,
                {
                    "arrangement": "{m.settings[arrangement]}",
                    "kind": "{m.settings[measured]}",
                    "good requests/s per device": lambda m: number(m.median),
                    "of prefill first": lambda m: _gain(m, made) or "–",
                    "prefill alone": lambda m: number(m.predicted),
                    "devices that may prefill": count("prefill_share", "{:.0%}"),
                    "met both": count("attainment", "{:.1%}"),
                    "rates simulated": count("runs", "{:.0f}"),
                },
            ),
            caption=(
                f"Goodput, {settings['workload']}, TTFT within {milliseconds(settings['ttft_slo'])}, TPOT within"
                f" {milliseconds(settings['tpot_slo'])}" + ("" if made else "; Run searches the rates")
            ),
            words=_words(made, settings),
        )


def _first(made: Sequence[Measurement]) -> Measurement | None:
    return next(iter(matching(made, measured=FIRST)), None)


def best_of(made: Sequence[Measurement], kind: str) -> Measurement | None:
    return max(matching(made, measured=kind), key=lambda m: m.median, default=None)


def _gain(m: Measurement, made: Sequence[Measurement]) -> str:
    """Goodput as a multiple of prefill first's."""
    first = _first(made)
    return f"{m.median / first.median:.1f} ×" if first is not None and first.median else ""


def _over_the_ratio(made: Sequence[Measurement]) -> Chart:
    apart = sorted(matching(made, measured=DISAGGREGATED), key=lambda m: m.counts["prefill_share"])
    levels = [
        (one.median, name, COLOURS[kind])
        for kind, name in ((FIRST, "prefill first"), (CHUNKED, "best chunked"))
        if (one := best_of(made, kind)) is not None
    ]
    alone = [(m.counts["prefill_share"], m.predicted) for m in apart]
    return Chart(
        Series("disaggregated", [(m.counts["prefill_share"], m.median) for m in apart], "measured", COLOURS[KINDS[2]]),
        predicted("its prefill alone", alone, COLOURS[KINDS[2]]),
        x=Axis("devices that prefill", "{:.0%}".format, limits=(0, 1), ticks=(0, 0.25, 0.5, 0.75, 1)),
        y=Axis("good requests/s per device", number, "zero", room=(1, 1.5)),
        levels=levels,
        title="over the ratio",
        legend="upper left" if made else "",
        empty="Run simulates",
    )


def _words(made: Sequence[Measurement], settings: dict[str, Any]) -> str:
    if not made:
        asked = WORKLOADS[settings["workload"]]
        return (
            f"Prompts have {asked.prompts.mean:,.0f} tokens on average and answers {asked.outputs.mean:,.0f}. A prompt"
            " that is computed whole stops the next tokens of everybody on its device: a tight TPOT then leaves little"
            " room for prompts. Guess before Run: what does it gain to give prompts devices of their own, and what is"
            " left of it if they come in chunks instead?"
        )
    lines = []
    first, chunked, apart = (best_of(made, kind) for kind in KINDS)
    if first is not None:
        lines.append(f"Prefill first: {number(first.median)} good requests/s per device.")
    if apart is not None:
        lines.append(
            f"Disaggregated, best {apart.settings['arrangement']}: {number(apart.median)}"
            + (f", {_gain(apart, made)} that." if first is not None and first.median else ".")
        )
    if chunked is not None:
        lines.append(
            f"In chunks, best {chunked.settings['arrangement'].removeprefix('chunked ')} tokens:"
            f" {number(chunked.median)}"
            + (f", {_gain(chunked, made)} that of prefill first." if first is not None and first.median else ".")
        )
    if apart is not None and chunked is not None and chunked.median:
        lines.append(
            f"Against the best chunk disaggregation has {apart.median / chunked.median:.2f} times the goodput; the"
            " right size of a chunk has to be known, and depends on the objective."
        )
    if apart is not None and apart.predicted:
        lines.append(
            f"Its devices for prompts are {apart.median / apart.predicted:.0%} of the time in work, a prompt at a time;"
            " batches of short prompts take less."
        )
    lines.append(f"Verified: {made[-1].check}.")
    return "\n".join(lines)
