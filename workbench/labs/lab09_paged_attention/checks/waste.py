"""Lab 09, what is wasted: cases and judges of paged-waste. Slot by slot: what each slot of the pool is, then counted.

The three kinds of waste are those of Kwon et al., arXiv 2309.06180 §3.1 and Fig. 3, whose two requests are the first
cases.
"""

from __future__ import annotations

import math
import random

from workbench.checks.tensors import missing_message
from workbench.grading.check import not_refused
from workbench.labs.lab09_paged_attention.checks.parts import Request

KINDS = ("contiguous", "buddy", "paged")
PARTS = ("used", "reserved", "internal", "external", "free")
FIGURE_3 = [[7, 1, 3, 2048], [3, 1, 2, 512]]  # "Four score and seven …", "You only live …"
WAITING = [20, 0, 100, 4096]


def request(draw: random.Random, most: int = 60, maximum: int = 128) -> list:
    output = draw.randint(3, most // 2)
    return [draw.randint(3, most // 2), draw.randint(0, output - 1), output, maximum]


def held_cases(draw: random.Random) -> list[dict]:
    """A power of two, one more, one fewer; whole blocks, half-full ones, and blocks of one token."""
    size = draw.choice([4, 8, 16])
    some = request(draw)
    rows = [
        ([3, 2, 4, 16], "contiguous", 4),
        ([3, 2, 4, 16], "buddy", 4),
        ([3, 2, 4, 16], "paged", 4),
        ([20, 5, 30, 100], "buddy", 16),
        ([20, 12, 30, 100], "buddy", 16),
        ([20, 13, 30, 100], "buddy", 16),
        (some, "buddy", 16),
        (some, "contiguous", size),
        (some, "paged", size),
        (some, "paged", 1),
        ([size, size, 3 * size, 100], "paged", size),
        ([size, 1, 9, 100], "paged", size),
    ]
    return [{"request": row, "kind": kind, "block_size": block_size} for row, kind, block_size in rows]


def account_case(requests: list, gaps: list, waiting: list | None, kind: str, block_size: int = 16) -> dict:
    return {"requests": requests, "gaps": gaps, "waiting": waiting, "kind": kind, "block_size": block_size}


def published_cases(draw: random.Random) -> list[dict]:
    """Figure 3's two requests in each kind, alone and with one that waits; then others."""
    cases = [account_case(FIGURE_3, [2048, 2048], WAITING, kind) for kind in KINDS]
    cases += [account_case(FIGURE_3, [], None, "contiguous"), account_case([[3, 2, 4, 16]], [8], None, "buddy", 4)]
    for kind in KINDS:
        requests = [request(draw) for _ in range(draw.randint(3, 5))]
        cases.append(account_case(requests, [16 * draw.randint(1, 9)], None, kind, draw.choice([4, 8, 16])))
    return cases


def gap_cases(draw: random.Random) -> list[dict]:
    """Gaps that are enough together and not alone, one that is just enough, too few altogether, and nobody who
    waits."""
    some = [request(draw, maximum=64) for _ in range(draw.randint(1, 3))]
    n = draw.randint(17, 31)
    waits = [n, 0, 9, 64]  # n tokens: 64 slots, or 32
    return [
        account_case(some, [48, 40, 60], waits, "contiguous"),  # enough, and in no piece
        account_case(some, [16, 64, 8], waits, "contiguous"),  # the second is just large enough
        account_case(some, [16, 8, 4], waits, "buddy"),  # as above, and rounded up
        account_case(some, [16, 4, 32], waits, "buddy"),
        # one slot too few altogether: free, if of no use to him
        account_case(some, [n - 9, 8], waits, "contiguous"),
        account_case(some, [8, 4], waits, "buddy"),
        account_case(some, [48, 40], None, "contiguous"),  # nobody waits
        account_case(some, [16, 16, 16, 16], waits, "paged", 16),  # any block will do
        account_case(some, [n, 4, 4], [n, 3, 9, 64], "contiguous"),  # it comes back with what it had written
    ]


def edge_cases(draw: random.Random) -> list[dict]:
    """Nothing there; no gaps; the last token written; a last block that the text will never fill."""
    whole = [draw.randint(3, 30), 8, 8, 64]
    size = draw.choice([8, 16])
    return [
        account_case([], [64], None, "contiguous"),
        account_case([], [], whole, "paged"),
        account_case([], [32, 32], whole, "contiguous"),
        account_case([whole, whole], [], whole, "contiguous"),
        account_case([whole], [16], None, "buddy"),
        account_case([[size, 1, 3, 64], [1, 1, 1, 64]], [size], whole, "paged", size),
    ]


def refused_cases(draw: random.Random) -> list[dict]:
    """Kinds that are not there."""
    some = [request(draw, maximum=64) for _ in range(3)]
    cases = [
        {"part": "slots_held", "request": some[0], "kind": kind, "block_size": 16} for kind in ("orca", "", "Paged")
    ]
    return [*cases, {"part": "account", **account_case(some, [64], None, "maximum")}]


# --- Judging ---


def exact_slots(r: Request, kind: str, block_size: int) -> int:
    there = r.prompt + r.written
    if kind == "contiguous":
        return r.maximum
    if kind == "buddy":
        return 2 ** math.ceil(math.log2(there))
    return math.ceil(there / block_size) * block_size


def exact_account(case: dict) -> dict:
    """By writing down what each slot is."""
    kind, size, gaps = case["kind"], case["block_size"], case["gaps"]
    slots: list[str] = []
    for r in (Request(*row) for row in case["requests"]):
        held, there, total = exact_slots(r, kind, size), r.prompt + r.written, r.prompt + r.output
        slots += ["used" if i < there else "reserved" if i < total else "internal" for i in range(held)]
    found = {part: slots.count(part) for part in PARTS[:3]}
    stuck = False
    if case["waiting"] is not None:
        r, room = Request(*case["waiting"]), sum(gaps) if kind == "paged" else max(gaps, default=0)
        stuck = room < exact_slots(r, kind, size) and sum(gaps) >= r.prompt + r.written
    found |= {"external": sum(gaps) * stuck, "free": sum(gaps) * (not stuck)}
    taken = len(slots) + found["external"]
    return found | {"useful": found["used"] / taken if taken else 0.0}


def told_request(r: Request) -> str:
    return f"prompt {r.prompt}, written {r.written}, output {r.output}, maximum {r.maximum:,}"


def judge_slots(case: dict, seen: dict) -> str | None:
    """slots_held of one request."""
    if lacking := missing_message(seen):
        return lacking
    r, kind, size = Request(*case["request"]), case["kind"], case["block_size"]
    where = f"slots_held of {told_request(r)}, kind {kind!r}" + (f", block_size {size}: " if kind == "paged" else ": ")
    came, right = seen["value"], exact_slots(r, kind, size)
    if isinstance(came, bool) or not isinstance(came, int):
        return f"{where}a {seen['returned']} came back, where a whole number was expected"
    if came == right:
        return None
    return f"{where}{came:,} came back, expected {right:,}"


def judge_account(case: dict, seen: dict) -> str | None:
    """All five numbers, and the useful share."""
    if lacking := missing_message(seen):
        return lacking
    waiting = case["waiting"]
    rows = [Request(*row) for row in case["requests"]]
    where = f"{case['kind']!r}, {len(rows)} request{'s' * (len(rows) != 1)}, gaps {case['gaps']}, "
    where += f"waiting: {told_request(Request(*waiting)) if waiting else 'nobody'}: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a dict was expected"
    if seen["changed"]:
        return f"{where}the list of gaps was changed; it belongs to the caller"
    came = {name.removeprefix("found "): value for name, value in seen.items() if name.startswith("found ")}
    right = exact_account(case)
    for part in right:
        if part not in came:
            return f"{where}the dict has no {part!r}; it has {sorted(came)}"
        if isinstance(came[part], bool) or not isinstance(came[part], int | float):
            return f"{where}{part} is a {type(came[part]).__name__}, where a number was expected"
    for part in PARTS:
        if came[part] != right[part]:
            return f"{where}{part} is {came[part]:,}, expected {right[part]:,}"
    if abs(came["useful"] - right["useful"]) > 1e-9:
        return f"{where}useful is {came['useful']:.6g}, expected {right['useful']:.6g}"
    return None


def judge_refused(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    if "refused" in seen:
        return None
    return f"{case['part']} with the kind {case['kind']!r}: {not_refused(seen)}, where a WorkbenchError was expected"
