"""Lab 08, padding: cases and judges of batching-waste."""

from __future__ import annotations

import random

from workbench.checks.lab05_tensors import told_missing
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
    """Nothing to do."""
    B = draw.randint(1, 9)
    return [waste_case("static", [], B), waste_case("continuous", [], B)]


def refused_cases(draw: random.Random) -> list[dict]:
    length = draw.randint(2, 9)
    return [
        waste_case("static", EXAMPLE, 0),
        waste_case("continuous", EXAMPLE, -1),
        waste_case("static", [[length, 3], [0, 3]], 2),
        waste_case("continuous", [[length, 3], [length, 0]], 2),
    ]


# --- Judging ---


def exact_static(
    lengths: list, B: int, *, first_row: int = 1, full: bool = False, fixed: bool = False
) -> tuple[int, int]:
    """(rows, steps). The last row of the prompt writes the first of the output, so that o − 1 more rows follow.

    first_row 0: as if o followed. full: every group padded to B members. fixed: all groups to the longest of all.
    """
    groups = [lengths[at : at + B] for at in range(0, len(lengths), B)]
    rows = steps = 0
    for group in groups:
        prompt = max(p for p, _ in (lengths if fixed else group))
        output = max(o for _, o in (lengths if fixed else group))
        rows += (B if full else len(group)) * (prompt + output - first_row)
        steps += 1 + output - first_row
    return rows, steps


def exact_useful(lengths: list) -> int:
    return sum(p + o - 1 for p, o in lengths)


def exact_continuous(lengths: list, B: int, *, sort: bool = False, gap: int = 0) -> int:
    """Steps: each request stays in a slot for as many as it writes tokens; step by step, by looking at every slot."""
    queue = [o for _, o in lengths]
    if sort:
        queue.sort()
    slots, steps = [0] * B, 0
    while queue or any(slots):
        for at, left in enumerate(slots):
            if left == 0 and queue:
                slots[at] = queue.pop(0) + (gap if steps else 0)
        slots = [max(0, left - 1) for left in slots]
        steps += 1
    return steps


def right_counts(case: dict) -> dict:
    lengths, B = case["lengths"], case["B"]
    useful = exact_useful(lengths)
    rows, steps = exact_static(lengths, B)
    if case["part"] == "continuous":
        rows, steps = useful, exact_continuous(lengths, B)
    return {
        "rows": rows,
        "useful": useful,
        "wasted": 1 - useful / rows if rows else 0.0,
        "steps": steps,
    }


def _where(case: dict) -> str:
    pairs = ", ".join(f"({p}, {o})" for p, o in case["lengths"][:6]) + (
        ", …" if len(case["lengths"]) > 6 else ""
    )
    return f"{case['part']}, B = {case['B']}, {len(case['lengths'])} requests [{pairs}]: "


def _judge(case: dict, seen: dict, *names: str) -> str | None:
    if lacking := told_missing(seen):
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
            return f"{where}{name} is {came!r}, expected {shown}: {_told(case, name, came, right)}"
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
    if lacking := told_missing(seen):
        return lacking
    if "refused" in seen:
        return None
    return f"{_where(case)}{not_refused(seen)}; WorkbenchError was expected: B and all lengths are at least 1"


def _told(case: dict, name: str, came, right: dict) -> str:
    lengths, B = case["lengths"], case["B"]
    if not lengths:
        return "nothing is asked for, and nothing is done"
    ways: list[tuple[str, float]] = []
    fallback = ""
    if name == "useful":
        ways = [
            ("that has a row for every token of the output; the first of it comes from the prompt's last row", sum(p + o for p, o in lengths)),
            ("that counts the outputs alone; the rows of the prompts are useful, too", sum(o for _, o in lengths)),
            ("that counts the prompts alone", sum(p for p, _ in lengths)),
        ]  # fmt: skip
        fallback = "a request takes a row for each token of its prompt, and one for each token it writes but the first"
    elif name == "rows" and case["part"] == "static":
        ways = [
            ("that has a row for every token of the output; the first of it comes from the prompt's last row", exact_static(lengths, B, first_row=0)[0]),
            ("the last group is not full, and only its members are computed", exact_static(lengths, B, full=True)[0]),
            ("each group is padded to its own longest, not to the longest of all", exact_static(lengths, B, fixed=True)[0]),
            ("nobody is padded in that; every member has as many rows as the longest", right["useful"]),
        ]  # fmt: skip
        fallback = "in a group every member has the rows of its longest prompt and of its longest output but the first token"
    elif name == "rows":
        ways = [("that pads; here no row is computed in vain", exact_static(lengths, B)[0])]
        fallback = "all rows are useful"
    elif name == "steps" and case["part"] == "static":
        ways = [
            ("the step of the prompt writes the first token, so that a group takes as many steps as its longest output", exact_static(lengths, B, first_row=0)[1]),
            ("that is as if all groups had the longest output of all", exact_static(lengths, B, fixed=True)[1]),
            ("that is one step too few in each group", exact_static(lengths, B, first_row=2)[1]),
        ]  # fmt: skip
        fallback = "a group goes on until its longest output is done"
    elif name == "steps":
        ways = [
            ("that is what static batching takes", exact_static(lengths, B)[1]),
            ("that is all work divided by the slots; at the end some of them have nothing to do", -(-sum(o for _, o in lengths) // B)),
            ("that takes the shortest first; they come in the order given", exact_continuous(lengths, B, sort=True)),
            ("a slot that becomes free after a step is taken in the next one, with no step between", exact_continuous(lengths, B, gap=1)),
            ("that is as if all came at once", max(o for _, o in lengths)),
            ("that is one after the other", sum(o for _, o in lengths)),
        ]  # fmt: skip
        fallback = (
            "a request is in its slot for as many steps as it writes tokens; then the next one takes the slot"
        )
    else:
        ways = [
            ("that is the share of useful rows", right["useful"] / right["rows"]),
            ("that is in percent; a share is between 0 and 1", 100 * right["wasted"]),
            ("that is what is wasted for each useful row; all rows are the whole", right["rows"] / right["useful"] - 1),
            ("that is a number of rows; a share of all rows was asked", right["rows"] - right["useful"]),
        ]  # fmt: skip
        fallback = "the rows that are not useful, divided by all rows"
    if isinstance(came, int | float):
        for words, way in ways:
            if abs(came - way) < CLOSE and abs(way - right[name]) > CLOSE:
                return words
    return fallback
