"""How long prompts and answers are: distributions over whole numbers of tokens. No torch.

Each is known by its quantile function, the length under which a given share of all lengths lies. A drawn length is that
function at a random share, so one random number makes one length, and `stratified` shares make a small sample that has
the shape of the whole.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, field
from random import Random

import numpy as np

from workbench.errors import WorkbenchError, check_above, check_between, check_whole


class Lengths(ABC):
    """A distribution over the whole numbers from `low` to `high`, in tokens."""

    low: int
    high: int

    @abstractmethod
    def at(self, share: float) -> int:
        """The quantile function: the length under which this share of all lengths lies, 0 ≤ share < 1."""
        ...

    @abstractmethod
    def chances(self) -> np.ndarray:
        """The probability of each length, [high − low + 1], from `low` on."""
        ...

    @property
    def mean(self) -> float:
        """Of the lengths as they are drawn: whole, and between `low` and `high`."""
        return float(self.chances() @ np.arange(self.low, self.high + 1))

    def draw(self, random: Random) -> int:
        return self.at(random.random())

    def scaled(self, factor: float, max_length: int) -> Lengths:
        """Every length times `factor`, rounded, at least 1 and at most `most`."""
        return Scaled(self, factor, max_length)


@dataclass(frozen=True)
class Uniform(Lengths):
    """Each length from `low` to `high` as often as any other. Uniform(n, n) is always n."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    def at(self, share: float) -> int:
        return self.low + int(share * (self.high - self.low + 1))

    def chances(self) -> np.ndarray:
        count = self.high - self.low + 1
        return np.full(count, 1 / count)


@dataclass(frozen=True)
class HeavyTail(Lengths):
    """A bounded Pareto distribution: most lengths are near `low`, a few near `high`. The share of lengths beyond x
    falls as x^−alpha. The smaller alpha, the heavier the tail; with alpha = 1 each doubling of the length holds about
    as many tokens as the one before.
    """

    low: int
    high: int
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        check_above("alpha", self.alpha, 0)

    def at(self, share: float) -> int:
        first, last = self.low**-self.alpha, (self.high + 1) ** -self.alpha
        return _whole((first - share * (first - last)) ** (-1 / self.alpha), self.low, self.high)

    def chances(self) -> np.ndarray:
        beyond = np.arange(self.low, self.high + 2, dtype=float) ** -self.alpha
        return -np.diff(beyond) / (beyond[0] - beyond[-1])


@dataclass(frozen=True)
class Fitted(Lengths):
    """A shape through what is published of a trace: its smallest and largest length, median, 99th percentile and mean.

    The quantile function goes through the first four, straight up to the median and straight in the logarithm above it,
    where lengths spread over orders of magnitude. One more point, at `share` between the median and the 99th
    percentile, is the unknown: the mean decides it. It is found by bisection and rounded to 10⁻⁶ tokens; the mean of
    the whole numbers that are drawn is then the published one within 10⁻⁵ tokens. Raises where no such point exists.
    """

    low: int
    median: int
    p99: int
    high: int
    published_mean: float
    share: float = 0.75
    solved: float = field(init=False)  # the length at `share`
    _line: tuple[list[float], list[float]] = field(init=False, repr=False, compare=False)  # made straight

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        if not self.low < self.median < self.p99 < self.high:
            raise WorkbenchError(
                "lengths must rise from the smallest over the median and the 99th percentile to the largest, got "
                f"{self.low}, {self.median}, {self.p99}, {self.high}"
            )
        check_above("published_mean", self.published_mean, 0)
        if not 0.5 < check_between("share", self.share, 0, 1) < 0.99:
            raise WorkbenchError(f"share must lie between 0.5 and 0.99, got {self.share}")
        below, above = float(self.median), float(self.p99)
        lowest, highest = self._mean_with(below + 1e-6), self._mean_with(above - 1e-6)
        if not lowest < self.published_mean < highest:
            raise WorkbenchError(
                f"with this median and 99th percentile the mean lies between {lowest:.2f} and {highest:.2f}, "
                f"got {self.published_mean}; choose another share or other ends"
            )
        for _ in range(60):
            middle = (below + above) / 2
            if self._mean_with(middle) < self.published_mean:
                below = middle
            else:
                above = middle
        object.__setattr__(self, "solved", round(below, 6))
        lengths, shares = self._points(self.solved)
        object.__setattr__(self, "_line", (self._flatten(np.array(lengths)).tolist(), shares))

    def at(self, share: float) -> int:
        flats, shares = self._line
        place = bisect_right(shares, share) - 1
        x, y = flats[place], flats[place + 1]
        flat = x + (y - x) * (share - shares[place]) / (shares[place + 1] - shares[place])
        if flat > self.median:
            flat = self.median * math.exp(flat / self.median - 1)
        return _whole(flat, self.low, self.high)

    def chances(self) -> np.ndarray:
        return self._chances_with(self.solved)

    def _points(self, solved: float) -> tuple[list[float], list[float]]:
        """Lengths, and the share of all that lies below each."""
        return [self.low, self.median, solved, self.p99, self.high + 1], [0, 0.5, self.share, 0.99, 1]

    def _flatten(self, length: np.ndarray) -> np.ndarray:
        """Where the quantile function is straight: x to the median m, and m (1 + ln x/m), which goes on smoothly."""
        m = self.median
        return np.where(length <= m, length, m * (1 + np.log(np.maximum(length, m) / m)))

    def _chances_with(self, solved: float) -> np.ndarray:
        lengths, shares = self._points(solved)
        edges = np.arange(self.low, self.high + 2)
        return np.diff(np.interp(self._flatten(edges), self._flatten(np.array(lengths)), shares))

    def _mean_with(self, solved: float) -> float:
        return float(self._chances_with(solved) @ np.arange(self.low, self.high + 1))


@dataclass(frozen=True)
class Scaled(Lengths):
    """Another distribution, each length times `factor`, rounded, at least 1 and at most `most`."""

    whole: Lengths
    factor: float
    max_length: int
    low: int = field(init=False)
    high: int = field(init=False)

    def __post_init__(self) -> None:
        check_above("factor", self.factor, 0)
        check_whole("max_length", self.max_length, 1)
        object.__setattr__(self, "low", self._scale(self.whole.low))
        object.__setattr__(self, "high", self._scale(self.whole.high))

    def _scale(self, length: int) -> int:
        return min(self.max_length, max(1, math.floor(self.factor * length + 0.5)))

    def at(self, share: float) -> int:
        return self._scale(self.whole.at(share))

    def chances(self) -> np.ndarray:
        chances = np.zeros(self.high - self.low + 1)
        for length, chance in enumerate(self.whole.chances(), self.whole.low):
            chances[self._scale(length) - self.low] += chance
        return chances


def stratified(count: int, random: Random) -> list[float]:
    """Shares for `count` lengths, one from each `count`-th of the distribution, in random order."""
    check_whole("count", count, 1)
    shares = [(place + random.random()) / count for place in range(count)]
    for last in range(count - 1, 0, -1):  # Fisher–Yates, by random() alone: see `workbench.serving.load`
        other = int(random.random() * (last + 1))
        shares[last], shares[other] = shares[other], shares[last]
    return shares


def _whole(length: float, low: int, high: int) -> int:
    """Rounded down. What is whole but for a rounding error stays what it is, on every platform."""
    return min(high, max(low, math.floor(length + 1e-9)))


def _check_range(low: int, high: int) -> None:
    check_whole("low", low, 1)
    check_whole("high", high, 1)
    if high < low:
        raise WorkbenchError(f"lengths go from low to high, got {low} to {high}")
