"""Lab 12, what matters: cases and judges of pruning-importance.

What is right is added up number by number in float64.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

import torch

from workbench.checks.tensors import missing_message, numbers, read
from workbench.grading.check import brief
from workbench.labs.lab12_pruning_and_distillation.checks.probes import activation_inputs

CLOSE = 1e-5  # a float32 answer is near enough
PARTS = {
    "neurons": "the mean of |silu(x·gateᵀ)·(x·upᵀ)| over the tokens, the L2 norm over the sequences",
    "channels": "the mean of |a| over the tokens, the L2 norm over the sequences, the sum over the norms",
    "kv_groups": "of each head the mean of its norms over the tokens, the L2 norm over the sequences; their sum"
    " in a group",
}


# --- Cases ---


def scores_case(
    draw: random.Random, part: str, lengths: list[int], tokens: int, side: str, sizes: dict, *, besides: str = "numbers"
) -> dict:
    seed = draw.randrange(10**6)
    case = {"part": part, "seed": seed, "lengths": lengths, "tokens": tokens, "side": side, "besides": besides}
    return case | sizes


def full(part: str, *settings: tuple[int, int, dict]):
    """Cases without padding: (sequences, tokens, sizes)."""

    def cases(draw: random.Random) -> list[dict]:
        return [scores_case(draw, part, [t] * b, t, "right", sizes) for b, t, sizes in settings]

    return cases


neuron_cases = full(
    "neurons",
    (1, 6, {"neurons": 5, "channels": 3}),
    (3, 4, {"neurons": 4, "channels": 4}),
    (4, 7, {"neurons": 6, "channels": 2}),
)
channel_cases = full(
    "channels",
    (1, 5, {"channels": 4, "norms": 1}),
    (3, 4, {"channels": 5, "norms": 1}),
    (2, 6, {"channels": 3, "norms": 3}),
)
group_cases = full(
    "kv_groups",
    (1, 5, {"heads": 4, "head_dim": 3, "kv_heads": 4}),
    (3, 4, {"heads": 6, "head_dim": 2, "kv_heads": 2}),
    (2, 5, {"heads": 6, "head_dim": 4, "kv_heads": 3}),
)
SIZES = {
    "neurons": {"neurons": 5, "channels": 3},
    "channels": {"channels": 4, "norms": 2},
    "kv_groups": {"heads": 4, "head_dim": 2, "kv_heads": 2},
}


def padded_cases(draw: random.Random) -> list[dict]:
    """Sequences of different lengths, the padding on either side or between; nan and infinity in it."""
    settings = (
        ("neurons", "right", "numbers"),
        ("channels", "left", "numbers"),
        ("kv_groups", "between", "numbers"),
        ("neurons", "left", "nan"),
        ("channels", "right", "inf"),
        ("kv_groups", "right", "nan"),
    )
    return [
        scores_case(draw, part, [draw.randint(3, 4), 7, draw.randint(1, 2)], 7, side, SIZES[part], besides=besides)
        for part, side, besides in settings
    ]


def empty_cases(draw: random.Random) -> list[dict]:
    """A sequence without a token beside others; nothing but padding; no sequence at all."""
    settings: tuple[tuple[str, list[int]], ...] = (
        ("neurons", [4, 0, 2]),
        ("channels", [0, 5]),
        ("kv_groups", [0, 0]),
        ("neurons", []),
        ("kv_groups", []),
        ("channels", []),
    )
    cases = [scores_case(draw, part, lengths, 5, "right", SIZES[part]) for part, lengths in settings]
    return [*cases, scores_case(draw, "neurons", [3, 0], 4, "left", SIZES["neurons"], besides="nan")]


def other_scores(draw: random.Random) -> list[dict]:
    """Other sizes, with some padding by chance."""
    cases = []
    for number, part in enumerate(("neurons", "channels", "kv_groups") * 2):
        tokens, d = draw.randint(3, 9), draw.randint(2, 6)
        kv, shared = draw.randint(2, 3), draw.randint(1, 3)
        sizes = {
            "neurons": {"neurons": draw.randint(2, 9), "channels": d},
            "channels": {"channels": d, "norms": draw.randint(2, 4)},
            "kv_groups": {"heads": kv * shared, "head_dim": draw.randint(2, 5), "kv_heads": kv},
        }[part]
        lengths = [draw.randint(1, tokens) for _ in range(draw.randint(2, 4))]
        side, besides = ("right", "left", "between")[number % 3], ("numbers", "inf")[number // 3]
        cases.append(scores_case(draw, part, lengths, tokens, side, sizes, besides=besides))
    return cases


def one_of_each(draw: random.Random) -> list[dict]:
    """One head for all, heads without groups, one token, one sequence."""
    return [
        scores_case(draw, "kv_groups", [4, 3], 5, "left", {"heads": 3, "head_dim": 2, "kv_heads": 1}),
        scores_case(draw, "kv_groups", [1, 1], 1, "right", {"heads": 3, "head_dim": 5, "kv_heads": 3}),
        scores_case(draw, "neurons", [0, 1], 6, "right", {"neurons": 1, "channels": 1}),
        scores_case(draw, "channels", [3], 6, "between", {"channels": 3, "norms": 1}),
        scores_case(draw, "channels", [0, 0, 0], 2, "right", {"channels": 2, "norms": 2}, besides="nan"),
        scores_case(draw, "channels", [], 3, "right", {"channels": 5, "norms": 3}),
    ]


def kept_case(draw: random.Random, count: int, eighths: int) -> dict:
    """All scores are different."""
    return {"scores": [n / 8 for n in draw.sample(range(1, 400), count)], "share": eighths / 8}


def kept_cases(draw: random.Random) -> list[dict]:
    """Shares that give whole numbers, and some that are rounded, the half among them."""
    settings = ((8, 4), (10, 3), (9, 4), (7, 2), (draw.randint(10, 20), draw.randint(2, 6)), (12, 1))
    return [kept_case(draw, *one) for one in settings]


def share_cases(draw: random.Random) -> list[dict]:
    """Shares whose product is a whole number and a half, and less in floating point; and some that are not."""
    settings = ((0.29, 50), (0.57, 50), (0.29, 100), (0.31, 10), (0.7, 10))
    return [kept_case(draw, count, 0) | {"share": share} for share, count in settings]


def kept_ends(draw: random.Random) -> list[dict]:
    """At least one, and all of them."""
    return [kept_case(draw, 5, 0), kept_case(draw, 3, 1), kept_case(draw, 6, 8), kept_case(draw, 1, 2)]


def tie_cases(draw: random.Random) -> list[dict]:
    """Equal scores on both sides of the border."""
    cases = []
    for levels, count, eighths in (([1, 1, 2], 8, 4), ([3], 6, 4), ([1, 2, 2, 2, 5], 10, 3), ([0, 0, 0, 4], 8, 5)):
        scores = [level / 4 for level in (levels * count)[:count]]
        draw.shuffle(scores)
        cases.append({"scores": scores, "share": eighths / 8})
    return cases


def many_equal(draw: random.Random) -> list[dict]:
    """Long lists of few different scores."""
    cases = []
    for _ in range(4):
        count = draw.randint(40, 90)
        scores = [draw.randint(0, 3) / 2 for _ in range(count)]
        cases.append({"scores": scores, "share": draw.randint(1, 7) / 8})
    count, share = draw.choice([(50, 0.29), (50, 0.57)])
    return [*cases, {"scores": [draw.randint(0, 3) / 2 for _ in range(count)], "share": share}]


# --- What is right ---


def exact_aggregate(activations: list, mask: list) -> list[float]:
    """Of activations [b][t][i]."""
    if not activations:
        return []
    scores = []
    for i in range(len(activations[0][0])):
        total = 0.0
        for rows, there in zip(activations, mask):
            values = [abs(row[i]) for row, token in zip(rows, there) if token]
            total += (math.fsum(values) / len(values)) ** 2 if values else 0.0
        scores.append(math.sqrt(total))
    return scores


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def exact_scores(case: dict) -> list[float]:
    given = activation_inputs(**case)
    mask, part = given["mask"].tolist(), case["part"]
    if part == "channels":
        each = [exact_aggregate(one.tolist(), mask) for one in given["normed"]]
        return [math.fsum(column) for column in zip(*each)] or [0.0] * case["channels"]
    if part == "neurons":
        gate, up = given["gate"].tolist(), given["up"].tolist()

        def inner(row: list[float]) -> list[float]:
            return [
                silu(math.fsum(a * b for a, b in zip(row, g))) * math.fsum(a * b for a, b in zip(row, u))
                for g, u in zip(gate, up)
            ]

        nothing = [0.0] * case["neurons"]  # of padding
        activations = [
            [inner(row) if token else nothing for row, token in zip(rows, there)]
            for rows, there in zip(given["x"].tolist(), mask)
        ]
        return exact_aggregate(activations, mask) or [0.0] * case["neurons"]
    lengths = [[[math.hypot(*head) for head in row] for row in rows] for rows in given["heads"].tolist()]
    scores = exact_aggregate(lengths, mask) or [0.0] * case["heads"]
    groups = [0.0] * case["kv_heads"]
    for head, score in enumerate(scores):
        groups[head * case["kv_heads"] // case["heads"]] += score
    return groups


def exact_kept(case: dict) -> list[int]:
    """One after the other, the best of those that are left."""
    count = max(1, math.floor(Fraction(str(case["share"])) * len(case["scores"]) + Fraction(1, 2)))
    left, chosen = list(range(len(case["scores"]))), []
    for _ in range(count):
        best = max(left, key=lambda i: (case["scores"][i], -i))
        left.remove(best)
        chosen.append(best)
    return sorted(chosen)


# --- Judging ---


def judge_scores(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    part, right = case["part"], torch.tensor(exact_scores(case), dtype=torch.float64)
    sizes = ", ".join(f"{name} {value}" for name, value in case.items() if name in ("heads", "kv_heads", "norms"))
    where = f"{part} of {len(case['lengths'])} sequences with {case['lengths']} tokens of {case['tokens']}"
    where += f", {sizes}" if sizes else ""
    where += ": " if case["besides"] == "numbers" else f", {case['besides']} in the padding: "
    if seen["changed"]:
        return f"{where}what was given was changed"
    came = read(seen["scores"], "the result", right.shape, "")
    if isinstance(came, str):
        return where + came
    far = ~((came.double() - right).abs() <= CLOSE * right.abs().clamp(min=1e-3))
    if not far.any():
        return None
    at = int(far.nonzero()[0])
    return (
        f"{where}{numbers(came, 6)} came back, expected {numbers(right, 6)}; the first difference is at {at}."
        f" {PARTS[part]}"
    )


def judge_kept(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    scores = case["scores"]
    where = f"kept({brief(scores, 90)}, {case['share']:g}) of {len(scores)}: "
    if seen["changed"]:
        return f"{where}the scores were changed"
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a list of whole numbers was expected"
    right = exact_kept(case)
    if seen["kept"] == right:
        return None
    came = brief(seen["kept"], 90)
    if len(seen["kept"]) != len(right):
        return f"{where}{len(seen['kept'])} indices came back, {came}, expected {len(right)}: {brief(right, 90)}"
    return f"{where}{came} came back, expected {brief(right, 90)}"
