"""The panel of kernels.bounds: the least time of every kernel on a card, and what was measured beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab10_kernels.bounds import EXPERIMENT, names_of, on_card
from workbench.labs.lab10_kernels.cases import MIN_SETS_BYTES
from workbench.panels import plots, style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Drawing, table, view
from workbench.panels.plots import LIMIT_COLOURS, card_title, flop_words, matching, write_middle
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import spread_words

NOT_MEASURED = "not yet measured"
ABOVE = 1.05  # of the bound: more than clocks explain


class BoundsPanel(Panel):
    """Lab 10: every kernel against the least time it can take on a card, and on this machine its twin in PyTorch."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        names, card = names_of(settings["kernels"]), card_title(settings["card"])
        expected = {name: on_card(name, settings["card"]) for name in names}
        gpu = {m.settings["kernel"]: m for taken in (self.record, self.measurements) for m in _on_gpu(taken)}
        checked = {m.settings["kernel"]: m for m in matching(self.measurements, ran="interpreted")}
        twins = {m.settings["kernel"]: m for m in matching(self.measurements, unit="s", by="torch")}
        shares = [m.counts["share_of_bound"] for m in twins.values()]
        alt_text = "Shares of the bound that PyTorch's operations reach where they ran: " + (
            f"{min(shares):.0%} to {max(shares):.0%}." if shares else "nothing is measured yet."
        )
        height = min(1.9 + 0.24 * len(names), style.TALLEST)

        def work(name: str):
            return expected[name][1]

        def of(known: dict[str, Measurement], text: Callable[[Measurement], str], missing: str = ""):
            """A cell about one of the measurements, or what stands there without it."""
            return lambda name: text(known[name]) if name in known else missing

        def share(m: Measurement) -> str:
            return f"{m.counts['share_of_bound']:.0%}"

        return view(
            _bound_bars(expected, card),
            Drawing(lambda axes: _draw_shares(axes, names, self.measurements, self.record), alt_text),
            height=height,
            width_ratios=[1.2, 1],
            table=table(
                names,
                {
                    "kernel": "{m}",
                    "size": lambda name: expected[name][0],
                    "bytes": lambda name: readable_bytes(work(name).bytes),
                    "FLOPs": lambda name: flop_words(work(name).flops) if work(name).flops else "0",
                    f"bound on {card}": lambda name: milliseconds(expected[name][2]),
                    "binds": lambda name: expected[name][3],
                    "kernel, share of bound": of(gpu, share, NOT_MEASURED),
                    "in the interpreter, off by": of(
                        checked, lambda m: f"{m.median:.1g} {m.unit}" if m.median else "nothing"
                    ),
                    "launches": lambda name: (
                        f"{checked[name].counts['launches']:.0f}" if name in checked else work(name).launches
                    ),
                    "PyTorch here": of(twins, spread_words),
                    "its share of bound": of(twins, share),
                },
            ),
            caption=f"Predicted for {card}; kernels there: "
            + ("recorded" if _on_gpu(self.record) else "measured" if _on_gpu(self.measurements) else NOT_MEASURED),
            words=_words(expected, card, self.measurements, self.record),
        )


def _on_gpu(measurements: list[Measurement]) -> list[Measurement]:
    return matching(measurements, ran="compiled", by="kernel")


def _bound_bars(expected: dict[str, tuple], card: str) -> Bars:
    def legend(axes: Axes) -> None:
        handles = [Patch(color=LIMIT_COLOURS[limit], label=limit) for limit in ("bandwidth", "compute", "launch")]
        place: dict[str, Any] = {"loc": "center right", "bbox_to_anchor": (1.0, 0.52)}
        axes.legend(handles=handles, fontsize=10, frameon=False, title="what binds", title_fontsize=10, **place)

    return Bars(
        [
            Bar(name, seconds, LIMIT_COLOURS[limit], text=milliseconds(seconds))
            for name, (_, _, seconds, limit) in expected.items()
        ],
        Axis("the least time", milliseconds, "zero", room=(1, 1.45)),
        f"bound on {card}, predicted",
        also=legend,
    )


