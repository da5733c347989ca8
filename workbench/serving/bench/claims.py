"""What so many requests can show: an interval for a share, and the percentile that a finite run can claim. No torch.

Wilson's interval: E. B. Wilson, Journal of the American Statistical Association 22, 1927. Early stopping: MLPerf
Inference's LoadGen. Of n requests, t missed a limit. With a chance of at least 1 − p of missing it, so few would have
missed it with a probability of P(X ≤ t), X binomial of n and 1 − p; where that is at most 1 − confidence, "a share of
at least p meets the limit" may be claimed. For p = 0.99 at 99 % confidence with none missed that takes ln 0.01 / ln
0.99 = 458.2, so 459 requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from workbench.errors import WorkbenchError, check_between, check_whole

CONFIDENCE = 0.99  # of early stopping
WILSON_Z = 1.959963984540054  # of a 95 % interval


def wilson(good: int, of: int, z: float = WILSON_Z) -> tuple[float, float]:
    """The 95 % interval of a share of which `good` of `of` were counted."""
    check_whole("of", of, 1)
    if not 0 <= check_whole("good", good, 0) <= of:
        raise WorkbenchError(f"{good} of {of} cannot be counted")
    share, square = good / of, z * z
    middle = share + square / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + square / (4 * of * of))
    low, high = (middle - half) / (1 + square / of), (middle + half) / (1 + square / of)
    return (0.0 if good == 0 else low), (1.0 if good == of else high)


def _log_chances(of: int, chance: float) -> Iterator[float]:
    """ln P(X ≤ k) for k = 0, 1, …, of; X binomial of `of` and `chance`, 0 < chance < 1."""
    odds, total = math.log(chance) - math.log1p(-chance), -math.inf
    term = of * math.log1p(-chance)
    for k in range(of + 1):
        high, low = max(total, term), min(total, term)
        total = high + math.log1p(math.exp(low - high))
        yield min(0.0, total)
        if k < of:
            term += math.log(of - k) - math.log(k + 1) + odds


def at_most(missed: int, of: int, chance: float) -> float:
    """P(X ≤ missed) of X binomial of `of` and `chance`."""
    if missed >= of or chance <= 0:
        return 1.0
    if chance >= 1:
        return 0.0
    return math.exp(next(islice(_log_chances(of, chance), missed, None)))


def claimable_share(missed: int, of: int, confidence: float = CONFIDENCE) -> float:
    """The largest p for which "a share of at least p meets the limit" may be claimed; 0 where all missed it."""
    check_whole("of", of, 1)
    check_whole("missed", missed, 0)
    check_between("confidence", confidence, 0.5, 1 - 1e-12)
    if missed >= of:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(missed, of, 1 - middle) <= 1 - confidence else (low, middle)
    return low


def requests_needed(percent: float, confidence: float = CONFIDENCE) -> int:
    """The fewest requests with which a percentile can be claimed: none may miss the limit."""
    check_between("percent", percent, 1, 99.9999)
    return math.ceil(math.log(1 - confidence) / math.log(percent / 100) - 1e-9)
