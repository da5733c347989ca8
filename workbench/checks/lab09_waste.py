"""Lab 09, what is wasted: cases and judges of paged-waste. Slot by slot: what each slot of the pool is, then counted.

The three kinds of waste are those of Kwon et al., arXiv 2309.06180 §3.1 and Fig. 3, whose two requests are the first cases.
"""

from __future__ import annotations

import math
import random

from workbench.checks.lab05_tensors import told_missing
from workbench.checks.lab09_parts import Request
from workbench.grading.check import not_refused

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
        ([3, 2, 4, 16], "contiguous", 4), ([3, 2, 4, 16], "buddy", 4), ([3, 2, 4, 16], "paged", 4),
        ([20, 5, 30, 100], "buddy", 16), ([20, 12, 30, 100], "buddy", 16), ([20, 13, 30, 100], "buddy", 16),
        (some, "buddy", 16), (some, "contiguous", size), (some, "paged", size), (some, "paged", 1),
        ([size, size, 3 * size, 100], "paged", size), ([size, 1, 9, 100], "paged", size),
    ]  # fmt: skip
    return [{"request": row, "kind": kind, "block_size": block_size} for row, kind, block_size in rows]


def account_case(requests: list, gaps: list, waiting: list | None, kind: str, block_size: int = 16) -> dict:
    return {"requests": requests, "gaps": gaps, "waiting": waiting, "kind": kind, "block_size": block_size}


def published_cases(draw: random.Random) -> list[dict]:
    """Figure 3's two requests in each kind, alone and with one that waits; then others."""
    cases = [account_case(FIGURE_3, [2048, 2048], WAITING, kind) for kind in KINDS]
    cases += [
        account_case(FIGURE_3, [], None, "contiguous"),
        account_case([[3, 2, 4, 16]], [8], None, "buddy", 4),
    ]
    for kind in KINDS:
        requests = [request(draw) for _ in range(draw.randint(3, 5))]
        cases.append(account_case(requests, [16 * draw.randint(1, 9)], None, kind, draw.choice([4, 8, 16])))
    return cases


