"""Lab 08, chunked prefill: cases and judges of batching-chunks."""

from __future__ import annotations

import random

from workbench.checks.lab05_tensors import told_missing
from workbench.checks.probes_lab08 import token_after


def text(name: str, prompt: int, written: int, computed: int, max_new: int = 9) -> dict:
    """prompt, written: numbers of tokens, which are made up."""
    return {
        "id": name,
        "prompt": [10 + at for at in range(prompt)],
        "written": [30 + at for at in range(written)],
        "computed": computed,
        "max_new_tokens": max_new,
    }


def writing(name: str, prompt: int, written: int) -> dict:
    """A decode: all but its last token is in the cache."""
    return text(name, prompt, written, prompt + written - 1)


def plan_case(tracks: list, budget: int, chunk: int | None = None) -> dict:
    return {"tracks": tracks, "budget": budget, "chunk": chunk}


def decode_cases(draw: random.Random) -> list[dict]:
    """Decodes alone; one behind a long prompt; and the exercise's own."""
    n = draw.randint(2, 6)
    return [
        plan_case([writing("a", n, 2), writing("b", 3, 1), writing("c", 9, 4)], 16),
        plan_case([text("p", 40, 0, 0), writing("a", n, 2), writing("b", 5, 1)], 12),
        plan_case([writing("A", 4, 3), text("C", 12, 0, 5), writing("B", 6, 1), text("D", 9, 0, 0)], 10),
        plan_case([text("p", 30, 0, 8), writing("a", 7, n), text("q", 20, 0, 0)], 1),
    ]


def chunk_cases(draw: random.Random) -> list[dict]:
    """A prompt in one piece, the middle of one, its end with the next one behind it, a limit on each chunk, and a text that
    was preempted: its prompt and what it has written are to be computed again."""
    done = draw.randint(3, 9)
    return [
        plan_case([text("p", 11, 0, 0)], 64),
        plan_case([text("p", 50, 0, done)], 16),
        plan_case([text("p", 20, 0, 20 - done), text("q", 30, 0, 0), text("r", 5, 0, 0)], 24),
        plan_case([writing("a", 5, 1), text("p", 40, 0, done), text("q", 30, 0, 0)], 32, chunk=8),
        plan_case([text("p", 14, 6, 0), writing("a", 3, 2)], 64),
        plan_case([text("p", 14, 6, 15), text("q", 8, 0, 0)], 9),
    ]


def tight_cases(draw: random.Random) -> list[dict]:
    """A budget below the number of decodes, just as large, and one more; and a prompt of which one token is missing."""
    n = draw.randint(4, 6)
    decodes = [writing(f"a{at}", draw.randint(1, 9), draw.randint(1, 4)) for at in range(n)]
    prompt = text("p", 9, 0, 2)
    return [
        plan_case([prompt, *decodes], n - 2),
        plan_case([prompt, *decodes], n),
        plan_case([prompt, *decodes], n + 1),
        plan_case([text("p", 30, 0, 0), text("q", 9, 0, 8), writing("a", 3, 3)], 6),
        plan_case([text("p", 30, 0, 0), text("q", 1, 0, 0)], 6, chunk=4),
        plan_case([], 8),
    ]


def settle_case(tracks: list, work: list, salt: int) -> dict:
    return {"tracks": tracks, "work": work, "salt": salt}


def settle_cases(draw: random.Random) -> list[dict]:
    """A decode, the middle of a prompt, its last chunk, a whole prompt, and what was preempted."""
    salt = draw.randrange(10**6)
    return [
        settle_case([writing("a", 4, 2)], [["a", 5, 1]], salt),
        settle_case([text("p", 12, 0, 4), text("q", 12, 0, 4)], [["p", 4, 5], ["q", 4, 8]], salt + 1),
        settle_case([text("p", 7, 0, 0), writing("a", 3, 1)], [["a", 3, 1], ["p", 0, 7]], salt + 2),
        settle_case([text("p", 6, 4, 0), text("q", 6, 4, 7)], [["p", 0, 6], ["q", 7, 3]], salt + 3),
        settle_case([text("p", 6, 0, 2), writing("a", 2, 2)], [["a", 3, 1]], salt + 4),
    ]


