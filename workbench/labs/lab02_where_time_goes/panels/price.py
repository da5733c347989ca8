"""The panel of time.price: dollars a million tokens and seconds per token, against batch size."""

from __future__ import annotations

from typing import Any

from workbench.experiments.cards import HERE, card_ceilings
from workbench.experiments.inputs import shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab02_where_time_goes.price import BATCHES, EXPERIMENT, Quote, arithmetic, quotes, your_price
from workbench.labs.lab02_where_time_goes.roofline import ridge
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, predicted, view
from workbench.panels.plots import REGIMES, card_title, dollars
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import recorded_label, spread_words

SAID = {"output": "written", "prompt": "prompt", "TPOT": "TPOT", "TTFT": "TTFT"}
COLOURS = {"output": style.DECODE, "prompt": style.PREFILL, "TPOT": style.DECODE, "TTFT": style.PREFILL}
# what was measured is another model on another machine than the lines: black here, grey where it was recorded
MARKS = {"output": "o", "prompt": "s", "TPOT": "o", "TTFT": "s"}


class PricePanel(Panel):
    """Lab 02: TTFT, TPOT and dollars a million tokens for a shape on a card. price=your workload_price."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        batches = [b for b in BATCHES if b <= max(64, 4 * settings["batch"])]
        offers = {q.batch: q for q in quotes(self.ceilings(), batches, self.bench.device, **settings)}
        chosen = offers[settings["batch"]]
        price = self.learner.get("price")
        yours = your_price(price, self.ceilings(), chosen, **settings) if price else None
        taken = {m.settings["what"]: m for m in self.measurements}
        archive = {m.settings["what"]: m for m in self.record}
        card = settings["card"]
        batch = Axis("batch (sequences)", scale="log", ticks=batches[::2])
        full = [(max(chosen.largest_batch, 0.5), "memory full", style.IDLE, 0.08)]

        def chart(title: str, text, legend: str, fields: dict[str, str], *others: Series) -> Chart:
            """Lines of some of the quantities, what was measured of them, and the chosen batch."""
            series = []
            for what, field in fields.items():
                points = [(q.batch, getattr(q, field)) for q in offers.values()]
                series += [predicted(f"{SAID[what]}, {card}", points, COLOURS[what])]
                series += _points(what, archive, "recorded") + _points(what, taken, "measured")
            first = next(iter(fields))
            diamond = {"marker": "D", "markersize": 9, "linestyle": ""}
            here = [(chosen.batch, getattr(chosen, fields[first]))]
            series.append(Series("the chosen batch", here, "line", COLOURS[first], legend=False, look=diamond))
            y = Axis("", text, "log", room=(1.8, 40))
            return Chart(*series, *others, x=batch, y=y, title=title, legend=legend, marks=full)

        cross = {"marker": "x", "markersize": 10, "linestyle": ""}
        own = [(chosen.batch, yours[1])] if yours and yours[1] > 0 else []
        return view(
            chart(
                "dollars for a million tokens",
                dollars,
                "upper right",
                {"output": "dollars_per_million_output", "prompt": "dollars_per_million_prompt"},
                Series("yours, written", own, "line", style.LEARNER, look=cross),
            ),
            chart("what a user waits", milliseconds, "upper left", {"TPOT": "tpot_s", "TTFT": "ttft_s"}),
            table=(["", "predicted", f"measured on {HERE}"], _rows(chosen, taken, yours)),
            caption=(
                f"{settings['shape']} on {card_title(settings['card'])}, batch {chosen.batch:,}, at "
                f"{dollars(settings['dollars_per_hour'])} an hour"
            ),
            words=_words(settings, chosen, self.ceilings(), taken),
        )


def _points(what: str, taken: dict[str, Measurement], kind: str) -> list[Series]:
    """The one point that was measured of a quantity, if it was."""
    if what not in taken:
        return []
    m = taken[what]
    name = recorded_label([m]) if kind == "recorded" else f"{m.settings['model']} here"
    points, colour = [(m.settings["batch"], m.median)], style.IDLE if kind == "recorded" else style.INK
    return [Series(f"{SAID[what]}, {name}", points, kind, colour, look={"zorder": 4, "marker": MARKS[what]})]


def _rows(q: Quote, measured: dict[str, Measurement], yours: tuple | None) -> list[list[str]]:
    def live(what: str) -> str:
        if what not in measured:
            return ""
        m = measured[what]
        return spread_words(m) if m.unit == "s" else dollars(m.median)

    tpot = measured.get("TPOT")
    rows = [
        ["TTFT, one prompt alone", f"{style.milliseconds(q.ttft_s)}, {q.ttft_limit}", live("TTFT")],
        ["TPOT", f"{style.milliseconds(q.tpot_s)}, {q.tpot_limit}", live("TPOT")],
        ["tokens a second, in all", f"{q.tokens_per_s:,.0f}", f"{tpot.counts['tokens_per_s']:,.0f}" if tpot else ""],
        ["a million prompt tokens", dollars(q.dollars_per_million_prompt), live("prompt")],
        ["a million written tokens", dollars(q.dollars_per_million_output), live("output")],
        ["a request", dollars(q.dollars_per_request), ""],
        ["weights and caches", f"{readable_bytes(q.needed_bytes)} of {readable_bytes(q.memory_bytes)}", ""],
        ["largest batch that fits", f"{q.largest_batch:,}", ""],
    ]
    if yours:
        rows.append(["yours: prompt, written, all", ", ".join(map(dollars, yours)), ""])
    return rows


def _words(settings: dict, q: Quote, here, measured: dict[str, Measurement]) -> str:
    card = card_title(settings["card"])
    ceilings = card_ceilings(settings["card"], here)
    tokens = settings["prompt_tokens"] + settings["output_tokens"]
    whole = q.ttft_s + settings["output_tokens"] * q.tpot_s
    sentences = [
        (
            f"On {card} a step is {REGIMES[q.tpot_limit]}. A prompt token costs"
            f" 1/{q.dollars_per_million_output / q.dollars_per_million_prompt:.3g} of a written one: all tokens of a"
            " prompt share one reading of the weights."
        ),
        f"A request takes {style.milliseconds(whole)} and costs {dollars(q.dollars_per_request)}.",
    ]
    if q.fits:
        sentences.append(
            f"It fits: {readable_bytes(q.needed_bytes)} of {readable_bytes(q.memory_bytes)}, and up to"
            f" {q.largest_batch:,} sequences of {tokens:,} tokens would."
        )
    else:
        sentences.append(
            f"It does NOT fit on one: weights and caches take {readable_bytes(q.needed_bytes)}, the memory is "
            f"{readable_bytes(q.memory_bytes)}; "
            + (
                f"at most {q.largest_batch:,} sequences would."
                if q.largest_batch
                else "not even the weights and one cache do."
            )
        )
    knee = ridge(ceilings, arithmetic(settings["weight_bytes"])) * settings["weight_bytes"] / 2
    sentences.append(
        f"The products' knee, ridge × bytes ÷ 2, is at batch {knee:,.0f}"
        + (": memory is full before it." if q.largest_batch < knee else ".")
    )
    if settings["prompt_tokens"] + settings["output_tokens"] > shape_of(settings["shape"]).context_length:
        sentences.append(
            f"{settings['shape']} was made for {shape_of(settings['shape']).context_length:,} tokens; this is more."
        )
    if measured:
        m = next(iter(measured.values()))
        sentences.append(
            f"Measured on {HERE} with {m.settings['model']}, at {dollars(m.settings['dollars_per_hour'])} an hour for"
            " it: "
            + "; ".join(
                f"{what} {dollars(measured[what].median)} a million"
                for what in ("prompt", "output")
                if what in measured
            )
            + ". Another model and another machine than the dashed lines."
        )
    sentences.append(
        "The price of an hour is yours to set, and no machine is busy all the time: real costs are higher."
    )
    return "\n".join(sentences)
