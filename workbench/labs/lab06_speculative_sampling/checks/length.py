"""Lab 06, how long a draft: cases and judges of spec-length."""

from __future__ import annotations

import random

from workbench.checks.tensors import missing_message
from workbench.grading.check import not_refused
from workbench.labs.lab06_speculative_sampling.checks.probes import verify_time

CLOSE = 1e-9


def expected_cases(draw: random.Random) -> list[dict]:
    """The lecture's table at two places, then others."""
    pairs = [(0.7, 4), (0.8, 8), (round(draw.uniform(0.3, 0.95), 2), draw.randint(2, 9)), (0.5, 1)]
    return [{"part": "expected_tokens", "alpha": alpha, "K": K} for alpha, K in pairs]


def edge_cases(draw: random.Random) -> list[dict]:
    """α = 0 and α = 1, K = 0, and where nothing falls with the position or everything ends at it."""
    expected = [(1.0, 5), (0.0, 5), (round(draw.uniform(0.3, 0.9), 2), 0), (1.0, 0), (1, draw.randint(2, 9))]
    rates = [[], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.9]]
    return [{"part": "expected_tokens", "alpha": alpha, "K": K} for alpha, K in expected] + [
        {"part": "expected_by_position", "rates": row} for row in rates
    ]


def position_cases(draw: random.Random) -> list[dict]:
    rows = [[0.8, 0.6, 0.5], [round(draw.uniform(0.2, 0.95), 2) for _ in range(5)], [0.9], [0.6, 0.6]]
    return [{"part": "expected_by_position", "rates": row} for row in rows]


def speed_cases(draw: random.Random) -> list[dict]:
    """With verifying as quick as a plain step, and slower; one that loses; and no draft at all."""
    settings = [
        (0.8, 4, 0.1, 1.0),
        (round(draw.uniform(0.4, 0.9), 2), draw.randint(2, 8), round(draw.uniform(0.05, 0.4), 2), 1.0),
        (0.7, 4, 0.1, round(draw.uniform(1.1, 1.6), 2)),
        (0.3, 6, 0.4, 1.5),
        (0.7, 0, 0.3, 1.0),
    ]
    return [{"part": "speedup", "alpha": alpha, "K": K, "c": c, "verify": verify} for alpha, K, c, verify in settings]


def best_case(alpha: float, c: float, free: int, slope: float, max_K: int) -> dict:
    return {"part": "best_length", "alpha": alpha, "c": c, "free": free, "slope": slope, "max_K": max_K}


def separated(draw: random.Random, slope: tuple[float, float], free: int = 1) -> dict:
    """Settings whose best K is clear, and neither 0 nor the most."""
    while True:
        case = best_case(
            round(draw.uniform(0.55, 0.95), 2),
            round(draw.uniform(0.02, 0.15), 3),
            free,
            round(draw.uniform(*slope), 3),
            16,
        )
        ranked = sorted((exact_speedup_of(case, K) for K in range(17)), reverse=True)
        if ranked[0] - ranked[1] > 1e-4 and 0 < exact_best(case) < 16:
            return case


def best_cases(draw: random.Random) -> list[dict]:
    """While a verification costs what a plain step does, and where more rows cost more."""
    return [separated(draw, (0.0, 0.0)), separated(draw, (0.02, 0.08)), separated(draw, (0.05, 0.2), free=4)]


