"""The panel of smaller.decode: time of a step against context for each way to remember, and what each one keeps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.experiments.smaller_decode import (
    COMPARISONS,
    WAYS,
    contexts_of,
    dtype_of_size,
    predict_ways,
    reserved_bytes,
    variant_config,
)
from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.kv import stored_dtype
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.cache_words import LIMIT_WORDS, time_axis
from workbench.panels.smaller_plots import COLOURS, MARKS, bars_of_bytes, listed
from workbench.panels.time_plots import same_knobs
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, recorded_label, spread_words

KNOBS = ("size", "compare", "largest_context", "arrangement")


class SmallerDecodePanel(Panel):
    """Step time of each variant. kv=MyCache drives the variant `yours_on` through your class as well."""

    experiment_name = "smaller.decode"

    def view(self, settings: dict[str, Any]) -> View:
        predicted = predict_ways(self.ceilings(), **settings)
        wanted = {name: settings[name] for name in KNOBS}
        made = [m for m in self.measurements if same_knobs(m, wanted)]
        record = [m for m in self.record if m.settings["way"] in predicted]
        names = COMPARISONS[settings["compare"]]
        kept = [self._bytes(name, settings) for name in names]
        figure, (times, bars) = style.new_figure(1, 2, height=3.9, width_ratios=[2.1, 1])
        _draw_times(times, predicted, made, record)
        bars_of_bytes(bars, names, [WAYS[n].title for n in names], kept)
        style.label(bars, title=f"reserved for {settings['largest_context'] + 1:,} tokens")
        figure.subplots_adjust(left=0.095, right=0.985, top=0.92, bottom=0.14, wspace=0.08)
        return View(
            figure=figure,
            alt=_alt(predicted, made, names, kept),
            header=[
                "",
                "reserved by formula",
                "allocated",
                "in use",
                "measured (p10 to p90)",
                "predicted",
                "limit",
            ],
            rows=_rows(predicted, made, names, kept),
            caption=f"One new token after {settings['largest_context']:,} others, "
            + ("measured" if made else "predicted; Run measures"),
            words=_words(settings, predicted, made, names, kept),
        )

    def _bytes(self, name: str, settings: dict[str, Any]) -> int:
        way = WAYS[name]
        stored = stored_dtype(dtype_of_size(settings["size"]), self.bench.device)
        config = variant_config(settings["size"], way.variant)
        return reserved_bytes(way, config, settings["largest_context"] + 1, stored)


def _of(made: Sequence[Measurement], way: str) -> list[Measurement]:
    return sorted((m for m in made if m.settings["way"] == way), key=lambda m: m.settings["context"])


def _draw_times(axes: Axes, predicted: dict, made: list[Measurement], record: list[Measurement]) -> None:
    for way, points in predicted.items():
        x, ms = zip(*((c, s * 1e3) for c, s, _ in points))
        axes.plot(x, ms, color=COLOURS[way], **style.PREDICTED)
    for way in dict.fromkeys(m.settings["way"] for m in record):
        points = _of(record, way)
        look = style.RECORDED | {"marker": MARKS[way]}
        axes.plot(
            [m.settings["context"] for m in points],
            [m.median * 1e3 for m in points],
            color=COLOURS[way],
            **look,
        )
    for way in dict.fromkeys(m.settings["way"] for m in made):
        points = _of(made, way)
        look = style.MEASURED | {"marker": MARKS[way], "markersize": 6, "linewidth": 1.5}
        x, middle = [m.settings["context"] for m in points], [m.median * 1e3 for m in points]
        axes.plot(x, middle, color=COLOURS[way], zorder=3, **look)
        low, high = zip(*(m.spread for m in points))
        bars = [[m - 1e3 * s for m, s in zip(middle, low)], [1e3 * s - m for m, s in zip(middle, high)]]
        axes.errorbar(
            x, middle, yerr=bars, fmt="none", ecolor=COLOURS[way], elinewidth=1.2, capsize=3, zorder=2
        )
    seconds = [s for points in predicted.values() for _, s, _ in points]
    seconds += [v for m in (*made, *record) for v in (m.median, *(m.spread if m in made else ()))]
    time_axis(axes, seconds, above=1.6)
    contexts = {c for points in predicted.values() for c, _, _ in points}
    style.log_ticks(axes, "x", sorted(contexts | {m.settings["context"] for m in record}))
    if record:
        note = f"hollow: {record[0].settings['size']}, {recorded_label(record)}"
        style.write(axes, 0.02, 0.97, note, fontsize=9, transform=axes.transAxes, va="top")
    style.label(axes, x="tokens remembered", y="time of a step", title="dashed: predicted")


def _rows(
    predicted: dict, made: list[Measurement], names: Sequence[str], kept: Sequence[int]
) -> list[list[str]]:
    rows = []
    for name, reserved in zip(names, kept):
        _, seconds, limit = predicted[name][-1]
        m = (_of(made, name) or [None])[-1]
        rows.append([
            WAYS[name].title,
            f"{reserved:,}",
            f"{m.counts['bytes_reserved']:,.0f}" if m else "",
            f"{m.counts['bytes_in_use']:,.0f}" if m else "",
            spread_words(m) if m else "",
            style.milliseconds(seconds),
            limit,
        ])  # fmt: skip
    for m in _of(made, "yours")[-1:]:
        in_use, taken = (f"{m.counts[name]:,.0f}" for name in ("bytes_in_use", "bytes_reserved"))
        rows.append(["yours", "", taken, in_use, spread_words(m), "", ""])
    return rows


def _alt(predicted: dict, made: list[Measurement], names: Sequence[str], kept: Sequence[int]) -> str:
    parts = []
    for name, reserved in zip(names, kept):
        first, last = predicted[name][0], predicted[name][-1]
        text = (
            f"{WAYS[name].title}: {readable_bytes(reserved)}, predicted {style.milliseconds(first[1])} after {first[0]:,} "
            f"tokens and {style.milliseconds(last[1])} after {last[0]:,}"
        )
        points = _of(made, name)
        if points:
            text += f", measured {style.milliseconds(points[0].median)} and {style.milliseconds(points[-1].median)}"
        parts.append(text)
    return (
        "Time of a decode step against tokens remembered, and bars of the bytes reserved. "
        + "; ".join(parts)
        + "."
    )


def _words(
    settings: dict, predicted: dict, made: list[Measurement], names: Sequence[str], kept: Sequence[int]
) -> str:
    base, others = names[0], names[1:]
    smallest = min(zip(kept, names))
    ends = {name: predicted[name][-1] for name in names}
    gains = listed([f"{WAYS[n].title} {ends[base][1] / ends[n][1]:.2f} ×" for n in others])
    lines = [
        f"{settings['size']} after {settings['largest_context']:,} tokens: {WAYS[base].title} reserves "
        f"{readable_bytes(kept[0])}, {WAYS[smallest[1]].title} {readable_bytes(smallest[0])}, "
        f"{kept[0] / smallest[0]:.1f} × less. Predicted, as fast as {WAYS[base].title}: {gains}.",
        _regimes(ends),
    ]
    if made and len(_of(made, base)) == len(contexts_of(settings["largest_context"])):
        lines += _measured(made, names)
    lines += [f"Yours: {m.check}." for m in _of(made, "yours")[-1:]]
    return "\n".join(lines)


def _regimes(ends: dict[str, tuple[int, float, str]]) -> str:
    """Which limit binds whom, and what follows for a smaller cache."""
    by_limit: dict[str, list[str]] = {}
    for name, (_, _, limit) in ends.items():
        by_limit.setdefault(limit, []).append(WAYS[name].title)
    parts = [f"{listed(titles)} {'is' if len(titles) == 1 else 'are'} {LIMIT_WORDS[limit]}"
             for limit, titles in by_limit.items()]  # fmt: skip
    text = "By the prediction " + "; ".join(parts) + "."
    if set(by_limit) == {"launch"}:
        text += (
            " No gain in time to speak of, then, however small the cache: what it buys here is memory, for more users "
            "or longer texts."
        )
    return text


def _measured(made: list[Measurement], names: Sequence[str]) -> list[str]:
    last = {name: _of(made, name)[-1] for name in names if _of(made, name)}
    base = last.pop(names[0])
    gains = {
        name: statistics.median(a / b for a, b in zip(base.samples, m.samples)) for name, m in last.items()
    }
    lines = [
        f"Measured, as fast as {WAYS[names[0]].title} ({style.milliseconds(base.median)}; medians over the turns): "
        f"{listed([f'{WAYS[n].title} {gain:.2f} ×' for n, gain in gains.items()])}. "
        + beside_prediction([base, *last.values()])
    ]
    lines += [f"{WAYS[n].title} is {m.check}." for n, m in last.items() if not WAYS[n].exact]
    slower = [
        n
        for n, m in last.items()
        if m.counts["bytes_in_use"] < base.counts["bytes_in_use"] and gains[n] < 0.97
    ]
    brought_back = [n for n in slower if not WAYS[n].exact or n == "mla re-expanded"]
    others = [n for n in slower if n not in brought_back]
    if brought_back:
        lines.append(
            f"{listed([WAYS[n].title for n in brought_back])}: fewer bytes and yet slower here. What is kept in another form "
            "is brought back to keys and values before it is attended to, and that costs more than the bytes it spares. A "
            "kernel that does both at once is needed (lab 10)."
        )
    if others:
        lines.append(
            f"{listed([WAYS[n].title for n in others])}: fewer bytes and yet slower here. The step has more operations, or "
            "more arithmetic, than those bytes are worth on this machine at this size."
        )
    return lines
