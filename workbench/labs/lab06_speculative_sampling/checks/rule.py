"""Lab 06, the rule: cases and judges of spec-rule. What is right is worked out from the definition, in fractions."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from workbench.labs.lab06_speculative_sampling.checks.fractions import (
    SAME,
    distribution_of,
    read,
    read_distribution,
    rows_of,
    same,
    same_row,
    tables,
    told,
    told_row,
    weights,
)
from workbench.speculation import theory

QUICK, BROWN = 0, 1  # of a vocabulary of three: quick, brown, fox
WORKED: dict[str, Any] = {"q": [[6, 2, 2], [1, 8, 1]], "p": [[7, 1, 2], [3, 4, 3], [1, 1, 8]]}


def rule_case(drafted: list[int], p: list[list[int]], q: list[list[int]], tensors: bool = False) -> dict:
    return {"drafted": drafted, "p": p, "q": q, "tensors": tensors}


def worked_cases(draw: random.Random) -> list[dict]:
    """The lecture's: "quick" is kept surely, "brown" with ½. Then the same with other numbers."""
    a, b = draw.randint(2, 4), draw.randint(5, 9)
    other: dict[str, Any] = {"q": [[a, b, 1], [b, 1, a]], "p": [[b, a, 1], [1, a, b], [b, 1, 1]]}
    return [rule_case([QUICK, BROWN], **WORKED), rule_case([1, 0], **other), rule_case([0, 2], **other)]


def chain_case(draw: random.Random, K: int, size: int, tensors: bool = False, smallest: int = 1) -> dict:
    p, q = tables(draw, K + 1, size, smallest=smallest), tables(draw, K, size, smallest=smallest)
    drafted = [draw.choice([token for token, weight in enumerate(row) if weight]) for row in q]
    return rule_case(drafted, p, q, tensors)


def contested_case(draw: random.Random, K: int, size: int, tensors: bool = False) -> dict:
    """Every drafted token may be kept and may be rejected, and a residual has more than one token."""
    while True:
        case = chain_case(draw, K, size, tensors)
        p, q = rows_of(case["p"]), rows_of(case["q"])
        left = [theory.total_variation(a, b) > 0 and sum(x > y for x, y in zip(a, b)) > 1 for a, b in zip(p, q)]
        if all(left) and all(q[i][x] > p[i][x] for i, x in enumerate(case["drafted"])):
            return case


def contested_cases(*sizes: tuple[int, int]):
    """Cases of (K, vocabulary)."""
    return lambda draw: [contested_case(draw, *one) for one in sizes]


def tensor_cases(draw: random.Random) -> list[dict]:
    return [contested_case(draw, 3, 5, True), chain_case(draw, 2, 4, True)]


def nothing_cases(draw: random.Random) -> list[dict]:
    """Nothing was drafted: one token from p, and it is called a bonus."""
    return [rule_case([], tables(draw, 1, size), []) for size in (3, 5)]


def picked_cases(draw: random.Random) -> list[dict]:
    """Tokens that were picked, not drawn: q is one token with probability 1; and tokens that p rules out."""
    size = 4
    drafted = [draw.randrange(size) for _ in range(3)]
    q = [[int(token == one) for token in range(size)] for one in drafted]
    p = tables(draw, 4, size)
    out = [list(row) for row in p]
    out[1][drafted[1]] = 0
    return [rule_case(drafted, p, q), rule_case(drafted, out, q), chain_case(draw, 3, 4, smallest=0)]


# --- Judging ---


def exact_verdicts(case: dict) -> tuple[list[Fraction], list[list[Fraction]]]:
    """(how surely each drafted token is kept, given those before; the row of the next token after so many)."""
    p, q = rows_of(case["p"]), rows_of(case["q"])
    kept, rows = [], []
    for i, token in enumerate(case["drafted"]):
        kept.append(min(Fraction(1), p[i][token] / q[i][token]))
        rows.append(_left(p[i], q[i]))
    return kept, [*rows, list(p[-1])]


