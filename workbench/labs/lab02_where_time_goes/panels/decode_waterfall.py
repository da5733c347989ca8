"""The panel of time.decode_waterfall: levels that fall from transformers' step to the ceiling, a bar for each cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab02_where_time_goes.decode_waterfall import (
    CAUSES,
    CEILING,
    EXPERIMENT,
    LEFT,
    Fall,
    ceiling_of,
    expected,
    falls,
)
from workbench.labs.lab02_where_time_goes.ways import DECODER, LOOPED, NATIVE, ONE_CALL, PACKED, PREPARED, WAYS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Drawing, view
from workbench.panels.plots import LOST, PALE, name
from workbench.panels.stage import tell
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import OFF_BY, listed, spread_words

COLOURS = {
    CAUSES[DECODER]: "#3B2066",
    CAUSES[PREPARED]: style.LAUNCH,
    CAUSES[PACKED]: "#6E9CC0",
    CAUSES[LOOPED]: "#C2A14D",
    CAUSES[ONE_CALL]: "#A88FCB",
    CAUSES[NATIVE]: "#4F8F86",
    LEFT: PALE,
}
MEANS = {
    CAUSES[DECODER]: "masks, output objects, a cache that is copied in each step: code for every model and every use",
    CAUSES[PREPARED]: "products that share their input are joined, and the rotary table is made once",
    CAUSES[PACKED]: "where each weight lies in memory, for the processor's products",
    CAUSES[
        LOOPED
    ]: "a norm, a gate or an attention is one call, where torch takes several; weights are read as they lie",
    CAUSES[ONE_CALL]: "the step is one compiled call: no Python and no dispatch between its operations",
    CAUSES[NATIVE]: "threads wait for each other five times a layer, and a weight is fetched before it is needed",
    LEFT: "attention, the choice, Python around the call, threads that wait for each other",
}
HERE = {  # what may make it so, where taking a cause away made the step slower
    DECODER: "ours has operations of its own, and `generate` keeps more than tokens",
    PREPARED: "larger operations may gain nothing on this processor",
    PACKED: "rows as they are may be read faster than blocks, at these sizes on this processor",
    LOOPED: "torch's operations of many values may be faster than a call of ours, at these sizes",
    ONE_CALL: "what the compiler wrote may read weights more slowly than the products before it",
    NATIVE: "its loops may read weights of this size more slowly than those that the compiler wrote",
}
READ = "a plain sum over as many bytes"
RIGHT = 1.7  # room for words beside the bars, in lengths of the longest


@dataclass(frozen=True)
class Levels:
    """What is drawn: the level of each way, measured here, elsewhere and predicted, and the ceiling, in seconds."""

    here: dict[str, float]
    ceiling_s: float
    falls: list[Fall]
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)  # of the fall to that way, round by round
    old: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)

    def ratio(self, seconds: float) -> str:
        return f"{seconds / self.ceiling_s:,.3g} ×"


class DecodeWaterfallPanel(Panel):
    """Lab 02: a decode step from transformers to the read ceiling, a bar for each cause that is taken away."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        costs, by_way = expected(self.ceilings(), **settings)
        read, once_s = ceiling_of(self.ceilings(), costs)
        promised = {way: one.seconds for way, one in by_way.items()}
        steps, causes = _steps(self.measurements), _causes(self.measurements)
        taken, read_now = (_part(self.measurements, part) for part in ("ceiling", "read"))
        if steps:
            promised = {way: m.predicted for way, m in steps.items() if m.predicted}
        ceiling_s = taken.median if steps and taken else once_s
        here = {way: m.median for way, m in steps.items()}
        levels = Levels(
            here,
            ceiling_s,
            falls(here, ceiling_s),
            {to: m.spread for to, m in causes.items() if len(m.samples) > 1},
            {way: m.median for way, m in _steps(self.record).items()},
            promised,
        )
        title = "one decode step; × of reading once (blue); dashes: predicted"
        return view(
            Drawing(partial(_draw, levels=levels, title=title), _alt(levels), title),
            table=_table(levels, steps, causes, read_now),
            caption=f"One decode step of {_name(settings['model'])}, {settings['weights']}, greedy, one sequence"
            + ("" if steps else "; Run measures it"),
            words=[
                f"Predicted for {_asked(settings)}:"
                f" {listed([f'{way} {milliseconds(one.seconds)}' for way, one in by_way.items()])}; reading"
                f" {readable_bytes(read)} of weights and cache once, {milliseconds(once_s)}.",
                *(_words(levels, steps) if steps else []),
                *_read(levels, read_now if steps else None),
                *_left_out(taken),
            ],
            height=4.7,
        )


