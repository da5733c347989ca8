"""The panel of time.price: dollars a million tokens and seconds a token, against batch size."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import shape_of
from workbench.experiments.time_price import BATCHES, Quote, arithmetic, quotes, your_price
from workbench.experiments.time_roofline import ridge
from workbench.experiments.time_steps import HERE, card_ceilings
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.time_plots import REGIMES, card_title, dollars, log_scale, mark
from workbench.panels.view import View
from workbench.panels.words import recorded_label, spread_words

SAID = {"output": "written", "prompt": "prompt", "TPOT": "TPOT", "TTFT": "TTFT"}


class PricePanel(Panel):
    """What a workload costs. price=your workload_price stands beside ours."""

    experiment_name = "time.price"

    def view(self, settings: dict[str, Any]) -> View:
        batches = [b for b in BATCHES if b <= max(64, 4 * settings["batch"])]
        found = {q.batch: q for q in quotes(self.ceilings(), batches, self.bench.device, **settings)}
        chosen = found[settings["batch"]]
        price = self.learner.get("price")
        yours = your_price(price, self.ceilings(), **settings) if price else None
        measured = {m.settings["what"]: m for m in self.measurements}
        figure, (left, right) = style.new_figure(1, 2)
        many = list(found.values())
        prompt = [q.dollars_per_million_prompt for q in many]
        output = [q.dollars_per_million_output for q in many]
        left.plot(batches, output, color=style.WEIGHTS, label="written, predicted", **style.PREDICTED)
        left.plot(batches, prompt, color=style.COMPUTE, label="prompt, predicted", **style.PREDICTED)
        left.plot([chosen.batch], [chosen.dollars_per_million_output], "D", color=style.WEIGHTS, markersize=9)
        right.plot(
            batches, [q.tpot_s for q in many], color=style.WEIGHTS, label="TPOT, predicted", **style.PREDICTED
        )
        right.plot(
            batches, [q.ttft_s for q in many], color=style.COMPUTE, label="TTFT, predicted", **style.PREDICTED
        )
        right.plot([chosen.batch], [chosen.tpot_s], "D", color=style.WEIGHTS, markersize=9)
        record = {m.settings["what"]: m for m in self.record}
        _draw_measured(left, right, record, recorded=True)
        _draw_measured(left, right, measured)
        taken = [*measured.items(), *record.items()]
        prices = [*prompt, *output, *(m.median for k, m in taken if k in ("prompt", "output"))]
        times = [v for q in many for v in (q.tpot_s, q.ttft_s)]
        times += [m.median for k, m in taken if k in ("TTFT", "TPOT")]
        if yours:
            left.plot(
                [chosen.batch], [yours[1]], "x", color=style.LEARNER, markersize=10, label="yours, written"
            )
            prices += [yours[1]] if yours[1] > 0 else []
        for axes in (left, right):
            style.log_ticks(axes, "x", batches[::2])
            axes.set_xlim(batches[0] / 1.3, batches[-1] * 1.3)
        log_scale(left, "y", [*prices, 6 * max(prices)], dollars)
        log_scale(right, "y", [*times, 6 * max(times)], style.milliseconds)
        for axes in (left, right):
            mark(axes, max(chosen.largest_batch, 0.5), "memory full", style.IDLE, height=0.08)
        time_plots.name(left, x="batch (sequences in a step)", title="dollars for a million tokens")
        time_plots.name(right, x="batch (sequences in a step)", title="what a user waits")
        style.legend(left, loc="upper right")
        style.legend(right, loc="upper left")
        figure.subplots_adjust(left=0.09, right=0.99, top=0.92, bottom=0.145, wspace=0.28)
        return View(
            figure=figure,
            alt=_alt(settings, chosen, measured),
            header=["", "predicted", f"measured on {HERE}"],
            rows=_rows(chosen, measured, yours),
            caption=f"{settings['shape']} on {card_title(settings['card'])}, batch {chosen.batch:,}, at "
            f"{dollars(settings['dollars_per_hour'])} an hour",
            words=_words(settings, chosen, self.ceilings(), measured),
        )


def _draw_measured(
    left: Axes, right: Axes, measured: dict[str, Measurement], *, recorded: bool = False
) -> None:
    for what, axes, colour in (
        ("output", left, style.WEIGHTS),
        ("prompt", left, style.COMPUTE),
        ("TPOT", right, style.WEIGHTS),
        ("TTFT", right, style.COMPUTE),
    ):
        if what not in measured:
            continue
        m = measured[what]
        label = f"{SAID[what]}, {recorded_label([m]) if recorded else 'measured: ' + m.settings['model']}"
        look = style.RECORDED if recorded else style.MEASURED
        axes.plot([m.settings["batch"]], [m.median], color=colour, label=label, zorder=4, **look)


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
        [
            "tokens a second, in all",
            f"{q.tokens_per_s:,.0f}",
            f"{tpot.counts['tokens_per_s']:,.0f}" if tpot else "",
        ],
        ["a million prompt tokens", dollars(q.dollars_per_million_prompt), live("prompt")],
        ["a million written tokens", dollars(q.dollars_per_million_output), live("output")],
        ["a request", dollars(q.dollars_per_request), ""],
        ["weights and caches", f"{readable_bytes(q.needed_bytes)} of {readable_bytes(q.memory_bytes)}", ""],
        ["largest batch that fits", f"{q.largest_batch:,}", ""],
    ]
    if yours:
        rows.append(["yours: prompt, written, all", ", ".join(map(dollars, yours)), ""])
    return rows


def _alt(settings: dict, q: Quote, measured: dict[str, Measurement]) -> str:
    text = (
        "Two plots against batch size, logarithmic: dollars for a million tokens, falling, and waiting times, rising. "
        f"{settings['shape']} on {card_title(settings['card'])} at batch {q.batch:,}: "
        f"{dollars(q.dollars_per_million_output)} a million written tokens, "
        f"{dollars(q.dollars_per_million_prompt)} a million prompt tokens, TPOT {style.milliseconds(q.tpot_s)}."
    )
    if "TPOT" in measured:
        text += f" Measured on {HERE}: TPOT {style.milliseconds(measured['TPOT'].median)}."
    return text


def _words(settings: dict, q: Quote, here, measured: dict[str, Measurement]) -> str:
    card = card_title(settings["card"])
    ceilings = card_ceilings(settings["card"], here)
    tokens = settings["prompt_tokens"] + settings["output_tokens"]
    whole = q.ttft_s + settings["output_tokens"] * q.tpot_s
    sentences = [
        f"On {card} a step is {REGIMES[q.tpot_limit]}. A prompt token costs "
        f"1/{q.dollars_per_million_output / q.dollars_per_million_prompt:.3g} of a written one: all tokens of a prompt "
        "share one reading of the weights.",
        f"A request takes {style.milliseconds(whole)} and costs {dollars(q.dollars_per_request)}.",
    ]
    if q.fits:
        sentences.append(
            f"It fits: {readable_bytes(q.needed_bytes)} of {readable_bytes(q.memory_bytes)}, and up to {q.largest_batch:,} "
            f"sequences of {tokens:,} tokens would."
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
            f"Measured on {HERE} with {m.settings['model']}, at {dollars(m.settings['dollars_per_hour'])} an hour for it: "
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
