"""The panel of server.offload: throughput by the block, where the time goes, and FlexGen's table beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab11_serving.offload import (
    BEST,
    COMPUTE,
    CONSTANT,
    CONSTANTS,
    EXPERIMENT,
    LOAD,
    PLANS,
    PUBLISHED_LINE,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import (
    VALUES,
    Axis,
    Bar,
    Bars,
    Chart,
    Series,
    count,
    measured,
    number,
    predicted,
    table,
    view,
)
from workbench.panels.plots import matching, rate
from workbench.panels.view import View

COLOURS = dict(zip(PLANS, (style.CACHE, style.WEIGHTS, style.DRAFT, style.TARGET)))
KNOBS = ("batch", "prompt_tokens", "new_tokens", "device")
PARTS = {
    "read_s": ("disk → host", style.CACHE),
    "up_s": ("host → device", style.WEIGHTS),
    "computed_s": ("layers", style.COMPUTE),
}
NEAR = 1.25  # a factor


class OffloadPanel(Panel):
    """Lab 11: a model larger than its device."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, KNOBS)
        runs, constants = matching(made, measured="run"), matching(made, measured=CONSTANT)
        published = matching(self.measurements, measured=PUBLISHED_LINE)
        series: list[Series] = []
        for plan, colour in COLOURS.items():
            of_plan = matching(runs, plan=plan)
            series.append(predicted(f"{plan}, predicted", _expected(of_plan), colour, legend=False))
            series.append(measured(plan, of_plan, _block, colour))
        return view(
            Chart(
                *series,
                x=Axis("sequences in a block", "{:.0f}".format, "log", VALUES),
                y=Axis("tokens/s (dashed: predicted)", number, "zero", room=(1, 1.35)),
                title=f"{settings['batch']} sequences at a time",
                legend="upper left",
                legend_columns=2,
                empty="Run measures the constants, then runs every plan",
            ),
            Bars(
                _shares_of_time(runs),
                Axis("of a run's time", "{:.0%}".format, "zero"),
                title="The program's plan",
                fewest=3,
            ),
            Bars(
                _lines(published),
                Axis("of what FlexGen reports", "{:.1f} ×".format, "zero", room=(1, 1.2)),
                title="Cost model ÷ its table",
                level=1.0,
                fewest=3,
            ),
            height=style.TALLEST,
            boxes=((0.09, 0.6, 0.88, 0.34), (0.19, 0.11, 0.27, 0.3), (0.62, 0.11, 0.35, 0.3)),
            table=_table(runs, published),
            caption=f"A device of {settings['device']:.0%} of the weights; the program may put half of them in the"
            " host, and one plan takes more there. One thread computes, one loads" + ("" if runs else "; Run measures"),
            words=_words(runs, constants, published),
        )


def _block(m: Measurement) -> float:
    return m.counts["block"]


def _expected(runs: Sequence[Measurement]) -> list[tuple[float, float]]:
    return [(m.counts["block"], m.predicted) for m in runs if m.predicted is not None]


def _shares_of_time(runs: Sequence[Measurement]) -> list[Bar]:
    """Of the program's plan, in its smallest and its largest block that were measured."""
    of_plan = matching(runs, plan=BEST)
    bars = []
    for m in dict.fromkeys([0, len(of_plan) - 1]) if of_plan else ():
        c = of_plan[m].counts
        for name, (words, colour) in PARTS.items():
            bars.append(Bar(f"{words}, {c['block']:.0f}", c[name] / c["all_s"], colour))
    return bars or [Bar(words, None, colour) for words, colour in PARTS.values()]


def _lines(published: Sequence[Measurement]) -> list[Bar]:
    bars = []
    for m in published:
        name, c = m.settings["shape"].upper(), m.counts
        bars.append(Bar(name, c["by_model"] / m.median, style.IDLE))
        if c["with_bandwidth"] != c["by_model"]:
            bars.append(Bar("+ 320 GB/s", c["with_bandwidth"] / m.median, style.TARGET))
    return bars or [Bar("OPT", None, style.IDLE)]