def _steps(measured: Sequence[Measurement]) -> dict[str, Measurement]:
    found = {m.settings["way"]: m for m in measured if m.settings["part"] == "step"}
    return {way: found[way] for way in WAYS if way in found}


def _part(measured: Sequence[Measurement], part: str) -> Measurement | None:
    return next((m for m in measured if m.settings["part"] == part), None)


def _causes(measured: Sequence[Measurement]) -> dict[str, Measurement]:
    return {m.settings["to"]: m for m in measured if m.settings["part"] == "cause"}


def _asked(settings: Mapping[str, Any]) -> str:
    return f"{_name(settings['model'])} in {settings['weights']}, {settings['context']:,} tokens cached"


def _name(model: Any) -> str:
    return model if isinstance(model, str) else getattr(model, "name", "") or f"{shape_of(model).num_layers} layers"


# -- in words --------------------------------------------------------------------------------------------------


def _words(levels: Levels, steps: Mapping[str, Measurement]) -> list[str]:
    (first, a), (last, b) = next(iter(steps.items())), next(reversed(list(steps.items())))
    said = [f"Measured for {_asked(a.settings)}."]
    if first != last:
        said.append(
            f"From {first} to {last} the step went from {milliseconds(a.median)} to {milliseconds(b.median)},"
            f" {a.median / b.median:.2g} × as fast."
        )
        said.append(_sizes(levels))
        said += [
            f"{_upper(fall.to)} is slower here than what stands before it, by {milliseconds(-fall.seconds)};"
            f" {HERE[fall.to]}."
            for fall in levels.falls
            if fall.to in HERE and fall.seconds < 0 and not _unsure(levels, fall)
        ]
    said.append(_left(levels, last, b))
    if "operations" in a.counts and first != last:
        said.append(
            f"Counted in a step: {a.counts['operations']:,.0f} operations and {a.counts['python_calls']:,.0f} Python"
            f" calls by {first}, {b.counts['operations']:,.0f} and {b.counts['python_calls']:,.0f} by {last}; the bytes"
            " of weights are the same."
        )
    return [" ".join(said)]


def _upper(way: str) -> str:
    """As a sentence begins with it."""
    return way[:1].upper() + way[1:]


def _unsure(levels: Levels, fall: Fall) -> bool:
    low, high = levels.spread.get(fall.to, (fall.seconds, fall.seconds))
    return low <= 0 <= high


def _sizes(levels: Levels) -> str:
    between = {fall.to: fall for fall in levels.falls if fall.cause != LEFT}
    unsure = [fall.cause for fall in between.values() if _unsure(levels, fall)]
    sure = [fall for fall in between.values() if fall.cause not in unsure and fall.seconds > 0]
    said = "No bar falls by more than rounds differ."
    if sure:
        largest = max(sure, key=lambda fall: fall.seconds)
        said = f"The largest cause is {largest.cause}, {milliseconds(largest.seconds)}."
    if unsure:
        said += f" Within what rounds differ by: {listed(unsure)}."
    unpacked = next((way for way in (LOOPED, ONE_CALL, NATIVE) if way in between), None)
    if unpacked and PACKED in between and between[PACKED].seconds < 0:
        said += (
            f" {_upper(unpacked)} reads weights as they are, so its bar first takes back the"
            f" {milliseconds(-between[PACKED].seconds)} of the packed ones."
        )
    return said


def _left(levels: Levels, last: str, step: Measurement) -> str:
    left = levels.here[last] - levels.ceiling_s
    if left < 0:
        return (
            f"{last} is {milliseconds(-left)} below the ceiling: some of its bytes came from a cache, or the machine"
            " was busy when its bandwidth was measured."
        )
    return (
        f"Left unexplained: {milliseconds(left)}, {left / step.median:.0%} of {last}'s step: {MEANS[LEFT]}, and"
        " whatever else the machine did."
    )


