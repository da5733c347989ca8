"""The panel of smaller.decode: time of a step against context for each way to remember, and what each one keeps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes

from workbench.instruments.memory import readable_bytes
from workbench.instruments.records import Measurement
from workbench.kv import stored_dtype
from workbench.labs.lab04_smaller_caches.panels.plots import COLOURS, MARKS, bars_of_ways
from workbench.labs.lab04_smaller_caches.variants import (
    EXPERIMENT,
    WAYS,
    contexts_of,
    dtype_of_size,
    predict_ways,
    reserved_bytes,
    variant_config,
    ways_here,
    words_left_out,
)
from workbench.panels import style
from workbench.panels.base import Panel
from workbench.panels.chart import VALUES, Axis, Chart, Drawing, Series, measured, predicted, recorded, table, view
from workbench.panels.limits import LIMIT_WORDS
from workbench.panels.plots import matching
from workbench.panels.style import milliseconds
from workbench.panels.view import View
from workbench.panels.words import beside_prediction, listed, recorded_label, spread_words

KNOBS = ("size", "compare", "largest_context", "arrangement")


class SmallerDecodePanel(Panel):
    """Lab 04: decode time and bytes of every attention variant. kv=: your own cache class beside ours."""

    experiment = EXPERIMENT

    def view(self, settings: dict[str, Any]) -> View:
        expected = predict_ways(self.ceilings(), **settings, device=self.bench.device)
        made = self.made(settings, KNOBS)
        record = [m for m in self.record if m.settings["way"] in expected]
        ways, left_out = ways_here(settings["compare"], settings["size"], self.bench.device)
        names, titles = list(ways), [way.title for way in ways.values()]
        kept = [self._bytes(name, settings) for name in names]
        reserved = ", ".join(f"{title} {readable_bytes(size)}" for title, size in zip(titles, kept))
        title = f"reserved for {settings['largest_context'] + 1:,} tokens"
        taken = {name: _of(made, name) for name in (*names, "yours")}
        last = {name: of_name[-1] if of_name else None for name, of_name in taken.items()}
        rows: list[tuple[Any, ...]] = [
            (name, last[name], size, *expected[name][-1][1:]) for name, size in zip(names, kept)
        ]
        rows += [("yours", last["yours"], None, None, "")] if last["yours"] else []
        return view(
            _times(expected, made, record),
            Drawing(lambda axes: bars_of_ways(axes, names, titles, kept, title), f"Bars, {title}: {reserved}.", title),
            height=3.9,
            width_ratios=[2.1, 1],
            table=table(
                rows,
                {
                    "": lambda row: WAYS[row[0]].title if row[0] in WAYS else row[0],
                    "reserved by formula": lambda row: f"{row[2]:,}" if row[2] is not None else "",
                    "allocated": lambda row: f"{row[1].counts['bytes_reserved']:,.0f}" if row[1] else "",
                    "in use": lambda row: f"{row[1].counts['bytes_in_use']:,.0f}" if row[1] else "",
                    "measured (p10 to p90)": lambda row: spread_words(row[1]),
                    "predicted": lambda row: milliseconds(row[3]) if row[3] is not None else "",
                    "limit": "{m[4]}",
                },
            ),
            caption=f"One new token after {settings['largest_context']:,} others, "
            + ("measured" if made else "predicted; Run measures"),
            words="\n".join([_words(settings, expected, made, names, kept), *words_left_out(left_out)]),
        )

    def _bytes(self, name: str, settings: dict[str, Any]) -> int:
        way = WAYS[name]
        stored = stored_dtype(dtype_of_size(settings["size"]), self.bench.device)
        config = variant_config(settings["size"], way.variant)
        return reserved_bytes(way, config, settings["largest_context"] + 1, stored)


def _of(made: Sequence[Measurement], way: str) -> list[Measurement]:
    return sorted(matching(made, way=way), key=lambda m: m.settings["context"])


def _times(expected: dict, made: list[Measurement], record: list[Measurement]) -> Chart:
    series: list[Series] = []
    for way, colour in COLOURS.items():
        title = WAYS[way].title if way in WAYS else way
        mark: dict[str, Any] = {"marker": MARKS[way], "legend": False}
        live: dict[str, Any] = {"markersize": 6, "linewidth": 1.5}
        series += [
            predicted(f"{title}, predicted", expected.get(way, ()), colour, legend=False),
            recorded(title, _of(record, way), "context", colour, **mark),
            measured(title, _of(made, way), "context", colour, **mark, **live),
        ]

    def note(axes: Axes) -> None:
        if record:
            words = f"hollow: {record[0].settings['size']}, {recorded_label(record)}"
            style.write(axes, 0.02, 0.97, words, fontsize=10, transform=axes.transAxes, va="top")

    return Chart(
        *series,
        x=Axis("tokens remembered", scale="log", ticks=VALUES),
        y=Axis("time of a step", milliseconds, "log", room=(1.8, 1.6)),
        title="dashed: predicted",
        also=note,
    )


def _words(settings: dict, predicted: dict, made: list[Measurement], names: Sequence[str], kept: Sequence[int]) -> str:
    base, others = names[0], names[1:]
    smallest = min(zip(kept, names))
    ends = {name: predicted[name][-1] for name in names}
    gains = listed([f"{WAYS[n].title} {ends[base][1] / ends[n][1]:.2f} ×" for n in others])
    lines = [
        (
            f"{settings['size']} after {settings['largest_context']:,} tokens: {WAYS[base].title} reserves "
            f"{readable_bytes(kept[0])}, {WAYS[smallest[1]].title} {readable_bytes(smallest[0])}, "
            f"{kept[0] / smallest[0]:.1f} × less. Predicted, as fast as {WAYS[base].title}: {gains}."
        ),
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
    parts = [
        f"{listed(titles)} {'is' if len(titles) == 1 else 'are'} {LIMIT_WORDS[limit]}"
        for limit, titles in by_limit.items()
    ]
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
    gains = {name: statistics.median(a / b for a, b in zip(base.samples, m.samples)) for name, m in last.items()}
    lines = [
        f"Measured, as fast as {WAYS[names[0]].title} ({style.milliseconds(base.median)}; medians over the turns): "
        f"{listed([f'{WAYS[n].title} {gain:.2f} ×' for n, gain in gains.items()])}. "
        + beside_prediction([base, *last.values()])
    ]
    lines += [f"{WAYS[n].title} is {m.check}." for n, m in last.items() if not WAYS[n].exact]
    slower = [n for n, m in last.items() if m.counts["bytes_in_use"] < base.counts["bytes_in_use"] and gains[n] < 0.97]
    brought_back = [n for n in slower if WAYS[n].restores]
    others = [n for n in slower if n not in brought_back]
    if brought_back:
        lines.append(
            f"{listed([WAYS[n].title for n in brought_back])}: fewer bytes and yet slower here. What is kept in another"
            " form is brought back to keys and values before it is attended to, and that costs more than the bytes it"
            f" spares. {_both_at_once(last)}"
        )
    if others:
        lines.append(
            f"{listed([WAYS[n].title for n in others])}: fewer bytes and yet slower here. The step has more operations,"
            " or more arithmetic, than those bytes are worth on this machine at this size."
        )
    return lines


def _both_at_once(measured: Iterable[str]) -> str:
    loops = [WAYS[name].title for name in measured if WAYS[name].reads_codes]
    if not loops:
        return "A kernel that does both at once is needed (lab 10)."
    return f"A loop that does both at once writes no copy: {listed(loops)}."
