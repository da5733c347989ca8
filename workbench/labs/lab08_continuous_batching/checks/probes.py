"""Lab 08: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value."""

from __future__ import annotations

import random
from collections import abc, deque
from collections.abc import Hashable
from functools import lru_cache
from operator import itemgetter
from typing import Any

from workbench.checks.tensors import missing
from workbench.decoding.sequence import Request, Sequence
from workbench.grading.check import refused_or_not
from workbench.kv.blocks import BlockTables
from workbench.labs.lab08_continuous_batching.checks.parts import sequence_of
from workbench.serving.scheduler import Work


def as_list(value: Any) -> list | None:
    return list(value) if isinstance(value, list | tuple | deque) else None


# --- What a made-up model writes ---


def written_token(salt: int, name: Hashable, number: int) -> int:
    """The token that a request writes as its `number`-th, one of 10."""
    return random.Random(f"{salt}/{name}/{number}").randrange(10)


def token_after(salt: int, token_ids: abc.Sequence[int]) -> int:
    """The token after a text, one of 50."""
    return _token_after(salt, tuple(token_ids))


@lru_cache(maxsize=50_000)
def _token_after(salt: int, token_ids: tuple[int, ...]) -> int:
    return random.Random(f"{salt}/{token_ids}").randrange(50)


def request_of(told: dict) -> Request:
    prompt = told["prompt"]
    return Request(
        id=told["id"],
        prompt_ids=tuple(range(10, 10 + prompt)) if isinstance(prompt, int) else tuple(prompt),
        max_new_tokens=told["max_new_tokens"],
        stop_token_ids=tuple(told.get("stop", ())),
        deadline_s=told.get("deadline_s"),
        arrival_s=told.get("arrival_s", 0.0),
    )


def sequences_of(told: list[dict]) -> list[Sequence]:
    """prompt and written: token ids, or how many."""
    sequences = []
    for number, one in enumerate(told):
        written = one.get("written", [])
        written = [7] * written if isinstance(written, int) else written
        sequences.append(sequence_of(request_of(one), number, written, one.get("computed", 0)))
    return sequences


def _states(sequences: abc.Sequence[Sequence]) -> list:
    return [(list(sequence.token_ids), sequence.computed) for sequence in sequences]


# --- batching-waste ---


def run_counts(answer: Any, part: str, lengths: list, B: int) -> dict:
    """static or continuous (lengths, B): (rows, useful, wasted, steps)."""
    if lacking := missing(answer, "static", "continuous"):
        return lacking
    given = [tuple(pair) for pair in lengths]
    before = list(given)
    found = answer[part](given, B)
    counts = as_list(found)
    if counts is None or len(counts) != 4:
        return {"returned": type(found).__name__}
    return dict(zip(("rows", "useful", "wasted", "steps"), counts)) | {"changed": given != before}


def run_counts_refused(answer: Any, part: str, lengths: list, B: int) -> dict:
    if lacking := missing(answer, "static", "continuous"):
        return lacking
    return refused_or_not(lambda: answer[part]([tuple(pair) for pair in lengths], B))


# --- batching-turn ---


def _turn(answer: Any, running: list, waiting: list, max_running: int, num_blocks: int, block_size: int):
    """((finished, admitted, running, waiting), the same by ids), or what else came."""
    found = answer(running, waiting, max_running, num_blocks, block_size)
    given = [as_list(item) for item in as_list(found) or ()]
    lists = [one for one in given if one is not None]
    if len(given) != 4 or len(lists) != 4:
        return None, f"a {type(found).__name__}"
    finished, *others = lists
    if not all(isinstance(item, list | tuple) and len(item) == 2 for item in finished):
        return None, "a list of finished that are not pairs (sequence, reason)"
    named = [pair[0] for pair in finished] + [sequence for sequences in others for sequence in sequences]
    if not all(isinstance(sequence, Sequence) for sequence in named):
        return None, "a list of something else than sequences"
    ids = {"finished": [[sequence.request.id, reason] for sequence, reason in finished]}
    ids |= {
        name: [t.request.id for t in sequences] for name, sequences in zip(("admitted", "running", "waiting"), others)
    }
    return lists, ids


