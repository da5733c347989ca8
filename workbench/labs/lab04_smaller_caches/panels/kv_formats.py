"""The panel of smaller.kv_formats: which channels suffer from fewer bits, and what that does to the perplexity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from workbench.experiments.inputs import dtype_of, shape_of
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.kv import Quantized, stored_dtype
from workbench.kv.quantized import KV_FORMATS
from workbench.labs.lab04_smaller_caches.kv_formats import EXPERIMENT, REFERENCE, SCHEMES
from workbench.labs.lab04_smaller_caches.panels.plots import COLOURS
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import Drawing, table, view
from workbench.panels.plots import matching, nothing
from workbench.panels.view import View
from workbench.panels.words import listed, recorded_label

SCHEME_COLOURS = {"per channel": style.TARGET, "per token": COLOURS["mla re-expanded"]}
TENSORS = ("keys", "values")
USUAL = {"keys": "per channel", "values": "per token"}  # what kv "quantized" does


class KVFormatsPanel(Panel):
    """Lab 04: keys and values in 8 and 4 bits: error by channel, perplexity by format. kv=: yours beside ours."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        made = self.made(settings, ("group", "context"))
        shown, live = (made, True) if made else (self.record, False)
        excess = ", ".join(f"{_name(m)} {m.counts['excess']:+.2%}" for m in _kept(shown))
        alt_text = (
            "Size of every channel and its error in two schemes, for keys and for values; below, bars of perplexity. "
        )
        alt_text += (
            f"{'Measured' if live else 'Recorded'}, above full precision: {excess}."
            if shown
            else f"Nothing measured yet, with {settings['model']} and groups of {settings['group']}."
        )

        return view(
            *(
                Drawing(partial(_draw_channels, taken=shown, tensor=tensor, settings=settings, live=live))
                for tensor in TENSORS
            ),
            Drawing(lambda axes: _draw_excess(axes, made, self.record), alt_text),
            height=style.TALLEST,
            boxes=[(0.11, 0.51, 0.39, 0.42), (0.59, 0.51, 0.39, 0.42), (0.11, 0.145, 0.87, 0.225)],
            table=_table(shown) if shown else self._bit_table(settings),
            caption=f"Passages of {settings['context']:,} tokens"
            + ("" if live else "; recorded" if shown else "; bits by formula, Run measures the rest"),
            words=self._words(settings, made, shown),
        )

    def _bits(self, settings: dict[str, Any]) -> dict[str, float]:
        stored = stored_dtype(dtype_of(settings["model"]), self.bench.device)
        given = {"dtype": stored, "group": settings["group"]}
        shape = shape_of(settings["model"])
        return {f: Quantized.bits_per_value(shape, settings["context"], format=f, **given) for f in KV_FORMATS}

    def _bit_table(self, settings: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
        return list(COLUMNS), [[name, f"{bits:.2f}", "", "", "", ""] for name, bits in self._bits(settings).items()]

    def _words(self, settings: dict[str, Any], made: Sequence[Measurement], shown: Sequence[Measurement]) -> str:
        bits = ", ".join(f"{name} {value:.2f}" for name, value in self._bits(settings).items())
        lines = [
            f"Bits a value at {settings['context']:,} tokens, with scales, zeros and the newest tokens that stay as"
            f" they came: {bits}. The longer the text, the nearer to 8, 8 and 4 and the scales."
        ]
        if not shown:
            return "\n".join([*lines, "Run measures the error of every channel, and the perplexity."])
        if not made:
            lines.append(f"What is drawn was {recorded_label(shown)}.")
        lines += _channel_words(shown)
        lines += _perplexity_words(shown)
        return "\n".join(lines)


def _first(taken: Sequence[Measurement], **wanted: Any) -> Measurement | None:
    return next(iter(matching(taken, **wanted)), None)


def _draw_channels(axes: Axes, taken: Sequence[Measurement], tensor: str, settings: dict[str, Any], live: bool) -> None:
    """Channels from the largest to the smallest: how large each is, and how far off in either scheme."""
    size = _first(taken, measured="magnitude", tensor=tensor)
    names = {"x": "channels, the largest first", "y": "root mean square" * (tensor == "keys")}
    style.label(axes, **names, title=tensor)
    if size is None:
        nothing(axes, "Run looks at every channel")
        return
    order = np.argsort(size.samples)[::-1]
    at, sizes = np.arange(1, len(order) + 1), np.array(size.samples)[order]
    axes.fill_between(at, sizes, 1e-9, step="mid", color=style.IDLE, alpha=0.3, linewidth=0, label="size")
    low = sizes.min()
    for scheme in SCHEMES:
        m = _first(taken, measured="error", tensor=tensor, scheme=scheme)
        if m is None:
            continue
        errors = np.array(m.samples)[order]
        look: dict[str, Any] = {"linestyle": "", "marker": "o" if scheme == "per channel" else "^", "markersize": 4}
        face: dict[str, Any] = {} if live else {"markerfacecolor": "none"}
        axes.plot(at, errors, color=SCHEME_COLOURS[scheme], label=f"error, {scheme}", **look, **face)
        low = min(low, errors[errors > 0].min())
    top = sizes.max() * 9
    axes.set_xlim(0, len(order) + 1)
    style.log_ticks(axes, "y", [10.0**e for e in range(-5, 4) if low / 2 <= 10.0**e <= top], text=lambda v: f"{v:g}")
    axes.set_ylim(low / 2, top)
    m = _first(taken, measured="error", tensor=tensor)
    title = f"{tensor} of layer {size.settings['layer']}, in {m.settings['format'] if m else settings['format']}"
    style.label(axes, **names, title=title)
    if tensor == "keys":
        style.legend(axes, loc="upper right", handletextpad=0.4, labelspacing=0.3)


def _kept(taken: Sequence[Measurement]) -> list[Measurement]:
    """Perplexities: through the kv in each format, then with keys alone rounded in either scheme."""
    through = [m for m in taken if m.settings["measured"] == "kv" and m.settings["format"] != REFERENCE]
    return through + [m for m in taken if m.settings["measured"] == "scheme"]


def _name(m: Measurement) -> str:
    if m.settings["measured"] == "scheme":
        return f"keys in {m.settings['format'].removeprefix('int')} bits, {m.settings['keys']}"
    return {REFERENCE: REFERENCE, "yours": "yours"}.get(m.settings["format"], f"cache in {m.settings['format']}")


def _colour(m: Measurement) -> str:
    if m.settings["measured"] == "scheme":
        return SCHEME_COLOURS[m.settings["keys"]]
    return COLOURS.get(m.settings["format"], style.LEARNER)


def _draw_excess(axes: Axes, made: Sequence[Measurement], record: Sequence[Measurement]) -> None:
    live, old = _kept(made), _kept(record)
    axes.grid(visible=False, axis="x")
    note = " (hollow: recorded)" if old else ""
    style.label(axes, y="percent", title=f"perplexity above full precision{note}")
    if not live and not old:
        nothing(axes, "Run measures the perplexity")
        return
    shown = live or old
    names = [_name(m) for m in shown]
    at = {name: x for x, name in enumerate(names)}
    values = [100 * m.counts["excess"] for m in (*live, *old)]
    top = max(*values, 0.02)
    for m in old:
        if _name(m) in at:
            look: dict[str, Any] = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "zorder": 4}
            axes.plot([at[_name(m)]], [100 * m.counts["excess"]], color=style.INK, **look)
    for m in live:
        x, excess, error = at[_name(m)], 100 * m.counts["excess"], 100 * m.counts["excess_standard_error"]
        axes.bar([x], [excess], yerr=[error], width=0.55, color=_colour(m), ecolor=style.INK, capsize=4, zorder=3)
        style.write(
            axes, x, max(excess + error, 0) + 0.03 * top, f"{excess:+.2f} %", ha="center", va="bottom", fontsize=10
        )
    axes.axhline(0, color=style.INK, linewidth=0.9, zorder=2)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(min(*values, 0) - 0.06 * top, 1.35 * top)
    axes.set_xticks(range(len(names)), labels=[name.replace(", ", ",\n").replace(" in ", "\nin ", 1) for name in names])
    axes.tick_params(axis="x", labelsize=10)