def losing_cases(draw: random.Random) -> list[dict]:
    """Every K loses: 0. All are alike: 0. The longest is best: the most that is allowed."""
    max_K = draw.randint(5, 9)
    return [
        best_case(0.3, 0.5, 1, 0.0, 8),
        best_case(0.6, 0.05, 1, round(draw.uniform(0.6, 0.9), 2), 8),  # under load: a row costs nearly a step
        best_case(0.0, 0.0, 1, 0.0, 8),
        best_case(1.0, 0.0, 1, 0.0, max_K),
        best_case(0.97, 0.01, 1, 0.0, max_K),
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    return [
        {"part": "expected_tokens", "alpha": round(draw.uniform(1.05, 2.0), 2), "K": 3},
        {"part": "expected_tokens", "alpha": -0.1, "K": 3},
        {"part": "expected_tokens", "alpha": 0.5, "K": -draw.randint(1, 3)},
        {"part": "speedup", "alpha": 0.5, "K": 3, "c": -0.1, "verify": 1.0},
        {"part": "speedup", "alpha": 1.5, "K": 3, "c": 0.1, "verify": 1.0},
        best_case(0.5, -0.2, 1, 0.0, 4),
    ]


# --- Judging ---


def exact_expected(alpha: float, K: int) -> float:
    return sum(alpha**k for k in range(K + 1))


def exact_by_position(rates: list[float]) -> float:
    total = kept = 1.0
    for rate in rates:
        kept *= rate
        total += kept
    return total


def exact_speedup_of(case: dict, K: int) -> float:
    verify = verify_time(case["free"], case["slope"], K + 1)
    return exact_expected(case["alpha"], K) / (verify + K * case["c"])


def exact_best(case: dict) -> int:
    return max(range(case["max_K"] + 1), key=lambda K: (exact_speedup_of(case, K), -K))


def judge_length(case: dict, seen: dict) -> str | None:
    """The number, or the best K."""
    if lacking := missing_message(seen):
        return lacking
    part, value = case["part"], seen["value"]
    given = ", ".join(f"{name} = {value}" for name, value in case.items() if name not in ("part", "free", "slope"))
    if "free" in case:
        given += (
            f", verify = 1 plain step for up to {case['free']} row{'s' * (case['free'] > 1)} and {case['slope']:g} more"
            " for each further one"
            if case["slope"]
            else ", verify = 1 plain step for any number of rows"
        )
    where = f"{part}({given}) gave "
    returned = seen.get("returned", type(value).__name__)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{where}a {returned}, where a number was expected"
    if part == "best_length":
        return _judge_best(case, where, value, returned)
    if part == "expected_tokens":
        right, formula = exact_expected(case["alpha"], case["K"]), "1 + α + … + α^K"
    elif part == "expected_by_position":
        right, formula = exact_by_position(case["rates"]), "1 + r₁ + r₁·r₂ + … + r₁·…·r_K"
    else:
        tokens, time = exact_expected(case["alpha"], case["K"]), case["verify"] + case["K"] * case["c"]
        right, formula = tokens / time, f"{tokens:.6g} tokens in verify + K·c = {time:.6g}"
    if abs(value - right) <= CLOSE * max(1.0, right):
        return None
    return f"{where}{value:.6g}, expected {right:.6g}: {formula}"


def _judge_best(case: dict, where: str, value: float, returned: str) -> str | None:
    right = exact_best(case)
    if value == right:
        return None if returned == "int" else f"{where}{value!r}, a {returned}; K is a whole number"
    if value != int(value) or not 0 <= value <= case["max_K"]:
        return f"{where}{value:g}, expected {right}: a whole number from 0 to {case['max_K']}"
    best, here = exact_speedup_of(case, right), exact_speedup_of(case, int(value))
    if abs(best - here) < 1e-12:
        return (
            f"{where}{value:g}, expected {right}: both give {best:.4f} times the plain speed, and the shorter draft is"
            " as good"
        )
    return (
        f"{where}{value:g}, expected {right}: K = {value:g} gives {here:.4f} times the plain speed, K = {right} "
        f"{best:.4f}"
    )


def judge_refused(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    if "refused" in seen:
        return None
    given = ", ".join(f"{name} = {value}" for name, value in case.items() if name not in ("part", "free", "slope"))
    return f"{case['part']}({given}): {not_refused(seen)}. Raise WorkbenchError: α is in 0 … 1, K and c are at least 0"