def whole_cases(draw: random.Random) -> list[dict]:
    """Texts from their first token to their last: a wide budget, a narrow one, and one that is limited twice."""

    def texts(count: int) -> list[dict]:
        return [
            text(f"r{at}", draw.randint(1, 30), 0, 0, draw.randint(1, 8)) for at in range(count)
        ]  # fmt: skip

    return [
        {"tracks": texts(4), "budget": 16, "chunk": None, "salt": draw.randrange(10**6), "limit": 200},
        {"tracks": texts(6), "budget": 5, "chunk": None, "salt": draw.randrange(10**6), "limit": 300},
        {"tracks": texts(5), "budget": 20, "chunk": 6, "salt": draw.randrange(10**6), "limit": 200},
    ]


# --- Judging ---


def unsent(track: dict) -> int:
    return len(track["prompt"]) + len(track["written"]) - track["computed"]


def exact_plan(
    tracks: list[dict],
    budget: int,
    chunk: int | None,
    *,
    in_order: bool = False,
    one: bool = False,
    decodes: bool = True,
) -> list[list]:
    """in_order: prompts do not wait for the decodes. one: one prompt in a step. decodes False: they come last."""
    first = [t for t in tracks if unsent(t) == 1]
    then = [t for t in tracks if unsent(t) > 1]
    if in_order:
        first, then = tracks, []
    elif not decodes:
        first, then = then, first
    plan, prompts = [], 0
    for track in (*first, *then):
        count = min(unsent(track), budget)
        if unsent(track) > 1:
            count = min(count, chunk or count)
            if one and prompts:
                continue
            prompts += 1
        if count > 0:
            plan.append([track["id"], track["computed"], count])
            budget -= count
    return plan


def _state(track: dict) -> str:
    if unsent(track) == 1 and track["written"]:
        return f"{track['id']} (a decode)"
    total = len(track["prompt"]) + len(track["written"])
    return f"{track['id']} ({track['computed']} of {total} tokens computed)"


def _works(work: list) -> str:
    return ", ".join(f"{name} {start}…{start + count - 1}" for name, start, count in work) or "nothing"


def _plan_fault(tracks: list[dict], budget: int, chunk: int | None, came: list) -> str | None:
    right = exact_plan(tracks, budget, chunk)
    if came == right:
        return None
    by_name = {t["id"]: t for t in tracks}
    told = f"{_works(came)}; expected {_works(right)}: "
    if stray := [name for name, _, _ in came if name not in by_name]:
        return told + f"{stray[0]!r} was not given"
    if len({name for name, _, _ in came}) < len(came):
        return told + "a text stands in it twice; what it brings in a step is one piece"
    rows = sum(count for _, _, count in came)
    waiting = [name for name, _, count in right if count == 1 and name not in [n for n, _, _ in came]]
    if rows > budget:
        return told + f"these are {rows} rows, and the budget is {budget}"
    if any(count < 1 for _, _, count in came):
        return told + "a piece has at least one token; who gets none is left out"
    for name, start, count in came:
        track = by_name[name]
        if start != track["computed"]:
            return told + f"{name} goes on at token {track['computed']}, the first that is not computed"
        if count > unsent(track):
            return told + f"of {name} only {unsent(track)} tokens are not computed"
    decodes = [t["id"] for t in tracks if unsent(t) == 1]
    if waiting and waiting[0] in decodes:
        return told + f"{waiting[0]} has one token to compute, and goes before every prompt"
    if chunk is not None and any(count > chunk for _, _, count in came):
        return told + f"a prompt brings at most chunk = {chunk} tokens in a step"
    if sorted(came) == sorted(right):
        return told + "decodes first, then prompts, each in the order given"
    ways = [
        ("decodes come first, whatever their place", exact_plan(tracks, budget, chunk, in_order=True)),
        ("decodes come first", exact_plan(tracks, budget, chunk, decodes=False)),
        (
            "what one prompt leaves of the budget is the next one's",
            exact_plan(tracks, budget, chunk, one=True),
        ),
        ("`chunk` limits a prompt, not the step", exact_plan(tracks, min(budget, chunk or budget), None)),
    ]
    hint = next((words for words, way in ways if way != right and came == way), None)
    return told + (
        hint or "each decode its token, then each prompt what is left of the budget, up to its end"
    )


