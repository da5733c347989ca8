"""Sentences that several panels say about their measurements."""

from __future__ import annotations

import re
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


def first_lines(text: str, lines: int = 4, width: int = 105) -> tuple[str, str]:
    """(whole sentences that fill so many lines of so many letters, all that follows): the first is never empty."""
    paragraphs = text.split("\n")
    sentences = [
        (number, sentence) for number, one in enumerate(paragraphs) for sentence in re.split(r"(?<=[.!?])\s+", one)
    ]
    used, count = 0, 0
    for at, (number, sentence) in enumerate(sentences):
        new_line = at > 0 and number != sentences[at - 1][0]
        used = -(-used // width) * width + len(sentence) if new_line else used + len(sentence) + 1
        if any(one.strip() for _, one in sentences[:count]) and -(-used // width) > lines:
            break
        count += 1

    def joined(some: list[tuple[int, str]]) -> str:
        kept = {number for number, _ in some}
        return "\n".join(" ".join(s for n, s in some if n == number) for number in sorted(kept)).strip()

    return joined(sentences[:count]), joined(sentences[count:])
