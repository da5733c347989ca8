"""The panel of quantize.table: bytes, perplexity and decode time of every method, and the best within a budget."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from workbench.experiments import Setting
from workbench.experiments.inputs import shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab05_quantization.inputs import linears_of
from workbench.labs.lab05_quantization.panels.plots import COLOURS, MARKS, legend_below
from workbench.labs.lab05_quantization.quantizers import EXPERIMENT
from workbench.labs.lab05_quantization.recipes import HALF, NAMES, REFERENCE, is_int8, title
from workbench.models.assembly import hollow_decoder
from workbench.models.config import ModelConfig
from workbench.panels import style
from workbench.panels.chart import Axis, Drawing, table, view
from workbench.panels.knobs import KnobPanel
from workbench.panels.plots import mark, matching, nothing
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import listed, recorded_label

SMALL = 1e-3  # of the perplexity: below it the axis is linear, since differences have either sign
FULL = (REFERENCE, HALF)
EDGE = "lower left is better (line: the edge)"


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
    points = []
    for m in matching(measured, measured="quality"):
        recipe = {key: m.settings.get(key) for key in ("method", "bits", "group", "options")}
        points.append(Point(m, next(iter(matching(measured, measured="decode", **recipe)), None)))
    return points


def _of_decode(text: Callable[[Measurement], str]) -> Callable[[Point], str]:
    """A cell about the decode step, where it was timed."""
    return lambda p: text(p.decode) if p.decode else ""


COLUMNS = {
    "recipe": "{m.title}",
    "bits per weight": "{m.bits:.2f}",
    "linears": lambda p: readable_bytes(p.linear_bytes),
    "file": lambda p: readable_bytes(p.quality.counts["saved_bytes"]),
    "perplexity": "{m.quality.median:.3f}",
    "nats above float32": lambda p: _above(p) if p.method != REFERENCE else "",
    "layer error": lambda p: f"{p.quality.counts['layer_output_error']:.2e}" if p.method != REFERENCE else "",
    "to quantize": lambda p: milliseconds(p.quality.counts["seconds_to_quantize"]) if p.method not in FULL else "",
    "a step": _of_decode(lambda m: milliseconds(m.median)),
    "× float32": _of_decode(lambda m: f"{m.counts['ratio']:.2f}"),
}


def _above(p: Point) -> str:
    c = p.quality.counts
    return f"{c['excess_nats']:+.4f} ± {c['excess_standard_error']:.4f}"


RATIO = Axis("decode time, × float32", lambda ratio: f"{ratio:g}", "log")


class QuantizersPanel(KnobPanel):
    """Lab 05: bytes, perplexity and decode time of every method of quantization, and the best within a budget."""

    experiment = EXPERIMENT
    knobs_words = "a budget for the weights:"
    knobs = (
        Setting(
            "budget",
            4.5,
            "choice",
            choices=(2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 8.5, 16.0),
            unit="bits per weight",
            help="scales and all else included; the best within it is named",
        ),
    )

    def view(self, settings: dict[str, Any]) -> View:
        live, old = points_of(self.made(settings, ("recipes",))), points_of(self.record)
        budget, weights = self.knob_settings["budget"], linear_weights(shape_of(settings["model"]))
        shown = live or old
        parts = [
            f"{p.title}: {p.bits:.2f} bits per weight, {p.excess:+.2%}"
            + (f", {milliseconds(p.decode.median)} a token" if p.decode else "")
            for p in shown
            if p.method != REFERENCE
        ]
        alt_text = (
            "Two plots against the bytes of the quantized linears: perplexity above float32, and the time of a step. "
        )
        alt_text += f"{'Measured' if live else 'Recorded'}: {'; '.join(parts)}." if parts else "Nothing measured yet."
        methods = list(dict.fromkeys(p.method for p in shown if p.method != REFERENCE))
        names = NAMES | {"int8 weights": "int8"}

        def legend(axes: Axes) -> None:
            _draw_steps(axes, live, old)
            legend_below(axes.figure, [(method, names.get(method, method)) for method in methods], columns=6)
            if old:
                note = f"hollow: {recorded_label(self.record)}"
                style.write(axes, 0.985, 0.105, note, fontsize=10, ha="right", transform=axes.figure.transFigure)

        passages = settings["passages"] if live or not old else old[0].quality.settings["passages"]
        return view(
            Drawing(lambda axes: _draw_quality(axes, live, old, budget, weights), alt_text, EDGE),
            Drawing(legend),
            height=5.0,
            width_ratios=[1.25, 1],
            below=0.6,
            table=table(shown, COLUMNS),
            caption=f"{passages} passages of held-out text"
            + ("" if live else "; recorded" if old else "; Run measures"),
            words=_words(shown, budget, weights=weights, live=bool(live), record=self.record),
        )


@functools.lru_cache(maxsize=8)
def linear_weights(config: ModelConfig) -> int:
    """Of the layers, without loading a model."""
    linears = linears_of(hollow_decoder(config, name="")).values()
    return sum(linear.in_features * linear.out_features for linear in linears)


def _draw_quality(axes: Axes, live: list[Point], old: list[Point], budget: float, weights: int) -> None:
    style.label(axes, x="bytes of the quantized linears", y="perplexity above float32", title=EDGE)
    every = [p for p in (*live, *old) if p.method != REFERENCE]
    if not every:
        nothing(axes, "Run quantizes the model by every method")
        _bytes_axis(axes, [bits * weights / 8 for bits in (2, 16)])
        _draw_limit(axes, budget, weights / 8)
        return
    _bytes_axis(axes, [p.linear_bytes for p in every])
    axes.set_yscale("symlog", linthresh=SMALL, linscale=0.5)
    low, high = min(-SMALL / 2, *(p.excess for p in every)), max(p.excess for p in every)
    ticks = [0.0, *(sign * 10.0**e for e in range(-3, 5) for sign in (1, -1) if 2 * low < sign * 10.0**e < 4 * high)]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    axes.set_ylim(1.6 * low, 2 * high)
    axes.axhline(0, color=style.INK, linewidth=0.9, zorder=2)
    for p in old:
        if p.method != REFERENCE:
            _mark(axes, p.linear_bytes, p.excess, p)
    for p in live:
        if p.method != REFERENCE:
            _mark(axes, p.linear_bytes, p.excess, p, (p.excess - p.excess_error, p.excess + p.excess_error))
    _draw_limit(axes, budget, every[0].linear_bytes / every[0].bits)
    outer = edge(p for p in live or old if p.method != REFERENCE)
    axes.plot([p.linear_bytes for p in outer], [p.excess for p in outer], color=style.IDLE, linewidth=1.1, zorder=2)
    best = best_within(live or old, budget)
    if best is not None:
        ring: dict[str, Any] = {
            "marker": "o",
            "markersize": 16,
            "markerfacecolor": "none",
            "markeredgewidth": 1.4,
            "zorder": 4,
        }
        axes.plot([best.linear_bytes], [best.excess], linestyle="", color=style.LEARNER, **ring)


def _draw_limit(axes: Axes, budget: float, bytes_a_bit: float) -> None:
    """The budget as a line, with its name on the side where there is room."""
    mark(axes, budget * bytes_a_bit, f"{budget:g} bits", style.LEARNER, height=0.985)


def _draw_steps(axes: Axes, live: list[Point], old: list[Point]) -> None:
    """Each against float32 in turns with it, so that a machine that slows down slows both."""
    timed = [p.decode for p in live or old if p.decode is not None]
    title = "a step of one token"
    if timed:
        float32_s = statistics.median(decode.counts["reference_s"] for decode in timed)
        title += f" (float32: {style.milliseconds(float32_s)})"
    style.label(axes, x="bytes of the quantized linears", y=RATIO.name, title=title)
    every = [(p, p.decode.counts) for p in (*live, *old) if p.decode is not None]
    if not every:
        nothing(axes, "Run times a step of each")
        return
    _bytes_axis(axes, [p.linear_bytes for p, _ in every])
    RATIO.draw(axes, "y", [1.0, *(counts["ratio"] for _, counts in every)])
    axes.axhline(1, color=style.INK, linewidth=1.2, linestyle=(0, (1, 2)), zorder=1)
    for p in old:
        if p.decode is not None:
            _mark(axes, p.linear_bytes, p.decode.counts["ratio"], p)
    for p in live:
        if p.decode is not None:
            ratio, low, high = (p.decode.counts[key] for key in ("ratio", "ratio_p10", "ratio_p90"))
            _mark(axes, p.linear_bytes, ratio, p, (low, high))


def _bytes_axis(axes: Axes, at: Sequence[float]) -> None:
    Axis("", readable_bytes, "log", room=(1.25, 1.25)).draw(axes, "x", at)


def _mark(axes: Axes, x: float, y: float, p: Point, ends: tuple[float, float] | None = None) -> None:
    """A point, with its spread where it was measured here, hollow where it was recorded."""
    face: dict[str, Any] = {"markeredgecolor": "#FFFFFF", "markeredgewidth": 0.7, "zorder": 4}
    if ends is None:
        face = {"markerfacecolor": "none", "zorder": 3}
    else:
        bars = [[max(0.0, y - ends[0])], [max(0.0, ends[1] - y)]]
        look: dict[str, Any] = {
            "fmt": "none",
            "ecolor": COLOURS[p.method],
            "elinewidth": 1.3,
            "capsize": 3,
            "zorder": 3,
        }
        axes.errorbar([x], [y], yerr=bars, **look)
    axes.plot([x], [y], linestyle="", marker=MARKS[p.method], color=COLOURS[p.method], markersize=8, **face)


def best_within(points: Sequence[Point], budget: float) -> Point | None:
    """The lowest perplexity of those that take at most so many bits per weight."""
    fitting = [p for p in points if p.bits <= budget]
    return min(fitting, key=lambda p: p.quality.median, default=None)


def edge(points: Iterable[Point]) -> list[Point]:
    """Those that no other is both smaller and better than, the smallest first."""
    outer: list[Point] = []
    for p in sorted(points, key=lambda p: (p.linear_bytes, p.quality.median)):
        if not outer or p.quality.median < outer[-1].quality.median:
            outer.append(p)
    return outer


def _words(shown: Sequence[Point], budget: float, *, weights: int, live: bool, record: Sequence[Measurement]) -> str:
    room = readable_bytes(budget * weights / 8)
    if not shown:
        return (
            f"{budget:g} bits per weight are {room} for the {weights:,} weights of the layers. Run quantizes the "
            "model by every method, with the same calibration text, and judges all on the same held-out text."
        )
    lines = [] if live else [f"What is drawn was {recorded_label(record)}."]
    best = best_within(shown, budget)
    if best is None:
        lines.append(f"No recipe here stays within {budget:g} bits per weight.")
    else:
        c = best.quality.counts
        lines.append(
            f"Within {budget:g} bits per weight ({best.title}, {best.bits:.2f}) the lowest perplexity is "
            f"{best.quality.median:.3f}, {c['excess_nats']:+.4f} ± {c['excess_standard_error']:.4f} nats per token "
            "from float32. Where two lie within their spread, the smaller or the faster one is the better choice."
        )
    outer = [p.title for p in edge(shown) if p.method not in FULL]
    if outer:
        lines.append(f"On the edge, where nothing else is both smaller and better: {listed(outer)}.")
    lines += _rtn_words(shown) + _time_words(shown)
    lines.append(
        "Bytes count codes, scales, codebooks and outliers of the linears; the file also holds the embedding and the"
        " norms. One model, one calibration text: ± is the standard error over the passages, paired with float32."
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
    timed = [p.decode.counts for p in shown if p.decode is not None and p.method not in FULL]
    if not timed:
        return []
    slower = [counts for counts in timed if counts["ratio_p10"] > 1]
    faster = [counts for counts in timed if counts["ratio_p90"] < 1]
    text = (
        f"A decode step is faster than in float32 for {len(faster)} of {len(timed)} recipes, slower for {len(slower)}"
    )
    if slower:
        text += (
            ": fewer bytes are read, but where codes are turned back into numbers on the way, that takes longer than"
            " the reading saves"
        )
    return [text + "."]
