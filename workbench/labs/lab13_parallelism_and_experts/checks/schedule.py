"""Lab 13, groups in stages: cases and judges of parallel-schedule.

When a group starts is the longest way to it: a way goes from the first group in the first stage to the next stage or
the next group, until it is there. All in fractions.
"""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

from workbench.checks.tensors import missing_message

CLOSE = 1e-5  # float32 is enough; the times are multiples of 1/8


# --- Cases: times [stages][groups] ---


def eighths(draw: random.Random, low: int = 1, high: int = 24) -> float:
    """A multiple of 1/8, which floats have exactly."""
    return draw.randint(low, high) / 8


def equal_cases(draw: random.Random) -> list[dict]:
    """Every stage and group takes equally long."""
    return [{"times": [[one] * m for _ in range(p)]} for p, m, one in ((3, 4, 1.0), (2, 5, eighths(draw)), (4, 2, 0.5))]


def uneven(draw: random.Random, stages: int, groups: int, slow: int) -> dict:
    """Stages of different times, one of them slow; the groups are alike."""
    times = [eighths(draw, 2, 12) for _ in range(stages)]
    times[slow] += 2.0
    return {"times": [[one] * groups for one in times]}


def uneven_cases(draw: random.Random) -> list[dict]:
    return [uneven(draw, 3, 4, 1), uneven(draw, 3, 3, 0), uneven(draw, 4, 3, 3), uneven(draw, 2, 4, 1)]


def mixed(draw: random.Random, stages: int, groups: int) -> dict:
    return {"times": [[eighths(draw) for _ in range(groups)] for _ in range(stages)]}


def mixed_cases(draw: random.Random) -> list[dict]:
    """Groups of different sizes, too."""
    return [mixed(draw, 3, 4), mixed(draw, 2, 5), mixed(draw, 4, 3), mixed(draw, 5, 5)]


def edge_cases(draw: random.Random) -> list[dict]:
    """One stage, one group, no group, a stage without work for some."""
    some = mixed(draw, 3, 4)["times"]
    some[1] = [0.0, some[1][1], 0.0, 0.0]
    waits = {"times": [[0.5, 0.5, 0.5], [eighths(draw, 16), 0.0, 1.0]]}  # a group without work waits for its turn, too
    return [mixed(draw, 1, 3), mixed(draw, 4, 1), {"times": [[], [], []]}, {"times": some}, waits]


def idle_cases(draw: random.Random) -> list[dict]:
    """Stages that start late or end early by much."""
    return [uneven(draw, 2, 2, 0), uneven(draw, 3, 2, 2), {"times": [[4.0, 0.125], [0.125, 4.0]]}]


def other_schedules(draw: random.Random) -> list[dict]:
    return [mixed(draw, draw.randint(2, 6), draw.randint(2, 6)) for _ in range(6)]


def wide_and_narrow(draw: random.Random) -> list[dict]:
    """Many groups in few stages, few groups in many stages."""
    return [mixed(draw, 2, 12), mixed(draw, 8, 2), mixed(draw, 1, 1), uneven(draw, 7, 3, 4), {"times": [[]]}]


# --- Cases: how many groups ---


def bound_case(stages: int, max_idle: float) -> dict:
    return {"stages": stages, "max_idle": max_idle}


def between(draw: random.Random, stages: int, groups: int) -> dict:
    """A bound that so many groups keep and one less does not, far from both."""
    low, high = bubble(stages, groups), bubble(stages, groups - 1)
    return bound_case(stages, float(low + (high - low) * draw.randint(20, 80) / 100))


def bound_cases(draw: random.Random) -> list[dict]:
    settings = ((2, 4), (4, draw.randint(5, 12)), (3, draw.randint(3, 9)), (8, draw.randint(20, 40)), (13, 5))
    return [between(draw, *one) for one in settings]


def exact_bounds(draw: random.Random) -> list[dict]:
    """Bounds that are met exactly, and that floats have exactly; and bounds just missed."""
    met = [(4, 0.375), (2, 0.125), (5, 0.5), (7, 0.75), (3, 0.25)]
    return [bound_case(*one) for one in met] + [bound_case(stages, bound - 2**-20) for stages, bound in met[:2]]


