"""The panel of naive.decoder: tokens, the weights of a layer, where a head of its attention looks, the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap

from workbench.experiments.inputs import plain, shape_of, token_text
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab01_naive_generation.decoder import (
    EXPERIMENT,
    Look,
    Weight,
    check_place,
    flops_by_formula,
    look_at,
    tokens_to_look_at,
    two_per_parameter,
    weights_of,
    weights_of_layer,
)
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.panels import html, style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Bar, Bars, Drawing, view
from workbench.panels.plots import PALE, empty, flop_words, matching, write_centred, write_middle
from workbench.panels.stage import tell
from workbench.panels.view import View
from workbench.panels.words import listed

SHARES = LinearSegmentedColormap.from_list("shares", ["#FFFFFF", style.TARGET])
MAX_NAMED = 14  # tokens beside the picture that have room for a name each
MAX_WRITTEN = 8  # heads or layers whose shares are written into their cells
SHORT = 10  # letters of a token's name
LOOKED_AT, NEXT = 5, 5  # tokens of each list
GIVEN = {"first": "given to the first token", "previous": "given to the previous token"}


class DecoderPanel(Panel):
    """Lab 01: which weights a layer reads, where each of its heads looks, and the next tokens.

    The model runs when the text or the model changes; another layer or head is only shown.
    """

    experiment = EXPERIMENT
    draws_records = False
    _known: tuple[tuple, tuple[Decoder, Look]] | None = None

    def _look(self, settings: dict[str, Any]) -> tuple[Decoder, Look]:
        """(model, what it looked at); the last one is kept."""
        ids = tokens_to_look_at(settings["model"], settings["text"])
        check_place(shape_of(settings["model"]), settings["layer"], settings["head"])
        decoder = self.bench.model(settings["model"])
        key = (id(decoder), settings["text"])
        if self._known is None or self._known[0] != key:
            weights_of(decoder)  # refuses what is no plain decoder
            self._known = (key, (decoder, look_at(decoder, ids)))
        return self._known[1]

    def view(self, settings: dict[str, Any]) -> View:
        decoder, look = self._look(settings)
        layer, head, shape = settings["layer"], settings["head"], decoder.config
        names = [html.token(token_text(decoder, i)) for i in look.ids]
        attention = look.probabilities[layer][head]
        made = matching(self.measurements, **plain({name: settings[name] for name in ("model", "text")}))
        weights, best = weights_of_layer(decoder, layer), _best(decoder, look)
        title = f"layer {layer}, head {head}"
        return view(
            Drawing(lambda axes: _draw_pattern(axes, attention.numpy(), names, title), _alt(attention, names, title)),
            _looked_at(attention, names),
            Bars([Bar(n, p, style.TARGET) for n, p in best], _percents("probability"), title="next token"),
            *(_heads(name, made, shape) for name in GIVEN),
            height=style.TALLEST,
            boxes=[
                (0.175, 0.472, 0.42, 0.463),
                (0.755, 0.771, 0.215, 0.164),
                (0.755, 0.472, 0.215, 0.164),
                (0.085, 0.087, 0.38, 0.25),
                (0.6, 0.087, 0.38, 0.25),
            ],
            table=(["", "counted", "by formula"], _table(made, shape, len(look.ids))),
            caption="The whole model" + (", and means of each head over the text" if made else "; Run counts"),
            words=_words(attention, names, best, weights, made, settings, shape),
            extra=_tokens(decoder, look) + _weights(weights, weights_of(decoder), layer),
        )


# -- the picture ---------------------------------------------------------------------------------------------


def _short(name: str) -> str:
    return name if len(name) <= SHORT else name[: SHORT - 1] + "…"


def _percents(name: str) -> Axis:
    return Axis(name, _percent, "zero")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or not share else f"{100 * share:.2g}%" if share >= 0.0001 else "< 0.01%"


def _best(decoder: Decoder, look: Look) -> list[tuple[str, float]]:
    """The most probable next tokens, by name, with their probabilities."""
    top = look.logits[-1].softmax(dim=-1).topk(min(NEXT, look.logits.shape[-1]))
    return [(_short(html.token(token_text(decoder, int(i)))), float(p)) for p, i in zip(*top)]


def _order(row: torch.Tensor) -> list[int]:
    """Positions by the attention that they get, the most first."""
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))


def _looked_at(attention: torch.Tensor, names: list[str]) -> Bars:
    row = attention[-1]
    bars = [Bar(f"{i}  {_short(names[i])}", float(row[i]), style.TARGET) for i in _order(row)[:LOOKED_AT]]
    return Bars(bars, _percents("attention"), title="the last row")


def _draw_pattern(axes: Axes, shares: np.ndarray, names: list[str], title: str) -> None:
    """[S, S] shares as cells, queries downwards, keys to the right; what a token cannot see is grey."""
    count = len(names)
    seen = np.ma.masked_array(shares, np.triu(np.ones_like(shares, dtype=bool), 1))
    axes.set_facecolor(PALE)
    axes.grid(visible=False)
    axes.imshow(seen, cmap=SHARES, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    pairs = [(i, j) for i in range(count) for j in range(i + 1)]
    cells = [[(j - 0.5, i - 0.5), (j + 0.5, i - 0.5), (j + 0.5, i + 0.5), (j - 0.5, i + 0.5)] for i, j in pairs]
    hover = PolyCollection(cells, visible=False)  # names under the pointer, and nothing to see
    tell(hover, *(f"{i} {names[i]} gives {shares[i, j]:.1%} to {j} {names[j]}" for i, j in pairs))
    axes.add_collection(hover, autolim=False)
    every = range(0, count, -(-count // MAX_NAMED))
    axes.set_yticks(every, [f"{i}  {style.drawable(_short(names[i]))}" for i in every], parse_math=False, fontsize=10)
    axes.set_xticks(every, [f"{j}" for j in every], fontsize=10)
    axes.tick_params(axis="both", length=0)
    style.label(axes, x="looks at position (green: 100%)", title=title)


def _heads(name: str, made: Sequence[Measurement], shape: ModelConfig) -> Drawing:
    return Drawing(lambda axes: _draw_heads(axes, name, made, shape), _alt_of_heads(name, made))


def _draw_heads(axes: Axes, name: str, made: Sequence[Measurement], shape: ModelConfig) -> None:
    """[L, H_q] means over the queries as cells, layers downwards."""
    heads = matching(made, unit="share")
    if not heads:
        empty(axes)
        write_middle(axes, "Run measures")
        style.label(axes, title=GIVEN[name])
        return
    layers, count = shape.num_layers, shape.num_heads
    values = np.ma.masked_all((layers, count))
    for m in heads:
        values[m.settings["layer"], m.settings["head"]] = m.counts[name]
    axes.set_facecolor(PALE)
    axes.grid(visible=False)
    axes.imshow(values, cmap=SHARES, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for m in heads if max(layers, count) <= MAX_WRITTEN else ():
        place = m.settings["head"], m.settings["layer"]
        write_centred(axes, *place, f"{100 * m.counts[name]:.0f}", fontsize=10, zorder=3)
    for set_ticks, many in ((axes.set_yticks, layers), (axes.set_xticks, count)):
        every = range(0, many, -(-many // MAX_WRITTEN))
        set_ticks(every, [f"{i}" for i in every], fontsize=10)
    axes.tick_params(axis="both", length=0)
    style.label(axes, x="head", y="layer", title=f"% {GIVEN[name]}")


def _alt(attention: torch.Tensor, names: list[str], title: str) -> str:
    best = ", ".join(f"{names[j]} {_percent(float(attention[-1, j]))}" for j in _order(attention[-1])[:3])
    return (
        f"A lower triangle of {len(names)} by {len(names)} cells, {title}: a row for each token, a column for each that"
        f" it may look at. The last token, {names[-1]}, looks most at {best}."
    )


def _alt_of_heads(name: str, made: Sequence[Measurement]) -> str:
    heads = matching(made, unit="share")
    if not heads:
        return ""
    top = max(heads, key=lambda m: m.counts[name])
    return (
        f"Cells of layers by heads, {GIVEN[name]}: the most {top.counts[name]:.0%} in layer {top.settings['layer']},"
        f" head {top.settings['head']}, {_mean(heads, name):.0%} in the mean."
    )


# -- words and tables ----------------------------------------------------------------------------------------


def _mean(heads: Sequence[Measurement], name: str) -> float:
    return sum(m.counts[name] for m in heads) / len(heads)


def _even(tokens: int) -> float:
    """What the first, or the previous, token would get if every query from the third on looked at all alike."""
    return sum(1 / (i + 1) for i in range(2, tokens)) / (tokens - 2)


def _table(made: Sequence[Measurement], shape: ModelConfig, tokens: int) -> list[list[str]]:
    formulas = {"parameters": shape.num_parameters(), "FLOP": flops_by_formula(shape, tokens)}
    named = {"parameters": "parameters", "FLOP": f"FLOPs of {tokens} tokens"}
    rows = []
    for unit, formula in formulas.items():
        counted = matching(made, unit=unit)
        rows.append([named[unit], f"{counted[0].median:,.0f}" if counted else "", f"{formula:,}"])
    rows.append(["2 × parameters × tokens", "", f"{two_per_parameter(shape, tokens):,}"])
    for m in matching(made, unit="share"):
        place = f"layer {m.settings['layer']}, head {m.settings['head']}"
        rows += [[f"{place}: {given} token", f"{m.counts[given]:.1%}", ""] for given in GIVEN]
    return rows


def _words(
    attention: torch.Tensor,
    names: list[str],
    best: list[tuple[str, float]],
    weights: list[Weight],
    made: Sequence[Measurement],
    settings: dict[str, Any],
    shape: ModelConfig,
) -> str:
    row, (token, probability) = attention[-1], best[0]
    looked = [f"“{names[j]}” ({_percent(float(row[j]))})" for j in _order(row)[:2]]
    lines = [
        f"In layer {settings['layer']}, head {settings['head']}, the last token “{names[-1]}” looks most at"
        f" {listed(looked)}. {_group(settings['head'], shape)} All layers together make “{token}” the most probable"
        f" next token ({probability:.1%})."
    ]
    lines.append(
        f"The layer reads {readable_bytes(sum(w.bytes for w in weights))} of weights, whatever the text. A row of the"
        " picture sums to 1, and grey is what a token cannot see: those that come after it."
    )
    return "\n".join([*lines, *_counted(made, len(names))])


def _group(head: int, shape: ModelConfig) -> str:
    group = shape.num_heads // shape.num_kv_heads
    if shape.latent_attention is not None or group == 1:
        return "Every query head has keys and values of its own."
    first = head // group * group
    sharing = listed([f"{h}" for h in range(first, first + group)])
    return f"Query heads {sharing} share the keys and values of key-value head {head // group}."


def _counted(made: Sequence[Measurement], tokens: int) -> list[str]:
    lines = []
    for m in matching(made, unit="parameters"):
        parts = {name: m.counts[name] for name in ("MLP", "attention", "embedding", "head") if m.counts[name]}
        said = listed([f"{name} {count / m.median:.0%}" for name, count in parts.items()])
        lines.append(f"Counted: {m.median:,.0f} parameters, as many as by formula; {said}.")
    for m in matching(made, unit="FLOP"):
        equal = "as many as by formula" if m.median == m.predicted else f"by formula {flop_words(m.predicted or 0)}"
        lines.append(
            f"The text took {flop_words(m.median)}, {equal}: {m.median / m.counts['two_per_parameter']:.3f} times 2 ×"
            " parameters × tokens."
        )
    if heads := matching(made, unit="share"):
        means = listed([f"{_mean(heads, name):.0%} to the {name} token" for name in GIVEN])
        lines.append(
            f"In the mean over {len(heads)} heads and the tokens from the third on, {means}; {_even(tokens):.0%} each"
            " if they looked at all alike."
        )
    return lines


def _tokens(decoder: Decoder, look: Look) -> str:
    """The text, its tokens apart by their shade."""
    shades = ("background:rgba(0,158,115,.28)", "background:rgba(128,128,128,.18)")
    parts = [(token_text(decoder, token), shades[i % 2]) for i, token in enumerate(look.ids)]
    return html.running_text(parts, f"S = {len(look.ids)} tokens:")


def _weights(weights: list[Weight], every: list[Weight], layer: int) -> str:
    whole = sum(w.bytes for w in every)
    rows = [_weight(w.name.removeprefix(f"layers.{layer}."), w, whole) for w in weights]
    total = sum(w.bytes for w in weights)
    rows.append(
        ["the layer", "", f"{sum(w.parameters for w in weights):,}", readable_bytes(total), f"{total / whole:.1%}"]
    )
    header = ["weight", "shape [out, in]", "parameters", "bytes", "of the model"]
    return html.table(header, rows, f"What layer {layer} reads")


def _weight(name: str, w: Weight, whole: int) -> list[str]:
    shape = "[" + ", ".join(f"{side:,}" for side in w.shape) + "]"
    return [name, shape, f"{w.parameters:,}", readable_bytes(w.bytes), f"{w.bytes / whole:.2%}"]