def _draw_shares(axes: Axes, names: tuple[str, ...], measured: list[Measurement], record: list[Measurement]) -> None:
    shares = [1.0]
    for y, name in enumerate(names):
        for taken, recorded in ((record, True), (measured, False)):
            for by, colour, mark in (("torch", style.IDLE, "o"), ("kernel", style.TARGET, "D")):
                for m in matching(taken, unit="s", kernel=name, by=by)[:1]:
                    if "share_of_bound" in m.counts:
                        shares.append(m.counts["share_of_bound"])
                        look: dict[str, Any] = {
                            "markersize": 8,
                            "markerfacecolor": "none" if recorded else colour,
                            "zorder": 4,
                        }
                        axes.plot(shares[-1:], [y], mark, color=colour, **look)
    axes.set_yticks([])
    axes.set(xlim=(0, 1.05 * max(shares)), ylim=(len(names) - 0.5, -0.6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.locator_params(axis="x", nbins=5)
    axes.axvline(1, color=style.INK, linewidth=1)
    if len(shares) == 1:
        write_middle(axes, "Run measures")
    kernels = "◆ kernel" if _on_gpu(measured) or _on_gpu(record) else f"◆ kernel on a GPU: {NOT_MEASURED}"
    plots.name(axes, x="share of the bound\nwhere it ran", title=f"● PyTorch   {kernels}")


def _above_words(twins: list[Measurement]) -> list[str]:
    """What was faster than its bound, and by which ceiling."""
    above = [m for m in twins if m.predicted and m.counts["share_of_bound"] > ABOVE]
    if not above:
        return []
    named = []
    for m in above:
        assert m.predicted is not None
        kind = "flops" if m.limit == "compute" else "bytes"
        rate, ceiling = (m.counts[kind] / seconds for seconds in (m.median, m.predicted))
        unit = "GFLOP/s" if kind == "flops" else "GB/s"
        named.append(
            f"{m.settings['kernel']} at {m.counts['share_of_bound']:.0%} ({rate / 1e9:.3g} {unit} where the ceiling"
            f" says {ceiling / 1e9:.3g})"
        )
    return [
        f"Above the bound: {', '.join(named)}. Nothing is faster than the machine, so a ceiling is too low there."
        f" {_cache_words(above[0].device)} A ceiling is what the plainest operation of a kind reached when it was"
        " measured, here a sum, a product with one row and a square product; a machine that was busier then, or an"
        " operation that PyTorch does better, is above it."
    ]


def _cache_words(device: Mapping[str, Any]) -> str:
    """Whether the last cache of the machine may hold what the inputs go round over."""
    around, last = readable_bytes(MIN_SETS_BYTES, binary=True), device.get("last_cache_bytes")
    if not last:
        return f"Or a cache holds the inputs, which go round over {around}; how large the last one is, is not known."
    cache = readable_bytes(last, binary=True)
    if 2 * last < MIN_SETS_BYTES:
        return f"It is not the cache: the inputs go round over {around}, and the last cache holds {cache}."
    return f"Or the cache holds them: the inputs go round over {around}, and the last cache has {cache}."


def _recorded_words(record: list[Measurement]) -> list[str]:
    """Whose ceilings the hollow shares are of, by the bytes that were counted then."""
    timed = [m for m in matching(record, unit="s") if m.predicted and "share_of_bound" in m.counts]
    if not timed:
        return []
    rates = [m.counts["bytes"] / m.predicted for m in timed if m.limit == "bandwidth" and m.predicted]
    text = f"Hollow: shares of the ceilings of {timed[0].device.get('name', 'that machine')} as they were measured then"
    text += f", {max(rates) / 1e9:.3g} GB/s of memory" if rates else ""
    above = [m for m in timed if m.counts["share_of_bound"] > ABOVE]
    if above:
        best = max(above, key=lambda m: m.counts["share_of_bound"])
        text += (
            f"; too low, since {best.settings['kernel']} reached {best.counts['bytes'] / best.median / 1e9:.3g} GB/s"
        )
    return [f"{text}."]


def _words(expected: dict[str, tuple], card: str, measured: list[Measurement], record: list[Measurement]) -> str:
    by_limit: dict[str, list[str]] = {}
    for name, (_, _, _, limit) in expected.items():
        by_limit.setdefault(limit, []).append(name)
    lines = [f"On {card}, at these sizes, {limit} binds: {', '.join(names)}." for limit, names in by_limit.items()]
    checked = matching(measured, ran="interpreted")
    if checked:
        launches = sum(m.counts["launches"] for m in checked)
        lines.append(
            f"In the interpreter {len(checked)} kernel{'s' * (len(checked) > 1)} gave what their definitions give in"
            f" float64, in {launches:.0f} launches, at sizes that it can do. It runs Triton block by block in numpy:"
            " its times mean nothing and were not taken."
        )
    twins = matching(measured, unit="s", by="torch")
    if twins and checked:
        worst = min(twins, key=lambda m: m.counts["share_of_bound"])
        best = max(twins, key=lambda m: m.counts["share_of_bound"])
        lines.append(
            f"PyTorch's own operations on this machine: {best.counts['share_of_bound']:.0%} of the bound for"
            f" {best.settings['kernel']} ({best.settings['what']}), {worst.counts['share_of_bound']:.0%} for"
            f" {worst.settings['kernel']} ({worst.settings['what']}). What is made of several operations goes over"
            " memory several times, and a CPU's exponentials and sums take longer than its memory."
        )
        lines += _above_words(twins)
    lines += _recorded_words(record)
    kernels = _on_gpu(measured) or _on_gpu(record)
    if kernels:
        ranked = sorted(kernels, key=lambda m: m.counts["share_of_bound"])
        lines.append(
            f"On {kernels[0].device.get('name', 'a GPU')} kernels reach {ranked[0].counts['share_of_bound']:.0%}"
            f" ({ranked[0].settings['kernel']}) to {ranked[-1].counts['share_of_bound']:.0%}"
            f" ({ranked[-1].settings['kernel']}) of its bound."
        )
    else:
        lines.append(f"How near our kernels come on a GPU: {NOT_MEASURED}.")
    return "\n".join(lines)
