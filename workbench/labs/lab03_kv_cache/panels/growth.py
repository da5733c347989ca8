"""The panel of cache.growth: how one slot fills, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.experiments.inputs import dtype_of, shape_of
from workbench.instruments.costs import kv_bytes
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.kv.slots import stored_dtype
from workbench.labs.lab03_kv_cache.growth import EXPERIMENT
from workbench.models.config import ModelConfig
from workbench.panels import html, style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Drawing, measured, predicted, table, view
from workbench.panels.plots import PALE
from workbench.panels.stage import tell
from workbench.panels.view import View

CELLS_A_ROW = 64
CELL_POINTS = 7.2  # width of a cell when a row has 64 of them
NEW = "#F7CF80"  # the cache's colour, lighter: keys and values of tokens the model wrote


class GrowthPanel(Panel):
    """Lab 03: how the slot of one sequence fills, token by token."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        shape = shape_of(settings["model"])
        element = stored_dtype(dtype_of(settings["model"]), self.bench.device).itemsize
        states = [m for m in self.measurements if not m.settings["refused"]]
        prompt, slot = settings["prompt_tokens"], settings["max_tokens"]
        if self.measurements:
            prompt, slot = (self.measurements[0].settings[k] for k in ("prompt_tokens", "max_tokens"))
        tokens = [m.settings["token"] for m in states]
        steps = len(states) if self.measurements else settings["new_tokens"]
        last = max(0, min(settings["shown_tokens"], steps - 1))
        held = min(prompt + last, slot) if prompt <= slot else 0
        cells_high = max(1, -(-slot // CELLS_A_ROW))
        in_use, reserved = (readable_bytes(kv_bytes(shape, tokens, element)) for tokens in (held, slot))
        alt_text = f"A slot of {slot:,} cells, {held:,} of them filled: {in_use} of {reserved} are in use."
        return view(
            Drawing(lambda axes: _draw_slot(axes, held, min(prompt, held), slot, tokens), alt_text, "the slot"),
            _bytes_chart(shape, settings, element, states, held - prompt if held else 0),
            columns=1,
            height=min(4.0 + 0.16 * cells_high, style.TALLEST),
            height_ratios=[0.35 + 0.16 * cells_high, 2.3],
            table=_table(states, shape, element, prompt, slot, steps),
            caption="State by state" if states else "By the formula; Run asks a real cache",
            words=_words(shape, settings, element, prompt, slot, held, self.measurements),
            extra=_written(states, last),
        )


def _draw_slot(axes: Axes, held: int, prompt: int, slot: int, tokens: list[str]) -> None:
    """A cell a position: of the prompt, written since, or reserved and free."""
    high = max(1, -(-slot // CELLS_A_ROW))
    wide = min(slot, CELLS_A_ROW)
    at = np.arange(slot)
    colours = [style.CACHE] * prompt + [NEW] * (held - prompt) + [PALE] * (slot - held)
    row = at // CELLS_A_ROW
    cells = axes.vlines(at % CELLS_A_ROW, row - 0.43, row + 0.43, colors=colours, linewidth=CELL_POINTS * 64 / wide)
    written = [f", written: {html.token(token)}" for token in tokens[: held - prompt]]
    words = (
        [", prompt"] * prompt + written + [", written"] * (held - prompt - len(written)) + [", free"] * (slot - held)
    )
    tell(cells, *(f"position {position}{what}" for position, what in enumerate(words)))
    axes.set_xlim(-0.5, wide - 0.5)
    axes.set_ylim(high - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set_xticks(range(0, wide, 8))
    axes.set_yticks(range(high), labels=[str(CELLS_A_ROW * r) for r in range(high)])
    title = f"{held:,} of {slot:,} positions hold keys and values\n(dark: prompt, light: written, grey: free)"
    style.label(axes, title=title, y="position")


def _bytes_chart(shape: ModelConfig, settings: dict, element: int, states: list[Measurement], shown: int) -> Chart:
    slot, prompt = settings["max_tokens"], settings["prompt_tokens"]
    by_formula = [
        (n, kv_bytes(shape, prompt + n, element)) for n in range(settings["new_tokens"]) if prompt + n <= slot
    ]
    reserved = states[0].counts["bytes_reserved"] if states else kv_bytes(shape, slot, element)
    end = max(settings["new_tokens"], len(states)) - 0.5
    small: dict[str, Any] = {"markersize": 5 if len(states) <= 80 else 0}
    in_use = measured("in use, as the cache says", states, "step", style.CACHE, spread=False, **small)

    def shade(axes: Axes) -> None:
        if states:
            x, y = zip(*in_use.points)
            axes.fill_between(x, y, 0, color=style.CACHE, alpha=0.25, linewidth=0)

    return Chart(
        predicted("2·L·H_kv·D·S·b", by_formula, zorder=4),
        in_use,
        x=Axis("tokens written since the prompt", limits=(-0.5, end)),
        y=Axis("bytes", readable_bytes, limits=(0, reserved * 1.35)),
        legend="upper left",
        legend_columns=3,
        levels=[(reserved, "reserved", style.IDLE)],
        marks=[(shown, "shown above", style.LEARNER, 0.1)],
        also=shade,
    )


def _table(states, shape: ModelConfig, element: int, prompt: int, slot: int, steps: int):
    columns = {
        "tokens in the cache": "{m.counts[tokens]:,}",
        "bytes in use": "{m.median:,.0f}",
        "2·L·H_kv·D·S·b": "{m.predicted:,.0f}",
        "bytes reserved": "{m.counts[bytes_reserved]:,.0f}",
        "in use": lambda m: f"{m.median / m.counts['bytes_reserved']:.0%}",
    }
    if states:
        shown = states[:: max(1, len(states) // 8)]
        return table(shown + ([states[-1]] if shown[-1] is not states[-1] else []), columns)
    tokens = sorted({t for t in (prompt, prompt + steps // 2, prompt + steps - 1) if t <= slot})
    total = kv_bytes(shape, slot, element)
    rows = [[f"{t:,}", "", f"{kv_bytes(shape, t, element):,.0f}", f"{total:,.0f}", f"{t / slot:.0%}"] for t in tokens]
    return list(columns), rows


def _words(shape: ModelConfig, settings: dict, element: int, prompt: int, slot: int, held: int, measurements) -> str:
    a_token = kv_bytes(shape, 1, element)
    heads = f"2 · {shape.num_layers} · {shape.num_kv_heads} · {shape.head_dim} · {element}"
    lines = [
        f"A token leaves 2·L·H_kv·D·b = {heads} = {a_token:,.0f} bytes: a key and a value in every layer and "
        f"key-value head. In the state shown {held:,} tokens hold {readable_bytes(held * a_token)} of the "
        f"{readable_bytes(slot * a_token)} that were reserved before the first came; {1 - held / slot:.0%} of the slot "
        "waits, and nobody else can use it."
    ]
    newest = prompt + settings["new_tokens"] - 1
    if not measurements and newest > slot:
        lines.append(
            f"{settings['new_tokens']:,} new tokens would need {newest:,} positions: at {slot:,} the cache will refuse."
        )
    if measurements:
        counts, refused = measurements[-1].counts, measurements[-1].settings["refused"]
        if refused:
            lines.append(f"The next token was {measurements[-1].check}.")
        else:
            lines.append(
                f"Every one of {len(measurements):,} states equals the formula. The newest token is chosen but has not "
                f"gone through the model, so the cache holds one less than the text; {counts['rows']:,} rows in all."
            )
    return "\n".join(lines)


def _written(states: list[Measurement], last: int) -> str:
    if not states:
        return ""
    shown = "".join(m.settings["token"] for m in states[: last + 1])
    return html.running_text([(shown, "font-weight:600")], f"written up to the state shown, {last + 1} tokens:")