def gap_cases(draw: random.Random) -> list[dict]:
    """Gaps that are enough together and not alone, one that is just enough, too few altogether, and nobody who waits."""
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
        {"part": "slots_held", "request": some[0], "kind": kind, "block_size": 16}
        for kind in ("orca", "", "Paged")
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
    if lacking := told_missing(seen):
        return lacking
    r, kind, size = Request(*case["request"]), case["kind"], case["block_size"]
    where = f"slots_held of {told_request(r)}, kind {kind!r}" + (
        f", block_size {size}: " if kind == "paged" else ": "
    )
    came, right, there = seen["value"], exact_slots(r, kind, size), r.prompt + r.written
    if isinstance(came, bool) or not isinstance(came, int):
        return f"{where}a {seen['returned']} came back, where a whole number was expected"
    if came == right:
        return None
    ways = {
        "buddy": [
            ("that is the power of two above; what is one already stays", 2 * right),
            ("that is smaller than what is there", right // 2),
            ("prompt and answer lie in one range, and it is rounded up whole", r.prompt + (1 << max(r.written - 1, 0).bit_length())),
            ("a range is for what is there; nobody knows the output", 1 << (r.prompt + r.output - 1).bit_length()),
        ],
        "paged": [
            ("that is in blocks; slots are asked", right // size),
            ("the last block is held whole, too", there // size * size),
            ("one block more than is needed where the last one is just full", (there // size + 1) * size),
            ("blocks are taken for what is there, not for what may come", math.ceil((r.prompt + r.output) / size) * size),
        ],
        "contiguous": [
            ("`maximum` is of prompt and answer together", r.prompt + r.maximum),
            ("the maximum is taken, whatever is there", r.prompt + r.output),
        ],
    }  # fmt: skip
    hint = next((f": {told}" for told, way in ways[kind] if came == way), "")
    return f"{where}{came:,} came back, expected {right:,}{hint}"


def judge_account(case: dict, seen: dict) -> str | None:
    """All five numbers, and the useful share."""
    if lacking := told_missing(seen):
        return lacking
    waiting = case["waiting"]
    rows = [Request(*row) for row in case["requests"]]
    where = f"{case['kind']!r}, {len(rows)} request{'s' * (len(rows) != 1)}, gaps {case['gaps']}, "
    where += f"waiting: {told_request(Request(*waiting)) if waiting else 'nobody'}: "
    if "returned" in seen:
        return f"{where}a {seen['returned']} came back, where a dict was expected"
    if seen["changed"]:
        return f"{where}the list of gaps was changed; it belongs to the caller"
    came, right = seen["found"], exact_account(case)
    for part in right:
        if part not in came:
            return f"{where}the dict has no {part!r}; it has {sorted(came)}"
        if isinstance(came[part], bool) or not isinstance(came[part], int | float):
            return f"{where}{part} is a {type(came[part]).__name__}, where a number was expected"
    for part in PARTS:
        if came[part] != right[part]:
            return f"{where}{part} is {came[part]:,}, expected {right[part]:,}" + _part_hint(
                case, rows, part, came, right
            )
    if abs(came["useful"] - right["useful"]) > 1e-9:
        return f"{where}useful is {came['useful']:.6g}, expected {right['useful']:.6g}" + _useful_hint(
            came, right
        )
    return None


def _part_hint(case: dict, rows: list[Request], part: str, came: dict, right: dict) -> str:
    """What a wrong number counts, where that can be told."""
    gaps = sum(case["gaps"])
    ways = {
        "used": [
            ("the prompts are there, too", sum(r.written for r in rows)),
            ("what is there so far, not what there will be", sum(r.prompt + r.output for r in rows)),
        ],
        "reserved": [
            ("what is held and will be written later is reserved", 0),
            ("what will never be written is internal", right["reserved"] + right["internal"]),
            ("of what is held; a block that is not taken yet is no waste", sum(r.output - r.written for r in rows)),
        ],
        "internal": [
            ("what will be written later is reserved", right["reserved"] + right["internal"]),
        ],
        "external": _external_ways(case, right, gaps),
        "free": [
            ("what is external is not free", gaps),
            ("all that is not external", 0),
        ],
    }  # fmt: skip
    return next((f": {told}" for told, way in ways[part] if way == came[part] != right[part]), "")


def _external_ways(case: dict, right: dict, gaps: int) -> list[tuple[str, int]]:
    if right["external"]:
        why = "together they are as much as it asks for, and none has room for it: all of them are external"
        return [(why, 0), *((why, gaps - gap) for gap in case["gaps"])]
    if case["waiting"] is None:
        return [("nobody waits, so nothing is missing", gaps)]
    r = Request(*case["waiting"])
    if gaps < r.prompt + r.written:
        why = (
            "the gaps together are fewer slots than it has tokens: that is a full memory, not a scattered one"
        )
    elif case["kind"] == "paged":
        why = "any block will do, so nothing is external"
    else:
        why = "a gap has room for it, so nothing is external"
    return [(why, gaps), *((why, gaps - gap) for gap in case["gaps"])]


def _useful_hint(came: dict, right: dict) -> str:
    taken = sum(right[part] for part in PARTS[:4])
    if not taken:
        return ": nothing is taken"
    held = taken - right["external"]
    ways = [
        ("of what is taken; what is free is no waste", right["used"] / (taken + right["free"])),
        ("external waste counts, too", right["used"] / held if held else None),
        ("reserved slots are not useful yet", (right["used"] + right["reserved"]) / taken),
        ("that is the wasted share", 1 - right["useful"]),
        ("a share, not a percentage", 100 * right["useful"]),
    ]
    return next(
        (f": {told}" for told, way in ways if way is not None and math.isclose(way, came["useful"])), ""
    )


def judge_refused(case: dict, seen: dict) -> str | None:
    if lacking := told_missing(seen):
        return lacking
    if "refused" in seen:
        return None
    return f"{case['part']} with the kind {case['kind']!r}: {not_refused(seen)}, where a WorkbenchError was expected"
