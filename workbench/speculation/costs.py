"""What a round of K drafted tokens takes, in plain steps, from a few measurements on a restless machine.

    steps(K) = verify(K) · (1 + share(K))

verify(K): the target's pass over K drafted tokens, over that of a plain step right before it. share(K): what drafting
took, over the verification of the same round. Both are ratios of times of the same moment, so a machine that is now
half as fast changes neither; and both are straight lines through medians, so a few times that are far too long change
them little.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterable

KEPT_PAIRS, KEPT_SHARES, KEPT_SLOPES = 21, 24, 16
FIT_ALWAYS, FIT_EVERY = 14, 5  # rounds: a fit takes time, too
ENOUGH_PAIRS = 9
ROUNDS_OF_A_MOMENT = 3  # plain steps no older than this are of the same moment
APART = 2  # depths this far apart tell what a row costs
STEEPEST = 0.25  # of a pass, for one more drafted token

Weighted = tuple[float, float]  # value, weight


class RoundCosts:
    """Shared by all sequences of one pair of models on one machine."""

    def __init__(self) -> None:
        self.num_pairs = 0
        self.since_pair = 0  # rounds with a draft
        # how far a pair lies below or above the line, at the quartiles: what `verify` may be as well
        self.low, self.high = 1.0, 1.0
        self._pairs: deque[tuple[int, float]] = deque(maxlen=KEPT_PAIRS)  # depth, passes
        self._shares: deque[tuple[int, float]] = deque(maxlen=KEPT_SHARES)  # depth, draft over verification
        self._slopes: deque[Weighted] = deque(maxlen=KEPT_SLOPES)  # of a pass for one more token
        self._plain: deque[tuple[int, float]] = deque(maxlen=ROUNDS_OF_A_MOMENT)  # round, seconds
        self._round = 0
        self._before: tuple[int, float] | None = None  # depth and seconds of the round before, if it was drafted
        self._base, self._slope = 1.0, 0.0  # verify(K) = base · (1 + slope · K)
        self._share_base, self._share_slope = 0.0, 0.0
        self._new_shares = 0  # since the last fit

    def add_plain(self, seconds: float) -> None:
        """Of a step without drafted tokens."""
        self._round += 1
        self._before = None
        self._plain.append((self._round, seconds))

    def add_round(self, depth: int, draft_s: float, verify_s: float, *, after_plain: bool, caught_up: bool) -> None:
        """Of a round with drafted tokens. after_plain: a plain step came right before. caught_up: the draft had read
        what came before, so its time is that of drafting."""
        self._round += 1
        self.since_pair += 1
        if draft_s < 0 or verify_s <= 0:  # a clock too coarse for these steps
            return
        if caught_up:
            self._shares.append((depth, draft_s / verify_s))
            self._new_shares += 1
            if len(self._shares) <= FIT_ALWAYS or self._new_shares >= FIT_EVERY:
                self._share_base, self._share_slope = line(self._shares)
                self._new_shares = 0
        if after_plain:
            self._add_pair(depth, verify_s)
        elif self._before is not None:
            self._add_slope(*self._before, depth, verify_s)
        self._before = (depth, verify_s)

    def add_warm_up(self) -> None:
        """Of a round that is not measured: the first of its depth."""
        self._round += 1
        self.since_pair += 1
        self._before = None

    def _add_pair(self, depth: int, verify_s: float) -> None:
        recent = [seconds for at, seconds in self._plain if at >= self._round - ROUNDS_OF_A_MOMENT and seconds > 0]
        if not recent:
            return
        self._pairs.append((depth, verify_s / statistics.median(recent)))
        self.num_pairs, self.since_pair = self.num_pairs + 1, 0
        self._fit()
        off = sorted(passes / self.verify(K) for K, passes in self._pairs)
        quarter = (len(off) - 1) // 4
        self.low, self.high = off[quarter], off[-1 - quarter]

    def _add_slope(self, K1: int, seconds_1: float, K2: int, seconds_2: float) -> None:
        """Two verifications one after the other: (1 + s·K2) / (1 + s·K1) is their ratio, solved for s."""
        ratio = seconds_2 / seconds_1
        if abs(K2 - K1) >= APART and (K2 - ratio * K1) * (K2 - K1) > 0:
            self._slopes.append(((ratio - 1) / (K2 - ratio * K1), abs(K2 - K1)))
            self._fit()

    def _fit(self) -> None:
        if not self._pairs:
            return
        middle = statistics.median(passes for _, passes in self._pairs)
        of_pairs = [(slope / middle, apart) for slope, apart in slopes(self._pairs) if apart >= APART]
        known = [*self._slopes, *of_pairs]
        self._slope = min(STEEPEST, max(0.0, weighted_median(known))) if known else 0.0
        self._base = statistics.median(passes / (1 + self._slope * K) for K, passes in self._pairs)

    def verify(self, K: int) -> float:
        """Plain steps that the pass over K drafted tokens takes, at least 1."""
        return max(1.0, self._base * (1 + self._slope * K))

    def steps(self, K: int, *, at_least: bool = False) -> float:
        """Plain steps that a round takes; 1 for K = 0. at_least: what it may be as well, at the lower quartile."""
        if not K:
            return 1.0
        verify = max(1.0, self.verify(K) * self.low) if at_least else self.verify(K)
        return verify * (1 + self._share_base + self._share_slope * K)


def slopes(points: Iterable[tuple[float, float]]) -> list[Weighted]:
    """Of each two points, with their distance in x."""
    return [
        ((y2 - y1) / (x2 - x1), abs(x2 - x1)) for (x1, y1), (x2, y2) in itertools.combinations(points, 2) if x1 != x2
    ]


def weighted_median(values: Iterable[Weighted]) -> float:
    ordered = sorted(values)
    half, reached = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("no values")


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b·x through the medians (Theil and Sen), neither below 0: what a draft takes, begun and for
    each token. Through the origin where there is one x only."""
    known = list(points)
    between = slopes(known)
    if between:
        slope = max(0.0, weighted_median(between))
        base = statistics.median(y - slope * x for x, y in known)
        if base >= 0:
            return base, slope
    return 0.0, statistics.median(y / x for x, y in known)