def _left(p, q) -> list[Fraction]:
    left = [max(a - b, Fraction(0)) for a, b in zip(p, q)]
    return [x / sum(left) for x in left] if sum(left) else list(p)


def judge_rule(case: dict, seen: dict) -> str | None:
    """Acceptance position by position, then the token after so many accepted, then what it is called."""
    drafted, p, q = case["drafted"], rows_of(case["p"]), rows_of(case["q"])
    kind = "tensors" if case["tensors"] else "fractions"
    where = f"drafted {drafted} ({kind}): "
    if "odd" in seen:
        return where + seen["odd"]
    if seen["changed"]:
        return f"{where}the rows of p or q were changed; make new rows"
    distribution: dict[int, dict[tuple[int, bool], Fraction]] = {}
    for path, token, bonus, probability in seen["distribution"]:
        if path != list(range(len(path))) or len(path) > len(drafted):
            return (
                f"{where}the path {tuple(path)} came back; of a chain the nodes 0, 1, … stay, up to the one before the "
                f"first rejection, and there are {len(drafted)}"
            )
        of = distribution.setdefault(len(path), {})
        of[token, bonus] = of.get((token, bonus), Fraction(0)) + read(probability)
    count = [sum(distribution.get(n, {}).values(), Fraction(0)) for n in range(len(drafted) + 1)]
    kept, rows = exact_verdicts(case)
    reached = Fraction(1)
    for i, rate in enumerate(kept):
        came = sum(count[i + 1 :], Fraction(0)) / sum(count[i:], Fraction(0))
        if not same(came, rate):
            token = drafted[i]
            return (
                f"{where}node {i}, token {token} with q = {told(q[i][token])}, p = {told(p[i][token])}, is kept with"
                f" {told(came)}, expected min(1, p / q) = {told(rate)}"
            )
        reached *= rate
        if not reached:
            break
    for n, right in enumerate(rows):
        if count[n] > SAME:
            row = [
                sum(distribution[n].get((x, b), Fraction(0)) for b in (True, False)) / count[n]
                for x in range(len(right))
            ]
            if not same_row(row, right):
                said = f"{told_row(row)}, expected {told_row(right)}"
                if n == len(drafted):
                    return f"{where}when all {n} are accepted the bonus is drawn from {said}: the last row of p"
                return (
                    f"{where}when node {n} (token {drafted[n]}) is rejected the correction is drawn from {said}: max(0,"
                    " p − q) of its rows, divided by its sum"
                )
            called = {bonus for _, bonus in distribution[n]}
            if called != {n == len(drafted)}:
                return (
                    f"{where}after {n} of {len(drafted)} accepted the token is said to be a "
                    f"{'bonus' if True in called else 'correction'}: bonus is True if and only if nothing was rejected"
                )
    return None


# --- Whole texts ---


def text_cases(*sizes: tuple[int, int, int]):
    """Cases of (vocabulary, K, length)."""

    def cases(draw: random.Random) -> list[dict]:
        return [
            {"target": tables(draw, V + 1, V), "draft": [weights(draw, V) for _ in range(V + 1)], "K": K, "length": n}
            for V, K, n in sizes
        ]

    return cases


def judge_texts(case: dict, seen: dict) -> str | None:
    """The distribution of what is written is the target's, as an equality of fractions."""
    came, right = (
        read_distribution(seen["distribution"]),
        theory.distribution_of_target(distribution_of(case["target"]), case["length"]),
    )
    for text in sorted(came.keys() | right.keys()):
        a, b = came.get(text, Fraction(0)), right.get(text, Fraction(0))
        if not same(a, b):
            return (
                f"K = {case['K']}, {len(case['target'][0])} tokens: the text {list(text)} is written with probability "
                f"{told(a)}; the target alone writes it with {told(b)}"
            )
    return None
