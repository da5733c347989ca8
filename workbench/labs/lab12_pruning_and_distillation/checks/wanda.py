"""Lab 12, zeros in a matrix: cases and judges of pruning-wanda.

What is right is chosen weight by weight, on scores in float64. Scores of a case are clearly apart, or exactly equal.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction

import torch

from workbench.checks.tensors import missing_message, numbers, read
from workbench.labs.lab12_pruning_and_distillation.checks.probes import batches_inputs

CLOSE = 1e-4
APART = 0.01  # scores of a row that are not equal differ by so much, relative to the larger one


# --- Cases: norms of inputs ---


def norms_case(
    draw: random.Random, tokens: list[int], inputs: int, *, dtype: str = "float32", dead: tuple[int, ...] = ()
) -> dict:
    return {"seed": draw.randrange(10**6), "tokens": tokens, "inputs": inputs, "dtype": dtype, "dead": list(dead)}


def norms_cases(draw: random.Random) -> list[dict]:
    """One batch, and several of different sizes."""
    return [norms_case(draw, [7], 5), norms_case(draw, [4, 9], 6), norms_case(draw, [3, 1, draw.randint(5, 9)], 4)]


def odd_norms(draw: random.Random) -> list[dict]:
    """Batches without a token, inputs that are always 0, half precision."""
    return [
        norms_case(draw, [0, 6], 4),
        norms_case(draw, [5, 0, 2], 5, dead=(1, 3)),
        norms_case(draw, [0], 3),
        norms_case(draw, [300], 4, dtype="float16"),
        norms_case(draw, [400, 3], 3, dtype="bfloat16"),
    ]


def other_norms(draw: random.Random) -> list[dict]:
    cases = []
    for number in range(5):
        tokens = [draw.randint(0, 12) for _ in range(draw.randint(1, 5))]
        dtype = ("float32", "float64", "float16")[number % 3]
        inputs = draw.randint(2, 9)
        cases.append(norms_case(draw, tokens, inputs, dtype=dtype, dead=(0,) if number % 2 else ()))
    return cases


# --- Cases: zeros ---


def matrix_case(
    draw: random.Random,
    outputs: int,
    inputs: int,
    share: float | None,
    *,
    dtype: str = "float32",
    such_that: Callable[[dict], bool] = lambda case: True,
) -> dict:
    """Weights and norms that are multiples of 1/64 and 1/16, with scores clearly apart in each row. share: None for
    two of four."""
    while True:
        weight = [draw_row(draw, inputs) for _ in range(outputs)]
        norms = [math.ceil(16 * math.exp(draw.gauss(0, 0.9))) / 16 for _ in range(inputs)]
        case = {"weight": weight, "norms": norms, "share": share, "dtype": dtype}
        if is_clear(case) and such_that(case):
            return case


def draw_row(draw: random.Random, inputs: int) -> list[float]:
    return [draw.choice([-1, 1]) * draw.randint(1, 127) / 64 for _ in range(inputs)]


def is_clear(case: dict) -> bool:
    """Scores of a row are apart, or the same product of the same factors."""
    for row in scores_of(case):
        for low, high in itertools.pairwise(sorted(row)):
            if low != high and high - low < APART * high:
                return False
    return True


def differs(other: Callable[[list[float], list[float]], list[float]]) -> Callable[[dict], bool]:
    """Whether another score (of weights and norms of a row) would set other weights of a case to zero."""

    def holds(case: dict) -> bool:
        given = [other(row, case["norms"]) for row in case["weight"]]
        return zeros_by(case, given) != zeros_by(case, scores_of(case))

    return holds


by_weights_alone = differs(lambda row, norms: [abs(w) for w in row])
without_absolute_value = differs(lambda row, norms: [w * n for w, n in zip(row, norms)])
by_norms_alone = differs(lambda row, norms: list(norms))
by_squares = differs(lambda row, norms: [abs(w) * n * n for w, n in zip(row, norms)])


def all_differ(case: dict) -> bool:
    return all(one(case) for one in (by_weights_alone, without_absolute_value, by_norms_alone, by_squares))


def row_cases(draw: random.Random) -> list[dict]:
    return [
        matrix_case(draw, 3, 8, 0.5, such_that=all_differ),
        matrix_case(draw, 4, 6, 0.5, such_that=all_differ),
        matrix_case(draw, 5, 8, 0.25, such_that=all_differ),
        matrix_case(draw, 3, 12, 0.75, such_that=all_differ),
    ]


def group_cases(draw: random.Random) -> list[dict]:
    return [
        matrix_case(draw, 3, 8, None, such_that=all_differ),
        matrix_case(draw, 4, 4, None, such_that=all_differ),
        matrix_case(draw, 2, 16, None, such_that=all_differ),
    ]


def share_cases(draw: random.Random) -> list[dict]:
    """Shares that are rounded down; nothing; everything; products that are whole, and less in floating point."""
    settings = ((3, 10, 0.25), (2, 7, 0.5), (4, 9, 0.875), (3, 5, 0.0), (3, 6, 1.0), (2, 3, 0.125))
    return [matrix_case(draw, *one) for one in settings] + [tie_case(draw, 2, 100, 0.29), tie_case(draw, 2, 50, 0.58)]


def tie_cases(draw: random.Random) -> list[dict]:
    """Equal scores on both sides of the border: equal weights and norms, all zero, inputs that are always 0."""
    return [tie_case(draw, *one) for one in ((3, 8, 0.5), (2, 10, 0.375), (4, 8, None), (2, 12, None), (3, 6, 0.625))]


def tie_case(draw: random.Random, outputs: int, inputs: int, share: float | None) -> dict:
    """Weights ±1/2 and 0, norms 0, 1 and 2, so that many scores are the same, and exactly so."""
    norms = [draw.choice([0.0, 1.0, 2.0, 2.0]) for _ in range(inputs)]
    weight = [[draw.choice([-0.5, 0.5, 0.5, 0.0]) for _ in range(inputs)] for _ in range(outputs)]
    weight[0] = [0.0] * inputs
    weight[-1] = [draw.choice([-0.5, 0.5]) for _ in range(inputs)]
    return {"weight": weight, "norms": norms, "share": share, "dtype": "float32"}


def dtype_cases(draw: random.Random) -> list[dict]:
    """A matrix keeps its dtype."""
    return [
        matrix_case(draw, 2, 8, share, dtype=dtype)
        for dtype in ("float16", "bfloat16", "float64", "float32")
        for share in (0.5, None)
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    """Inputs that are no multiple of 4, beside some that are."""
    return [matrix_case(draw, 2, inputs, None) for inputs in (6, 8, 9, 3, 12)]


def other_rows(draw: random.Random) -> list[dict]:
    return [
        matrix_case(draw, draw.randint(2, 5), draw.randint(5, 14), draw.randint(2, 7) / 8, such_that=by_weights_alone)
        for _ in range(6)
    ] + [
        *(tie_case(draw, 3, draw.randint(9, 15), draw.randint(2, 6) / 8) for _ in range(3)),
        tie_case(draw, 2, *draw.choice([(100, 0.29), (100, 0.57), (100, 0.58), (50, 0.58)])),
    ]


def other_groups(draw: random.Random) -> list[dict]:
    cases = [
        matrix_case(draw, draw.randint(2, 5), 4 * draw.randint(1, 4), None, such_that=by_weights_alone)
        for _ in range(5)
    ]
    return [*cases, tie_case(draw, 3, 16, None), matrix_case(draw, 2, 4 * draw.randint(1, 3) + 2, None)]


# --- What is right ---


def scores_of(case: dict) -> list[list[float]]:
    return [[abs(w) * n for w, n in zip(row, case["norms"])] for row in case["weight"]]


def lowest(scores: list[float], count: int) -> set[int]:
    """So many indices, taken one after the other: the lowest score, of equal ones the last."""
    left, gone = set(range(len(scores))), set()
    for _ in range(count):
        low = min(left, key=lambda i: (scores[i], -i))
        left.remove(low)
        gone.add(low)
    return gone


def zeros_by(case: dict, scores: list[list[float]]) -> list[set[int]]:
    """Of each row, the indices that are set to zero."""
    inputs = len(case["norms"])
    if case["share"] is not None:
        count = math.floor(Fraction(str(case["share"])) * inputs)
        return [lowest(row, count) for row in scores]
    return [{start + i for start in range(0, inputs, 4) for i in lowest(row[start : start + 4], 2)} for row in scores]


def exact_norms(case: dict) -> list[float]:
    rows = [row for batch in batches_inputs(**case) for row in batch.double().tolist()]
    return [math.sqrt(math.fsum(row[i] ** 2 for row in rows)) for i in range(case["inputs"])]


# --- Judging ---


def judge_norms(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    where = f"input_norms of {len(case['tokens'])} batches with {case['tokens']} tokens of {case['inputs']} inputs"
    where += f", {case['dtype']}: "
    if seen["changed"]:
        return f"{where}the batches were changed"
    right = torch.tensor(exact_norms(case), dtype=torch.float64)
    came = read(seen["norms"], "the result", right.shape, "", "[in]")
    if isinstance(came, str):
        return where + came
    if bool(((came.double() - right).abs() <= CLOSE * right).all()):
        return None
    return f"{where}{numbers(came, 6)}, expected {numbers(right, 6)}"


def judge_prune(case: dict, seen: dict) -> str | None:
    """The zeros are where they should be, and all else is as it was."""
    if lacking := missing_message(seen):
        return lacking
    outputs, inputs, share = len(case["weight"]), len(case["norms"]), case["share"]
    part = "two_of_four" if share is None else "by_row"
    where = f"{part} of a weight [{outputs}, {inputs}]" + ("" if share is None else f", share {share:g}") + ": "
    refuse = share is None and inputs % 4 > 0
    if refuse or "refused" in seen:
        if refuse and "refused" in seen:
            return None
        what = "a ValueError was raised" if "refused" in seen else "no error was raised"
        expected = "expected a ValueError: no multiple of 4" if refuse else "expected a matrix"
        return f"{where}{what}, {expected}"
    if seen["changed"]:
        return f"{where}what was given was changed"
    came = read(seen["weight"], "the result", (outputs, inputs), case["dtype"], "[out, in]")
    if isinstance(came, str):
        return where + came
    for i, (row, scores, gone) in enumerate(zip(came.tolist(), scores_of(case), zeros_by(case, scores_of(case)))):
        given = case["weight"][i]
        right = [0.0 if j in gone else w for j, w in enumerate(given)]
        if row != right:
            listed = ", ".join(f"{score:.4g}" for score in scores[:16]) + (", …" if inputs > 16 else "")
            zeros = [j for j, w in enumerate(row) if w == 0]
            if [w for w in row if w] != [w for w in given if w and w in row] and set(row) - {0.0} - set(given):
                return f"{where}row {i} has numbers that are not its own: {numbers(came[i], 6)} of {given}"
            wanted = [j for j, w in enumerate(right) if w == 0]
            return (
                f"{where}row {i} has {len(zeros)} zeros, at {zeros}, expected {len(wanted)}, at {wanted};"
                f" scores {listed}"
            )
    return None
