"""The panel of smaller.rolling: a rolling buffer, token by token, and its bytes against a cache that keeps all."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from workbench.experiments.inputs import dtype_of, shape_of
from workbench.experiments.smaller_rolling import Buffer, buffer_bytes, full_bytes, rolling_config
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.kv import stored_dtype
from workbench.models.config import ModelConfig
from workbench.panels import style
from workbench.panels.smaller_knobs import PlayPanel
from workbench.panels.smaller_plots import PALE
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View

SINK = "#8A5C00"  # the cache's colour, darker: kept for good
SPARE = "#F7CF80"  # the same, lighter: held and no longer seen, so that tokens can be taken back
NUMBERED = 40  # cells in a row up to which each carries its number


class RollingPanel(PlayPanel):
    """What a rolling buffer holds after `shown_tokens`; Play lets the text grow."""

    experiment_name = "smaller.rolling"
    draws_records = False
    played = "shown_tokens"

    def view(self, settings: dict[str, Any]) -> View:
        knobs = {name: settings[name] for name in ("window", "sinks", "global_every")}
        config = rolling_config(shape_of(settings["model"]), **knobs)
        buffer = Buffer(settings["window"], settings["sinks"], settings["rewind"])
        element = stored_dtype(dtype_of(settings["model"]), self.bench.device).itemsize
        made = [m for m in self.measurements if same_knobs(m, {**knobs, "rewind": settings["rewind"]})]
        shown = min(settings["shown_tokens"], settings["tokens"])
        figure, (strips, ring, curve) = style.new_figure(3, 1, height=5.2, height_ratios=[1.15, 0.62, 2.5])
        _draw_strips(strips, config, buffer, shown, settings["tokens"])
        _draw_ring(ring, buffer, shown)
        _draw_bytes(curve, config, buffer, settings["tokens"], shown, element, made)
        figure.subplots_adjust(left=0.125, right=0.985, top=0.945, bottom=0.105, hspace=0.5)
        now, full = (
            f(config, *rest, element) for f, rest in ((buffer_bytes, (buffer, shown)), (full_bytes, (shown,)))
        )
        return View(
            figure=figure,
            alt=_alt(config, buffer, shown, now, full),
            header=[
                "tokens",
                "held in a windowed layer",
                "bytes in use",
                "by formula",
                "a cache that keeps all",
            ],
            rows=_rows(config, buffer, settings["tokens"], element, made),
            caption="Token by token" if made else "By the formula; Run asks a real kv",
            words=_words(config, buffer, shown, now, full, element, made),
        )


def _cells(axes: Axes, row: float, colours: list[str], texts: list[str], height: float = 0.8) -> None:
    """A row of cells from x = 0, each with its colour and its text."""
    boxes = [Rectangle((x - 0.46, row - height / 2), 0.92, height) for x in range(len(colours))]
    axes.add_collection(PatchCollection(boxes, facecolor=colours, edgecolor="none", zorder=2))
    size = 9 if len(texts) <= 28 else 7.5
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
    colours = [
        _colour(p, buffer, held, seen) if p < shown else style.sheet()["axes.facecolor"]
        for p in range(tokens)
    ]
    numbers = [str(p) if tokens <= NUMBERED and p < shown else "" for p in range(tokens)]
    rows = ["with window"]
    _cells(axes, 0, colours, numbers)
    if config.global_layers:
        rows.append("global")
        _cells(
            axes,
            1,
            [style.CACHE if p < shown else style.sheet()["axes.facecolor"] for p in range(tokens)],
            numbers,
        )
    for row in range(len(rows)):
        axes.add_patch(
            Rectangle((shown - 1.46, row - 0.4), 0.92, 0.8, fill=False, edgecolor=style.INK, linewidth=1.6)
        )
    _bare(axes, tokens, 2)
    axes.set_yticks(range(len(rows)), labels=rows)
    style.label(
        axes,
        title=f"the text after {shown:,} tokens (dark: sinks; light: held, no longer seen; grey: forgotten)",
    )


def _colour(position: int, buffer: Buffer, held: set[int], seen: set[int]) -> str:
    if position not in held:
        return PALE
    if position < buffer.sinks:
        return SINK
    return style.CACHE if position in seen else SPARE


def _draw_ring(axes: Axes, buffer: Buffer, shown: int) -> None:
    """The places of the buffer with the positions they hold; the newest is framed."""
    held, seen = buffer.held(shown), buffer.seen(shown)
    live = {p for p in held if p is not None}
    colours = [PALE if p is None else _colour(p, buffer, live, seen) for p in held]
    texts = ["" if p is None or buffer.places > NUMBERED else str(p) for p in held]
    _cells(axes, 0, colours, texts)
    newest = buffer.place_of(shown - 1)
    axes.add_patch(
        Rectangle((newest - 0.46, -0.4), 0.92, 0.8, fill=False, edgecolor=style.INK, linewidth=1.6)
    )
    _bare(axes, max(buffer.places, 20), 1)
    axes.set_yticks([0], labels=["the buffer"])
    title = f"{buffer.places:,} places: {buffer.sinks} sinks, then a ring of W − 1 + {buffer.rewind} = {buffer.turns}"
    style.label(axes, title=title + " (numbers: the position that a place holds)")


def _draw_bytes(axes: Axes, config, buffer: Buffer, tokens: int, shown: int, element: int, made) -> None:
    numbers = range(1, tokens + 1)
    axes.plot(numbers, [full_bytes(config, n, element) for n in numbers], color=style.IDLE, linewidth=2,
              label="a cache that keeps all")  # fmt: skip
    axes.plot(numbers, [buffer_bytes(config, buffer, n, element) for n in numbers], color=style.INK, zorder=4,
              label="this one, by formula", **style.PREDICTED)  # fmt: skip
    if made:
        x, y = [m.settings["tokens"] for m in made], [m.median for m in made]
        axes.plot(x, y, color=style.CACHE, label="as the kv says", **(style.MEASURED | {"markersize": 4}))
        axes.fill_between(x, y, 0, color=style.CACHE, alpha=0.25, linewidth=0)
    axes.axvline(shown, color=style.LEARNER, linewidth=1.4, linestyle=(0, (1, 2)), label="shown above")
    axes.set_xlim(0.5, tokens + 0.5)
    axes.set_ylim(0, full_bytes(config, tokens, element) * 1.05)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: readable_bytes(v)))
    layers = config.num_layers - len(config.global_layers)
    title = f"{layers} of {config.num_layers} layers have the window"
    style.label(axes, x="tokens of the text", y="bytes, all layers", title=title)
    style.legend(axes, loc="upper left")


def _rows(config, buffer: Buffer, tokens: int, element: int, made: list[Measurement]) -> list[list[str]]:
    steps = sorted({1, buffer.sinks + buffer.window, buffer.places, buffer.places + 1, tokens // 2, tokens})
    said = {m.settings["tokens"]: m for m in made}
    return [
        [f"{n:,}", f"{min(n, buffer.places):,}", f"{said[n].median:,.0f}" if n in said else "",
         f"{buffer_bytes(config, buffer, n, element):,}", f"{full_bytes(config, n, element):,}"]
        for n in steps
        if 1 <= n <= tokens
    ]  # fmt: skip


def _alt(config: ModelConfig, buffer: Buffer, shown: int, now: int, full: int) -> str:
    held = [p for p in buffer.held(shown) if p is not None]
    return (
        f"After {shown:,} tokens a layer with a window of {buffer.window:,} and {buffer.sinks} sinks holds "
        f"{len(held):,} positions in {buffer.places:,} places: {_ranges(sorted(held))}. Below, bytes against tokens: this "
        f"cache {readable_bytes(now)}, one that keeps all {readable_bytes(full)}; {len(config.global_layers)} of "
        f"{config.num_layers} layers see everything."
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 7, 8, 9] -> '0 to 1, 7 to 9'."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in found)


def _words(
    config, buffer: Buffer, shown: int, now: int, full: int, element: int, made: list[Measurement]
) -> str:
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
        most = buffer_bytes(config, buffer, buffer.places, element)
        return f"However long the text gets, it stays at {readable_bytes(most)}: bytes O(W), not O(S)."
    return (
        f"The {wide} global layers still grow with the text. In the long run {layers / wide:.0f} × fewer bytes than a "
        "cache that keeps all, and the text is still seen from end to end."
    )
