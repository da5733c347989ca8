"""The panel of paging.prefixes: hits against the size of the pool and the optimum, what was evicted, and TTFT."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.records import Measurement
from workbench.labs.lab09_paged_attention.prefix_hits import AMPLE, EXPERIMENT, Order, optimum, order_of, pools
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Series, predicted, table, view
from workbench.panels.plots import NOTE, legend_above, matching
from workbench.panels.view import View
from workbench.panels.words import recorded_label

KNOBS = ("load", "requests", "rate", "running", "tenants", "block_size", "seed")
INDEXES = {"hash": "chain of hashes", "radix": "radix tree"}
MARKS = {"hash": "o", "radix": "x"}
COLOURS = {True: style.WEIGHTS, False: style.CACHE}  # tenants apart, together
APART = {True: "tenants apart", False: "tenants together"}
ASKED = 0.95  # of the optimum


class PrefixHitsPanel(Panel):
    """Lab 09: how much of the prompts a pool finds again, against the best there is, and what it saves of TTFT."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        order = order_of(**{name: settings[name] for name in KNOBS})
        best = {apart: optimum(order, settings["block_size"], apart) / order.prompt_tokens for apart in (True, False)}
        taken = self.made(settings, KNOBS)
        made, timed = matching(taken, measured="hits"), matching(taken, measured="ttft")
        places = list(pools(order))
        columns = {
            "pool": lambda m: _pool(m.settings["pool"]),
            "blocks": "{m.counts[num_blocks]:,.0f}",
            "tenants": lambda m: APART[m.settings["isolated"]],
            "index": lambda m: INDEXES[m.settings["index"]],
            "prompt tokens found": "{m.median:.1%}",
            "of the optimum": "{m.counts[of_optimum]:.1%}",
            "evicted": "{m.counts[evictions]:,.0f}",
        }
        before = [
            ["optimum", f"{order.all_blocks:,}", APART[apart], "", f"{share:.1%}", "100.0%", "0"]
            for apart, share in best.items()
        ]
        return view(
            _hits_chart(made, best, places),
            _evictions_chart(made, places),
            _ttft_chart(timed, matching(self.record, measured="ttft")),
            height=4.8,
            boxes=[(0.085, 0.16, 0.345, 0.6), (0.515, 0.16, 0.165, 0.6), (0.775, 0.16, 0.215, 0.6)],
            table=table(made, columns) if made else (list(columns), before),
            caption=f"'{settings['load']}', {settings['requests']} requests, {order.prompt_tokens:,} prompt tokens"
            + ("" if made else "; the optimum, before a run"),
            words=_words(order, made, timed, best, settings),
        )


def _pool(name: str) -> str:
    return name if name == AMPLE else f"{name} ×"


def _by_pool(made: Sequence[Measurement], places: list[str], value: Callable[[Measurement], float]) -> list[Series]:
    """Pools beside each other, by their names: the ample one lies far out."""
    return [
        Series(
            f"{APART[apart]}, {name}",
            [(places.index(m.settings["pool"]), value(m)) for m in matching(made, isolated=apart, index=index)],
            "measured",
            COLOURS[apart],
            look={"marker": MARKS[index], "markersize": 7 if index == "hash" else 8},
        )
        for apart in (True, False)
        for index, name in INDEXES.items()
    ]


def _pools_axis(name: str, places: list[str], every: int = 1) -> Axis:
    shown = range(0, len(places), every)
    return Axis(name, lambda at: places[round(at)], ticks=shown, limits=(-0.4, len(places) - 0.6))


def _legend(axes: Axes) -> None:
    """What is what in the first two plots, over all three."""
    legend_above(axes, {}, *axes.get_lines(), columns=2)


def _hits_chart(made: Sequence[Measurement], best: dict[bool, float], places: list[str]) -> Chart:
    ends = (-0.4, len(places) - 0.6)
    top, low = max(best.values()), min([*best.values(), *(m.median for m in made)])
    return Chart(
        *(
            predicted(f"optimum, {APART[apart]}", [(x, share) for x in ends], COLOURS[apart], zorder=2)
            for apart, share in best.items()
        ),
        *_by_pool(made, places, lambda m: m.median),
        x=_pools_axis("pool, × what texts in work need", places),
        y=Axis(
            "",
            lambda share: f"{share:.0%}",
            limits=(max(0.0, low - 0.9 * max(0.08, top - low)), min(1.0, top + 0.02) + 1e-3),
        ),
        title="share of prompt tokens found",
        also=_legend,
    )


