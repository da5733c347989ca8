"""Lab 11, goodput: cases and judges of server-goodput. Times are multiples of 1/64 s, so that limits are met
exactly."""

from __future__ import annotations

import random

from workbench.checks.tensors import missing_message as lacks

OBJECTIVES = {"ttft_s": 0.5, "tpot_s": 0.125}
GRID = 64


def row(due: float, sent: float, first: float | None, last: float | None, tokens: int, outcome: str = "ok") -> dict:
    return {"due_s": due, "send_s": sent, "first_s": first, "last_s": last, "tokens": tokens, "outcome": outcome}


def answered(due: float, ttft: float, tpot: float, tokens: int, outcome: str = "ok", late: float = 0.0) -> dict:
    """late: how much later than due it was sent."""
    first = due + ttft
    return row(due, due + late, first, first + tpot * (tokens - 1), tokens, outcome)


def refused(due: float, outcome: str = "refused", late: float = 0.0) -> dict:
    return row(due, due + late, None, None, 0, outcome)


EXAMPLE = [  # the exercise's own
    row(1.0, 1.0, 1.25, 2.25, 9),
    row(2.0, 2.5, 3.0, 3.5, 5),
    row(3.0, 3.0, 3.25, 3.25, 1),
    refused(4.0),
    row(5.0, 5.0, 5.25, 5.5, 3, "error_event"),
    row(10.0, 10.0, 10.25, 10.5, 3),
]


def trace_case(rows: list, objectives: dict | None = None, start_s: float = 0.0, end_s: float = 10.0) -> dict:
    return {
        "rows": rows,
        "objectives": OBJECTIVES if objectives is None else objectives,
        "start_s": start_s,
        "end_s": end_s,
        "duration_s": end_s + 2,
    }


def any_row(draw: random.Random, outcomes: tuple = ("ok", "ok", "ok", "error_event", "refused", "timeout")) -> dict:
    due, late = draw.randint(0, 12 * GRID) / GRID, draw.choice((0.0, 0.0, 0.25))
    outcome = draw.choice(outcomes)
    if outcome == "refused" or (outcome == "timeout" and draw.random() < 0.5):
        return refused(due, outcome, late)
    ttft, tpot = draw.choice((0.25, 0.375, 0.5, 0.625, 2.0)), draw.choice((4, 8, 9, 16)) / GRID
    return answered(due, ttft + late, tpot, draw.choice((1, 2, 3, 9, 40)), outcome, late)


def rate_cases(draw: random.Random) -> list[dict]:
    """(last − first) / (n − 1), and where there is none."""
    n = draw.randint(3, 30)
    return [
        trace_case(EXAMPLE),
        trace_case([answered(1.0, 0.25, 0.125, n), answered(2.0, 0.25, 0.5, 2), answered(3.0, 0.5, 0.0, 1)]),
        trace_case([refused(1.0), refused(2.0, "timeout"), answered(4.0, 8.0, 0.25, n, "timeout")]),
    ]


def limit_cases(draw: random.Random) -> list[dict]:
    """Both limits, each alone, met exactly; and from when TTFT counts."""
    over, under = draw.choice((1, 2, 8)) / GRID, draw.choice((1, 2, 8)) / GRID
    rows = [
        answered(1.0, 0.5 + over, 0.0625, 5),
        answered(1.0, 0.25, 0.125 + over, 5),
        answered(1.0, 0.5, 0.125, 9),
        answered(1.0, 0.5 - under, 0.125, 2),
        answered(1.0, 0.5 + over, 0.25, 2),
        answered(1.0, 0.625, 0.0625, 5, late=0.25),
        answered(1.0, 0.25, 0.0, 1),
        answered(1.0, 0.75, 0.0, 1),
        answered(1.0, 0.25, 0.0625, 4, "error_event"),
        answered(1.0, 0.25, 0.0625, 4, "timeout"),
    ]
    one = draw.choice(list(OBJECTIVES))
    return [trace_case(rows), trace_case(rows, {one: OBJECTIVES[one]}), trace_case(rows, {"ttft_s": 0.25})]


def window_cases(draw: random.Random) -> list[dict]:
    """What is due in the window counts, whenever it ended; what failed counts as well."""
    fast = [answered(at, 0.25, 0.0625, 5) for at in (0.0, 1.0, 4.0, 7.0, 8.0, 11.0)]
    slow = [answered(at, 3.0, 0.5, 9) for at in (2.0, 7.5)]
    lost = [refused(at, draw.choice(("refused", "timeout"))) for at in (3.0, 5.0)]
    late = [answered(3.5, 0.5, 0.0625, 3, late=0.25), row(3.75, 4.25, 4.25, 30.0, 400)]
    return [
        trace_case([*fast, *slow], start_s=1.0, end_s=8.0),
        trace_case([*fast, *lost, *slow], start_s=1.0, end_s=8.0),
        trace_case([*lost, *late, *fast], start_s=4.0, end_s=8.0),
        trace_case(EXAMPLE),
    ]


def vllm_cases(draw: random.Random) -> list[dict]:
    """The same rows by another definition: what failed is left out, a stream with an error event is not."""
    return [
        trace_case(EXAMPLE),
        trace_case([*(answered(at, 0.25, 0.0625, 5) for at in (1.0, 2.0, 30.0)), *(refused(at) for at in (3.0, 4.0))]),
        trace_case([answered(1.0, 0.75, 0.0625, 5, late=0.25), answered(2.0, 0.25, 0.0625, 9, "error_event")]),
        trace_case(
            [refused(1.0, "error_event"), answered(1.0, 0.25, 0.0625, 3, "timeout"), answered(2.0, 0.5, 0.25, 9)]
        ),
        trace_case([any_row(draw) for _ in range(30)]),
    ]


