"""Lab 02, one graph: cases and judges of one-graph."""

from __future__ import annotations

import random

from workbench.checks.arithmetic import close, shown


def capped(row: list[float], limit: float) -> list[float]:
    """Scaled so that its largest logit is `limit`, if that is exceeded."""
    top = max(row)
    return [x * (limit / top) for x in row] if top > limit else list(row)


def rows_case(draw: random.Random, rows: int, vocabulary: int, limit: float) -> dict:
    """Rows of which every other one, the first among them, exceeds the limit."""
    logits = []
    for number in range(rows):
        top = limit * (draw.uniform(1.5, 4.0) if number % 2 == 0 else draw.uniform(0.3, 0.9))
        row = [round(draw.uniform(-5.0, 0.9 * top), 3) for _ in range(vocabulary)]
        row[draw.randrange(vocabulary)] = round(top, 3)
        logits.append(row)
    return {"logits": logits, "limit": limit}


def compared(call: dict, came: list) -> str | None:
    """A message where the rows that came are not the capped ones."""
    limit = call["limit"]
    if [len(row) for row in came] != [len(row) for row in call["logits"]]:
        return f"{len(came)} rows came for {len(call['logits'])} that were given"
    for number, (row, got) in enumerate(zip(call["logits"], came)):
        want = capped(row, limit)
        if all(close(a, b, 1e-5) for a, b in zip(got, want)):
            continue
        return (
            f"row {number} of {len(came)}, {shown(row)} with limit {limit:g}, became {shown(got)}, expected"
            f" {shown(want)}: a row whose largest logit exceeds the limit is multiplied by limit / largest"
        )
    return None


def judge_eager(case: dict, seen: dict) -> str | None:
    """The rows, capped, as a new tensor of the same shape and dtype."""
    if "returned" in seen:
        return f"cap_logits returned {seen['returned']}, where a tensor was expected"
    shape = [len(case["logits"]), len(case["logits"][0])]
    if seen["shape"] != shape:
        return f"logits of shape {seen['shape']} came back, expected {shape}"
    if message := compared(case, seen["logits"]):
        return message
    if seen["dtype"] != f"torch.{case.get('dtype', 'float32')}":
        return f"{case['dtype']} logits went in, {seen['dtype']} came back; the dtype stays"
    if not all(close(a, b, 1e-6) for old, new in zip(case["logits"], seen["input_after"]) for a, b in zip(old, new)):
        return "the input was changed: return a new tensor (no `logits[…] = …`, no `mul_`)"
    return None


def judge_compiled(case: dict, seen: dict) -> str | None:
    """Captured whole, right each time, and in one graph for all calls."""
    if "returned" in seen:
        return f"cap_logits returned {seen['returned']}, where a tensor was expected"
    if "broke" in seen:
        reason = " ".join(seen["broke"].split())
        return (
            f"torch.compile(fullgraph=True) could not capture call {seen['call']} in one graph: {reason} "
            "(a Python `if`, `bool`, `.item()` or `.tolist()` on a tensor needs its value; torch.where does not)"
        )
    calls = case["calls"]
    for number, (call, came) in enumerate(zip(calls, seen["outputs"]), 1):
        if message := compared(call, came):
            return f"compiled, call {number}: {message}"
    if sum(seen["graphs_a_call"]) == 1:
        return None
    if not sum(seen["graphs_a_call"]):
        return "no graph was captured: the compiler was kept out of the function"
    shapes = [[len(call["logits"]), len(call["logits"][0])] for call in calls]
    again = next(i for i, made in enumerate(seen["graphs_a_call"]) if made and i)
    what = f"{sum(seen['graphs_a_call'])} graphs were made for {len(calls)} calls, expected 1: it was compiled again"
    if shapes[again] not in shapes[:again]:
        return (
            f"{what} for shape {shapes[again]} after {shapes[again - 1]}: something depends on the number of rows or "
            "of tokens (a Python loop over rows, an `if` on a length, a number taken from the shape)"
        )
    return (
        f"{what} for limit {calls[again]['limit']:g} after {calls[again - 1]['limit']:g}: something in Python depends "
        "on the limit's value"
    )


def eager_cases(draw: random.Random) -> list[dict]:
    return [
        {"logits": [[2.0, 8.0, -4.0], [1.0, 3.0, 0.0]], "limit": 4.0},
        rows_case(draw, 5, 6, 2.5) | {"dtype": "float64"},
    ]


def one_call_cases(draw: random.Random) -> list[dict]:
    return [{"calls": [rows_case(draw, 3, 7, 4.0)]}]


def length_cases(draw: random.Random) -> list[dict]:
    """Other numbers of rows and of tokens; 1 is left out, which the compiler always treats apart."""
    return [{"calls": [rows_case(draw, n, v, 4.0) for n, v in ((3, 7), (5, 7), (8, 11), (2, 4), (6, 5))]}]
