"""Lab 11, the time to the first token: cases and judges of server-admission. What is right is played through row by
row: every row of every step is given to somebody. Times of steps are sums of powers of two, so that sums are exact."""

from __future__ import annotations

import random

from workbench.checks.tensors import missing_message as lacks

FIXED = {"fixed": 1.0, "row": 0.0, "text": 0.0, "context": 0.0}
EXAMPLE = {"queue": [[6, 3], [3, 5]], "running": [[10, 2]], "max_running": 2, "token_budget": 4}  # the exercise's own


def wait_case(queue: list, running: list, max_running: int, token_budget: int, **cost: float) -> dict:
    """cost: of a step in seconds, "fixed", and for each "row", "text" and token of "context"."""
    return {
        "queue": queue,
        "running": running,
        "max_running": max_running,
        "token_budget": token_budget,
        "cost": FIXED | cost,
    }


def place_cases(draw: random.Random) -> list[dict]:
    """Prompts that fit into one step; the places decide: a free one, none until somebody ends, one after the other."""
    n = draw.randint(3, 7)
    return [
        wait_case([[5, 4]], [], 2, 64),
        wait_case([[5, 4]], [[9, n], [7, n + 2]], 2, 64),
        wait_case([[5, n], [6, 2], [4, 9], [3, 3]], [], 2, 64),
        wait_case([[5, 4], [6, 2]], [[9, 1], [4, n]], 3, 64),
    ]


def budget_cases(draw: random.Random) -> list[dict]:
    """Places for all; the rows decide: decodes first, then prompts in order, in chunks."""
    n = draw.randint(20, 60)
    return [
        EXAMPLE | {"cost": FIXED | {"row": 1 / 64}},
        wait_case([[n, 4]], [], 4, 8),
        wait_case([[n, 4], [3, 4], [5, 4]], [[9, 90], [9, 90]], 8, 10),
        wait_case([[8, 4], [8, 4]], [], 4, 8),
        wait_case([[7, 4], [9, 4], [1, 4]], [[3, 2], [3, 5], [3, 7]], 8, 8),
    ]


def cost_cases(draw: random.Random) -> list[dict]:
    """What a step costs: its rows, the texts that get a token, and what lies in the cache, which grows."""
    n = draw.randint(10, 30)
    long = wait_case([[n, 4], [6, 4]], [[40, 3], [25, 9]], 3, 12)
    return [
        long | {"cost": FIXED | {"row": 1 / 16}},
        long | {"cost": FIXED | {"text": 1 / 4}},
        long | {"cost": FIXED | {"context": 1 / 256}},
        EXAMPLE | {"cost": {"fixed": 1 / 4, "row": 1 / 64, "text": 1 / 32, "context": 1 / 1024}},
    ]


def retry_cases(draw: random.Random) -> list[dict]:
    """In time, too late by less than a second, by exactly some, by a little more."""
    n = draw.randint(2, 9)
    return [{"wait_s": w, "deadline_s": d} for w, d in ((0.5, 2.0), (n + 0.25, float(n)), (n + 3.0, 2.0), (9.5, 4.25))]


def edge_cases(draw: random.Random) -> list[dict]:
    """Nobody in the queue; nothing but decodes, with a single row left; a text of one token, which never decodes; more
    places than rows are taken by prompts."""
    n = draw.randint(5, 9)
    return [
        wait_case([], [[4, 9]], 2, 8),
        wait_case([[n, 4]], [[9, 50]] * 7, 8, 8, context=1 / 64),
        wait_case([[4, 1], [4, 1], [4, 1]], [[9, 3]], 2, 16),
        wait_case([[3, 1], [5, 2], [6, 2]], [], 1, 2),
        wait_case([[2, 2]], [[9, 1]] * 8, 8, 8),
    ]


def deadline_cases(draw: random.Random) -> list[dict]:
    """Exactly in time; and late by next to nothing."""
    n = float(draw.randint(1, 20))
    return [{"wait_s": n, "deadline_s": n}, {"wait_s": n + 2**-20, "deadline_s": n}, {"wait_s": n, "deadline_s": 0.0}]