def _table(runs: Sequence[Measurement], published: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    made = table(
        runs,
        {
            "plan": "{m.settings[plan]}",
            "block": count("block", "{:.0f}"),
            "weights on device, host, disk": lambda m: _three(m, "weights"),
            "measured, tokens/s": lambda m: number(m.median),
            "predicted": lambda m: number(m.predicted or 0.0),
            "predicted / measured": count("predicted_over_measured", "{:.2f}"),
            "in the turns": lambda m: f"{m.counts['least_ratio']:.2f} to {m.counts['largest_ratio']:.2f}",
            "with one rate": count("one_rate", "{:.2f}"),
            "and the bandwidth": count("roofline", "{:.2f}"),
            "longest": "{m.settings[binds]}",
        },
    )
    if runs or not published:
        return made
    return table(
        published,
        {
            "shape": "{m.settings[shape]}",
            "reported, tokens/s": lambda m: number(m.median),
            "by its cost model": count("by_model", number),
            "with the card's bandwidth": count("with_bandwidth", number),
            "by the program, same block": count("by_program", number),
        },
    )


def _three(m: Measurement, kind: str) -> str:
    return ", ".join(f"{m.counts[f'{kind}_{tier}']:.0%}" for tier in ("device", "host", "disk"))


def _words(
    runs: Sequence[Measurement], constants: Sequence[Measurement], published: Sequence[Measurement]
) -> list[str]:
    if not runs and not published:
        return [
            "The weights are brought once for a whole block, so a larger block divides the loading. Guess before Run:"
            " from which block on does computing take longer than loading?"
        ]
    lines = []
    for name in (BEST, "all on disk"):
        of_plan = matching(runs, plan=name)
        if of_plan:
            lines.append(_regime(name, of_plan))
    ratios = sorted(m.counts["predicted_over_measured"] for m in runs)
    if ratios:
        near = sum(1 / NEAR <= ratio <= NEAR for ratio in ratios)
        lines.append(
            f"Predicted over measured: {ratios[0]:.2f} to {ratios[-1]:.2f}, within a quarter for {near} of"
            f" {len(ratios)} points. Not predicted: the interpreter's lock, which both threads want, and"
            " whatever else the machine does."
        )
        largest = max(m.counts["peak_bytes"] for m in runs)
        lines.append(
            f"At most {readable_bytes(largest)} were on the device, whose limit is"
            f" {readable_bytes(runs[0].counts['limit_bytes'])}. Verified: {runs[0].check}."
        )
    known = {m.settings["constant"]: m for m in constants}
    if known:
        shown = [f"{name} {_rate(known[name])}" for name in CONSTANTS if name in known]
        lines.append(f"This machine: {', '.join(shown)}; {next(iter(known.values())).check}.")
    by_line = {m.settings["shape"]: m.counts["by_model"] / m.median for m in published}
    if by_line:
        said = ", ".join(f"{ratio:.2f} × for {name.upper()}" for name, ratio in by_line.items())
        lines.append(
            f"With its authors' constants the cost model gives, of what they report, {said}: it knows no memory"
            " bandwidth of the card, and its fitted disk is a quarter of the one that the paper states."
        )
    return lines


def _regime(name: str, runs: Sequence[Measurement]) -> str:
    loading = [m.counts["block"] for m in runs if m.settings["binds"] == LOAD]
    computing = [m.counts["block"] for m in runs if m.settings["binds"] == COMPUTE]
    best = max(runs, key=lambda m: m.median)
    said = f"{name[:1].upper()}{name[1:]}: {number(best.median)} tokens/s in a block of {best.counts['block']:.0f}; "
    if loading and computing:
        return (
            said + f"loading takes longest up to {max(loading):.0f} sequences, computing from {min(computing):.0f} on."
        )
    if loading:
        return said + "loading takes longest in every block, so a larger one still gains."
    return said + "computing takes longest in every block, so a larger one gains nothing."


def _rate(m: Measurement) -> str:
    return rate(m.median) if m.unit == "FLOP/s" else f"{m.median / 1e9:.3g} GB/s"
