"""Lab 08, chunked prefill: cases and judges of batching-chunks."""

from __future__ import annotations

import random

from workbench.checks.tensors import missing_message
from workbench.labs.lab08_continuous_batching.checks.probes import token_after


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


def plan_case(sequences: list, budget: int, chunk: int | None = None) -> dict:
    return {"sequences": sequences, "budget": budget, "chunk": chunk}


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
    """A prompt in one piece, the middle of one, its end with the next one behind it, a limit on each chunk, and a text
    that was preempted: its prompt and what it has written are to be computed again."""
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


def postprocess_case(sequences: list, work: list, salt: int) -> dict:
    return {"sequences": sequences, "work": work, "salt": salt}


def postprocess_cases(draw: random.Random) -> list[dict]:
    """A decode, the middle of a prompt, its last chunk, a whole prompt, and what was preempted."""
    salt = draw.randrange(10**6)
    return [
        postprocess_case([writing("a", 4, 2)], [["a", 5, 1]], salt),
        postprocess_case([text("p", 12, 0, 4), text("q", 12, 0, 4)], [["p", 4, 5], ["q", 4, 8]], salt + 1),
        postprocess_case([text("p", 7, 0, 0), writing("a", 3, 1)], [["a", 3, 1], ["p", 0, 7]], salt + 2),
        postprocess_case([text("p", 6, 4, 0), text("q", 6, 4, 7)], [["p", 0, 6], ["q", 7, 3]], salt + 3),
        postprocess_case([text("p", 6, 0, 2), writing("a", 2, 2)], [["a", 3, 1]], salt + 4),
    ]


def whole_cases(draw: random.Random) -> list[dict]:
    """Texts from their first token to their last: a wide budget, a narrow one, and one that is limited twice."""

    def texts(count: int) -> list[dict]:
        return [text(f"r{at}", draw.randint(1, 30), 0, 0, draw.randint(1, 8)) for at in range(count)]

    return [
        {"sequences": texts(4), "budget": 16, "chunk": None, "salt": draw.randrange(10**6), "limit": 200},
        {"sequences": texts(6), "budget": 5, "chunk": None, "salt": draw.randrange(10**6), "limit": 300},
        {"sequences": texts(5), "budget": 20, "chunk": 6, "salt": draw.randrange(10**6), "limit": 200},
    ]


# --- Judging ---


def unsent(sequence: dict) -> int:
    return len(sequence["prompt"]) + len(sequence["written"]) - sequence["computed"]


def exact_plan(sequences: list[dict], budget: int, chunk: int | None) -> list[list]:
    plan = []
    for sequence in sorted(sequences, key=lambda t: unsent(t) > 1):
        count = min(unsent(sequence), budget, chunk or budget)
        if count > 0:
            plan.append([sequence["id"], sequence["computed"], count])
            budget -= count
    return plan


def _state(sequence: dict) -> str:
    if unsent(sequence) == 1 and sequence["written"]:
        return f"{sequence['id']} (a decode)"
    total = len(sequence["prompt"]) + len(sequence["written"])
    return f"{sequence['id']} ({sequence['computed']} of {total} tokens computed)"


def _works(work: list) -> str:
    return ", ".join(f"{name} {start}…{start + count - 1}" for name, start, count in work) or "nothing"


def _plan_fault(sequences: list[dict], budget: int, chunk: int | None, came: list) -> str | None:
    right = exact_plan(sequences, budget, chunk)
    if came == right:
        return None
    by_name = {t["id"]: t for t in sequences}
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
        sequence = by_name[name]
        if start != sequence["computed"]:
            return told + f"{name} goes on at token {sequence['computed']}, the first that is not computed"
        if count > unsent(sequence):
            return told + f"of {name} only {unsent(sequence)} tokens are not computed"
    decodes = [t["id"] for t in sequences if unsent(t) == 1]
    if waiting and waiting[0] in decodes:
        return told + f"{waiting[0]} has one token to compute, and goes before every prompt"
    if chunk is not None and any(count > chunk for _, _, count in came):
        return told + f"a prompt brings at most chunk = {chunk} tokens in a step"
    if sorted(came) == sorted(right):
        return told + "decodes first, then prompts, each in the order given"
    return told + "each decode its token, then each prompt what is left of the budget, up to its end"


