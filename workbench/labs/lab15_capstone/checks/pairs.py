"""Lab 15, pairs of runs: cases and judge of capstone-pairs.

How far an interval covers is counted over all 2ⁿ ways in which the ratios may lie on the two sides of the median;
ratios are fractions.
"""

from __future__ import annotations

import random
from fractions import Fraction

CLOSE = 1e-5
LEAST, COVERED = 5, Fraction(9, 10)


# --- Cases: pairs ---


def pairs_case(draw: random.Random, count: int) -> dict:
    """Ratios that are far from each other, and in no order; the machine is as fast as it happens to be."""
    ratios = [(50 + 7 * place + draw.randint(0, 4)) / 64 for place in range(count)]
    draw.shuffle(ratios)
    baseline = [draw.randint(200, 900) / 2 for _ in ratios]
    return {"ours": [a * b for a, b in zip(ratios, baseline)], "baseline": baseline}


def five_cases(draw: random.Random) -> list[dict]:
    return [pairs_case(draw, 5) for _ in range(3)]


def more_cases(draw: random.Random) -> list[dict]:
    """Odd and even numbers of pairs, k from 1 to 6."""
    return [pairs_case(draw, count) for count in (7, 8, 11, 14, 20)]


def even_cases(draw: random.Random) -> list[dict]:
    return [pairs_case(draw, count) for count in (6, 10, 12)]


def zero_cases(draw: random.Random) -> list[dict]:
    """Runs in which nothing was served: of the baseline, of ours, of both."""
    nothing = pairs_case(draw, 6)
    nothing["baseline"][draw.randrange(6)] = 0.0
    ours = pairs_case(draw, 8)
    ours["ours"][draw.randrange(8)] = 0.0
    both = pairs_case(draw, 5)
    both["ours"][2] = both["baseline"][2] = 0.0
    return [nothing, ours, both]


def refused_cases(draw: random.Random) -> list[dict]:
    """Too few, none, and lists of different lengths; five are enough."""
    longer, shorter = pairs_case(draw, 6), pairs_case(draw, 7)
    longer["ours"].append(400.0)
    shorter["ours"].pop()
    nothing: dict[str, list[float]] = {"ours": [], "baseline": []}
    return [pairs_case(draw, 4), nothing, pairs_case(draw, 1), longer, shorter, pairs_case(draw, 5)]


def other_pairs(draw: random.Random) -> list[dict]:
    return [pairs_case(draw, count) for count in (draw.randint(5, 7), 9, 13, 16, draw.randint(17, 20))]


def tied_cases(draw: random.Random) -> list[dict]:
    """Equal ratios: of some pairs, and of all."""
    some = [draw.choice([0.75, 1.0, 1.5]) for _ in range(9)]
    cases = []
    for ratios in (some, [1.25] * 6, [*[0.5] * 4, *[2.0] * 4]):
        baseline = [float(draw.randint(100, 500)) for _ in ratios]
        cases.append({"ours": [a * b for a, b in zip(ratios, baseline)], "baseline": baseline})
    return cases


def edge_pairs(draw: random.Random) -> list[dict]:
    return [*zero_cases(draw), *refused_cases(draw)[::2], *tied_cases(draw)[:1]]


def long_series(draw: random.Random) -> list[dict]:
    """More pairs than anybody runs."""
    return [pairs_case(draw, count) for count in (draw.randint(21, 29), 40, 61)]


# --- What is right ---


def ways(count: int) -> list[int]:
    """[i]: in how many of the 2ⁿ ways i ratios lie below the median; one ratio after the other."""
    row = [1]
    for _ in range(count):
        row = [a + b for a, b in zip([0, *row], [*row, 0])]
    return row


def covers(count: int, k: int) -> Fraction:
    enclosed = sum(of for below, of in enumerate(ways(count)) if k <= below <= count - k)
    return Fraction(enclosed, 2**count)


def right_of(case: dict) -> dict | None:
    """None: to be refused."""
    if len(case["ours"]) != len(case["baseline"]) or len(case["ours"]) < LEAST:
        return None
    each = [Fraction(a) / Fraction(b) if b else Fraction(0) for a, b in zip(case["ours"], case["baseline"])]
    ordered, count = sorted(each), len(each)
    k = max(k for k in range(1, count // 2 + 1) if covers(count, k) >= COVERED)
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    ends = {"low": ordered[k - 1], "high": ordered[-k]}
    return {"each": each, "median": median, **ends, "confidence": covers(count, k)}


# --- Judging ---


def judge_pairs(case: dict, seen: dict) -> str | None:
    right = right_of(case)
    ours, baseline = ([f"{one:.6g}" for one in case[name]] for name in ("ours", "baseline"))
    where = f"ours [{', '.join(ours)}], baseline [{', '.join(baseline)}]: "
    if right is None:
        came = "a ValueError was expected"
        return None if "refused" in seen else f"{where}{came}, of {len(ours)} and {len(baseline)} runs"
    if "refused" in seen:
        return f"{where}a ValueError was raised, and these are {len(ours)} pairs"
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, expected a dict"
    if lacking := next((name for name in right if name not in seen), None):
        return f"{where}the dict has no {lacking!r}"
    if isinstance(seen["each"], str) or len(seen["each"]) != len(right["each"]):
        came = f"a {seen['each']}" if isinstance(seen["each"], str) else f"{len(seen['each'])} numbers"
        return f"{where}'each' is {came}, expected a list of {len(right['each'])} ratios"
    for number, (came, expected) in enumerate(zip(seen["each"], right["each"])):
        if differ(came, expected):
            return f"{where}the ratio of pair {number} is {_shown(came)}, expected {float(expected):.6g}"
    each = ", ".join(f"{float(one):.5g}" for one in sorted(right["each"]))
    for name in ("median", "low", "high", "confidence"):
        if differ(seen[name], right[name]):
            came = f"{name} {_shown(seen[name])}, expected {float(right[name]):.6g}"
            return f"{len(right['each'])} pairs, their ratios in order {each}: {came}"
    return f"{where}what was given was changed" if seen["changed"] else None


def differ(came: float | str, right: Fraction) -> bool:
    return isinstance(came, str) or not abs(came - right) <= CLOSE * (1 + right)


def _shown(came: float | str) -> str:
    return f"a {came}" if isinstance(came, str) else f"{came:.6g}"
