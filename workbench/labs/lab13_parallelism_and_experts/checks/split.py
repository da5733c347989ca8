"""Lab 13, parts of matrices: cases and judges of parallel-split.

What a rank holds follows from who needs what: a query head is on one rank, and a key-value head on every rank with one
of the query heads that use it. The output of a feed-forward is worked out number by number.
"""

from __future__ import annotations

import math
import random

import torch

from workbench.checks.tensors import exactly, missing_message, read
from workbench.labs.lab13_parallelism_and_experts.checks.probes import input_rows, parts_of, weights_of

CLOSE = 1e-9
MATRICES = {"feed_forward": ("gate", "up", "down"), "attention": ("q", "k", "v", "o")}


# --- Cases: what a rank holds ---


def split_case(draw: random.Random, part: str, ranks: int, sizes: tuple[int, ...], biases: str = "") -> dict:
    """sizes: channels and neurons, or channels, heads, kv_heads and head_dim."""
    names = ("channels", "neurons") if part == "feed_forward" else ("channels", "heads", "kv_heads", "head_dim")
    known = dict(zip(names, sizes))
    return {"part": part, "seed": draw.randrange(10**6), "ranks": ranks, "sizes": known, "biases": biases.split()}


def neuron_parts(draw: random.Random) -> list[dict]:
    """With more neurons than channels, with as many, and with fewer."""
    return [
        split_case(draw, "feed_forward", p, (d, f))
        for p, d, f in ((2, 4, 6), (3, 4, 6), (4, 4, 8), (3, 6, 6), (2, 6, 4))
    ]


def head_parts(draw: random.Random) -> list[dict]:
    """At least as many key-value heads as ranks; in the last one all matrices are square."""
    settings = ((2, (6, 4, 4, 2)), (2, (5, 8, 4, 3)), (2, (4, 6, 2, 2)), (3, (4, 6, 3, 2)), (2, (8, 4, 4, 2)))
    return [split_case(draw, "attention", *one) for one in settings]


def replicated_parts(draw: random.Random) -> list[dict]:
    """Fewer key-value heads than ranks."""
    settings = ((2, (4, 4, 1, 2)), (4, (5, 8, 2, 2)), (4, (4, 4, 2, 3)), (6, (3, 6, 2, 2)))
    return [split_case(draw, "attention", *one) for one in settings]


def bias_parts(draw: random.Random) -> list[dict]:
    return [
        split_case(draw, "feed_forward", 2, (3, 6), "gate up down"),
        split_case(draw, "feed_forward", 3, (4, 6), "down"),
        split_case(draw, "attention", 2, (4, 4, 2, 3), "q k v o"),
        split_case(draw, "attention", 4, (4, 8, 2, 2), "q k v"),
        split_case(draw, "attention", 2, (4, 4, 4, 2), "o"),
    ]


def refused_parts(draw: random.Random) -> list[dict]:
    """Neurons, query heads and key-value heads that do not divide, beside some that do."""
    return [
        split_case(draw, "feed_forward", 4, (3, 6)),
        split_case(draw, "feed_forward", 3, (3, 6)),
        split_case(draw, "attention", 4, (3, 6, 2, 2)),
        split_case(draw, "attention", 2, (3, 6, 3, 2)),
        split_case(draw, "attention", 6, (3, 12, 4, 2)),
        split_case(draw, "attention", 3, (3, 6, 3, 1)),
        split_case(draw, "attention", 4, (3, 12, 3, 1)),
    ]


def lone_parts(draw: random.Random) -> list[dict]:
    """One rank holds everything, in memory of its own, too."""
    return [split_case(draw, "feed_forward", 1, (3, 4), "down"), split_case(draw, "attention", 1, (4, 4, 2, 2), "q o")]


def other_neurons(draw: random.Random) -> list[dict]:
    cases = []
    for number in range(5):
        ranks = draw.randint(2, 5)
        neurons = ranks * draw.randint(1, 4) + (number == 4)
        biases = " ".join(name for name in ("gate", "up", "down") if draw.random() < 0.6)
        cases.append(split_case(draw, "feed_forward", ranks, (draw.randint(2, 6), neurons), biases))
    return cases


def other_heads(draw: random.Random) -> list[dict]:
    """Every kind of share between ranks and heads."""
    cases = []
    for number in range(8):
        kv_heads = draw.randint(1, 4)
        divisors = [n for n in range(1, 5) if kv_heads % n == 0]
        ranks = kv_heads * draw.randint(2, 3) if number % 2 else draw.choice(divisors)
        heads = math.lcm(kv_heads, ranks) * draw.randint(1, 2)
        biases = " ".join(name for name in ("q", "k", "v", "o") if draw.random() < 0.6)
        sizes = (draw.randint(2, 5), heads, kv_heads, draw.randint(1, 3))
        cases.append(split_case(draw, "attention", ranks, sizes, biases))
    return [*cases, split_case(draw, "attention", 4, (3, 12, 6, 1)), split_case(draw, "attention", 5, (3, 6, 1, 1))]


