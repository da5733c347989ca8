"""Lab 06, how long a draft: cases and judges of spec-length."""

from __future__ import annotations

import random

from workbench.checks.lab05_tensors import told_missing
from workbench.checks.probes_lab06 import verify_time
from workbench.grading.check import not_refused

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
    return [
        {"part": "speedup", "alpha": alpha, "K": K, "c": c, "verify": verify}
        for alpha, K, c, verify in settings
    ]


def best_case(alpha: float, c: float, free: int, slope: float, most: int) -> dict:
    return {"part": "best_length", "alpha": alpha, "c": c, "free": free, "slope": slope, "most": most}


def separated(draw: random.Random, slope: tuple[float, float], free: int = 1) -> dict:
    """Settings whose best K is clear, and neither 0 nor the most."""
    while True:
        case = best_case(
            round(draw.uniform(0.55, 0.95), 2), round(draw.uniform(0.02, 0.15), 3), free,
            round(draw.uniform(*slope), 3), 16,
        )  # fmt: skip
        ranked = sorted((exact_speedup_of(case, K) for K in range(17)), reverse=True)
        if ranked[0] - ranked[1] > 1e-4 and 0 < exact_best(case) < 16:
            return case


def best_cases(draw: random.Random) -> list[dict]:
    """While a verification costs what a plain step does, and where more rows cost more."""
    return [separated(draw, (0.0, 0.0)), separated(draw, (0.02, 0.08)), separated(draw, (0.05, 0.2), free=4)]


def losing_cases(draw: random.Random) -> list[dict]:
    """Every K loses: 0. All are alike: 0. The longest is best: the most that is allowed."""
    most = draw.randint(5, 9)
    return [
        best_case(0.3, 0.5, 1, 0.0, 8),
        best_case(0.6, 0.05, 1, round(draw.uniform(0.6, 0.9), 2), 8),  # under load: a row costs nearly a step
        best_case(0.0, 0.0, 1, 0.0, 8),
        best_case(1.0, 0.0, 1, 0.0, most),
        best_case(0.97, 0.01, 1, 0.0, most),
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
    return max(range(case["most"] + 1), key=lambda K: (exact_speedup_of(case, K), -K))


def judge_length(case: dict, seen: dict) -> str | None:
    """The number, or the best K."""
    if lacking := told_missing(seen):
        return lacking
    part, value = case["part"], seen["value"]
    given = ", ".join(
        f"{name} = {value}" for name, value in case.items() if name not in ("part", "free", "slope")
    )
    if "free" in case:
        given += (
            f", verify = 1 plain step for up to {case['free']} row{'s' * (case['free'] > 1)} and {case['slope']:g} more "
            "for each further one"
            if case["slope"]
            else ", verify = 1 plain step for any number of rows"
        )
    where = f"{part}({given}) gave "
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{where}a {seen['returned']}, where a number was expected"
    if part == "best_length":
        return _judge_best(case, where, value, seen["returned"])
    if part == "expected_tokens":
        right, ways = exact_expected(case["alpha"], case["K"]), _expected_ways(case["alpha"], case["K"])
    elif part == "expected_by_position":
        right, ways = exact_by_position(case["rates"]), _position_ways(case["rates"])
    else:
        right, ways = _speed(case), _speed_ways(case)
    if abs(value - right) <= CLOSE * max(1.0, right):
        return None
    hint = next((words for words, way in ways if abs(way - right) > 1e-6 and abs(value - way) <= 1e-6), None)
    return f"{where}{value:.6g}, expected {right:.6g}" + (f": {hint}" if hint else "")


def _expected_ways(alpha: float, K: int) -> list[tuple[str, float]]:
    return [
        ("that is 1 + α + … + α^(K−1): a round also brings the token of the target itself, correction or bonus",
         sum(alpha**k for k in range(K))),
        ("that is α + … + α^K, the accepted ones: the token of the target itself comes to it", exact_expected(alpha, K) - 1),
        ("that is 1 + α·K: a token counts only when all before it were kept", 1 + alpha * K),
        ("that is α·K: a token counts only when all before it were kept, and the target's own comes to it", alpha * K),
        ("that is K + 1, as if all were kept", K + 1.0),
        ("that has one token too many", exact_expected(alpha, K + 1)),
    ]  # fmt: skip


def _position_ways(rates: list[float]) -> list[tuple[str, float]]:
    return [
        ("the token of the target itself is missing", exact_by_position(rates) - 1),
        ("that is 1 + the sum of the rates: a token counts only when all before it were kept", 1 + sum(rates)),
        ("that is with their mean at every position", exact_expected(sum(rates) / len(rates), len(rates)) if rates else 1.0),
        ("that is with the first rate at every position", exact_expected(rates[0], len(rates)) if rates else 1.0),
        ("that is in the other order", exact_by_position(rates[::-1])),
    ]  # fmt: skip


def _speed(case: dict) -> float:
    return exact_expected(case["alpha"], case["K"]) / (case["verify"] + case["K"] * case["c"])


def _speed_ways(case: dict) -> list[tuple[str, float]]:
    tokens, K, c, verify = exact_expected(case["alpha"], case["K"]), case["K"], case["c"], case["verify"]
    time = verify + K * c
    return [
        ("the cost of drafting is missing, K·c", tokens / verify),
        ("a round drafts K tokens, each costs c", tokens / (verify + c)),
        ("that drafts K + 1 tokens; the draft is not asked about the last one", tokens / (verify + (K + 1) * c)),
        ("the verification counts 1; here it takes longer than a plain step", tokens / (1 + K * c)),
        ("the verification is missing from the time", tokens / (K * c) if K * c else tokens),
        ("the verification is counted for each of the K tokens; it is one pass", tokens / (K * (verify + c)) if K else tokens),
        ("that is upside down", time / tokens),
        ("the token of the target itself is missing", (tokens - 1) / time),
    ]  # fmt: skip


def _judge_best(case: dict, where: str, value: float, returned: str) -> str | None:
    right = exact_best(case)
    if value == right:
        return None if returned == "int" else f"{where}{value!r}, a {returned}; K is a whole number"
    if value != int(value) or not 0 <= value <= case["most"]:
        return f"{where}{value:g}, expected {right}: a whole number from 0 to {case['most']}"
    best, here = exact_speedup_of(case, right), exact_speedup_of(case, int(value))
    if abs(best - here) < 1e-12:
        return f"{where}{value:g}, expected {right}: both give {best:.4f} times the plain speed, and the shorter draft is as good"
    flat = exact_best(case | {"slope": 0.0})
    hint = ""
    if case["slope"] and value == flat:
        hint = "; that is the best where a verification costs the same for all K: it has K + 1 rows"
    elif value == exact_best(case | {"c": 0.0}):
        hint = "; that is the best where drafting costs nothing"
    elif right == 0:
        hint = "; every K loses, so K = 0, no draft at all"
    return (
        f"{where}{value:g}, expected {right}: K = {value:g} gives {here:.4f} times the plain speed, K = {right} "
        f"{best:.4f}{hint}"
    )


def judge_refused(case: dict, seen: dict) -> str | None:
    if lacking := told_missing(seen):
        return lacking
    if "refused" in seen:
        return None
    given = ", ".join(
        f"{name} = {value}" for name, value in case.items() if name not in ("part", "free", "slope")
    )
    return f"{case['part']}({given}): {not_refused(seen)}. Raise WorkbenchError: α is in 0 … 1, K and c are at least 0"