def load_cases(draw: random.Random) -> list[dict]:
    """Any queue before any engine."""
    cases = []
    for _ in range(12):
        places = draw.randint(1, 8)
        running = [[draw.randint(1, 90), draw.randint(1, 20)] for _ in range(draw.randint(0, places))]
        queue = [[draw.randint(1, 60), draw.choice((1, 2, 5, 20))] for _ in range(draw.randint(1, 9))]
        cost = {"row": 1 / 32, "text": 1 / 16, "context": 1 / 1024}
        cases.append(wait_case(queue, running, places, draw.randint(places, 40), **cost))
    return cases


# --- Judging ---


def exact_steps(case: dict) -> list[tuple[int, int, int]]:
    """(rows, texts, contexts) of every step until the last of the queue has its first token."""
    texts = [{"prompt": 0, "cached": context, "to_come": left, "at": -1} for context, left in case["running"]]
    texts += [{"prompt": p, "cached": 0, "to_come": left, "at": n} for n, (p, left) in enumerate(case["queue"])]
    inside = [text for text in texts if text["at"] < 0]
    last, steps = len(case["queue"]) - 1, []
    while any(text["at"] == last >= 0 and text["cached"] < text["prompt"] for text in texts):
        while len(inside) < case["max_running"] and (out := [t for t in texts if t["to_come"] and t not in inside]):
            inside.append(out[0])
        given = [0] * len(inside)
        for _ in range(case["token_budget"]):  # a row at a time, to the first that can use one
            wants = [n for n, t in enumerate(inside) if t["cached"] >= t["prompt"] and given[n] == 0]
            wants += [n for n, t in enumerate(inside) if t["cached"] + given[n] < t["prompt"]]
            if wants:
                given[wants[0]] += 1
        contexts = sum(text["cached"] for text, rows in zip(inside, given) if rows)
        written = 0
        for text, rows in zip(inside, given):
            text["cached"] += rows
            if rows and text["cached"] >= text["prompt"]:
                text["to_come"] -= 1
                written += 1
        steps.append((sum(given), written, contexts))
        inside = [text for text in inside if text["to_come"]]
    return steps


def seconds(cost: dict, rows: int, texts: int, contexts: int) -> float:
    return cost["fixed"] + rows * cost["row"] + texts * cost["text"] + contexts * cost["context"]


def _where(case: dict) -> str:
    queue = ", ".join(f"({p}, {left})" for p, left in case["queue"])
    running = ", ".join(f"({context}, {left})" for context, left in case["running"])
    limits = f"max_running {case['max_running']}, token_budget {case['token_budget']}"
    return f"queue [{queue}], running [{running}], {limits}: "


def judge_wait(case: dict, seen: dict) -> str | None:
    if lacking := lacks(seen):
        return lacking
    where, right = _where(case), exact_steps(case)
    if seen["changed"]:
        return f"{where}a list that was given was changed"
    expected = sum(seconds(case["cost"], *step) for step in right)
    came = seen["seconds"]
    if isinstance(came, int | float) and abs(came - expected) <= 1e-9 * max(1.0, expected):
        return None
    message = f"{where}{came!r} s, expected {expected:.6g} s, {len(right)} steps"
    for number, (a, b) in enumerate(zip(seen["steps"], right), 1):
        if tuple(a) != b:
            return f"{message}: in step {number} rows, texts, contexts are {tuple(a)}, expected {b}"
    if len(seen["steps"]) != len(right):
        return f"{message}: step_s was called for {len(seen['steps'])}; the last of the queue has its first token then"
    return f"{message}: the sum of what step_s gives for each"


def judge_retry(case: dict, seen: dict) -> str | None:
    if lacking := lacks(seen):
        return lacking
    late = case["wait_s"] - case["deadline_s"]
    right = None if late <= 0 else int(late) + (late > int(late))
    came = seen["retry_after"]
    if came == right and not isinstance(came, bool):
        return None
    message = f"expected in {case['wait_s']:.8g} s, due in {case['deadline_s']:g} s: Retry-After is {came!r}, expected"
    return f"{message} {right!r}: " + (
        "it comes in time" if right is None else "the seconds that are missing, rounded up to whole ones"
    )