def run_turn(answer: Any, running: list, waiting: list, max_running: int, num_blocks: int, block_size: int) -> dict:
    """turn(running, waiting, max_running, num_blocks, block_size), once."""
    live, queue = sequences_of(running), sequences_of(waiting)
    given, before = (list(live), list(queue)), _states([*live, *queue])
    lists, ids = _turn(answer, live, queue, max_running, num_blocks, block_size)
    if lists is None:
        return {"returned": ids}
    return ids | {"changed": (live, queue) != given or _states([*given[0], *given[1]]) != before}


def run_turns(
    answer: Any, requests: list, max_running: int, num_blocks: int, block_size: int, salt: int, limit: int
) -> dict:
    """Turn after turn, until nobody is left; after each, all that run have written a token."""
    live: list[Sequence] = []
    queue: list[Sequence] = []
    turns = []
    for number in range(limit):
        queue += sequences_of([told for told in requests if told["at"] == number])
        lists, ids = _turn(answer, live, queue, max_running, num_blocks, block_size)
        if lists is None:
            return {"returned": ids, "turn": number}
        turns.append(ids)
        _, _, live, queue = lists
        for sequence in live:
            sequence.token_ids.append(written_token(salt, sequence.request.id, sequence.written))
        over = not live and not queue and number >= max(told["at"] for told in requests)
        if over or len(live) > 4 * len(requests):  # more than there are: the judge will see that
            break
    return {"turns": turns}


# --- batching-chunks ---


def _kind(value: Any) -> str:
    """What it is, in words: a list of tuple."""
    inside = {type(item).__name__ for item in as_list(value) or ()}
    return f"a {type(value).__name__}" + (f" of {', '.join(sorted(inside))}" if inside else "")


def _works(plan: Any) -> list | None:
    pieces = as_list(plan)
    if pieces is None or not all(isinstance(piece, Work) for piece in pieces):
        return None
    return [[piece.sequence.request.id, piece.start, piece.count] for piece in pieces]


def run_plan(answer: Any, sequences: list, budget: int, chunk: int | None) -> dict:
    """plan_step(sequences, budget, chunk)."""
    if lacking := missing(answer, "plan_step", "postprocess"):
        return lacking
    made = sequences_of(sequences)
    given, before = list(made), _states(made)
    plan = answer["plan_step"](made, budget, chunk)
    if (work := _works(plan)) is None:
        return {"returned": _kind(plan)}
    return {"work": work, "changed": made != given or _states(given) != before}


def run_postprocess(answer: Any, sequences: list, work: list, salt: int) -> dict:
    """postprocess(work, tokens). The model has a token after the last one of every piece, also within a prompt."""
    if lacking := missing(answer, "plan_step", "postprocess"):
        return lacking
    made = sequences_of(sequences)
    by_name = {sequence.request.id: sequence for sequence in made}
    pieces = [Work(by_name[name], start, count) for name, start, count in work]
    answer["postprocess"](pieces, _tokens(pieces, salt))
    return {"sequences": [{"token_ids": list(t.token_ids), "computed": t.computed} for t in made]}


def _tokens(work: abc.Sequence[Work], salt: int) -> dict:
    return {p.sequence.id: token_after(salt, p.sequence.token_ids[: p.start + p.count]) for p in work}


def run_reading(answer: Any, sequences: list, budget: int, chunk: int | None, salt: int, limit: int) -> dict:
    """plan_step and postprocess in turn, until all are written."""
    if lacking := missing(answer, "plan_step", "postprocess"):
        return lacking
    live = sequences_of(sequences)
    steps, texts = [], []
    for _ in range(limit):
        plan = answer["plan_step"](list(live), budget, chunk)
        if (work := _works(plan)) is None:
            return {"returned": _kind(plan)}
        answer["postprocess"](plan, _tokens(plan, salt))
        steps.append(work)
        texts.append({sequence.request.id: list(sequence.token_ids) for sequence in live})
        live = [sequence for sequence in live if sequence.remaining > 0]
        if not live:
            break
    return {"steps": steps, "texts": texts}


# --- batching-deadline ---


def run_order(answer: Any, sequences: list, now_s: float, rates: dict) -> dict:
    """The names in the order of key(sequence, now_s, …)."""
    made = sequences_of(sequences)
    ordered = sorted(made, key=lambda sequence: answer(sequence, now_s, **rates))
    return {"order": [sequence.request.id for sequence in ordered]}


