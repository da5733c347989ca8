"""The panel of cache.memory: weights and cache in bytes, against the memory of cards. Nothing is loaded for it."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.inputs import shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.labs.lab03_kv_cache.memory import CARDS_GB, EXPERIMENT, PRECISIONS, Fit, Need, both_units, fit, need
from workbench.models.config import ModelConfig
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Axis, Chart, Drawing, line, table, view
from workbench.panels.stage import tell
from workbench.panels.view import View


class MemoryPanel(Panel):
    """Lab 03: bytes of weights and cache for every shape, against the memory of cards. Loads no model."""

    experiment = EXPERIMENT
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        shape = shape_of(settings["model"])
        asked = {k: settings[k] for k in ("weights", "cache", "context", "batch")}
        wanted = need(shape, **asked)
        fits = [fit(shape, card, **asked) for card in CARDS_GB]
        holding = [f"{f.card_gb} GB" for f in fits if f.total_fits]
        alt_text = (
            f"Memory of {settings['model']}: weights {readable_bytes(wanted.weight_bytes)} and, on top, a cache of"
            f" {readable_bytes(wanted.cache_bytes)} for {settings['batch']:,} × {settings['context']:,} tokens. Cards"
            f" that hold it: {', '.join(holding) or 'none of those shown'}."
        )
        title = f"in all {readable_bytes(wanted.total_bytes)}"
        return view(
            Drawing(lambda axes: _draw_bar(axes, wanted, title), alt_text, title),
            _by_context(shape, settings, wanted),
            height=3.5,
            width_ratios=[1, 2.2],
            table=table(
                fits,
                {
                    "card": "{m.card_gb} GB",
                    "weights and this cache": lambda f: "fit" if f.total_fits else "do not fit",
                    "left beside the weights": lambda f: (
                        both_units(f.card_gb * 10**9 - wanted.weight_bytes)
                        if f.weights_fit
                        else "the weights alone do not fit"
                    ),
                    "largest batch": lambda f: f"{f.largest_batch:,}" if f.weights_fit else "",
                    "longest context": lambda f: f"{f.longest_context:,}" if f.weights_fit else "",
                },
            ),
            caption=(
                f"Each card, with {settings['context']:,} tokens for the largest batch, "
                f"and batch {settings['batch']:,} for the longest context that memory allows, "
                f"whatever the model was made for ({shape.context_length:,})"
            ),
            words=_words(shape, settings, wanted, fits, self.measurements),
        )


def _draw_bar(axes: Axes, wanted: Need, title: str) -> None:
    """Weights, and the cache on top; a line for each card."""
    weights, cache = wanted.weight_bytes / 1e9, wanted.cache_bytes / 1e9
    for name, size, bottom, colour in (("weights", weights, 0, style.WEIGHTS), ("cache", cache, weights, style.CACHE)):
        [bar] = axes.bar([0], [size], width=0.7, bottom=[bottom], color=colour, label=name)
        tell(bar, f"{name}: {readable_bytes(size * 1e9)}")
    top = max(1.3 * (weights + cache), 30)
    drawn = [card for card in CARDS_GB if card <= top]
    for card, above in zip(drawn, [*drawn[1:], math.inf]):
        axes.axhline(card, color=style.INK, linewidth=1.1, linestyle=(0, (4, 3)))
        if above - card >= 0.085 * top:  # no label on another, or on the next line
            style.write(axes, 1.02, card, f"{card} GB", ha="right", va="bottom", fontsize=10)
    axes.set_xlim(-0.5, 1.05)
    axes.set_ylim(0, top)
    axes.set_xticks([])
    axes.grid(visible=False, axis="x")
    style.label(axes, y="GB (10⁹ bytes)", title=title)


def _by_context(shape: ModelConfig, settings: dict, wanted: Need) -> Chart:
    """Weights and cache against the context, both axes logarithmic."""
    contexts = [2**i for i in range(7, 21)]
    weights = wanted.weight_bytes / 1e9
    caches = [settings["batch"] * c * wanted.token_bytes / 1e9 for c in contexts]
    low, high = min(weights, caches[0]) / 2, max(weights + caches[-1], 200) * 2
    ends = (contexts[0] / 1.3, contexts[-1] * 1.3)

    def cards(axes: Axes) -> None:
        style.write(axes, contexts[0], weights * 0.85, "weights", va="top")
        style.write(axes, contexts[2], caches[2] * 0.8, "cache", va="top")
        axes.hlines(CARDS_GB, *ends, color=style.INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.6)
        if shape.context_length < contexts[-1]:
            axes.axvspan(shape.context_length, ends[1], color=style.IDLE, alpha=0.14, linewidth=0)

    here = [(settings["context"], wanted.cache_bytes / 1e9)]
    return Chart(
        line("weights and cache", [(c, weights + cache) for c, cache in zip(contexts, caches)], linewidth=1.4),
        line("weights", [(c, weights) for c in contexts], style.WEIGHTS),
        line("cache", zip(contexts, caches), style.CACHE),
        line("chosen", here, style.CACHE, marker="o", markersize=9),
        x=Axis("context (tokens; grey: beyond the model's)", _short, "log", contexts[3::2], limits=ends),
        y=Axis(
            "",
            lambda gb: f"{gb:,.0f} GB" if gb >= 1 else f"{gb:g} GB",
            "log",
            [10.0**e for e in range(-3, 7) if low <= 10.0**e <= high],
            limits=(low, high),
        ),
        title=f"batch {settings['batch']:,}; black: both; thin: cards",
        also=cards,
    )


def _short(tokens: float) -> str:
    return next((f"{tokens / n:.0f}{k}" for n, k in ((2**20, "M"), (1024, "K")) if tokens >= n), f"{tokens:.0f}")


def _words(shape: ModelConfig, settings: dict, wanted: Need, fits: list[Fit], measurements) -> str:
    element = f"{PRECISIONS[settings['cache']]:g}"
    if shape.latent_attention is not None:
        ranks = f"{shape.num_layers} · ({shape.latent_attention.kv_rank} + {shape.latent_attention.rotary_head_dim})"
        formula = f"L·(latent + rotary)·b = {ranks} · {element}"
    else:
        heads = f"2 · {shape.num_layers} · {shape.num_kv_heads} · {shape.head_dim}"
        formula = f"2·L·H_kv·D·b = {heads} · {element}"
    share = wanted.cache_bytes / wanted.total_bytes
    lines = [
        (
            f"A token takes {formula} = {wanted.token_bytes:,.0f} bytes"
            f" ({readable_bytes(wanted.token_bytes, binary=True)}). {settings['batch']:,} × {settings['context']:,}"
            f" tokens: {both_units(wanted.cache_bytes)}. Weights in {settings['weights']}:"
            f" {both_units(wanted.weight_bytes)}. Together {both_units(wanted.total_bytes)}, {share:.0%} of it cache."
        ),
        _cards(wanted, fits),
    ]
    if settings["context"] > shape.context_length:
        lines.append(
            f"This model was made for {shape.context_length:,} tokens; beyond that the bytes are right and the text is"
            " not."
        )
    if shape.sliding_window is not None:
        lines.append(
            f"It attends to the last {shape.sliding_window:,} tokens only, so a cache could stop growing there "
            "(lab 04); counted here is one that keeps all."
        )
    if {settings["weights"], settings["cache"]} & {"int8", "int4"}:
        lines.append("Formats below 16 bits also keep scales, a few percent more than counted here.")
    lines += [_tried(m) for m in measurements if m.settings["source"] != "formula"]
    return "\n".join(lines)


def _cards(wanted: Need, fits: list[Fit]) -> str:
    smallest = next((f.card_gb for f in fits if f.total_fits), None)
    head = (
        "It fits on none of these cards"
        if smallest is None
        else f"The smallest of these cards that holds it has {smallest} GB"
    )
    return (
        f"{head}. A GB is 10^9 bytes here, as cards are sold, and a GiB 2^30, 7 % more. Driver, engine and "
        "activations take some of every card, so plan for less than it says."
    )


def _tried(m: Measurement) -> str:
    return f"{m.settings['model']} in {m.settings['cache']}: {m.check}."
