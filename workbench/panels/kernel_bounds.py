"""The panel of kernels.bounds: the least time of every kernel on a card, and what was measured beside it."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from workbench.experiments.kernel_bounds import names_of, on_card
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.panels import style, time_plots
from workbench.panels.base import Panel
from workbench.panels.smaller_plots import flop_words
from workbench.panels.speculate_plots import NOTE
from workbench.panels.time_plots import LIMIT_COLOURS, card_title
from workbench.panels.view import View
from workbench.panels.words import spread_words

NOT_MEASURED = "not yet measured"


class BoundsPanel(Panel):
    """Left: the least time on the card, by what binds. Right: the share of the bound that was measured, and of what."""

    experiment_name = "kernels.bounds"

    def view(self, settings: dict[str, Any]) -> View:
        names = names_of(settings["kernels"])
        expected = {name: on_card(name, settings["card"]) for name in names}
        figure, (left, right) = style.new_figure(1, 2, height=1.9 + 0.24 * len(names), width_ratios=[1.2, 1])
        _draw_bounds(left, expected, card_title(settings["card"]))
        _draw_shares(right, names, self.measurements, self.record)
        figure.subplots_adjust(left=0.215, right=0.975, top=0.9, bottom=0.115, wspace=0.08)
        return View(
            figure=figure,
            alt=_alt(expected, card_title(settings["card"]), self.measurements),
            header=["kernel", "size", "bytes", "FLOPs", f"bound on {card_title(settings['card'])}", "binds",
                    "kernel, share of bound", "in the interpreter, off by", "launches", "PyTorch here", "its share of bound"],
            rows=[_row(name, expected[name], self.measurements, self.record) for name in names],
            caption=f"Predicted for {card_title(settings['card'])}; kernels there: "
            + ("recorded" if _on_gpu(self.record) else "measured" if _on_gpu(self.measurements) else NOT_MEASURED),
            words=_words(expected, card_title(settings["card"]), self.measurements, self.record),
        )  # fmt: skip


def _of(measurements: list[Measurement], kernel: str, **wanted: Any) -> Measurement | None:
    for m in measurements:
        if m.settings["kernel"] == kernel and all(m.settings.get(k) == v for k, v in wanted.items()):
            return m
    return None


def _on_gpu(measurements: list[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.settings.get("ran") == "compiled" and m.settings["by"] == "kernel"]


def _draw_bounds(axes: Axes, expected: dict[str, tuple], card: str) -> None:
    widest = max(seconds for _, _, seconds, _ in expected.values())
    for y, (_, _, seconds, limit) in enumerate(expected.values()):
        axes.barh(y, seconds, height=0.62, color=LIMIT_COLOURS[limit], zorder=3)
        style.write(axes, seconds + 0.012 * widest, y, style.milliseconds(seconds), va="center", fontsize=9)
    axes.set_yticks(range(len(expected)), list(expected), fontsize=9.5)
    axes.set(xlim=(0, 1.2 * widest), ylim=(len(expected) - 0.5, -0.6))
    axes.xaxis.set_major_formatter(lambda value, _: style.milliseconds(value) if value else "0")
    axes.locator_params(axis="x", nbins=4)
    axes.grid(visible=False, axis="y")
    time_plots.name(axes, x="the least time", title=f"bound on {card}, predicted")
    handles = [Patch(color=LIMIT_COLOURS[limit], label=limit) for limit in ("bandwidth", "compute", "launch")]
    axes.legend(
        handles=handles, loc="upper right", fontsize=9, frameon=False, title="what binds", title_fontsize=9
    )


def _draw_shares(
    axes: Axes, names: tuple[str, ...], measured: list[Measurement], record: list[Measurement]
) -> None:
    shares = [1.0]
    for y, name in enumerate(names):
        for some, recorded in ((record, True), (measured, False)):
            for by, colour in (("torch", style.IDLE), ("kernel", style.TARGET)):
                m = _of([m for m in some if m.unit == "s"], name, by=by)
                if m is None or "share_of_bound" not in m.counts:
                    continue
                shares.append(m.counts["share_of_bound"])
                face = "none" if recorded else colour
                axes.plot([m.counts["share_of_bound"]], [y], "o" if by == "torch" else "D", markersize=8, color=colour,
                          markerfacecolor=face, zorder=4)  # fmt: skip
    axes.set_yticks([])
    axes.set(xlim=(0, 1.05 * max(shares)), ylim=(len(names) - 0.5, -0.6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.locator_params(axis="x", nbins=5)
    axes.axvline(1, color=style.INK, linewidth=1)
    if len(shares) == 1:
        style.write(axes, 0.5, 0.5, "Run measures", transform=axes.transAxes, ha="center", color=NOTE)
    if not _on_gpu(measured) and not _on_gpu(record):
        style.write(axes, 0.98, 0.03, f"kernels on a GPU: {NOT_MEASURED}", transform=axes.transAxes, ha="right", fontsize=9,
                    color=NOTE)  # fmt: skip
    time_plots.name(axes, x="share of the bound where it ran", title="◆ kernel   ● PyTorch")


def _row(name: str, expected: tuple, measured: list[Measurement], record: list[Measurement]) -> list[str]:
    words, work, seconds, limit = expected
    kernel = next(
        (m for some in (measured, record) for m in _on_gpu(some) if m.settings["kernel"] == name), None
    )
    told = _of(measured, name, ran="interpreted")
    twin = _of([m for m in measured if m.unit == "s"], name, by="torch")
    return [
        name, words, readable_bytes(work.bytes), flop_words(work.flops) if work.flops else "0", style.milliseconds(seconds), limit,
        f"{kernel.counts['share_of_bound']:.0%}" if kernel else NOT_MEASURED,
        (f"{told.median:.1g} {told.unit}" if told.median else "nothing") if told else "",
        f"{told.counts['launches']:.0f}" if told else f"{work.launches}",
        spread_words(twin) if twin else "", f"{twin.counts['share_of_bound']:.0%}" if twin else "",
    ]  # fmt: skip


def _alt(expected: dict[str, tuple], card: str, measured: list[Measurement]) -> str:
    told = ", ".join(
        f"{name} {style.milliseconds(seconds)} ({limit})" for name, (_, _, seconds, limit) in expected.items()
    )
    text = (
        f"Bars of the least time of each kernel on {card}, predicted: {told}. Beside them shares of the bound"
    )
    twins = [m for m in measured if m.unit == "s" and m.settings["by"] == "torch"]
    if twins:
        low, high = (f(m.counts["share_of_bound"] for m in twins) for f in (min, max))
        return text + f" that PyTorch's operations reach where they ran, {low:.0%} to {high:.0%}."
    return text + ", nothing is measured yet."


def _words(
    expected: dict[str, tuple], card: str, measured: list[Measurement], record: list[Measurement]
) -> str:
    by_limit: dict[str, list[str]] = {}
    for name, (_, _, _, limit) in expected.items():
        by_limit.setdefault(limit, []).append(name)
    lines = [
        f"On {card}, at these sizes, {limit} binds: {', '.join(names)}." for limit, names in by_limit.items()
    ]
    told = [m for m in measured if m.settings.get("ran") == "interpreted"]
    if told:
        launches = sum(m.counts["launches"] for m in told)
        lines.append(
            f"In the interpreter {len(told)} kernel{'s' * (len(told) > 1)} gave what their definitions give in float64, in "
            f"{launches:.0f} launches, at sizes that it can do. It runs Triton block by block in numpy: its times mean nothing "
            "and were not taken."
        )
    twins = [m for m in measured if m.unit == "s" and m.settings["by"] == "torch"]
    if twins and told:
        worst = min(twins, key=lambda m: m.counts["share_of_bound"])
        best = max(twins, key=lambda m: m.counts["share_of_bound"])
        lines.append(
            f"PyTorch's own operations on this machine: {best.counts['share_of_bound']:.0%} of the bound for "
            f"{best.settings['kernel']} ({best.settings['what']}), {worst.counts['share_of_bound']:.0%} for "
            f"{worst.settings['kernel']} ({worst.settings['what']}). What is made of several operations goes over memory several "
            "times, and a CPU's exponentials and sums take longer than its memory."
        )
    kernels = _on_gpu(measured) or _on_gpu(record)
    if kernels:
        best = sorted(kernels, key=lambda m: m.counts["share_of_bound"])
        lines.append(
            f"On {kernels[0].device.get('name', 'a GPU')} kernels reach {best[0].counts['share_of_bound']:.0%} "
            f"({best[0].settings['kernel']}) to {best[-1].counts['share_of_bound']:.0%} ({best[-1].settings['kernel']}) of its bound."
        )
    else:
        lines.append(f"How near our kernels come on a GPU: {NOT_MEASURED}.")
    return "\n".join(lines)
