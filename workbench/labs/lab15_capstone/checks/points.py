"""Lab 15, levels and points: cases and judges of capstone-points. What is right is worked out in fractions."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

from workbench.checks.tensors import missing_message

CLOSE = 1e-5
EXAMPLE = [1.0, 1.25, 1.6, 2.0]
WIDE = [1.0, 2.0, 4.0, 8.0]


# --- Cases: levels ---


def thresholds_of(draw: random.Random) -> list[float]:
    """Four that rise, in sixteenths, by unequal steps."""
    first = draw.randint(8, 24)
    steps = draw.sample(range(3, 30), 3)
    return [at / 16 for at in (first, first + steps[0], first + sum(steps[:2]), first + sum(steps))]


def between(draw: random.Random, thresholds: list[float]) -> list[float]:
    """A ratio inside each stretch, off its middle."""
    return [low + (high - low) * draw.choice([3, 5, 11, 13]) / 16 for low, high in pairwise(thresholds)]


def level_cases(draw: random.Random) -> list[dict]:
    """At the thresholds, and between them."""
    own = thresholds_of(draw)
    return [{"ratios": [*one, *between(draw, one)], "thresholds": one} for one in (EXAMPLE, WIDE, own)]


def beyond_cases(draw: random.Random) -> list[dict]:
    """Below the first and above the last."""
    own = thresholds_of(draw)
    return [
        {"ratios": [one[0] * draw.uniform(0.3, 0.95), one[3] * draw.uniform(1.1, 3), 0.0, 1e9], "thresholds": one}
        for one in (EXAMPLE, WIDE, own)
    ]


def other_levels(draw: random.Random) -> list[dict]:
    cases = []
    for _ in range(4):
        own = thresholds_of(draw)
        low, high = own[0] * draw.uniform(0.1, 0.99), own[3] * draw.uniform(1.01, 9)
        cases.append({"ratios": [low, *between(draw, own), high, *own], "thresholds": own})
    return cases


# --- Cases: points ---

NAMES = ("weight_bytes", "tokens_per_s", "bytes_read", "good_requests")


def weights_of(draw: random.Random, count: int) -> dict[str, float]:
    """In sixteenths, no two equal, added up to 1."""
    while True:
        cuts = sorted(draw.sample(range(1, 16), count - 1))
        sizes = [high - low for low, high in zip([0, *cuts], [*cuts, 16])]
        if len(set(sizes)) == count:
            return {name: size / 16 for name, size in zip(draw.sample(NAMES, count), sizes)}


def points_case(
    draw: random.Random, ratios: list[float], thresholds: list[float], share: float = 1.0, **more: float
) -> dict:
    """more: ratios without a weight."""
    weights = weights_of(draw, len(ratios))
    given = {"ratios": dict(zip(weights, ratios)) | more, "weights": weights}
    return {**given, "thresholds": thresholds, "share_served": share}


def inside(draw: random.Random, thresholds: list[float], count: int) -> list[float]:
    return draw.sample(between(draw, thresholds), count)


def points_cases(draw: random.Random) -> list[dict]:
    """One count, two and three, at different levels; all served."""
    own = thresholds_of(draw)
    return [points_case(draw, inside(draw, one, count), one) for one, count in ((EXAMPLE, 1), (EXAMPLE, 2), (own, 3))]


def share_cases(draw: random.Random) -> list[dict]:
    """Some of the requests, and none."""
    own = thresholds_of(draw)
    shares = (draw.randint(20, 46) / 48, 0.5, 0.0)
    return [points_case(draw, inside(draw, own, 2), own, share) for share in shares]


def zero_cases(draw: random.Random) -> list[dict]:
    """A count that is no better than the baseline's, beside good ones."""
    own = thresholds_of(draw)
    return [
        points_case(draw, [EXAMPLE[0] * 0.8, *inside(draw, EXAMPLE, 1)], EXAMPLE),
        points_case(draw, [*inside(draw, own, 2), own[0]], own),
        points_case(draw, [0.0, 0.5], EXAMPLE),
    ]


def capped_cases(draw: random.Random) -> list[dict]:
    """A count that is driven far beyond the last threshold."""
    own = thresholds_of(draw)
    return [
        points_case(draw, [500.0, *inside(draw, EXAMPLE, 1)], EXAMPLE),
        points_case(draw, [own[3] * 40, own[0] * 0.5, own[1]], own),
        points_case(draw, [3.0, 3.0], EXAMPLE),
    ]


def unweighted_cases(draw: random.Random) -> list[dict]:
    """Ratios of counts that have no weight."""
    return [points_case(draw, inside(draw, one, 2), one, rows=1.9, passes=1.3) for one in (EXAMPLE, WIDE)]


def other_points(draw: random.Random) -> list[dict]:
    cases = []
    for count in (2, 3, 3, 1):
        own = thresholds_of(draw)
        share = draw.randint(30, 48) / 48
        cases.append(points_case(draw, inside(draw, own, count), own, share, rows=draw.uniform(1, 3)))
    return cases


def odd_points(draw: random.Random) -> list[dict]:
    return [*zero_cases(draw)[:2], *capped_cases(draw)[:2], *share_cases(draw)[1:], *unweighted_cases(draw)[:1]]


# --- What is right ---


def level(ratio: float, thresholds: list[float]) -> Fraction:
    """Of each stretch the part that lies below the ratio."""
    exact, total = Fraction(ratio), Fraction(0)
    for low, high in pairwise(map(Fraction, thresholds)):
        total += (min(max(exact, low), high) - low) / (high - low)
    return total


def points(case: dict) -> Fraction:
    levels = (Fraction(w) * level(case["ratios"][name], case["thresholds"]) for name, w in case["weights"].items())
    return 100 * Fraction(case["share_served"]) * sum(levels, Fraction(0)) / 3


# --- Judging ---


def judge_levels(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    for ratio, came in zip(case["ratios"], seen["levels"], strict=True):
        where = f"level({ratio:g}, {tuple(case['thresholds'])}): "
        right = level(ratio, case["thresholds"])
        if isinstance(came, str):
            return f"{where}a {came} came back, expected a number"
        if not abs(came - right) <= CLOSE:
            return f"{where}{came:g}, expected {float(right):g}"
    return None


def judge_points(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    weights = {name: f"weight {weight:g}" for name, weight in case["weights"].items()}
    counts = "; ".join(f"{n} {ratio:g} ({weights.get(n, 'no weight')})" for n, ratio in case["ratios"].items())
    where = f"ratios {counts}; thresholds {tuple(case['thresholds'])}, share_served {case['share_served']:g}: "
    came, right = seen["points"], points(case)
    if isinstance(came, str):
        return f"{where}a {came} came back, expected a number"
    if not abs(came - right) <= 100 * CLOSE:
        return f"{where}{came:.6g} points, expected {float(right):.6g}"
    return f"{where}what was given was changed" if seen["changed"] else None
