"""From counts to points, from pairs to a ratio with its interval, and from a prediction to its score.

    ratio of a count    the baseline's over ours where less is better, ours over the baseline's where more is
    level               0 at the track's first threshold, 3 at its last, in between along straight lines
    points              100 · Σ weight · level / 3 · share of the requests that were served
    prediction          1 − |ln(predicted / measured)| / ln 2, at least 0: 1 is exact, 0 is off by two or more
    total               0.9 · points + 10 · prediction

A sum, and no geometric mean: where levels multiply, one count that is driven to nothing carries all others (as was
seen in contests of kernels). A level is capped, so that the whole of a track's counts is asked for. The clock decides
none of the points: it ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workbench.capstone.served import Run
from workbench.capstone.traces import Asked
from workbench.capstone.tracks import Objectives, Track

POINTS, PREDICTION_POINTS = 90.0, 10.0  # of the total
MIN_PAIRS = 5


def good(run: Run, trace: Sequence[Asked], objectives: Objectives, slowdown: float = 1.0) -> list[str]:
    """Requests that were served whole, within both objectives times `slowdown`."""
    names = []
    for one in trace:
        times = run.times_s.get(one.id, [])
        if one.id not in run.texts or not times:
            continue
        ttft = times[0] - one.arrival_s
        tpot = (times[-1] - times[0]) / max(1, len(times) - 1)
        if ttft <= objectives.ttft_s * slowdown and tpot <= objectives.tpot_s * slowdown:
            names.append(one.id)
    return names


def served_tokens(run: Run) -> int:
    return sum(map(len, run.texts.values()))


def _per_token(amount: float, run: Run) -> float:
    return amount / max(1, served_tokens(run))


def _tokens_per_s(run: Run) -> float:
    return served_tokens(run) / run.ended_s if run.ended_s else 0.0


@dataclass(frozen=True)
class Count:
    """words: what is counted, with its unit. less: whether less of it is better. of: (run, trace, track) -> amount."""

    words: str
    less: bool
    of: Callable[[Run, Sequence[Asked], Track], float]


COUNTS: dict[str, Count] = {
    "rows": Count(
        "rows through the model, per token", True, lambda run, trace, track: _per_token(run.totals.rows, run)
    ),
    "passes": Count(
        "passes of the model, per token", True, lambda run, trace, track: _per_token(run.totals.passes, run)
    ),
    "weight_bytes": Count(
        "weight bytes read, the draft's too, per token",
        True,
        lambda run, trace, track: _per_token(run.totals.weight_bytes + run.totals.draft_weight_bytes, run),
    ),
    "bytes_read": Count(
        "bytes of weights, keys and values read, per token",
        True,
        lambda run, trace, track: _per_token(
            run.totals.weight_bytes + run.totals.draft_weight_bytes + run.totals.kv_bytes, run
        ),
    ),
    "evicted_or_preempted": Count(
        "blocks evicted or never kept, sequences preempted, and one",  # so that none has a ratio, too
        True,
        lambda run, trace, track: 1.0 + run.facts["evictions"] + run.facts["preemptions"],
    ),
    "tokens_per_s": Count(
        "tokens per second on the course's clock", False, lambda run, trace, track: _tokens_per_s(run)
    ),
    "good_requests": Count(
        "requests within both objectives on the course's clock, and one",
        False,
        lambda run, trace, track: 1.0 + len(good(run, trace, track.objectives)),
    ),
}


@dataclass(frozen=True)
class Counted:
    """One count of a track: the baseline's amount, ours, the ratio (above 1 is better), its level and weight."""

    name: str
    baseline: float
    amount: float
    ratio: float
    level: float
    weight: float


def level(ratio: float, thresholds: Sequence[float]) -> float:
    """0 to 3, straight between the thresholds."""
    if not ratio > thresholds[0]:
        return 0.0
    for number, (low, high) in enumerate(pairwise(thresholds)):
        if ratio < high:
            return number + (ratio - low) / (high - low)
    return float(len(thresholds) - 1)


def counted(track: Track, trace: Sequence[Asked], run: Run, base: Run) -> list[Counted]:
    """Every count of the track."""
    amounts = []
    for name, weight in track.counts.items():
        count = COUNTS[name]
        ours, theirs = count.of(run, trace, track), count.of(base, trace, track)
        better, worse = (theirs, ours) if count.less else (ours, theirs)
        ratio = better / worse if worse > 0 else 0.0
        amounts.append(Counted(name, theirs, ours, ratio, level(ratio, track.levels), weight))
    return amounts


def points(counts: Sequence[Counted], share_served: float) -> float:
    """0 to 100."""
    top = 3
    return 100.0 * share_served * sum(one.weight * one.level / top for one in counts)


def prediction_score(predicted: float | None, measured: float) -> float:
    """1 exact; 0 for none, and from a factor of two on."""
    if not predicted or measured <= 0:
        return 0.0
    return max(0.0, 1.0 - abs(math.log(predicted / measured)) / math.log(2))


@dataclass(frozen=True)
class Ratios:
    """Of pairs: each ours over the baseline's. low, high: an interval that covers the median with `confidence`."""

    each: tuple[float, ...]
    median: float
    low: float
    high: float
    confidence: float


def ratios_of(ours: Sequence[float], baseline: Sequence[float]) -> Ratios:
    """The sign-test interval of the median: the k-th smallest and k-th largest of n, for the largest k that covers it
    with at least 0.9, whatever the distribution is. Five pairs: smallest and largest, 0.9375."""
    each = tuple(a / b if b > 0 else 0.0 for a, b in zip(ours, baseline, strict=True))
    ordered, n = sorted(each), len(each)

    def covers(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    k = max((k for k in range(1, n // 2 + 1) if covers(k) >= 0.9), default=1)
    return Ratios(each, statistics.median(each), ordered[k - 1], ordered[n - k], covers(k))