def bound_edges(draw: random.Random) -> list[dict]:
    """A bound of 0, and one near it; one stage; a bound that one group keeps."""
    return [
        bound_case(3, 0.0),
        bound_case(1, 0.0),
        bound_case(4, draw.uniform(0.8, 0.95)),
        bound_case(1, 0.5),
        bound_case(2, 1.0),
        between(draw, 2, draw.randint(2000, 6000)),
    ]


def other_bounds(draw: random.Random) -> list[dict]:
    cases = [between(draw, draw.randint(2, 12), draw.randint(2, 60)) for _ in range(6)]
    return [*cases, bound_case(9, 1 / 64), bound_case(1, 0.25), bound_case(2, 0.0), bound_case(6, 0.9)]


# --- What is right ---


def bubble(stages: int, groups: int) -> Fraction:
    return Fraction(stages - 1, groups + stages - 1)


def longest_way(times: list[list[Fraction]], stage: int, group: int) -> Fraction:
    """To the start of a group in a stage."""
    longest = Fraction(0)
    for turns in itertools.combinations(range(stage + group), stage):
        s = g = 0
        length = Fraction(0)
        for move in range(stage + group):
            length += times[s][g]
            s, g = (s + 1, g) if move in turns else (s, g + 1)
        longest = max(longest, length)
    return longest


def schedule(case: dict) -> dict:
    times = [[Fraction(one) for one in row] for row in case["times"]]
    stages, groups = len(times), len(times[0])
    starts = [[longest_way(times, s, g) for g in range(groups)] for s in range(stages)]
    total = max((starts[s][g] + times[s][g] for s in range(stages) for g in range(groups)), default=Fraction(0))
    idle = 1 - sum(sum(row) for row in times) / (stages * total) if total else Fraction(0)
    return {"starts": starts, "total_s": total, "idle_share": idle}


def least_groups(case: dict) -> int | None:
    """None: no number of groups is enough."""
    stages, bound = case["stages"], Fraction(case["max_idle"])
    if stages > 1 and bound <= 0:
        return None
    groups = 1
    while bubble(stages, groups) > bound:
        groups += 1
    return groups


# --- Judging ---


def judge_schedule(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    where = f"run({case['times']}): "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, expected a dict"
    right = schedule(case)
    for name in right:
        if name not in seen:
            return f"{where}the dict has no {name!r}"
    starts = seen["starts"]
    if isinstance(starts, str):
        return f"{where}'starts' is a {starts}, expected lists of numbers [stages][groups]"
    sizes, wanted = [len(row) for row in starts], [len(row) for row in right["starts"]]
    if sizes != wanted:
        came = f"{len(sizes)} lists of {sizes} numbers"
        return f"{where}'starts' has {came}, expected {len(wanted)} of {wanted}: [stages][groups]"
    for s, (came, expected) in enumerate(zip(starts, right["starts"])):
        for g, (one, start) in enumerate(zip(came, expected)):
            if not abs(one - start) <= CLOSE:
                return f"{where}group {g} starts in stage {s} at {one:g}, expected {float(start):g}"
    for name in ("total_s", "idle_share"):
        if isinstance(seen[name], str):
            return f"{where}{name!r} is a {seen[name]}, expected a number"
        if not abs(seen[name] - right[name]) <= CLOSE:
            return f"{where}{name} {seen[name]:.9g}, expected {float(right[name]):.9g}"
    return f"{where}what was given was changed" if seen["changed"] else None


def judge_bound(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    where = f"min_groups({case['stages']}, {case['max_idle']:g}): "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, expected a whole number or None"
    came, right = seen["groups"], least_groups(case)
    if came == right:
        return None
    if right is None:
        return f"{where}{came}, expected None: no number of groups keeps that bound"
    return f"{where}{came}, expected {right}, with an idle share of {float(bubble(case['stages'], right)):.6g}"
