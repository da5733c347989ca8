"""When requests come: the gaps between one and the next. Poisson, bursts, a constant rate, all at once. No torch.

Only `random()` of `random.Random` is used, see `workbench.serving.load`; so the distributions are made here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from workbench.errors import check_above, check_between


@dataclass(frozen=True)
class Poisson:
    """Many who do not know of each other: exponential gaps, coefficient of variation 1."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)

    def gap_s(self, random: Random) -> float:
        return exponential(random) / self.rate_per_s

    def at_rate(self, rate_per_s: float) -> Poisson:
        return Poisson(rate_per_s)


@dataclass(frozen=True)
class Bursty:
    """Gamma gaps. cv: coefficient of variation, the gaps' standard deviation over their mean; 1 is Poisson, more is
    bursts and pauses. The shape of the Gamma distribution is 1/cv², its scale cv²/rate.
    """

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)
        check_between("cv", self.cv, 0.05, 50)

    def gap_s(self, random: Random) -> float:
        return gamma(self.cv**-2, random) * self.cv**2 / self.rate_per_s

    def at_rate(self, rate_per_s: float) -> Bursty:
        return Bursty(rate_per_s, self.cv)


@dataclass(frozen=True)
class Constant:
    """One every 1/rate seconds."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)

    def gap_s(self, random: Random) -> float:
        return 1 / self.rate_per_s

    def at_rate(self, rate_per_s: float) -> Constant:
        return Constant(rate_per_s)


@dataclass(frozen=True)
class AtOnce:
    """All at time 0: a batch job. At a rate it becomes Poisson."""

    def gap_s(self, random: Random) -> float:
        return 0.0

    def at_rate(self, rate_per_s: float) -> Poisson:
        return Poisson(rate_per_s)


Gaps = Poisson | Bursty | Constant | AtOnce


def _check_rate(rate_per_s: float) -> None:
    check_above("rate_per_s", rate_per_s, 0)
    check_between("rate_per_s", rate_per_s, 0, 10_000)  # times are whole microseconds


def exponential(random: Random) -> float:
    return -math.log(1 - random.random())


def normal(random: Random) -> float:
    """Marsaglia's polar method; the second of its two numbers is thrown away."""
    while True:
        x, y = 2 * random.random() - 1, 2 * random.random() - 1
        square = x * x + y * y
        if 0 < square < 1:
            return x * math.sqrt(-2 * math.log(square) / square)


def gamma(shape: float, random: Random) -> float:
    """Of scale 1. Marsaglia and Tsang, "A simple method for generating gamma variables", ACM TOMS 26(3), 2000; a shape
    below 1 by Gamma(a) = Gamma(a + 1) · U^(1/a)."""
    if shape < 1:
        return gamma(shape + 1, random) * (1 - random.random()) ** (1 / shape)
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = normal(random)
        v = (1 + c * x) ** 3
        if v > 0 and math.log(1 - random.random()) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v