def _read(levels: Levels, now: Measurement | None) -> list[str]:
    """How a plain read of as many bytes did in the same rounds: whether the ceiling holds now."""
    if now is None:
        return []
    share = now.median / levels.ceiling_s
    means = "about as fast as when the bandwidth was measured"
    if share > OFF_BY:
        means = "slower than when the bandwidth was measured, and the steps of these rounds are likely to be, too"
    elif share < 1 / OFF_BY:
        means = "faster than memory: so many bytes stay in a cache, or the bandwidth was measured on a busy machine"
    took = f"{milliseconds(now.median)}, {share:.2g} × the ceiling"
    return [f"In the same rounds a plain sum over as many bytes took {took}: {means}."]


def _left_out(taken: Measurement | None) -> list[str]:
    reasons: Mapping[str, str] = taken.settings["left_out"] if taken else {}
    return [f"Left out: {'; '.join(f'{way}, because {why}' for way, why in reasons.items())}."] if reasons else []


def _table(
    levels: Levels, steps: Mapping[str, Measurement], causes: Mapping[str, Measurement], read_now: Measurement | None
) -> tuple[list[str], list[list[str]]]:
    header = ["step", "operations", "Python calls", "weights read", "cache read", "here", "of reading once"]
    header += ["taken away", "by it", "round by round", "predicted", "recorded"]
    fall_to = {fall.to: fall for fall in levels.falls}

    def row(way: str, cells: list[str]) -> list[str]:
        fall, cause = fall_to.get(way), causes.get(way)
        away = [fall.cause, milliseconds(fall.seconds)] if fall else ["", ""]
        promised = milliseconds(levels.predicted[way]) if way in levels.predicted else ""
        old = milliseconds(levels.old[way]) if way in levels.old else ""
        return [way, *cells, *away, spread_words(cause), promised, old]

    rows = []
    for way in WAYS:
        m = steps.get(way)
        counted = ["", "", "", ""]
        if m is not None:
            counted = [f"{m.counts[key]:,.0f}" for key in ("operations", "python_calls")]
            counted += [readable_bytes(m.counts[key]) for key in ("weight_bytes", "kv_bytes")]
        rows.append(row(way, [*counted, spread_words(m), levels.ratio(m.median) if m else ""]))
    rows.append(row(CEILING, ["", "", "", "", milliseconds(levels.ceiling_s), levels.ratio(levels.ceiling_s)]))
    if read_now is not None:
        rows.append(row(READ, ["", "", "", "", spread_words(read_now), levels.ratio(read_now.median)]))
    return header, rows


# -- drawn -----------------------------------------------------------------------------------------------------


def _draw(axes: Axes, levels: Levels, title: str) -> None:
    """The levels under each other, each fall from where the one before it ended; below them the ceiling."""
    name(axes, title=title)
    shown = list(levels.here) or list(WAYS)
    every = [levels.ceiling_s, *levels.here.values(), *levels.old.values(), *levels.predicted.values()]
    every += [levels.here[a] - low for a, b in zip(levels.here, shown[1:]) for low in levels.spread.get(b, ())]
    words_at = 1.03 * max(every)
    fall_to = {fall.to: fall for fall in levels.falls}
    rows = [*shown, *([LEFT] if levels.here else []), CEILING]
    before = 0.0
    for y, way in enumerate(shown):
        if way in levels.here:
            _draw_level(axes, y, before, levels.here[way], fall_to.get(way), levels.spread.get(way))
            before = levels.here[way]
        _draw_marks(axes, y, levels.predicted.get(way), levels.old.get(way))
        _write(axes, words_at, y, _beside(levels, way, fall_to.get(way)))
    if levels.here:
        left = fall_to[CEILING]
        _draw_level(axes, len(shown), before, levels.ceiling_s, left, levels.spread.get(CEILING))
        _write(axes, words_at, len(shown), _signed(left))
    bottom = len(rows) - 1
    [drawn] = axes.barh(bottom, levels.ceiling_s, height=0.62, color=style.WEIGHTS, zorder=3)
    tell(drawn, f"{CEILING}: {milliseconds(levels.ceiling_s)}")
    _write(axes, words_at, bottom, f"{milliseconds(levels.ceiling_s)}, {levels.ratio(levels.ceiling_s)}")
    axes.axvline(levels.ceiling_s, color=style.WEIGHTS, linestyle=(0, (4, 3)), linewidth=1.6, zorder=4)
    axes.set_yticks(range(len(rows)), rows, fontsize=10)
    axes.set_ylim(bottom + 0.6, -0.6)
    axes.grid(visible=False, axis="y")
    Axis("", milliseconds, "zero", room=(1, RIGHT)).draw(axes, "x", every)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick < words_at])


