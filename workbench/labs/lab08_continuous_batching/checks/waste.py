"""Lab 08, padding: cases and judges of batching-waste."""

from __future__ import annotations

import random

from workbench.checks.tensors import missing_message
from workbench.grading.check import not_refused

EXAMPLE = [[3, 2], [5, 4], [2, 6], [4, 3]]  # the exercise's own
CLOSE = 1e-9


def waste_case(part: str, lengths: list, B: int) -> dict:
    return {"part": part, "lengths": lengths, "B": B}


def ragged(draw: random.Random, count: int) -> list[list[int]]:
    """Prompts of 1 … 40 tokens, outputs of 1 … 30."""
    return [[draw.randint(1, 40), draw.randint(1, 30)] for _ in range(count)]


def static_cases(draw: random.Random) -> list[dict]:
    """The example; whole groups; and groups of one, in which nothing is padded."""
    return [
        waste_case("static", EXAMPLE, 2),
        waste_case("static", ragged(draw, 12), 4),
        waste_case("static", ragged(draw, 5), 1),
    ]


def share_cases(draw: random.Random) -> list[dict]:
    return [
        waste_case("static", EXAMPLE, 2),
        waste_case("static", ragged(draw, 16), 8),
        waste_case("static", [[7, 5]] * 6, 3),
        waste_case("continuous", ragged(draw, 6), 3),
    ]


def continuous_cases(draw: random.Random) -> list[dict]:
    """The example; slots that become free one by one, and several at once; and an order that counts."""
    first = draw.randint(8, 12)
    return [
        waste_case("continuous", EXAMPLE, 2),
        waste_case("continuous", [[1, first], [9, 3], [2, 3], [4, 1], [3, 4], [6, 2]], 3),
        waste_case("continuous", ragged(draw, 14), 4),
        waste_case("continuous", [[2, 2], [2, 2], [2, 2], [2, 2], [3, 15]], 2),
    ]


def uneven_cases(draw: random.Random) -> list[dict]:
    """A last group that is not full, more slots than requests, one request, outputs of one token."""
    return [
        waste_case("static", ragged(draw, 11), 4),
        waste_case("static", ragged(draw, 3), 8),
        waste_case("continuous", ragged(draw, 3), 8),
        waste_case("static", [[draw.randint(2, 30), 1] for _ in range(5)], 2),
        waste_case("continuous", [[draw.randint(2, 30), 1] for _ in range(5)], 2),
        waste_case("continuous", ragged(draw, 40), 1),
    ]


def edge_cases(draw: random.Random) -> list[dict]:
    """Nothing to do; and a request."""
    B = draw.randint(1, 9)
    return [
        waste_case(part, lengths, B) for lengths in ([], [[draw.randint(2, 9), 3]]) for part in ("static", "continuous")
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    length = draw.randint(2, 9)
    return [
        waste_case("static", EXAMPLE, 0),
        waste_case("continuous", EXAMPLE, -1),
        waste_case("static", [[length, 3], [0, 3]], 2),
        waste_case("continuous", [[length, 3], [length, 0]], 2),
    ]


# --- Judging ---


def exact_static(lengths: list, B: int) -> tuple[int, int]:
    """(rows, steps). The last row of the prompt writes the first of the output, so that o − 1 more rows follow."""
    rows = steps = 0
    for start in range(0, len(lengths), B):
        prompts, outputs = zip(*lengths[start : start + B])
        rows += len(prompts) * (max(prompts) + max(outputs) - 1)
        steps += max(outputs)
    return rows, steps


def exact_useful(lengths: list) -> int:
    return sum(p + o - 1 for p, o in lengths)


def exact_continuous(lengths: list, B: int) -> int:
    """Steps: each request stays in a slot for as many as it writes tokens; step by step, by looking at every slot."""
    queue = [o for _, o in lengths]
    slots, steps = [0] * B, 0
    while queue or any(slots):
        for slot, left in enumerate(slots):
            if left == 0 and queue:
                slots[slot] = queue.pop(0)
        slots = [max(0, left - 1) for left in slots]
        steps += 1
    return steps


def right_counts(case: dict) -> dict:
    lengths, B = case["lengths"], case["B"]
    useful = exact_useful(lengths)
    rows, steps = exact_static(lengths, B)
    if case["part"] == "continuous":
        rows, steps = useful, exact_continuous(lengths, B)
    return {"rows": rows, "useful": useful, "wasted": 1 - useful / rows if rows else 0.0, "steps": steps}


def _where(case: dict) -> str:
    pairs = ", ".join(f"({p}, {o})" for p, o in case["lengths"][:6]) + (", …" if len(case["lengths"]) > 6 else "")
    return f"{case['part']}, B = {case['B']}, {len(case['lengths'])} requests [{pairs}]: "


def _judge(case: dict, seen: dict, *names: str) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    where = _where(case)
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where (rows, useful, wasted, steps) was expected"
    if seen["changed"]:
        return f"{where}the list that was given was changed"
    right = right_counts(case)
    for name in names:
        came = seen[name]
        if not isinstance(came, int | float) or abs(came - right[name]) > CLOSE:
            shown = f"{right[name]:.4g}" if name == "wasted" else f"{right[name]:,}"
            return f"{where}{name} is {came!r}, expected {shown}: {_meaning(case, name)}"
    return None


def judge_counts(case: dict, seen: dict) -> str | None:
    """Rows, useful rows and steps."""
    return _judge(case, seen, "useful", "rows", "steps")


def judge_share(case: dict, seen: dict) -> str | None:
    """The share that is wasted, and what it is a share of."""
    return _judge(case, seen, "wasted")


def judge_all(case: dict, seen: dict) -> str | None:
    return _judge(case, seen, "useful", "rows", "steps", "wasted")


def judge_refused(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    if "refused" in seen:
        return None
    return f"{_where(case)}{not_refused(seen)}; WorkbenchError was expected: B and all lengths are at least 1"


def _meaning(case: dict, name: str) -> str:
    """What the number is."""
    if not case["lengths"]:
        return "nothing is asked for, and nothing is done"
    if name == "wasted":
        return "the rows that are not useful, divided by all rows"
    if name == "useful" or (name == "rows" and case["part"] == "continuous"):
        return "a request takes a row for each token of its prompt, and one for each token it writes but the first"
    if name == "rows":
        return (
            "in a group every member has the rows of its longest prompt and of its longest output but the first token"
        )
    if case["part"] == "static":
        return "a group goes on until its longest output is done"
    return "a request is in its slot for as many steps as it writes tokens; then the next one takes the slot"
