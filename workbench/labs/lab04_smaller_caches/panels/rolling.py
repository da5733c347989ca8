"""The panel of smaller.rolling: a rolling buffer, token by token, and its bytes against a cache that keeps all."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from workbench.experiments.inputs import dtype_of, shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.kv import stored_dtype
from workbench.labs.lab04_smaller_caches.rolling import EXPERIMENT, Buffer, buffer_bytes, full_bytes, rolling_config
from workbench.models.config import ModelConfig
from workbench.panels import style
from workbench.panels.chart import Axis, Chart, Drawing, line, measured, predicted, table, view
from workbench.panels.knobs import PlayPanel
from workbench.panels.plots import PALE
from workbench.panels.stage import tell
from workbench.panels.view import View

SINK = "#8A5C00"  # the cache's colour, darker: kept for good
SPARE = "#F7CF80"  # the same, lighter: held and no longer seen, so that tokens can be taken back
NUMBERED = 30  # cells in a row up to which each carries its number, and the second, third of up to 2, 3 times as many


class RollingPanel(PlayPanel):
    """Lab 04: what a rolling buffer holds, token by token, with a Play button."""

    experiment = EXPERIMENT
    draws_records = False
    played = "shown_tokens"

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in ("window", "sinks", "global_every")}
        config = rolling_config(shape_of(settings["model"]), **knobs)
        buffer = Buffer(settings["window"], settings["sinks"], settings["rewind"])
        element = stored_dtype(dtype_of(settings["model"]), self.bench.device).itemsize
        made, tokens = self.made(settings, (*knobs, "rewind")), settings["tokens"]
        shown = min(settings["shown_tokens"], tokens)
        now, full = buffer_bytes(config, buffer, shown, element), full_bytes(config, shown, element)
        held = sorted(p for p in buffer.held(shown) if p is not None)
        alt_text = (
            f"After {shown:,} tokens a layer with a window of {buffer.window:,} and {buffer.sinks} sinks holds"
            f" {len(held):,} positions in {buffer.places:,} places: {_ranges(held)}. In bytes: this cache"
            f" {readable_bytes(now)}, one that keeps all {readable_bytes(full)}; {len(config.global_layers)} of"
            f" {config.num_layers} layers see everything."
        )
        steps = sorted({1, buffer.sinks + buffer.window, buffer.places, buffer.places + 1, tokens // 2, tokens})
        said = {m.settings["tokens"]: f"{m.median:,.0f}" for m in made}
        return view(
            Drawing(lambda axes: _draw_strips(axes, config, buffer, shown, tokens), alt_text, "the text"),
            Drawing(lambda axes: _draw_ring(axes, buffer, shown)),
            _bytes_chart(config, buffer, tokens, shown, element, made),
            columns=1,
            height=style.TALLEST,
            height_ratios=[1.15, 0.62, 2.5],
            table=table(
                [n for n in steps if 1 <= n <= tokens],
                {
                    "tokens": "{m:,}",
                    "held in a windowed layer": lambda n: f"{min(n, buffer.places):,}",
                    "bytes in use": lambda n: said.get(n, ""),
                    "by formula": lambda n: f"{buffer_bytes(config, buffer, n, element):,}",
                    "a cache that keeps all": lambda n: f"{full_bytes(config, n, element):,}",
                },
            ),
            caption="Token by token" if made else "By the formula; Run asks a real kv",
            words=_words(config, buffer, shown, now, full, element, made),
        )


def _cells(axes: Axes, row: float, colours: list[str], texts: list[str], hover: list[str], height: float = 0.8) -> None:
    """A row of cells from x = 0, each with its colour, its text and its hover name."""
    boxes = [Rectangle((x - 0.46, row - height / 2), 0.92, height) for x in range(len(colours))]
    cells = PatchCollection(boxes, facecolor=colours, edgecolor="none", linewidth=0, zorder=2)
    tell(cells, *hover)
    axes.add_collection(cells)
    size = 10
    for x, (text, colour) in enumerate(zip(texts, colours)):
        if text:
            ink = "#FFFFFF" if colour == SINK else style.INK
            style.write(axes, x, row, text, ha="center", va="center", fontsize=size, color=ink, zorder=3)


def _bare(axes: Axes, wide: int, high: float) -> None:
    axes.set_xlim(-0.6, wide - 0.4)
    axes.set_ylim(high - 0.5, -0.5)
    axes.set_xticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_strips(axes: Axes, config: ModelConfig, buffer: Buffer, shown: int, tokens: int) -> None:
    """The text, position by position, in a layer with the window and in one without."""
    held, seen = {p for p in buffer.held(shown) if p is not None}, buffer.seen(shown)
    colours = [_colour(p, buffer, held, seen) if p < shown else style.sheet()["axes.facecolor"] for p in range(tokens)]
    numbers = [_number(p, tokens) if p < shown else "" for p in range(tokens)]
    rows = ["with window"]
    hover = [
        f"position {p}: {_state(p, buffer, held, seen)}" if p < shown else f"position {p}: to come"
        for p in range(tokens)
    ]
    _cells(axes, 0, colours, numbers, hover)
    if config.global_layers:
        rows.append("global")
        hover = [f"position {p}: {'held and seen' if p < shown else 'to come'}" for p in range(tokens)]
        all_held = [style.CACHE if p < shown else style.sheet()["axes.facecolor"] for p in range(tokens)]
        _cells(axes, 1, all_held, numbers, hover)
    for row in range(len(rows)):
        axes.add_patch(Rectangle((shown - 1.46, row - 0.4), 0.92, 0.8, fill=False, edgecolor=style.INK, linewidth=1.6))
    _bare(axes, tokens, 2)
    axes.set_yticks(range(len(rows)), labels=rows)
    style.label(
        axes, title=f"the text after {shown:,} tokens\n(dark: sinks; light: held, no longer seen; grey: forgotten)"
    )


def _number(position: int, cells: int) -> str:
    return "" if position % -(-cells // NUMBERED) else str(position)


def _colour(position: int, buffer: Buffer, held: set[int], seen: set[int]) -> str:
    if position not in held:
        return PALE
    if position < buffer.sinks:
        return SINK
    return style.CACHE if position in seen else SPARE


def _state(position: int, buffer: Buffer, held: set[int], seen: set[int]) -> str:
    if position not in held:
        return "forgotten"
    if position < buffer.sinks:
        return "a sink, held and seen"
    return "held and seen" if position in seen else "held, no longer seen"


def _draw_ring(axes: Axes, buffer: Buffer, shown: int) -> None:
    """The places of the buffer with the positions they hold; the newest is framed."""
    held, seen = buffer.held(shown), buffer.seen(shown)
    live = {p for p in held if p is not None}
    colours = [PALE if p is None else _colour(p, buffer, live, seen) for p in held]
    texts = ["" if p is None else _number(p, buffer.places) for p in held]
    hover = [
        f"place {place}: " + ("free" if p is None else f"position {p}, {_state(p, buffer, live, seen)}")
        for place, p in enumerate(held)
    ]
    _cells(axes, 0, colours, texts, hover)
    newest = buffer.place_of(shown - 1)
    axes.add_patch(Rectangle((newest - 0.46, -0.4), 0.92, 0.8, fill=False, edgecolor=style.INK, linewidth=1.6))
    _bare(axes, max(buffer.places, 20), 1)
    axes.set_yticks([0], labels=["the buffer"])
    title = f"{buffer.places:,} places: {buffer.sinks} sinks, then a ring of W − 1 + {buffer.rewind} = {buffer.turns}"
    style.label(axes, title=title + "\n(numbers: the position that a place holds)")


def _bytes_chart(config, buffer: Buffer, tokens: int, shown: int, element: int, made: list[Measurement]) -> Chart:
    numbers = range(1, tokens + 1)
    in_use = measured("as the kv says", made, "tokens", style.CACHE, spread=False, markersize=4)

    def shade(axes: Axes) -> None:
        if made:
            tokens_now, bytes_now = zip(*in_use.points)
            axes.fill_between(tokens_now, bytes_now, 0, color=style.CACHE, alpha=0.25, linewidth=0)

    return Chart(
        line("a cache that keeps all", [(n, full_bytes(config, n, element)) for n in numbers], style.IDLE),
        predicted("this one, by formula", [(n, buffer_bytes(config, buffer, n, element)) for n in numbers], zorder=4),
        in_use,
        x=Axis("tokens of the text", limits=(0.5, tokens + 0.5)),
        y=Axis("bytes, all layers", readable_bytes, "zero", room=(1, 1.05)),
        title=f"{config.num_layers - len(config.global_layers)} of {config.num_layers} layers have the window",
        legend="upper left",
        marks=[(shown, "shown above", style.LEARNER, 0.1)],
        also=shade,
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 7, 8, 9] -> '0 to 1, 7 to 9'."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


def _words(config, buffer: Buffer, shown: int, now: int, full: int, element: int, made: list[Measurement]) -> str:
    held = sorted(p for p in buffer.held(shown) if p is not None)
    newest, place = shown - 1, buffer.place_of(shown - 1)
    lines = [
        f"Token {newest} stands at place {place}"
        + (f", where token {newest - buffer.turns} stood" if newest - buffer.turns >= buffer.sinks else "")
        + f"; it sees {len(buffer.seen(shown)):,} of the {shown:,} tokens. A windowed layer holds {_ranges(held)}. All "
        f"layers together: {readable_bytes(now)}, where a cache that keeps all has {readable_bytes(full)} "
        f"({full / now:.1f} × as much).",
        _limit_words(config, buffer, element),
    ]
    if made:
        lines.append(
            f"Measured: in every one of {len(made):,} states the kv says what the formula says, and the logits equal "
            "those of full attention with a mask of that window."
        )
    return "\n".join(lines)


def _limit_words(config: ModelConfig, buffer: Buffer, element: int) -> str:
    wide, layers = len(config.global_layers), config.num_layers
    if not wide:
        max_bytes = buffer_bytes(config, buffer, buffer.places, element)
        return f"However long the text gets, it stays at {readable_bytes(max_bytes)}: bytes O(W), not O(S)."
    return (
        f"The {wide} global layers still grow with the text. In the long run {layers / wide:.0f} × fewer bytes than a "
        "cache that keeps all, and the text is still seen from end to end."
    )