def _evictions_chart(made: Sequence[Measurement], places: list[str]) -> Chart:
    return Chart(
        *_by_pool(made, places, lambda m: m.counts["evictions"]),
        x=_pools_axis("pool, × that", places, 3),
        y=Axis("", scale="zero"),
        title="evictions",
        empty="",
    )


def _ttft_chart(timed: Sequence[Measurement], archive: Sequence[Measurement]) -> Chart:
    """Each request's TTFT without the index over that with it; dashed: by the cost model."""
    dots = {"linestyle": "", "zorder": 4}
    series = []
    for m in timed:
        series.append(Series("measured", list(enumerate(m.samples, 1)), "measured", style.CACHE, look=dots))
        series.append(predicted("predicted", enumerate(m.settings["promised"], 1)))
    for m in archive:
        series.append(Series(recorded_label([m]), list(enumerate(m.samples, 1)), "recorded", style.CACHE))
    ratios = [s for m in (*timed, *archive) for s in (*m.samples, *m.settings["promised"])] or [1.0]

    def draw_one(axes: Axes) -> None:
        axes.axhline(1, color=NOTE, linewidth=0.9, zorder=1)

    return Chart(
        *series,
        x=Axis("request"),
        y=Axis(
            "",
            lambda ratio: f"{ratio:.3g} ×",
            "log",
            limits=(min(*ratios, 1) / 1.6, max(*ratios, 2) * 6),  # room for the legend
        ),
        title="TTFT, times",
        legend="upper left",
        also=draw_one,
        empty="Run measures TTFT\non the engine",
    )


def _words(
    order: Order,
    made: Sequence[Measurement],
    timed: Sequence[Measurement],
    best: dict[bool, float],
    settings: dict[str, Any],
) -> str:
    lines = [
        f"The best that any cache of whole blocks could find on this order of requests is {best[True]:.1%} of the"
        f" prompts' tokens where each tenant finds his own alone, and {best[False]:.1%} where all find everything."
        f" Texts in work need {order.peak:,} blocks at most; everything that is ever computed fills"
        f" {order.all_blocks:,}."
    ]
    tight = {m.settings["pool"]: m for m in matching(made, isolated=True, index="hash")}
    if list(tight) == list(pools(order)):
        ample = min(m.counts["of_optimum"] for m in matching(made, pool=AMPLE))
        enough = next((m for m in tight.values() if m.counts["of_optimum"] >= ASKED), tight[AMPLE])
        smallest = next(iter(tight.values()))
        lines.append(
            f"An ample pool finds {ample:.1%} of that. {ASKED:.0%} of it takes a pool of"
            f" {enough.counts['num_blocks']:,.0f} blocks; the smallest finds {smallest.counts['of_optimum']:.1%} and"
            f" evicts {smallest.counts['evictions']:,.0f}."
        )
    hashes, trees = (
        {(m.settings["isolated"], m.settings["pool"]): m.median for m in matching(made, index=index)}
        for index in ("hash", "radix")
    )
    if hashes and set(hashes) == set(trees):
        lines.append(
            "Hashes and tree find the same: who holds a block holds all before it, so what is found is a beginning"
            " either way."
            if hashes == trees
            else "Hashes and tree differ: where a block is lost, what followed it is lost to the tree at once."
        )
    for m in timed:
        c, promised = m.counts, m.settings["promised"]
        text = (
            f"On the engine {c['hit_tokens']:,.0f} of {c['prompt_tokens']:,.0f} prompt tokens were not computed again:"
            f" TTFT {style.milliseconds(c['ttft_found_s'])} instead of {style.milliseconds(c['ttft_s'])}, medians."
        )
        if m.samples[1:]:
            text += (
                f" From the second request on {statistics.median(m.samples[1:]):.2g} times as fast, "
                f"{statistics.median(promised[1:]):.2g} by the cost model, which counts the pass alone, "
                "not the scheduler's work nor the gathering of blocks; the first found nothing."
            )
        lines.append(f"{text} {m.check[0].upper()}{m.check[1:]}.")
    return "\n".join(lines)