# --- Cases: outputs ---


def forward_case(
    draw: random.Random, ranks: int, rows: int, channels: int, neurons: int, biases: str = "", whole: bool = False
) -> dict:
    """neurons: of each rank, or, where the whole is split by the answer itself, of the whole."""
    seed, sizes = draw.randrange(10**6), {"channels": channels, "neurons": neurons}
    return {"seed": seed, "ranks": ranks, "rows": rows, "sizes": sizes, "biases": biases.split(), "whole": whole}


def forward_cases(draw: random.Random) -> list[dict]:
    return [forward_case(draw, 2, 3, 4, 3), forward_case(draw, 3, 2, 3, 4), forward_case(draw, 4, 1, 5, 2)]


def bias_outputs(draw: random.Random) -> list[dict]:
    return [
        forward_case(draw, 2, 2, 4, 3, "down"),
        forward_case(draw, 4, 3, 3, 2, "gate up down"),
        forward_case(draw, 3, 2, 3, 2, "gate"),
        forward_case(draw, 2, 2, 3, 2, "up"),
    ]


def together_cases(draw: random.Random) -> list[dict]:
    return [forward_case(draw, 2, 3, 4, 6, whole=True), forward_case(draw, 3, 2, 4, 6, "gate up down", whole=True)]


def lone_outputs(draw: random.Random) -> list[dict]:
    return [forward_case(draw, 1, 2, 3, 4, "down"), forward_case(draw, 2, 0, 3, 2, "down")]


def other_outputs(draw: random.Random) -> list[dict]:
    cases = []
    for number in range(5):
        ranks = draw.randint(1, 5)
        neurons = draw.randint(1, 4) * (ranks if number % 2 else 1)
        biases = " ".join(name for name in ("gate", "up", "down") if draw.random() < 0.6)
        rows, channels = draw.randint(1, 4), draw.randint(2, 6)
        cases.append(forward_case(draw, ranks, rows, channels, neurons, biases, whole=bool(number % 2)))
    return cases


# --- What is right ---


def refusal(case: dict) -> str:
    """Why this cannot be split, or ""."""
    ranks, sizes = case["ranks"], case["sizes"]
    if case["part"] == "feed_forward":
        left = sizes["neurons"] % ranks
        return f"{sizes['neurons']} neurons are no multiple of {ranks}" if left else ""
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if heads % ranks:
        return f"{heads} query heads are no multiple of {ranks}"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} key-value heads are neither a multiple nor a divisor of {ranks}"
    return ""


