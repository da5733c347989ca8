"""The panel of quantize.table: bytes, perplexity and decode time of every method, and the best within a budget."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from workbench.experiments import Setting
from workbench.experiments.inputs import shape_of
from workbench.experiments.quantize_inputs import linears_of
from workbench.experiments.quantize_recipes import HALF, NAMES, REFERENCE, is_int8, title
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.models.assembly import hollow_decoder
from workbench.models.config import ModelConfig
from workbench.panels import style
from workbench.panels.quantize_plots import COLOURS, MARKS, NOTE, legend_below
from workbench.panels.smaller_knobs import KnobPanel
from workbench.panels.smaller_plots import listed
from workbench.panels.time_plots import log_scale, same_knobs
from workbench.panels.view import View
from workbench.panels.words import recorded_label

SMALL = 1e-3  # of the perplexity: below it the axis is linear, since differences have either sign
FULL = (REFERENCE, HALF)


@dataclass(frozen=True)
class Point:
    """One recipe, measured."""

    quality: Measurement
    decode: Measurement | None

    @property
    def method(self) -> str:
        """By which it is drawn."""
        settings = self.quality.settings
        return "int8 weights" if is_int8(settings) else settings["method"]

    @property
    def title(self) -> str:
        return title(self.quality.settings)

    @property
    def linear_bytes(self) -> float:
        return self.quality.counts["linear_bytes"]

    @property
    def bits(self) -> float:
        return self.quality.counts["bits_per_weight"]

    @property
    def excess(self) -> float:
        """Of the perplexity, as a share."""
        return math.expm1(self.quality.counts["excess_nats"])

    @property
    def excess_error(self) -> float:
        return math.exp(self.quality.counts["excess_nats"]) * self.quality.counts["excess_standard_error"]


def points_of(measured: Sequence[Measurement]) -> list[Point]:
    """In the order they were measured."""
    found = []
    for m in measured:
        if m.settings["measured"] != "quality":
            continue
        recipe = {key: m.settings.get(key) for key in ("method", "bits", "group", "options")}
        steps = (
            d
            for d in measured
            if d.settings["measured"] == "decode" and {k: d.settings.get(k) for k in recipe} == recipe
        )
        found.append(Point(m, next(steps, None)))
    return found


class QuantizersPanel(KnobPanel):
    """Every recipe a point: its bytes against its perplexity, and against the time of a step."""

    experiment_name = "quantize.table"
    knobs_words = "a budget for the weights:"
    knobs = (
        Setting("budget", 4.5, "choice", choices=(2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 8.5, 16.0), unit="bits a weight",
                help="scales and all else included; the best within it is named"),
    )  # fmt: skip

    def view(self, settings: dict[str, Any]) -> View:
        made = [m for m in self.measurements if same_knobs(m, {"recipes": settings["recipes"]})]
        live, old = points_of(made), points_of(self.record)
        budget, weights = self.knob_settings["budget"], linear_weights(shape_of(settings["model"]))
        figure, (quality, steps) = style.new_figure(1, 2, height=4.9, width_ratios=[1.25, 1])
        shown = live or old
        _draw_quality(quality, live, old, budget, weights)
        _draw_steps(steps, live, old)
        methods = list(dict.fromkeys(p.method for p in shown if p.method != REFERENCE))
        names = NAMES | {"int8 weights": "int8"}
        legend_below(figure, [(method, names.get(method, method)) for method in methods], columns=6)
        if old:
            note = f"hollow: {recorded_label(self.record)}"
            style.write(steps, 0.985, 0.125, note, fontsize=9, ha="right", transform=figure.transFigure)
        figure.subplots_adjust(left=0.1, right=0.985, top=0.93, bottom=0.245, wspace=0.23)
        return View(
            figure=figure,
            alt=_alt(shown, live=bool(live)),
            header=["recipe", "bits a weight", "linears", "file", "perplexity", "nats above float32",
                    "layer error", "to quantize", "a step", "× float32"],
            rows=[_row(p) for p in shown],
            caption=f"{settings['passages'] if live or not old else old[0].quality.settings['passages']} passages of "
            "held-out text" + ("" if live else "; recorded" if old else "; Run measures"),
            words=_words(shown, budget, weights=weights, live=bool(live), record=self.record),
        )  # fmt: skip


@functools.lru_cache(maxsize=8)
def linear_weights(config: ModelConfig) -> int:
    """Of the layers, without loading a model."""
    linears = linears_of(hollow_decoder(config, name="")).values()
    return sum(linear.in_features * linear.out_features for linear in linears)


def _draw_quality(axes: Axes, live: list[Point], old: list[Point], budget: float, weights: int) -> None:
    title = "lower left is better (line: the edge)"
    style.label(axes, x="bytes of the quantized linears", y="perplexity above float32", title=title)
    every = [p for p in (*live, *old) if p.method != REFERENCE]
    if not every:
        _nothing(axes, "Run quantizes the model by every method")
        _bytes_axis(axes, [bits * weights / 8 for bits in (2, 16)])
        _draw_limit(axes, budget, weights / 8)
        return
    _bytes_axis(axes, [p.linear_bytes for p in every])
    axes.set_yscale("symlog", linthresh=SMALL, linscale=0.5)
    low, high = min(-SMALL / 2, *(p.excess for p in every)), max(p.excess for p in every)
    ticks = [
        0.0,
        *(sign * 10.0**e for e in range(-3, 5) for sign in (1, -1) if 2 * low < sign * 10.0**e < 4 * high),
    ]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    axes.set_ylim(1.6 * low, 2 * high)
    axes.axhline(0, color=style.INK, linewidth=0.9, zorder=2)
    for p in old:
        if p.method != REFERENCE:
            _mark(axes, p.linear_bytes, p.excess, p, hollow=True)
    for p in live:
        if p.method != REFERENCE:
            _mark(axes, p.linear_bytes, p.excess, p)
            axes.errorbar([p.linear_bytes], [p.excess], yerr=[p.excess_error], fmt="none",
                          ecolor=COLOURS[p.method], elinewidth=1.3, capsize=3, zorder=3)  # fmt: skip
    _draw_limit(axes, budget, every[0].linear_bytes / every[0].bits)
    outer = edge(p for p in live or old if p.method != REFERENCE)
    axes.plot(
        [p.linear_bytes for p in outer], [p.excess for p in outer], color=style.IDLE, linewidth=1.1, zorder=2
    )
    best = best_within(live or old, budget)
    if best is not None:
        axes.plot([best.linear_bytes], [best.excess], linestyle="", marker="o", markersize=16, zorder=4,
                  markerfacecolor="none", markeredgecolor=style.LEARNER, markeredgewidth=1.4)  # fmt: skip


def _draw_limit(axes: Axes, budget: float, bytes_a_bit: float) -> None:
    """The budget as a line, with its name on the side where there is room."""
    at = budget * bytes_a_bit
    axes.axvline(at, color=style.LEARNER, linewidth=1.4, linestyle=(0, (1, 2)), zorder=1)
    low, high = axes.get_xlim()
    side = "right" if at > (low * high) ** 0.5 else "left"
    if low <= at <= high:
        style.write(axes, at, 0.985, f" {budget:g} bits ", color=style.LEARNER, ha=side, va="top", fontsize=9,
                    transform=axes.get_xaxis_transform())  # fmt: skip


def _draw_steps(axes: Axes, live: list[Point], old: list[Point]) -> None:
    """Each against float32 in turns with it, so that a machine that slows down slows both."""
    timed = [p for p in live or old if p.decode is not None]
    title = "a step of one token"
    if timed:
        float32_s = statistics.median(p.decode.counts["reference_s"] for p in timed)
        title += f" (float32: {style.milliseconds(float32_s)})"
    style.label(axes, x="bytes of the quantized linears", y="decode time, × float32", title=title)
    every = [p for p in (*live, *old) if p.decode is not None]
    if not every:
        _nothing(axes, "Run times a step of each")
        return
    _bytes_axis(axes, [p.linear_bytes for p in every])
    log_scale(axes, "y", [1.0, *(p.decode.counts["ratio"] for p in every)], lambda v: f"{v:g}")
    axes.axhline(1, color=style.INK, linewidth=1.2, linestyle=(0, (1, 2)), zorder=1)
    for p in (p for p in old if p.decode is not None):
        _mark(axes, p.linear_bytes, p.decode.counts["ratio"], p, hollow=True)
    for p in (p for p in live if p.decode is not None):
        ratio, low, high = (p.decode.counts[key] for key in ("ratio", "ratio_p10", "ratio_p90"))
        _mark(axes, p.linear_bytes, ratio, p)
        axes.errorbar([p.linear_bytes], [ratio], yerr=[[max(0.0, ratio - low)], [max(0.0, high - ratio)]], fmt="none",
                      ecolor=COLOURS[p.method], elinewidth=1.3, capsize=3, zorder=3)  # fmt: skip


def _bytes_axis(axes: Axes, at: Sequence[float]) -> None:
    low, high = min(at) / 1.25, max(at) * 1.25
    ticks = [b * 10.0**e for e in range(2, 12) for b in (1, 2, 5) if low <= b * 10.0**e <= high]
    style.log_ticks(axes, "x", ticks, text=readable_bytes)
    axes.set_xlim(low, high)


def _mark(axes: Axes, x: float, y: float, p: Point, *, hollow: bool = False) -> None:
    face = {"markerfacecolor": "none"} if hollow else {"markeredgecolor": "#FFFFFF", "markeredgewidth": 0.7}
    axes.plot([x], [y], linestyle="", marker=MARKS[p.method], color=COLOURS[p.method], markersize=8,
              zorder=3 if hollow else 4, **face)  # fmt: skip


def _nothing(axes: Axes, text: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    style.write(axes, 0.5, 0.5, text, color=NOTE, transform=axes.transAxes, ha="center", va="center")


def best_within(points: Sequence[Point], budget: float) -> Point | None:
    """The lowest perplexity of those that take at most so many bits a weight."""
    fitting = [p for p in points if p.bits <= budget]
    return min(fitting, key=lambda p: p.quality.median, default=None)


def edge(points: Iterable[Point]) -> list[Point]:
    """Those that no other is both smaller and better than, the smallest first."""
    found: list[Point] = []
    for p in sorted(points, key=lambda p: (p.linear_bytes, p.quality.median)):
        if not found or p.quality.median < found[-1].quality.median:
            found.append(p)
    return found


def _row(p: Point) -> list[str]:
    c, steps = p.quality.counts, p.decode
    above = f"{c['excess_nats']:+.4f} ± {c['excess_standard_error']:.4f}" if p.method != REFERENCE else ""
    is_made = p.method not in FULL
    return [
        p.title,
        f"{p.bits:.2f}",
        readable_bytes(p.linear_bytes),
        readable_bytes(c["saved_bytes"]),
        f"{p.quality.median:.3f}",
        above,
        f"{c['layer_output_error']:.2e}" if p.method != REFERENCE else "",
        style.milliseconds(c["seconds_to_quantize"]) if is_made else "",
        style.milliseconds(steps.median) if steps else "",
        f"{steps.counts['ratio']:.2f}" if steps else "",
    ]


def _alt(shown: Sequence[Point], *, live: bool) -> str:
    head = "Two plots against the bytes of the quantized linears: perplexity above float32, and the time of a decode step. "
    if not shown:
        return head + "Nothing measured yet."
    parts = [
        f"{p.title}: {p.bits:.2f} bits a weight, {p.excess:+.2%}"
        + (f", {style.milliseconds(p.decode.median)} a token" if p.decode else "")
        for p in shown
        if p.method != REFERENCE
    ]
    return f"{head}{'Measured' if live else 'Recorded'}: {'; '.join(parts)}."


def _words(
    shown: Sequence[Point], budget: float, *, weights: int, live: bool, record: Sequence[Measurement]
) -> str:
    room = readable_bytes(budget * weights / 8)
    if not shown:
        return (
            f"{budget:g} bits a weight are {room} for the {weights:,} weights of the layers. Run quantizes the model by "
            "every method, with the same calibration text, and judges all on the same held-out text."
        )
    lines = [] if live else [f"What is drawn was {recorded_label(list(record))}."]
    best = best_within(shown, budget)
    if best is None:
        lines.append(f"No recipe here stays within {budget:g} bits a weight.")
    else:
        c = best.quality.counts
        lines.append(
            f"Within {budget:g} bits a weight ({best.title}, {best.bits:.2f}) the lowest perplexity is "
            f"{best.quality.median:.3f}, {c['excess_nats']:+.4f} ± {c['excess_standard_error']:.4f} nats a token from "
            "float32. Where two lie within their spread, the smaller or the faster one is the better choice."
        )
    outer = [p.title for p in edge(shown) if p.method not in FULL]
    if outer:
        lines.append(f"On the edge, where nothing else is both smaller and better: {listed(outer)}.")
    lines += _rtn_words(shown) + _time_words(shown)
    lines.append(
        "Bytes count codes, scales, codebooks and outliers of the linears; the file also holds the embedding and the norms. "
        "One model, one calibration text: ± is the standard error over the passages, paired with float32."
    )
    return "\n".join(lines)


def _rtn_words(shown: Sequence[Point]) -> list[str]:
    """What GPTQ and AWQ leave of RTN's excess, and whether all that a recipe must show it showed."""
    shares = [
        f"{p.title} {p.quality.counts['share_of_rtn_excess']:.2f}"
        for p in shown
        if p.method in ("gptq", "awq") and "share_of_rtn_excess" in p.quality.counts
    ]
    lines = []
    if shares:
        lines.append(f"Of RTN's excess in as many bits and groups is left: {listed(shares)}.")
    failed = [p for p in shown if p.quality.counts.get("claim_holds") == 0]
    lines += [f"{p.title}: {p.quality.check.partition(';')[0]}." for p in failed]
    return lines


def _time_words(shown: Sequence[Point]) -> list[str]:
    timed = [p for p in shown if p.decode is not None and p.method not in FULL]
    if not timed:
        return []
    slower = [p for p in timed if p.decode.counts["ratio_p10"] > 1]
    faster = [p for p in timed if p.decode.counts["ratio_p90"] < 1]
    text = f"A decode step is faster than in float32 for {len(faster)} of {len(timed)} recipes, slower for {len(slower)}"
    if slower:
        text += (
            ": fewer bytes are read, but where codes are turned back into numbers on the way, that takes longer than the "
            "reading saves"
        )
    return [text + "."]
