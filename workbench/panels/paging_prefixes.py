"""The panel of paging.prefixes: hits against the size of the pool and the optimum, what was evicted, and TTFT."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.paging_prefixes import AMPLE, Order, optimum, order_of, pools
from workbench.instruments.records import Measurement
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.speculate_plots import NOTE, empty
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View
from workbench.panels.words import recorded_label

KNOBS = ("load", "requests", "rate", "running", "tenants", "block_size", "seed")
INDEXES = {"hash": "chain of hashes", "radix": "radix tree"}
MARKS = {"hash": "o", "radix": "x"}
COLOURS = {True: style.WEIGHTS, False: style.CACHE}  # tenants apart, together
APART = {True: "tenants apart", False: "tenants together"}
ASKED = 0.95  # of the optimum


class PrefixHitsPanel(Panel):
    """Hit share and evictions by pool, tenants apart and together, both indexes; and TTFT of each request on the engine."""

    experiment_name = "paging.prefixes"

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in KNOBS}
        order = order_of(**knobs)
        best = {
            apart: optimum(order, settings["block_size"], apart) / order.prompt_tokens
            for apart in (True, False)
        }
        made = [m for m in self.measurements if same_knobs(m, knobs) and m.settings["measured"] == "hits"]
        timed = [m for m in self.measurements if same_knobs(m, knobs) and m.settings["measured"] == "ttft"]
        recorded = [m for m in self.record if m.settings["measured"] == "ttft"]
        figure, (hits, evictions, ttft) = style.new_figure(1, 3, height=3.9)
        hits.set_position([0.075, 0.145, 0.335, 0.735])
        evictions.set_position([0.48, 0.145, 0.165, 0.735])
        ttft.set_position([0.735, 0.145, 0.25, 0.735])
        places = {name: blocks / order.peak for name, blocks in pools(order).items()}
        _draw_hits(hits, made, best, places)
        _draw_evictions(evictions, made, places)
        _draw_ttft(ttft, timed, recorded)
        return View(
            figure=figure,
            alt=_alt(made, timed, best),
            header=["pool", "blocks", "tenants", "index", "prompt tokens found", "of the optimum", "evicted"],
            rows=[_row(m) for m in made] or [_best_row(order, apart, share) for apart, share in best.items()],
            caption=f"'{settings['load']}', {settings['requests']} requests, {order.prompt_tokens:,} prompt tokens"
            + ("" if made else "; the optimum, before a run"),
            words=_words(order, made, timed, best, settings),
        )


def _legend(axes: Axes, place: str) -> None:
    style.legend(axes, loc=place)
    for text in axes.get_legend().get_texts():
        text.set_fontsize(7.5)


def _of(made: Sequence[Measurement], **wanted: Any) -> list[Measurement]:
    return [m for m in made if same_knobs(m, wanted)]


def _pool_axis(axes: Axes, places: dict[str, float]) -> None:
    """Pools beside each other, by their names: the ample one lies far out."""
    axes.set_xticks(
        range(len(places)), [name if name == AMPLE else f"{name} ×" for name in places], fontsize=8.5
    )
    axes.set_xlim(-0.4, len(places) - 0.6)


def _line(axes: Axes, found: Sequence[Measurement], places: dict[str, float], value, label: str) -> None:
    first = found[0].settings
    mark = {"marker": MARKS[first["index"]], "markersize": 7 if first["index"] == "hash" else 8}
    axes.plot([list(places).index(m.settings["pool"]) for m in found], [value(m) for m in found], zorder=3,
              color=COLOURS[first["isolated"]], label=label, **(style.MEASURED | mark))  # fmt: skip


def _draw_hits(
    axes: Axes, made: Sequence[Measurement], best: dict[bool, float], places: dict[str, float]
) -> None:
    for apart, share in best.items():
        axes.axhline(
            share, color=COLOURS[apart], zorder=2, label=f"optimum, {APART[apart]}", **style.PREDICTED
        )
        for index, name in INDEXES.items():
            found = _of(made, isolated=apart, index=index)
            if found:
                _line(axes, found, places, lambda m: m.median, f"{APART[apart]}, {name}")
    low = min([*best.values(), *(m.median for m in made)])
    axes.set_ylim(
        max(0.0, low - 0.9 * max(0.08, max(best.values()) - low)), min(1.0, max(best.values()) + 0.02) + 1e-3
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _pool_axis(axes, places)
    _legend(axes, "lower right")
    style.label(axes, x="pool, times what texts in work need", title="share of prompt tokens found")


def _draw_evictions(axes: Axes, made: Sequence[Measurement], places: dict[str, float]) -> None:
    if not made:
        empty(axes)
        style.label(axes, title="evicted blocks")
        return
    for apart in (True, False):
        for index in INDEXES:
            found = _of(made, isolated=apart, index=index)
            if found:
                _line(axes, found, places, lambda m: m.counts["evictions"], "")
    _pool_axis(axes, places)
    axes.set_xticks(
        range(0, len(places), 3), [list(places)[i] for i in range(0, len(places), 3)], fontsize=8.5
    )
    axes.set_ylim(bottom=0)
    style.label(axes, x="pool", title="evicted blocks")


def _draw_ttft(axes: Axes, timed: Sequence[Measurement], recorded: Sequence[Measurement]) -> None:
    """Each request's TTFT without the index over that with it; dashed: by the cost model."""
    if not timed and not recorded:
        empty(axes)
        style.write(
            axes,
            0.5,
            0.5,
            "Run measures TTFT\non the engine",
            transform=axes.transAxes,
            ha="center",
            color=NOTE,
        )
        style.label(axes, title="TTFT without / with")
        return
    for m in timed:
        x = range(1, len(m.samples) + 1)
        axes.plot(
            x,
            m.samples,
            color=style.CACHE,
            label="measured",
            zorder=4,
            **(style.MEASURED | {"linestyle": ""}),
        )
        axes.plot(x, m.settings["promised"], color=style.INK, label="predicted", zorder=3, **style.PREDICTED)
    for m in recorded:
        axes.plot(range(1, len(m.samples) + 1), m.samples, color=style.CACHE, zorder=4, label=recorded_label([m]),
                  **style.RECORDED)  # fmt: skip
    axes.axhline(1, color=NOTE, linewidth=0.9, zorder=1)
    axes.set_yscale("log")
    ratios = [s for m in (*timed, *recorded) for s in (*m.samples, *m.settings["promised"])]
    ticks = [
        t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if min(ratios) / 2 < t < max(ratios) * 2
    ][-7:]
    axes.set_yticks(ticks, [f"{t:g} ×" for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(min(*ratios, 1) / 1.6, max(*ratios, 2) * 6)  # room for the legend
    _legend(axes, "upper left")
    style.label(axes, x="request", title="TTFT without / with")


def _row(m: Measurement) -> list[str]:
    s, c = m.settings, m.counts
    return [
        s["pool"] if s["pool"] == AMPLE else f"{s['pool']} ×",
        f"{c['num_blocks']:,.0f}",
        APART[s["isolated"]],
        INDEXES[s["index"]],
        f"{m.median:.1%}",
        f"{c['of_optimum']:.1%}",
        f"{c['evictions']:,.0f}",
    ]


def _best_row(order: Order, apart: bool, share: float) -> list[str]:
    return ["optimum", f"{order.all_blocks:,}", APART[apart], "", f"{share:.1%}", "100.0%", "0"]


def _alt(made: Sequence[Measurement], timed: Sequence[Measurement], best: dict[bool, float]) -> str:
    told = [f"the optimum is {share:.1%} with {APART[apart]}" for apart, share in best.items()]
    for apart in (True, False):
        found = _of(made, isolated=apart, index="hash")
        if found:
            told.append(
                f"with {APART[apart]} the smallest pool finds {found[0].median:.1%} and the ample one {found[-1].median:.1%}"
            )
    for m in timed:
        told.append(
            f"TTFT without an index is {m.median:.2g} times that with one, predicted {m.predicted:.2g}"
        )
    return "Share of prompt tokens found again against the size of the pool: " + "; ".join(told) + "."


def _words(
    order: Order, made: Sequence[Measurement], timed: Sequence[Measurement], best: dict[bool, float], settings: dict[str, Any]
) -> str:  # fmt: skip
    lines = [
        f"The best that any cache of whole blocks could find on this order of requests is {best[True]:.1%} of the prompts' "
        f"tokens where each tenant finds his own alone, and {best[False]:.1%} where all find everything. Texts in work need "
        f"{order.peak:,} blocks at most; everything that is ever computed fills {order.all_blocks:,}."
    ]
    if made:
        ample = min(m.counts["of_optimum"] for m in _of(made, pool=AMPLE))
        tight = _of(made, isolated=True, index="hash")
        enough = next((m for m in tight if m.counts["of_optimum"] >= ASKED), tight[-1])
        same = all(
            a.median == b.median
            for a, b in zip(_of(made, index="hash"), _of(made, index="radix"), strict=True)
        )
        lines.append(
            f"An ample pool finds {ample:.1%} of that. {ASKED:.0%} of it takes a pool of {enough.counts['num_blocks']:,.0f} blocks; "
            f"the smallest finds {tight[0].counts['of_optimum']:.1%} and evicts {tight[0].counts['evictions']:,.0f}."
        )
        lines.append(
            "Hashes and tree find the same: who holds a block holds all before it, so what is found is a beginning either way."
            if same
            else "Hashes and tree differ: where a block is lost, what followed it is lost to the tree at once."
        )
    for m in timed:
        c, promised = m.counts, m.settings["promised"]
        told = (
            f"On the engine {c['hit_tokens']:,.0f} of {c['prompt_tokens']:,.0f} prompt tokens were not computed again: TTFT "
            f"{style.milliseconds(c['ttft_found_s'])} instead of {style.milliseconds(c['ttft_s'])}, medians."
        )
        if m.samples[1:]:
            told += (
                f" From the second request on {statistics.median(m.samples[1:]):.2g} times as fast, "
                f"{statistics.median(promised[1:]):.2g} by the cost model, which counts the pass alone, "
                "not the scheduler's work nor the gathering of blocks; the first found nothing."
            )
        lines.append(f"{told} {m.check[0].upper()}{m.check[1:]}.")
    return "\n".join(lines)
