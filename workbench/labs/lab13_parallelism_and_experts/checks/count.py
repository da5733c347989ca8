"""Lab 13, messages of a step: cases and judge of parallel-count.

What is right is counted on a step that is written down message by message, with sender and receiver.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from workbench.labs.lab13_parallelism_and_experts.checks.probes import OPERATIONS

# --- Cases ---


def count_case(
    draw: random.Random, tensor: int, pipeline: int, layers: int, groups: list[tuple[int, int]], *, ragged: bool = False
) -> dict:
    """ragged: the vocabulary is no multiple of the ranks."""
    vocabulary = tensor * draw.randint(40, 90) + (draw.randint(1, tensor - 1) if ragged else 0)
    model = {
        "layers": layers,
        "hidden_size": 8 * draw.randint(2, 9),
        "vocabulary": vocabulary,
        "element_bytes": draw.choice([2, 4]),
    }
    return {"model": model, "tensor": tensor, "pipeline": pipeline, "groups": [list(group) for group in groups]}


def some(draw: random.Random, groups: int, *, empty: bool = False) -> list[tuple[int, int]]:
    """(N, M) of so many groups, 0 < M < N in all but the last: that one decodes, M = N. empty: the first one asks for
    no logits."""
    made = []
    for number in range(groups):
        tokens = draw.randint(5, 30)
        made.append((tokens, tokens if 0 < number == groups - 1 else draw.randint(1, 4)))
    return [(made[0][0], 0), *made[1:]] if empty else made


def tensor_cases(draw: random.Random) -> list[dict]:
    return [count_case(draw, t, 1, draw.randint(2, 9), some(draw, 1)) for t in (2, 4, 3)]


def pipeline_cases(draw: random.Random) -> list[dict]:
    return [count_case(draw, 1, p, p * draw.randint(1, 4), some(draw, 1)) for p in (2, 3, 4)]


def both_cases(draw: random.Random) -> list[dict]:
    return [
        count_case(draw, t, p, p * draw.randint(1, 4), some(draw, m)) for t, p, m in ((2, 2, 1), (2, 3, 2), (4, 2, 3))
    ]


def uneven_cases(draw: random.Random) -> list[dict]:
    """Layers that do not divide."""
    return [
        count_case(draw, t, p, layers, some(draw, 1)) for t, p, layers in ((2, 2, 5), (2, 3, 7), (3, 4, 10), (2, 4, 7))
    ]


def ragged_cases(draw: random.Random) -> list[dict]:
    return [count_case(draw, t, p, 4, some(draw, 2), ragged=True) for t, p in ((2, 1), (4, 2), (3, 2))]


def rowless_cases(draw: random.Random) -> list[dict]:
    """Groups that ask for no logits."""
    return [
        count_case(draw, 2, 2, 4, some(draw, 1, empty=True)),
        count_case(draw, 2, 3, 6, some(draw, 3, empty=True)),
        count_case(draw, 3, 1, 2, some(draw, 2, empty=True)),
        count_case(draw, 1, 2, 2, some(draw, 2, empty=True)),
    ]


def edge_cases(draw: random.Random) -> list[dict]:
    """One rank; no group; a layer for each stage."""
    return [
        count_case(draw, 1, 1, 4, some(draw, 2)),
        count_case(draw, 2, 2, 4, []),
        count_case(draw, 2, 3, 3, some(draw, 1)),
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    """More stages than layers, beside as many."""
    return [count_case(draw, 1, 3, 2, some(draw, 1)), count_case(draw, 1, 3, 3, some(draw, 1))]


def other_steps(draw: random.Random) -> list[dict]:
    cases = []
    for number in range(6):
        tensor, pipeline = draw.randint(1, 4), draw.randint(1, 4)
        layers = pipeline + draw.randint(0, 9)
        groups = some(draw, draw.randint(1, 4), empty=number % 3 == 1)
        cases.append(count_case(draw, tensor, pipeline, layers, groups, ragged=tensor > 1 and number % 2 == 0))
    return cases


def long_pipelines(draw: random.Random) -> list[dict]:
    return [count_case(draw, 2, p, p + draw.randint(1, p - 1), some(draw, 3)) for p in (5, 6)]


def first_and_last(draw: random.Random) -> list[dict]:
    """Rank 0 of few, whose messages are the most kinds."""
    return [
        count_case(draw, 2, 2, 3, some(draw, 4, empty=True), ragged=True),
        count_case(draw, 3, 2, 2, some(draw, 2), ragged=True),
        count_case(draw, 1, 2, 5, some(draw, 1)),
    ]


# --- What is right ---

Event = tuple[str, int, int]  # operation, rank, bytes


def layers_of(layers: int, stages: int) -> list[int]:
    """How many each stage has: dealt out one by one."""
    counts = [0] * stages
    for layer in range(layers):
        counts[layer % stages] += 1
    return counts


def step(case: dict) -> Iterator[Event]:
    """All that is called in a step, by all ranks."""
    model, tensor, pipeline = case["model"], case["tensor"], case["pipeline"]
    size = model["element_bytes"]
    share = 0
    while share * tensor < model["vocabulary"]:
        share += 1
    for tokens, rows in case["groups"]:
        hidden = tokens * model["hidden_size"] * size
        for stage, layers in enumerate(layers_of(model["layers"], pipeline)):
            members = [stage * tensor + part for part in range(tensor)]
            if tensor > 1:
                yield from (("all_reduce", rank, hidden) for _ in range(layers) for _ in range(2) for rank in members)
            if stage + 1 < pipeline:
                for rank in members:
                    yield "send", rank, hidden
                    yield "receive", rank + tensor, hidden
            elif rows:
                if tensor > 1:
                    yield from (("gather", rank, share * rows * size) for rank in members)
                if stage:
                    yield "send", members[0], rows * model["vocabulary"] * size
                    yield "receive", 0, rows * model["vocabulary"] * size


def counted(case: dict) -> list[dict[str, list[int]]]:
    """Of each rank, operation -> calls and bytes."""
    counts = [{name: [0, 0] for name in OPERATIONS} for _ in range(case["tensor"] * case["pipeline"])]
    for operation, rank, nbytes in step(case):
        counts[rank][operation][0] += 1
        counts[rank][operation][1] += nbytes
    return counts


# --- Judging ---


def judge_counts(case: dict, seen: dict) -> str | None:
    model = case["model"]
    where = (
        f"{model['layers']} layers, D = {model['hidden_size']}, V = {model['vocabulary']}, b = "
        f"{model['element_bytes']}, t = {case['tensor']}, p = {case['pipeline']}, (N, M) = "
        f"{', '.join(map(str, map(tuple, case['groups']))) or '–'}: "
    )
    too_few = model["layers"] < case["pipeline"]
    for rank, right in enumerate(counted(case)):
        came = seen.get(f"rank {rank}")
        if too_few or came == "refused":
            if too_few and came == "refused":
                continue
            what = "a ValueError was raised" if came == "refused" else "no error was raised"
            return f"{where}rank {rank}: {what}, expected " + ("a ValueError: too few layers" if too_few else "counts")
        if came is not None:
            return f"{where}rank {rank}: a {came} came back, expected a dict"
        for name, (calls, nbytes) in right.items():
            pair = seen.get(f"rank {rank} {name}")
            if pair is None:
                return f"{where}rank {rank}: the dict has no {name!r}; expected all of {', '.join(OPERATIONS)}"
            if pair != [calls, nbytes]:
                shown = f"{pair[0]:,} calls, {pair[1]:,} bytes" if _is_pair(pair) else str(pair)
                place = f"stage {rank // case['tensor']}, part {rank % case['tensor']}"
                return f"{where}{name} of rank {rank} ({place}): {shown}, expected {calls} calls, {nbytes:,} bytes"
    return f"{where}what was given was changed" if seen.get("changed") else None


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2