def _count(name: str, format: str) -> Callable[[Measurement], str]:
    """A cell with one of the counts, where it was taken."""
    return lambda m: format.format(m.counts[name]) if name in m.counts else ""


COLUMNS = {
    "cache": _name,
    "bits a value": _count("bits_per_value", "{:.2f}"),
    "bytes per token": _count("bytes_per_token", "{:,.0f}"),
    "perplexity": "{m.median:.4f}",
    "above full precision": lambda m: (
        f"{m.counts['excess']:+.3%} ± {m.counts['excess_standard_error']:.3%}" if not _is_full(m) else ""
    ),
    "largest error of a key": _count("largest_key_error", "{:.3g}"),
}


def _is_full(m: Measurement) -> bool:
    return m.settings["measured"] == "kv" and m.settings["format"] == REFERENCE


def _table(taken: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    return table([*[m for m in taken if _is_full(m)][:1], *_kept(taken)], COLUMNS)


def _channel_words(shown: Sequence[Measurement]) -> list[str]:
    lines = []
    for tensor in TENSORS:
        size = _first(shown, measured="magnitude", tensor=tensor)
        firsts = {s: _first(shown, measured="error", tensor=tensor, scheme=s) for s in SCHEMES}
        errors = {s: m for s, m in firsts.items() if m is not None}
        if size is None or len(errors) < len(SCHEMES):
            continue
        means = {s: m.counts["error_to_size"] for s, m in errors.items()}
        worst = {s: m.counts["worst_channel_error_to_size"] for s, m in errors.items()}
        best = min(means, key=lambda scheme: means[scheme])
        verdict = (
            ""
            if best == USUAL[tensor]
            else (
                "; the kv gives a value the scale of its token all the same, which need not wait for a group to be full"
            )
        )
        lines.append(
            f"{tensor.capitalize()}: the largest channel is {size.counts['largest_to_median']:.1f} × the median one."
            f" The error in {errors[best].settings['format']} is {means['per channel']:.1%} of their size per channel"
            f" and {means['per token']:.1%} per token; in the worst channel {worst['per channel']:.1%} and"
            f" {worst['per token']:.1%}. Better {best}{verdict}."
        )
    return lines


def _perplexity_words(shown: Sequence[Measurement]) -> list[str]:
    through = [m for m in _kept(shown) if m.settings["measured"] == "kv"]
    full = _first(shown, measured="kv", format=REFERENCE)
    if not through or full is None:
        return []
    parts = [
        f"{m.settings['format']} {m.counts['excess']:+.3%} (± {m.counts['excess_standard_error']:.3%})" for m in through
    ]
    lines = [
        f"Perplexity {full.median:.3f} in full precision, {readable_bytes(full.counts['bytes_per_token'])} a token."
        f" Above it: {listed(parts)}."
    ]
    keys = [m for m in _kept(shown) if m.settings["measured"] == "scheme"]
    if keys:
        pairs = [f"{_name(m)} {m.counts['excess']:+.2%}" for m in keys]
        lines.append(f"What a key's scale serves, at equal bits, every key rounded and nothing else: {listed(pairs)}.")
    return lines
