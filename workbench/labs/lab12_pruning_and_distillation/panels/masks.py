"""The panel of pruning.masks: the increase of the loss by method, and what zeros bring by form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.experiments.inputs import plain
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab12_pruning_and_distillation.masks import (
    COMPRESSED,
    DENSE,
    EXPERIMENT,
    MASK_FIRST,
    ORDERS,
    ROUND_FIRST,
    SHARES,
    TENSOR_CORES,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Chart, measured, predicted, recorded, table, view
from workbench.panels.plots import matching
from workbench.panels.view import View
from workbench.pruning.masks import METHODS

NAMES = {"magnitude": "magnitude", "wanda": "Wanda", "sparsegpt": "SparseGPT"}
FORMS = {DENSE: style.IDLE, COMPRESSED: style.WEIGHTS, TENSOR_CORES: style.TARGET}
NOISE = 2  # standard errors within which two losses are alike
LEFT_OUT = (
    "columns of compressed rows are looked up one by one, and what stands in a processor's cache is read faster than"
    " memory"
)


class MasksPanel(Panel):
    """Lab 12: single weights set to zero: loss by method and order, and products timed."""

    experiment = EXPERIMENT
    left_out = {"time": LEFT_OUT}  # noqa: RUF012

    def view(self, settings: dict[str, Any]) -> View:
        wanted = plain({"model": settings["model"]}) | {"pattern": settings["pattern"]}
        run, old = (matching(taken, **wanted) for taken in (self.measurements, self.record))
        times = matching(self.measurements, measured="time", size=settings["size"], rows=settings["rows"])
        before = matching(self.record, measured="time", size=settings["size"], rows=settings["rows"])
        bars = [
            *(_bar(NAMES[one], run, old, style.WEIGHTS, measured="masked", method=one) for one in METHODS),
            *(_bar(one, run, old, style.CACHE, measured="order", order=one) for one in ORDERS),
        ]
        chart = Chart(
            *(
                predicted(f"{form}, by bytes", _by_bytes(matching(times, stored=form)), colour, legend=False)
                for form, colour in FORMS.items()
            ),
            *(measured(form, matching(times, stored=form), "zeros", colour) for form, colour in FORMS.items()),
            *(recorded(form, matching(before, stored=form), "zeros") for form in FORMS),
            x=Axis("share of zeros", "{:.0%}".format, ticks=SHARES[:1] + SHARES[1:3] + SHARES[-1:]),
            y=Axis("times as fast as the full matrix", "{:g}".format, "log", (0.5, 1, 2, 5, 10, 20, 50)),
            title="a product, here (dashed: by bytes)",
            legend="upper left" if times or before else "",
        )
        return view(
            Bars(
                bars, Axis("increase of the loss, nats per token", scale="zero"), title=f"zeros: {settings['pattern']}"
            ),
            chart,
            height=4.4,
            table=_table(run, times),
            caption="Masked layer by layer, nothing trained" + ("" if run else "; Run masks, scores and times"),
            words=_words(run, times),
        )


def _bar(name: str, run: Sequence[Measurement], record: Sequence[Measurement], colour: str, **which: str) -> Bar:
    live, old = (next(iter(matching(taken, **which)), None) for taken in (run, record))
    value = None if live is None else live.counts["increase"]
    error = 0.0 if live is None else live.counts["standard_error"]
    spread = None if value is None else (value - error, value + error)
    return Bar(name, value, colour, spread, recorded=None if old is None else old.counts["increase"])


def _by_bytes(times: Sequence[Measurement]) -> list[tuple[float, float]]:
    return [(m.settings["zeros"], m.predicted) for m in times if m.predicted is not None]


def _table(run: Sequence[Measurement], times: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    def name(m: Measurement) -> str:
        what = m.settings
        if what["measured"] == "time":
            return what["stored"]
        return NAMES.get(what.get("method", ""), what.get("order", what["measured"]))

    def loss(text: str) -> Any:
        return lambda m: "" if m.unit == "x" else text.format(m=m)

    def time(text: Any) -> Any:
        return lambda m: text(m) if m.unit == "x" else ""

    return table(
        [*(m for m in run if m.settings["measured"] != "between"), *times],
        {
            "": name,
            "zeros": lambda m: f"{m.settings['zeros'] if m.unit == 'x' else m.counts['zeros']:.0%}",
            "nats per token": loss("{m.median:.3f}"),
            "increase": loss("{m.counts[increase]:+.3f} ± {m.counts[standard_error]:.3f}"),
            "bytes of the matrix": time(lambda m: readable_bytes(m.counts["bytes"])),
            "by bytes": time(lambda m: f"{m.predicted:.2f} x"),
            "measured": time(lambda m: f"{m.median:.2f} x ({m.spread[0]:.2f} to {m.spread[1]:.2f})"),
        },
    )


def _between(m: Measurement) -> str:
    """A difference of two losses in words, with what it can carry."""
    lower, error = m.median, m.counts["standard_error"]
    one, other = (NAMES.get(m.settings[which], m.settings[which]) for which in ("one", "other"))
    if abs(lower) < NOISE * error:
        return f"{one} and {other} are not apart ({lower:+.3f} ± {error:.3f})"
    if lower < 0:
        one, other, lower = other, one, -lower
    return f"{one} is {lower:.3f} ± {error:.3f} lower than {other}"


def _words(run: Sequence[Measurement], times: Sequence[Measurement]) -> str:
    lines = []
    masked = {m.settings["method"]: m for m in matching(run, measured="masked")}
    if masked:
        said = [f"{m.counts['increase']:+.3f} by {NAMES[method]}" for method, m in masked.items()]
        lines.append(f"Nats per token against the whole model: {', '.join(said)}.")
        apart = [_between(m) for m in matching(run, measured="between") if m.settings["one"] in METHODS]
        if apart:
            lines.append(f"Passage by passage (± a standard error): {'; '.join(apart)}.")
    orders = {m.settings["order"]: m for m in matching(run, measured="order")}
    if {MASK_FIRST, ROUND_FIRST} <= orders.keys():
        first, second = orders[MASK_FIRST], orders[ROUND_FIRST]
        apart = [_between(m) for m in matching(run, measured="between", one=MASK_FIRST)]
        lines.append(
            f"With 4 bits as well: {first.counts['increase']:+.3f} {MASK_FIRST}, {second.counts['increase']:+.3f}"
            f" {ROUND_FIRST}{''.join('; ' + words for words in apart)}. Published (arXiv 2405.20935): mask first, since"
            " a score sees the weights themselves then."
        )
    dense = matching(times, stored=DENSE)
    if dense:
        lowest, highest = min(m.median for m in dense), max(m.median for m in dense)
        lines.append(
            f"A matrix with zeros in it is {lowest:.2f} to {highest:.2f} times as fast as one without: the zeros"
            " are read"
            " and multiplied."
        )
    compressed = matching(times, stored=COMPRESSED)
    if compressed:
        wins = next((m for m in compressed if m.median > 1), None)
        half = compressed[0]
        lines.append(
            f"Without the zeros, as compressed rows, {half.median:.2f} times at {half.settings['zeros']:.0%}"
            " zeros, where it"
            f" has {half.counts['bytes'] / half.counts['dense_bytes']:.2f} of the bytes (a column beside each weight)"
            + (f"; ahead from {wins.settings['zeros']:.0%} on." if wins else ", and nowhere ahead here.")
        )
    for m in matching(times, stored=TENSOR_CORES):
        lines.append(f"On sparse tensor cores 2:4 is {m.median:.2f} times as fast, by bytes {m.predicted:.2f}.")
    if not lines:
        lines.append("Half of the numbers are zero. Guess before Run what a product gains by that.")
    return "\n".join(lines)
