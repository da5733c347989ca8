"""Lab 02, one graph: cases and judges of one-graph."""

from __future__ import annotations

import math
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
        told = f"row {number} of {len(came)}, {shown(row)} with limit {limit:g}, became {shown(got)}, expected {shown(want)}"
        return f"{told}: {_mistake(call['logits'], row, got, limit)}"
    return None


def _mistake(rows: list, row: list[float], got: list[float], limit: float) -> str:
    top, highest = max(row), max(max(r) for r in rows)

    def is_row(wanted: list[float]) -> bool:
        return all(close(a, b, 1e-5) for a, b in zip(got, wanted))

    if any(math.isnan(x) for x in got):
        return (
            "nan comes of 0/0, 0·inf or inf - inf; multiplying it by 0 does not remove it, torch.where does"
        )
    if is_row([min(x, limit) for x in row]):
        return "each logit was clipped by itself; scale the whole row, so that the order of its tokens stays"
    if top < 0 and is_row([x * (limit / top) for x in row]):
        return "limit / largest is negative where all logits are, and turns their order around"
    if is_row([x * (limit / highest) for x in row]):
        return "the largest logit is that of each row, not of all rows together (dim=-1)"
    if is_row([x * (limit / top) for x in row]):
        return "this row does not exceed the limit, and stays as it is"
    if is_row(row):
        return "this row exceeds the limit"
    size = max(abs(x) for x in row if math.isfinite(x))
    if is_row([x * min(1.0, limit / size) for x in row]):
        return "the largest logit counts, not the largest size: a very negative one exceeds nothing"
    return "rows whose largest logit exceeds the limit are multiplied by limit / largest"


def judge_eager(case: dict, seen: dict) -> str | None:
    """The rows, capped, as a new tensor of the same shape and dtype."""
    if "returned" in seen:
        return f"cap_logits gave back {seen['returned']}, where a tensor was expected"
    shape = [len(case["logits"]), len(case["logits"][0])]
    if seen["shape"] != shape:
        return f"logits of shape {seen['shape']} came back, expected {shape}"
    if message := compared(case, seen["logits"]):
        return message
    if seen["dtype"] != f"torch.{case.get('dtype', 'float32')}":
        return f"{case['dtype']} logits went in, {seen['dtype']} came back; the dtype stays"
    if not all(close(a, b, 1e-6) for old, new in zip(case["logits"], seen["input_after"]) for a, b in zip(old, new)):  # fmt: skip
        return "the input was changed: give back a new tensor (no `logits[…] = …`, no `mul_`)"
    return None


def judge_compiled(case: dict, seen: dict) -> str | None:
    """Captured whole, right each time, and in one graph for all calls."""
    if "returned" in seen:
        return f"cap_logits gave back {seen['returned']}, where a tensor was expected"
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