def run_stream(answer: Any, sequences: list, rates: dict) -> dict:
    """One text is served at a time, from its first token to its last; then the one with the smallest key of those that
    came.

    Returns [name, start] in that order.
    """
    waiting, now_s, served = sequences_of(sequences), 0.0, []
    while waiting:
        here = [sequence for sequence in waiting if sequence.arrival_s <= now_s]
        if not here:
            now_s = min(sequence.arrival_s for sequence in waiting)
            continue
        sequence = min(here, key=lambda sequence: answer(sequence, now_s, **rates))
        served.append([sequence.request.id, now_s])
        waiting.remove(sequence)
        now_s += sequence.unsent / rates["prefill_per_s"] + sequence.remaining / rates["tokens_per_s"]
    return {"served": served}


# --- batching-scheduler ---


class _Watched(BlockTables):
    """A pool that says whose blocks were given back."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.released: set = set()

    def release(self, sequence) -> None:
        super().release(sequence)
        self.released.add(sequence)


def _request_of(name: Any) -> Any:
    """The request of a sequence, by its name in the kv."""
    return name[0]


class _Model:
    """`run` for a scheduler: keeps what was computed of each text as long as the text holds blocks, and writes what
    that says, right or wrong."""

    def __init__(self, tables: _Watched, salt: int) -> None:
        self.tables, self.salt = tables, salt
        self.texts: dict = {}
        self.calls = 0
        self.work: list[Any] = []

    def begin(self) -> None:
        self.calls = 0
        self.work = []

    def forget(self) -> None:
        """A text whose blocks were given back is not remembered."""
        self.texts = {name: ids for name, ids in self.texts.items() if name not in self.tables.released}
        self.tables.released.clear()

    def __call__(self, work: abc.Sequence[Work]) -> dict:
        self.calls += 1
        self.forget()
        tokens = {}
        for piece in work:
            name, start, end = piece.sequence.id, piece.start, piece.start + piece.count
            text = self.texts.get(name, [])
            told = [piece.sequence.request.id, start, piece.count, len(text), self.tables.lengths.get(name, 0)]
            self.work.append(told)
            self.texts[name] = text[:start] + list(piece.sequence.token_ids[start:end])
            tokens[name] = token_after(self.salt, self.texts[name])
        return tokens


def run_scheduler(
    answer: Any,
    events: list,
    num_blocks: int,
    block_size: int,
    max_running: int,
    token_budget: int,
    watermark: int,
    salt: int,
    limit: int,
) -> dict:
    """Requests come and are aborted before the step that their event names; step by step until nobody waits or runs.

    Returns what each step showed, name by name: {"work": [of step 1, …], "done": …, …}.
    """
    tables = _Watched(num_blocks, block_size)
    scheduler = answer(tables, max_running=max_running, token_budget=token_budget, watermark=watermark)
    model, events, steps = _Model(tables, salt), list(events), []
    for number in range(limit):
        refused = []
        while events and events[0]["step"] <= number:
            refused.append(_door(scheduler, events.pop(0)))
        model.forget()
        model.begin()
        found = scheduler.step(model)
        done = as_list(found)
        if done is None or not all(isinstance(sequence, Sequence) for sequence in done):
            return {"returned": _kind(found)}
        model.forget()
        steps.append(
            {
                "refused": refused,
                "work": sorted(model.work, key=itemgetter(0)),
                "calls": model.calls,
                "done": sorted(([t.request.id, t.finish_reason, list(t.token_ids)] for t in done), key=itemgetter(0)),
                "running": [sequence.request.id for sequence in scheduler.running],
                "waiting": [sequence.request.id for sequence in scheduler.waiting],
                "holding": {_request_of(name): len(table) for name, table in tables.tables.items()},
            }
        )
        if not events and not scheduler.running and not scheduler.waiting:
            break
    return {name: [step[name] for step in steps] for name in steps[0]}


def _door(scheduler: Any, event: dict) -> list:
    if "add" in event:
        request = request_of(event["add"])
        return [f"add {request.id}", refused_or_not(lambda: scheduler.add(request))]
    return [f"abort {event['abort']}", refused_or_not(lambda: scheduler.abort(event["abort"]))]


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
