"""The panel of cache.memory: weights and cache in bytes, against the memory of cards. Nothing is loaded for it."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.cache_memory import CARDS_GB, PRECISIONS, Fit, Need, both_units, fit, need
from workbench.experiments.inputs import shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.models.config import ModelConfig
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.view import View


class MemoryPanel(Panel):
    """What fits on which card: every public shape, any precision, context and batch."""

    experiment_name = "cache.memory"
    draws_records = False

    def view(self, settings: dict[str, Any]) -> View:
        shape = shape_of(settings["model"])
        asked = {k: settings[k] for k in ("weights", "cache", "context", "batch")}
        wanted = need(shape, **asked)
        fits = [fit(shape, card, **asked) for card in CARDS_GB]
        figure, (bar, curve) = style.new_figure(1, 2, height=3.5, width_ratios=[1, 2.2])
        _draw_bar(bar, wanted)
        _draw_curve(curve, shape, settings, wanted)
        figure.subplots_adjust(left=0.085, right=0.985, top=0.9, bottom=0.16, wspace=0.24)
        return View(
            figure=figure,
            alt=_alt(settings, wanted, fits),
            header=[
                "card",
                "weights and this cache",
                "left beside the weights",
                "largest batch",
                "longest context",
            ],
            rows=[_row(f, wanted) for f in fits],
            caption=f"Each card, with {settings['context']:,} tokens for the largest batch, "
            f"and batch {settings['batch']:,} for the longest context that memory allows, "
            f"whatever the model was made for ({shape.context_length:,})",
            words=_words(shape, settings, wanted, fits, self.measurements),
        )


def _draw_bar(axes: Axes, wanted: Need) -> None:
    """Weights, and the cache on top; a line for each card."""
    weights, cache = wanted.weight_bytes / 1e9, wanted.cache_bytes / 1e9
    axes.bar([0], [weights], width=0.7, color=style.WEIGHTS, label="weights")
    axes.bar([0], [cache], width=0.7, bottom=[weights], color=style.CACHE, label="cache")
    top = max(1.3 * (weights + cache), 30)
    written = 0.0  # no label on another
    for card in CARDS_GB:
        if card <= top:
            axes.axhline(card, color=style.INK, linewidth=1.1, linestyle=(0, (4, 3)))
        if written + 0.07 * top <= card <= top:
            style.write(axes, 1.02, card, f"{card} GB", ha="right", va="bottom", fontsize=9)
            written = card
    axes.set_xlim(-0.5, 1.05)
    axes.set_ylim(0, top)
    axes.set_xticks([])
    axes.grid(visible=False, axis="x")
    style.label(axes, y="GB (10^9 bytes)", title=f"in all {readable_bytes(wanted.total_bytes)}")


def _draw_curve(axes: Axes, shape: ModelConfig, settings: dict, wanted: Need) -> None:
    """Weights and cache against the context, both axes logarithmic."""
    contexts = [2**i for i in range(7, 21)]
    weights = wanted.weight_bytes / 1e9
    caches = [settings["batch"] * c * wanted.token_bytes / 1e9 for c in contexts]
    axes.plot(contexts, [weights + c for c in caches], color=style.INK, linewidth=1.4)
    axes.plot(contexts, [weights] * len(contexts), color=style.WEIGHTS, linewidth=2.2)
    axes.plot(contexts, caches, color=style.CACHE, linewidth=2.2)
    style.write(axes, contexts[0], weights * 0.85, "weights (black: both)", va="top")
    style.write(axes, contexts[2], caches[2] * 0.8, "cache", va="top")
    low, high = min(weights, caches[0]) / 2, max(weights + caches[-1], 200) * 2
    ends = (contexts[0] / 1.3, contexts[-1] * 1.3)
    axes.hlines(CARDS_GB, *ends, color=style.INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.6)
    here = settings["context"]
    axes.plot([here], [wanted.cache_bytes / 1e9], marker="o", markersize=9, color=style.CACHE)
    beyond = shape.context_length
    if beyond < contexts[-1]:
        axes.axvspan(beyond, ends[1], color=style.IDLE, alpha=0.14, linewidth=0)
    style.log_ticks(axes, "x", contexts[3::2], text=_short)
    style.log_ticks(
        axes, "y", [10.0**e for e in range(-3, 7) if low <= 10.0**e <= high], text=lambda v: f"{v:,g} GB"
    )
    axes.set_ylim(low, high)
    axes.set_xlim(*ends)
    style.label(axes, x="context (tokens; grey: beyond what the model was made for)",
                title=f"batch {settings['batch']:,}; thin lines: the cards")  # fmt: skip


def _short(tokens: float) -> str:
    return next(
        (f"{tokens / n:.0f}{k}" for n, k in ((2**20, "M"), (1024, "K")) if tokens >= n), f"{tokens:.0f}"
    )


def _row(f: Fit, wanted: Need) -> list[str]:
    left = f.card_gb * 10**9 - wanted.weight_bytes
    return [
        f"{f.card_gb} GB",
        "fit" if f.total_fits else "do not fit",
        both_units(left) if f.weights_fit else "the weights alone do not fit",
        f"{f.largest_batch:,}" if f.weights_fit else "",
        f"{f.longest_context:,}" if f.weights_fit else "",
    ]


def _alt(settings: dict, wanted: Need, fits: list[Fit]) -> str:
    holding = [f"{f.card_gb} GB" for f in fits if f.total_fits]
    return (
        f"Memory of {settings['model']}: weights {readable_bytes(wanted.weight_bytes)} and, on top, a cache of "
        f"{readable_bytes(wanted.cache_bytes)} for {settings['batch']:,} × {settings['context']:,} tokens; beside it both "
        f"against the context. Cards that hold it: {', '.join(holding) or 'none of those shown'}."
    )


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
        f"A token takes {formula} = {wanted.token_bytes:,.0f} bytes ({readable_bytes(wanted.token_bytes, binary=True)}). "
        f"{settings['batch']:,} × {settings['context']:,} tokens: {both_units(wanted.cache_bytes)}. Weights in "
        f"{settings['weights']}: {both_units(wanted.weight_bytes)}. Together {both_units(wanted.total_bytes)}, "
        f"{share:.0%} of it cache.",
        _cards(wanted, fits),
    ]
    if settings["context"] > shape.context_length:
        lines.append(
            f"This model was made for {shape.context_length:,} tokens; beyond that the bytes are right and the text is not."
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
