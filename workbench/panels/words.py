"""Sentences that several panels say about their measurements."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence

from workbench.instruments.records import Measurement
from workbench.panels.style import milliseconds


def listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def spread_words(m: Measurement | None) -> str:
    """'12.1 ms (11.9 to 13 ms)'; one sample has no spread, and what is not measured no words."""
    if m is None:
        return ""
    low, high = m.spread
    if len(m.samples) == 1:
        return milliseconds(m.median)
    return f"{milliseconds(m.median)} ({milliseconds(low)} to {milliseconds(high)})"


OFF_BY = 1.25  # a factor, up or down, that a panel explains
OVER, OF = "measured is", "× predicted"
MAX_NAMED, LONGEST_NAMED = 2, 32  # settings of the point furthest off, and the letters of one
TIMES = ("s", "s/token", "µs")
RATES = ("FLOP/s", "GB/s")
FACTORS = ("ratio",)
NAMES = {"ratio": "The factor"} | dict.fromkeys(TIMES, "Time") | dict.fromkeys(RATES, "Rate")
AROUND = "what is done around the model's step, and whatever else the machine does"
BOUND = (
    "the prediction adds the calls, bytes and arithmetic of each operation, at the speed that this machine has for each"
    " when it does nothing else"
)
BEYOND = (
    "faster than predicted, so something it counts did not happen: what was to be read from memory lay in a cache, or"
    " the machine was busy when its ceilings were measured"
)


def beside_prediction(measured: Sequence[Measurement], what: str = "", *, left_out: str = "") -> str:
    """How far the prediction is off, and from a quarter on why, or what it leaves out; and where it is off otherwise
    than in the middle. what: the subject; left_out: in place of what is said of every time. Empty where nothing was
    predicted."""
    known = [m for m in measured if m.predicted]
    if not known:
        return ""
    ratios = [m.median / m.predicted for m in known if m.predicted]
    unit, middle = known[0].unit, statistics.median(ratios)
    text = f"{what or NAMES.get(unit, 'It')}: {OVER} {middle:.2g} {OF}"
    text += f" ({min(ratios):.2g} to {max(ratios):.2g} ×)" if len(ratios) > 1 else ""
    elsewhere = _furthest_off(known, middle)
    if OFF_BY >= middle >= 1 / OFF_BY:
        return f"{text}.{elsewhere}"
    slower = middle > 1 if unit in TIMES else middle < 1
    why = "" if unit in FACTORS else BOUND if slower else BEYOND
    if slower or left_out or unit in FACTORS:
        missing = left_out or (AROUND if unit not in FACTORS else "the work around the model and unsteady clocks")
        why = f"{why}; not in the prediction: {missing}" if why else f"not in the prediction: {missing}"
    return f"{text}: {why}.{elsewhere}"


def _furthest_off(known: Sequence[Measurement], middle: float) -> str:
    """The point whose prediction is furthest off, by what its settings have that others have not. Empty where all are
    off as the middle one is."""
    ratios = [(m.median / m.predicted, m) for m in known if m.predicted and m.median / m.predicted > 0]
    if not ratios or middle <= 0:
        return ""
    ratio, m = max(ratios, key=lambda pair: abs(math.log(pair[0])))
    if OFF_BY >= ratio / middle >= 1 / OFF_BY or OFF_BY >= ratio >= 1 / OFF_BY:
        return ""
    own = {key.replace("_", " "): _short(m.settings[key]) for key in m.settings if _sets_apart(key, m, known)}
    named = ", ".join([f"{key} {value}" for key, value in own.items()][:MAX_NAMED])
    return f" Furthest off: {ratio:.2g} ×" + (f" at {named}." if named else ".")


def _sets_apart(key: str, m: Measurement, known: Sequence[Measurement]) -> bool:
    value = m.settings[key]
    return isinstance(value, str | int | float) and any(one.settings.get(key) != value for one in known)


def _short(value: str | float) -> str:
    text = value if isinstance(value, str) else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return text if len(text) <= LONGEST_NAMED else text[: LONGEST_NAMED - 1] + "…"


def gaps(measured: Sequence[Measurement], left_out: Mapping[str, str]) -> list[str]:
    """A sentence for each kind of what was timed, by unit and by what the settings say was "measured". left_out: what
    the prediction of that kind leaves out; "": of every kind."""
    kinds: dict[tuple[str, str], list[Measurement]] = {}
    for m in measured:
        if m.predicted and m.unit in NAMES:
            kinds.setdefault((str(m.settings.get("measured", "")), m.unit), []).append(m)
    return [
        beside_prediction(of_kind, kind.capitalize(), left_out=left_out.get(kind, left_out.get("", "")))
        for (kind, _), of_kind in kinds.items()
    ]


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
