"""Lab 06, the rule: cases and judges of spec-rule. What is right is worked out from the definition, in fractions."""

from __future__ import annotations

import random
from fractions import Fraction

from workbench.checks.lab06_fractions import (
    SAME,
    law_of,
    read,
    read_law,
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
WORKED = {"q": [[6, 2, 2], [1, 8, 1]], "p": [[7, 1, 2], [3, 4, 3], [1, 1, 8]]}


def rule_case(drafted: list[int], p: list[list[int]], q: list[list[int]], tensors: bool = False) -> dict:
    return {"drafted": drafted, "p": p, "q": q, "tensors": tensors}


def worked_cases(draw: random.Random) -> list[dict]:
    """The lecture's: "quick" is kept surely, "brown" with ½. Then the same with other numbers."""
    a, b = draw.randint(2, 4), draw.randint(5, 9)
    other = {"q": [[a, b, 1], [b, 1, a]], "p": [[b, a, 1], [1, a, b], [b, 1, 1]]}
    return [rule_case([QUICK, BROWN], **WORKED), rule_case([1, 0], **other), rule_case([0, 2], **other)]


def chain_case(draw: random.Random, K: int, size: int, tensors: bool = False, least: int = 1) -> dict:
    p, q = tables(draw, K + 1, size, least=least), tables(draw, K, size, least=least)
    drafted = [draw.choice([token for token, weight in enumerate(row) if weight]) for row in q]
    return rule_case(drafted, p, q, tensors)


def contested_case(draw: random.Random, K: int, size: int, tensors: bool = False) -> dict:
    """Every drafted token may be kept and may be rejected, and a residual has more than one token."""
    while True:
        case = chain_case(draw, K, size, tensors)
        p, q = rows_of(case["p"]), rows_of(case["q"])
        left = [
            theory.total_variation(a, b) > 0 and sum(x > y for x, y in zip(a, b)) > 1 for a, b in zip(p, q)
        ]
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
    return [rule_case(drafted, p, q), rule_case(drafted, out, q), chain_case(draw, 3, 4, least=0)]


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
    law: dict[int, dict[tuple[int, bool], Fraction]] = {}
    for path, token, bonus, probability in seen["law"]:
        if path != list(range(len(path))) or len(path) > len(drafted):
            return (
                f"{where}the path {tuple(path)} came back; of a chain the nodes 0, 1, … stay, up to the one before the "
                f"first rejection, and there are {len(drafted)}"
            )
        of = law.setdefault(len(path), {})
        of[token, bonus] = of.get((token, bonus), Fraction(0)) + read(probability)
    count = [sum(law.get(n, {}).values(), Fraction(0)) for n in range(len(drafted) + 1)]
    kept, rows = exact_verdicts(case)
    reached = Fraction(1)
    for i, right in enumerate(kept):
        came = sum(count[i + 1 :], Fraction(0)) / sum(count[i:], Fraction(0))
        if not same(came, right):
            return where + _acceptance_told(i, drafted[i], p, q, came, right)
        reached *= right
        if not reached:
            break
    for n, right in enumerate(rows):
        if count[n] > SAME:
            row = [
                sum(law[n].get((x, b), Fraction(0)) for b in (True, False)) / count[n]
                for x in range(len(right))
            ]
            if not same_row(row, right):
                return where + _token_told(n, drafted, p, q, row, right)
            called = {bonus for _, bonus in law[n]}
            if called != {n == len(drafted)}:
                return (
                    f"{where}after {n} of {len(drafted)} accepted the token is said to be a "
                    f"{'bonus' if True in called else 'correction'}: bonus is True if and only if nothing was rejected"
                )
    return None


def _acceptance_told(i: int, token: int, p, q, came: Fraction, right: Fraction) -> str:
    a, b = p[i][token], q[i][token]
    ways = (
        ("it is always kept, or counted in the path where it was rejected", Fraction(1)),
        ("that is q / p: upside down", min(Fraction(1), b / a) if a else Fraction(1)),
        ("that is p(x) alone, not over q(x)", a),
        ("that is q(x)", b),
        ("it is never kept", Fraction(0)),
        ("that is the probability of a rejection", 1 - right),
        ("that is with the row of p after this token; p[i] is the law before node i", min(Fraction(1), p[i + 1][token] / b)),
        ("that is with the first row of p, at every position", min(Fraction(1), p[0][token] / b)),
        ("that is with the first row of q, at every position", min(Fraction(1), a / q[0][token]) if q[0][token] else None),
        ("that is Σ min(p, q), how often any token is kept; this one's own chance is asked", sum(map(min, p[i], q[i]))),
    )  # fmt: skip
    hint = next((words for words, way in ways if way is not None and way != right and same(came, way)), None)
    return (
        f"node {i}, token {token} with q = {told(b)}, p = {told(a)}, is kept with {told(came)}, expected "
        f"min(1, p / q) = {told(right)}" + (f": {hint}" if hint else "")
    )


def _token_told(n: int, drafted: list[int], p, q, came: list[Fraction], right: list[Fraction]) -> str:
    if n == len(drafted):
        ways = [
            (
                f"that is row {i} of p; the bonus follows the last drafted token, so it is the last row",
                list(p[i]),
            )
            for i in range(n)
        ]
        ways += [
            ("that is a residual; nothing was rejected, so it is p itself", _left(p[i], q[i]))
            for i in range(n)
        ]
        told_where = f"when all {n} are accepted the bonus"
    else:
        token = drafted[n]
        clipped = [max(a - b, Fraction(0)) for a, b in zip(p[n], q[n])]
        short = [*clipped[:-1], clipped[-1] + 1 - sum(clipped)]
        other = [Fraction(int(x != token)) * a for x, a in enumerate(p[n])]
        ways = [
            ("that is p itself: what the draft gives too often would come twice", list(p[n])),
            ("that is q: the target has not been asked", list(q[n])),
            ("that is max(0, p − q) without dividing by its sum", short),
            ("that is p without the rejected token; q takes away from all tokens", [x / sum(other) for x in other] if sum(other) else right),
            ("that is the rejected token", [Fraction(int(x == token)) for x in range(len(right))]),
            ("that is max(0, q − p): p and q are exchanged", _left(q[n], p[n])),
            ("that is the row after the rejected token; the correction takes its place", list(p[n + 1])),
            ("that is the last row of p, the bonus's", list(p[-1])),
        ]  # fmt: skip
        ways += [
            (f"that is with the rows of node {i}, not of node {n}", _left(p[i], q[i]))
            for i in range(len(drafted))
        ]
        told_where = f"when node {n} (token {token}) is rejected the correction"
    hint = next((words for words, way in ways if not same_row(way, right) and same_row(came, way)), None)
    return f"{told_where} is drawn from {told_row(came)}, expected {told_row(right)}" + (
        f": {hint}" if hint else ""
    )


# --- Whole texts ---


def text_cases(*sizes: tuple[int, int, int]):
    """Cases of (vocabulary, K, length)."""

    def cases(draw: random.Random) -> list[dict]:
        return [
            {"target": tables(draw, V + 1, V), "draft": [weights(draw, V) for _ in range(V + 1)], "K": K, "length": n}
            for V, K, n in sizes
        ]  # fmt: skip

    return cases


def judge_texts(case: dict, seen: dict) -> str | None:
    """The law of what is written is the target's, as an equality of fractions."""
    came, right = read_law(seen["law"]), theory.law_of_target(law_of(case["target"]), case["length"])
    for text in sorted(came.keys() | right.keys()):
        a, b = came.get(text, Fraction(0)), right.get(text, Fraction(0))
        if not same(a, b):
            return (
                f"K = {case['K']}, {len(case['target'][0])} tokens: the text {list(text)} is written with probability "
                f"{told(a)}; the target alone writes it with {told(b)}"
            )
    return None