def _draw_level(
    axes: Axes, y: int, before: float, after: float, fall: Fall | None, spread: tuple[float, float] | None
) -> None:
    """The first level as a bar from 0, every other one as what lies between it and the one before."""
    low, high = (0.0, after) if fall is None else sorted((before, after))
    colour = style.INK if fall is None else COLOURS[fall.causes[-1]]
    rises = fall is not None and fall.seconds < 0
    look: dict[str, Any] = {"edgecolor": style.INK, "linewidth": 0.6}
    if rises:
        look = {"edgecolor": LOST, "linewidth": 1.4, "hatch": "////"}
    [drawn] = axes.barh(y, high - low, left=low, height=0.62, color=colour, zorder=3, **look)
    tell(
        drawn,
        f"to {milliseconds(after)}"
        if fall is None
        else f"{fall.cause}: {'; '.join(MEANS[cause] for cause in fall.causes)}",
    )
    axes.plot([after] * 2, [y, y + 1], color=style.INK, linewidth=0.9, zorder=2)
    if fall is not None and spread is not None and spread[0] < spread[1]:
        for colour, width in ((PALE, 3.6), (style.INK, 1.4)):  # seen on every bar
            axes.plot([before - end for end in spread], [y, y], color=colour, linewidth=width, zorder=5)


def _draw_marks(axes: Axes, y: int, predicted: float | None, old: float | None) -> None:
    if predicted is not None:
        look = style.PREDICTED | {"linestyle": (0, (2, 1)), "zorder": 5}
        axes.plot([predicted] * 2, [y - 0.38, y + 0.38], color=style.INK, **look)
    if old is not None:
        look = style.RECORDED | {"markerfacecolor": style.sheet()["axes.facecolor"]}
        axes.plot([old], [y], color=style.INK, zorder=6, **look)


def _beside(levels: Levels, way: str, fall: Fall | None) -> str:
    if way not in levels.here:
        return f"predicted {milliseconds(levels.predicted[way])}" if way in levels.predicted else "Run measures"
    seconds = levels.here[way]
    reached = f"{milliseconds(seconds)}, {levels.ratio(seconds)}"
    return reached if fall is None else f"{reached}\n{_signed(fall)}"


def _signed(fall: Fall) -> str:
    """The fall with the sign of what it does to the step, a cause a line."""
    sign = "−" if fall.seconds >= 0 else "+"
    causes = "\nand ".join(fall.causes)
    return f"{sign}{milliseconds(abs(fall.seconds))} {causes}"


def _write(axes: Axes, x: float, y: int, text: str) -> None:
    style.write(axes, x, y, text, va="center", fontsize=10, zorder=6, linespacing=1.15)


def _alt(levels: Levels) -> str:
    if not levels.here:
        promised = listed([f"{way} {milliseconds(seconds)}" for way, seconds in levels.predicted.items()])
        return (
            f"A waterfall of one decode step, not measured yet. Predicted: {promised}; reading weights and cache once"
            f" {milliseconds(levels.ceiling_s)} (dashed)."
        )
    reached = "; ".join(f"{way} {milliseconds(seconds)}" for way, seconds in levels.here.items())
    between = "; ".join(f"{fall.cause} {milliseconds(fall.seconds)}" for fall in levels.falls)
    return (
        f"A waterfall of one decode step, down to the dashed line of reading once, {milliseconds(levels.ceiling_s)}."
        f" Levels: {reached}. Between them: {between}."
    )
