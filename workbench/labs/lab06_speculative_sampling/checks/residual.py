"""Lab 06, the residual: cases and judge of spec-residual."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from workbench.labs.lab06_speculative_sampling.checks.fractions import read, rows_of, same_row, told_row, weights
from workbench.labs.lab06_speculative_sampling.checks.probes import left_rows


def left_case(p: list[int], q: list[int], kind: str) -> dict:
    return {"p": p, "q": q, "kind": kind}


def overlapping(draw: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Two rows, each above the other somewhere, and p above q at two tokens that are not the same."""
    while True:
        p, q = weights(draw, size), weights(draw, size)
        over = [a - b for a, b in zip(*rows_of([p, q]))]
        if sum(x > 0 for x in over) > 1 and sum(x < 0 for x in over) > 1:
            return p, q


def plain_cases(*sizes: int):
    return lambda draw: [
        left_case([7, 1, 2], [6, 2, 2], "fractions"),
        *(left_case(*overlapping(draw, size), "fractions") for size in sizes),
    ]


def tensor_cases(*sizes: int):
    return lambda draw: [left_case(*overlapping(draw, size), "tensors") for size in sizes]


def equal_cases(draw: random.Random) -> list[dict]:
    """p = q, exactly and but for the last bit: nothing is left, nothing may be divided by 0. And one where some is."""
    row, other = weights(draw, 4), weights(draw, 6)
    equal = [left_case(row, row, "fractions"), left_case(row, row, "tensors"), left_case(other, other, "nearly")]
    return [*equal, left_case(*overlapping(draw, 4), "tensors")]


def apart_cases(draw: random.Random) -> list[dict]:
    """No token in common: all of p is left. And one where some of it is."""
    p, q = [*weights(draw, 3), 0, 0, 0], [0, 0, 0, *weights(draw, 3)]
    apart = [left_case(*both, kind) for kind in ("fractions", "tensors") for both in ((p, q), (q, p))]
    return [*apart, left_case(*overlapping(draw, 6), "fractions")]


def one_token_cases(draw: random.Random) -> list[dict]:
    """q is one token with probability 1, as where a token was copied; p has it or not; p is one token itself."""
    size = 5
    at = draw.randrange(size)
    q = [int(x == at) for x in range(size)]
    p = weights(draw, size)
    without = [0 if x == at else w for x, w in enumerate(p)]
    one = [int(x == (at + 1) % size) for x in range(size)]
    pairs = ((p, q), (without, q), (one, q), (one, p), (q, q))
    return [left_case(*both, kind) for kind in ("fractions", "tensors") for both in pairs]


def judge_left_over(case: dict, seen: dict) -> str | None:
    """max(0, p − q) renormalized; p where nothing is left."""
    p, q = rows_of([case["p"], case["q"]])
    kind = case["kind"]
    where = f"p = {told_row(p)}, q = {told_row(q)}{' but for the last bit' if kind == 'nearly' else ''} as "
    where += "an array of Fractions: " if kind == "fractions" else "tensors: "
    expected = "an array of object" if kind == "fractions" else "a tensor of float64"
    if seen.get("kind") != expected or seen["shape"] != [len(p)]:
        came = f"{seen['kind']} of shape {seen['shape']}" if "kind" in seen else f"a {seen['returned']}"
        return f"{where}{came} came back, where {expected} [{len(p)}] was expected, as p is"
    if seen["changed"]:
        return f"{where}a row that was given was changed; make a new one"
    if kind == "fractions" and any(isinstance(x, float) for x in seen["row"]):
        return f"{where}floats came back; of Fractions everything stays exact"
    p, q = (
        ([Fraction(x) for x in map(float, row)] for row in left_rows(case["p"], case["q"], kind))
        if kind == "nearly"
        else (p, q)
    )
    left = [max(a - b, Fraction(0)) for a, b in zip(p, q)]
    right = [x / sum(left) for x in left] if sum(left) else list(p)
    finite = all(isinstance(x, str) or math.isfinite(x) for x in seen["row"])
    if finite and same_row([read(x) for x in seen["row"]], right):
        return None
    came = told_row(seen["row"]) if finite else seen["row"]
    return (
        f"{where}{came} came back, expected {told_row(right)}: max(0, p − q) divided by its sum, and p where nothing is"
        " left"
    )