def edge_cases(draw: random.Random) -> list[dict]:
    """Nothing in the window, nothing at all, nothing but failures; a text of one token; a due time at either end."""
    at = float(draw.randint(2, 5))
    return [
        trace_case([], start_s=at, end_s=at + 4),
        trace_case([answered(at + 9, 0.25, 0.0625, 3)], start_s=at, end_s=at + 4),
        trace_case([refused(at + n / 8) for n in range(5)], start_s=at, end_s=at + 4),
        trace_case([answered(at, 0.25, 0.0, 1), answered(at + 4, 0.25, 0.0, 1)], start_s=at, end_s=at + 4),
    ]


def trace_cases(draw: random.Random) -> list[dict]:
    """Any rows, any limits."""
    cases = []
    for objectives in (OBJECTIVES, {"ttft_s": 0.375}, {"tpot_s": 0.125}, {"ttft_s": 1.0, "tpot_s": 0.25}):
        start = float(draw.randint(0, 4))
        cases.append(trace_case([any_row(draw) for _ in range(40)], objectives, start, start + draw.randint(4, 8)))
    return cases


# --- Judging ---


def exact_tpot(row: dict) -> float | None:
    return None if row["tokens"] < 2 else (row["last_s"] - row["first_s"]) / (row["tokens"] - 1)


def kept(row: dict, objectives: dict, start_s: float) -> bool:
    values = {"ttft_s": row["first_s"] - start_s, "tpot_s": exact_tpot(row)}
    return all(values[name] is None or values[name] <= limit for name, limit in objectives.items())


def exact(case: dict) -> dict:
    rows, objectives = case["rows"], case["objectives"]
    good = [r["outcome"] == "ok" and kept(r, objectives, r["due_s"]) for r in rows]
    due = [g for g, r in zip(good, rows) if case["start_s"] <= r["due_s"] < case["end_s"]]
    seen = [r for r in rows if r["outcome"] in ("ok", "error_event") and r["first_s"] is not None]
    theirs = [kept(r, objectives, r["send_s"]) for r in seen]
    length = case["end_s"] - case["start_s"]
    return {
        "tpot_s": [exact_tpot(r) for r in rows],
        "is_good": good,
        "goodput": [sum(due) / length, sum(due) / len(due) if due else 0.0],
        "vllm_goodput": [sum(theirs) / case["duration_s"], sum(theirs) / len(theirs) if theirs else 0.0],
        "counted": len(due),
        "theirs": len(theirs),
    }


def _shown(row: dict) -> str:
    if row["first_s"] is None:
        return f"due {row['due_s']:g}, {row['outcome']}, no token"
    sent = "" if row["send_s"] == row["due_s"] else f", sent {row['send_s']:g}"
    times = f"first {row['first_s']:g}, last {row['last_s']:g}, {row['tokens']} tokens"
    return f"due {row['due_s']:g}{sent}, {times}, {row['outcome']}"


def _limits(objectives: dict) -> str:
    return ", ".join(f"{name.removesuffix('_s').upper()} {limit:g} s" for name, limit in objectives.items())


def _close(a: object, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return isinstance(a, int | float) and abs(a - b) <= 1e-9


def judge_rates(case: dict, seen: dict) -> str | None:
    """TPOT of each row."""
    if lacking := lacks(seen):
        return lacking
    for row, came, right in zip(case["rows"], seen["tpot_s"], exact(case)["tpot_s"]):
        if not _close(came, right):
            why = "fewer than 2 tokens have no time between them" if right is None else "the first token ends TTFT"
            return f"{_shown(row)}: TPOT is {came!r}, expected {right!r}: {why}; (last − first) / (n − 1)"
    return None


def judge_good(case: dict, seen: dict) -> str | None:
    """Which rows are good."""
    if lacking := lacks(seen):
        return lacking
    for row, came, right in zip(case["rows"], seen["is_good"], exact(case)["is_good"]):
        if came is not right:
            message = f"{_shown(row)}; limits {_limits(case['objectives'])}: good is {came!r}, expected {right}: "
            return message + "complete, TTFT from when it was due, and each limit there is, met also exactly"
    return None


def _judge_pair(case: dict, seen: dict, name: str, of: int, over: float, why: str) -> str | None:
    if lacking := lacks(seen):
        return lacking
    came, right = seen[name], exact(case)[name]
    where = f"{len(case['rows'])} requests, window {case['start_s']:g} … {case['end_s']:g} s, {name}: "
    if not isinstance(came, list) or len(came) != 2:
        return f"{where}{came!r} came, where (a second, share) was expected"
    for what, a, b in zip(("good requests a second are", "their share is"), came, right):
        if not _close(a, b):
            return (
                f"{where}{what} {a!r}, expected {b:.6g}: {round(right[1] * of)} good, {of} counted, {over:g} s; {why}"
            )
    return None


def judge_goodput(case: dict, seen: dict) -> str | None:
    over = case["end_s"] - case["start_s"]
    why = "all that were due in the window count, whatever became of them"
    return _judge_pair(case, seen, "goodput", exact(case)["counted"], over, why)


def judge_vllm(case: dict, seen: dict) -> str | None:
    why = "all rows with status 200 and tokens, TTFT from the send"
    return _judge_pair(case, seen, "vllm_goodput", exact(case)["theirs"], case["duration_s"], why)


def judge_all(case: dict, seen: dict) -> str | None:
    return judge_rates(case, seen) or judge_good(case, seen) or judge_goodput(case, seen) or judge_vllm(case, seen)