def judge_plan(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    sequences, budget, chunk = case["sequences"], case["budget"], case["chunk"]
    where = (
        f"{', '.join(map(_state, sequences)) or 'nobody'}; budget {budget}"
        + (f", chunk {chunk}" if chunk else "")
        + ": "
    )
    if "returned" in seen:
        return f"{where}{seen['returned']} came back, where a list of Work(sequence, start, count) was expected"
    if seen["changed"]:
        return f"{where}a plan changes nothing of the texts; postprocess does"
    fault = _plan_fault(sequences, budget, chunk, seen["work"])
    return fault and where + fault


def postprocessed(sequence: dict, piece: list, salt: int) -> dict:
    """The text after a piece of it was computed, and its token, if it has one, was taken."""
    _, start, count = piece
    ids = [*sequence["prompt"], *sequence["written"]]
    more = [token_after(salt, ids)] if start + count == len(ids) else []
    return sequence | {"computed": start + count, "written": [*sequence["written"], *more]}


def judge_postprocess(case: dict, seen: dict) -> str | None:
    if lacking := missing_message(seen):
        return lacking
    work = {piece[0]: piece for piece in case["work"]}
    for before, after in zip(case["sequences"], seen["sequences"]):
        name = before["id"]
        right = postprocessed(before, work[name], case["salt"]) if name in work else before
        total = len(before["prompt"]) + len(before["written"])
        where = f"{name}, {total} tokens, {before['computed']} computed; "
        where += f"computed now: {_works([work[name]])}: " if name in work else "not in this step: "
        if after["computed"] != right["computed"]:
            return (
                f"{where}computed is {after['computed']}, expected {right['computed']}: the tokens in the cache, those"
                " of this step among them"
            )
        ids = [*right["prompt"], *right["written"]]
        if after["token_ids"] != ids:
            return (
                f"{where}the text has now {len(after['token_ids'])} tokens, {after['token_ids'][total:]} new, expected"
                f" {ids[total:]} new: "
                + (
                    "its last token is among those computed, so that a token was written"
                    if len(ids) > total
                    else "its last token is not among those computed: what the model says there is no part of the text"
                )
            )
    return None


def judge_whole(case: dict, seen: dict) -> str | None:
    """Step by step; then the texts."""
    if lacking := missing_message(seen):
        return lacking
    if "returned" in seen:
        return f"{seen['returned']} came back, where a list of Work(sequence, start, count) was expected"
    sequences, salt = [dict(t) for t in case["sequences"]], case["salt"]
    for number, work in enumerate(seen["steps"], 1):
        if fault := _plan_fault(sequences, case["budget"], case["chunk"], work):
            return (
                f"{len(case['sequences'])} texts, step {number}, {', '.join(map(_state, sequences))}, budget"
                f" {case['budget']}: {fault}"
            )
        pieces = {piece[0]: piece for piece in work}
        sequences = [postprocessed(t, pieces[t["id"]], salt) if t["id"] in pieces else t for t in sequences]
        for t in sequences:
            came = seen["texts"][number - 1].get(t["id"])
            if came != [*t["prompt"], *t["written"]]:
                return (
                    f"after step {number}, {_works(work)}, the text of {t['id']} is {came}, expected"
                    f" {[*t['prompt'], *t['written']]}"
                )
        sequences = [t for t in sequences if len(t["written"]) < t["max_new_tokens"]]
    if sequences:
        return f"after {len(seen['steps'])} steps {', '.join(map(_state, sequences))} are still not done"
    return None
