"""Sentences that several panels say about their measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from workbench.instruments.records import Measurement
from workbench.panels.style import milliseconds


def spread_words(m: Measurement | None) -> str:
    """'12.1 ms (11.9 to 13 ms)'; one sample has no spread, and what is not measured no words."""
    if m is None:
        return ""
    low, high = m.spread
    if len(m.samples) == 1:
        return milliseconds(m.median)
    return f"{milliseconds(m.median)} ({milliseconds(low)} to {milliseconds(high)})"


def beside_prediction(measured: list[Measurement]) -> str:
    """How far the prediction is off, and what it leaves out."""
    ratios = [m.median / m.predicted for m in measured if m.predicted]
    if not ratios:
        return ""
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    text = f"Measured steps take {middle:.2g} × the predicted time"
    text += f" ({low:.2g} to {high:.2g} ×)" if len(ratios) > 1 else ""
    if middle > 1.25:
        text += (
            ": the prediction is a bound from below. It lets the bytes and the arithmetic of an operation overlap"
            " entirely and takes each at the best this machine reached; real operations are smaller, and wait for each"
            " other"
        )
    elif middle < 0.8:
        text += (
            ": faster than the bound, so something it counts did not happen. A model that fits in the processor's "
            "cache is not read from memory; or the machine was busy when its ceilings were measured"
        )
    return text + "."


def recorded_label(record: Sequence[Measurement]) -> str:
    """What hollow points are called: never to be taken for live."""
    first = record[0]
    return f"recorded on {first.device.get('name', 'another machine')}, {first.date[:10]}"