def own_indices(case: dict, rank: int) -> dict[str, list[int]]:
    """Of each matrix the rows that a rank holds, of down and o the columns."""
    ranks, sizes = case["ranks"], case["sizes"]
    if case["part"] == "feed_forward":
        neurons = [i for i in range(sizes["neurons"]) if i * ranks // sizes["neurons"] == rank]
        return dict.fromkeys(MATRICES["feed_forward"], neurons)
    heads, shared, width = sizes["heads"], sizes["heads"] // sizes["kv_heads"], sizes["head_dim"]
    own = [head for head in range(heads) if head * ranks // heads == rank]
    needed = sorted({head // shared for head in own})
    queries = [head * width + i for head in own for i in range(width)]
    keys = [head * width + i for head in needed for i in range(width)]
    return {"q": queries, "k": keys, "v": keys, "o": queries}


def held_by(case: dict, rank: int) -> dict[str, list]:
    """Each matrix and bias of a rank, as lists of numbers."""
    weights = weights_of(case["part"], case["seed"], case["biases"], **case["sizes"])
    held: dict[str, list] = {}
    for name, indices in own_indices(case, rank).items():
        by_columns = name in ("down", "o")
        rows = weights[name].tolist()
        held[name] = [[row[i] for i in indices] for row in rows] if by_columns else [rows[i] for i in indices]
        if (bias := weights.get(f"{name}_bias")) is not None:
            numbers = bias.tolist()
            held[f"{name}_bias"] = numbers if by_columns else [numbers[i] for i in indices]
    return held


def inner_of(x: list[float], part: dict[str, list], neuron: int) -> float:
    def product(name: str) -> float:
        bias = part[f"{name}_bias"][neuron] if f"{name}_bias" in part else 0.0
        return math.fsum(a * b for a, b in zip(x, part[name][neuron])) + bias

    gate = product("gate")
    return gate / (1 + math.exp(-gate)) * product("up")


def outputs_of(case: dict) -> torch.Tensor:
    """[N, D]: of all neurons of all ranks, and the bias once."""
    sizes, rows = case["sizes"], input_rows(case["seed"], case["rows"], case["sizes"]["channels"]).tolist()
    if case["whole"]:
        tensors = [weights_of("feed_forward", case["seed"], case["biases"], **sizes)]
    else:
        tensors = parts_of(case["seed"], case["ranks"], case["biases"], **sizes)
    parts = [{name: one.tolist() for name, one in part.items()} for part in tensors]
    bias = parts[0].get("down_bias", [0.0] * sizes["channels"])
    result = torch.zeros(len(rows), sizes["channels"], dtype=torch.float64)
    for n, x in enumerate(rows):
        inner = [[inner_of(x, part, i) for i in range(sizes["neurons"])] for part in parts]
        for d in range(sizes["channels"]):
            terms = [part["down"][d][i] * a for part, own in zip(parts, inner) for i, a in enumerate(own)]
            result[n, d] = math.fsum(terms) + bias[d]
    return result


# --- Judging ---


def of_sizes(case: dict) -> str:
    sizes = case["sizes"]
    if case.get("part") == "attention":
        what = f"H = {sizes['heads']}, K = {sizes['kv_heads']}, head_dim {sizes['head_dim']}"
    else:
        what = f"F = {sizes['neurons']}"
    what = f"{what}, D = {sizes['channels']}, p = {case['ranks']}"
    return what + (f", biases of {', '.join(case['biases'])}" if case["biases"] else "")


def judge_split(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    where = f"{case['part']} of {of_sizes(case)}: "
    if why := refusal(case):
        taken = [rank for rank in range(case["ranks"]) if seen.get(f"rank {rank}") != "refused"]
        return f"{where}rank {taken[0]} was given something, expected a ValueError: {why}" if taken else None
    for rank in range(case["ranks"]):
        if message := _judge_rank(case, seen, rank):
            return where + message
    if seen["changed"]:
        return f"{where}the whole weights were changed"
    if seen["views"]:
        return f"{where}{seen['views'][0]} lies in the memory of the whole matrix, expected memory of its own"
    for name, kept, taken in seen["slices"]:
        return f"{where}{name} is a slice of {kept} bytes, which all stay in memory; its own numbers take {taken}"
    for name, other in seen["shared"]:
        return f"{where}{name} lies in the memory of {other}, expected memory of its own"
    return None


def _judge_rank(case: dict, seen: dict, rank: int) -> str | None:
    if (came := seen.get(f"rank {rank}")) is not None:
        what = "a ValueError was raised" if came == "refused" else f"a {came} came back"
        return f"rank {rank}: {what}, expected a dict of tensors"
    right = held_by(case, rank)
    names = seen[f"rank {rank} names"]
    if names != sorted(right):
        return f"rank {rank} holds {', '.join(names)}, expected {', '.join(sorted(right))}"
    for name, numbers in right.items():
        expected = torch.tensor(numbers, dtype=torch.float64)
        came = read(seen[f"rank {rank} {name}"], f"{name} of rank {rank}", expected.shape, "float64")
        if isinstance(came, str):
            return came
        far = (came - expected).abs() > CLOSE
        if far.any():
            at = tuple(far.nonzero()[0].tolist())
            seen_there = f"{came[at]:.6g}, expected {expected[at]:.6g}"
            return f"{name} of rank {rank} at {list(at)}: {seen_there}; {_own(case, rank, name)}"
    return None


def _own(case: dict, rank: int, name: str) -> str:
    """In words, what of a matrix or bias is this rank's."""
    matrix = name.removesuffix("_bias")
    by_columns = matrix in ("down", "o")
    if by_columns and name != matrix:
        return "this bias is whole on each rank"
    return f"it holds the {'columns' if by_columns else 'rows'} {own_indices(case, rank)[matrix]} of the whole"


def judge_forward(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    split = "what feed_forward gives each rank" if case["whole"] else "given parts"
    where = f"forward of {split}, {case['rows']} rows, {of_sizes(case)}{'' if case['whole'] else ' (F of each rank)'}: "
    for rank, calls in enumerate(seen["calls"]):
        if calls != 1:
            return f"{where}rank {rank} called all_reduce {calls} times, expected once"
    shape = [case["rows"], case["sizes"]["channels"]]
    for rank, (brought,) in enumerate(seen["brought"]):
        if brought != shape:
            return f"{where}rank {rank} handed {brought} to all_reduce, expected a tensor {shape}, as x is"
    right = outputs_of(case)
    for rank in range(case["ranks"]):
        came = read(seen[f"output of rank {rank}"], f"the output of rank {rank}", right.shape, "float64", "[N, D]")
        if isinstance(came, str):
            return where + came
        far = ~((came - right).abs() <= CLOSE * (1 + right.abs()))
        if far.any():
            at = tuple(far.nonzero()[0].tolist())
            return f"{where}rank {rank} at {list(at)}: {exactly(came[at])}, expected {exactly(right[at])}"
    if seen["changed"]:
        return f"{where}what was given was changed"
    return None