def judge_plan(case: dict, seen: dict) -> str | None:
    if lacking := told_missing(seen):
        return lacking
    tracks, budget, chunk = case["tracks"], case["budget"], case["chunk"]
    where = (
        f"{', '.join(map(_state, tracks)) or 'nobody'}; budget {budget}"
        + (f", chunk {chunk}" if chunk else "")
        + ": "
    )
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, where a list of Work(track, start, count) was expected"
    if seen["changed"]:
        return f"{where}a plan changes nothing of the texts; settle does"
    fault = _plan_fault(tracks, budget, chunk, seen["work"])
    return fault and where + fault


def settled(track: dict, piece: list, salt: int) -> dict:
    """The text after a piece of it was computed, and its token, if it has one, was taken."""
    _, start, count = piece
    ids = [*track["prompt"], *track["written"]]
    more = [token_after(salt, ids)] if start + count == len(ids) else []
    return track | {"computed": start + count, "written": [*track["written"], *more]}


def judge_settle(case: dict, seen: dict) -> str | None:
    if lacking := told_missing(seen):
        return lacking
    work = {piece[0]: piece for piece in case["work"]}
    for before, after in zip(case["tracks"], seen["tracks"]):
        name = before["id"]
        right = settled(before, work[name], case["salt"]) if name in work else before
        total = len(before["prompt"]) + len(before["written"])
        where = f"{name}, {total} tokens, {before['computed']} computed; "
        where += f"computed now: {_works([work[name]])}: " if name in work else "not in this step: "
        if after["computed"] != right["computed"]:
            return f"{where}computed is {after['computed']}, expected {right['computed']}: the tokens in the cache, those of this step among them"
        ids = [*right["prompt"], *right["written"]]
        if after["token_ids"] != ids:
            return (
                f"{where}the text has now {len(after['token_ids'])} tokens, {after['token_ids'][total:]} new, expected {ids[total:]} new: "
                + (
                    "its last token is among those computed, so that a token was written"
                    if len(ids) > total
                    else "its last token is not among those computed: what the model says there is no part of the text"
                )
            )
    return None


def judge_whole(case: dict, seen: dict) -> str | None:
    """Step by step; then the texts."""
    if lacking := told_missing(seen):
        return lacking
    if "returned" in seen:
        return f"{seen['returned']} came back, where a list of Work(track, start, count) was expected"
    tracks, salt = [dict(t) for t in case["tracks"]], case["salt"]
    for number, work in enumerate(seen["steps"], 1):
        if fault := _plan_fault(tracks, case["budget"], case["chunk"], work):
            return f"{len(case['tracks'])} texts, step {number}, {', '.join(map(_state, tracks))}, budget {case['budget']}: {fault}"
        pieces = {piece[0]: piece for piece in work}
        tracks = [settled(t, pieces[t["id"]], salt) if t["id"] in pieces else t for t in tracks]
        for t in tracks:
            came = seen["texts"][number - 1].get(t["id"])
            if came != [*t["prompt"], *t["written"]]:
                return f"after step {number}, {_works(work)}, the text of {t['id']} is {came}, expected {[*t['prompt'], *t['written']]}"
        tracks = [t for t in tracks if len(t["written"]) < t["max_new_tokens"]]
    if tracks:
        return f"after {len(seen['steps'])} steps {', '.join(map(_state, tracks))} are still not done"
    return None
