"""Lab 11: what the checks do with an answer, and what they see. Probes run beside the answer and hold no expected
value."""

from __future__ import annotations

import functools
from collections import abc
from typing import Any

from workbench.checks.tensors import missing
from workbench.decoding.sequence import NewToken, Request, Sequence
from workbench.decoding.text import Detokenizer
from workbench.kv.blocks import BlockTables
from workbench.kv.prefix import prefix_index
from workbench.labs.lab11_serving.checks.parts import Cached, Timed, raise_unwritten, serve
from workbench.serving.api.choices import Choice, Piece
from workbench.serving.metrics import Objectives
from workbench.serving.scheduler import Scheduler, Written
from workbench.serving.settings import SchedulerSettings
from workbench.serving.soak_kinds import tiny_model, tiny_tokenizer

MAX_STEPS = 10_000  # of a forecast that never ends

# --- server-stops ---


def run_stops(answer: Any, stop: list, pieces: list) -> dict:
    """Piece by piece, until a stop string is complete; then the end."""
    stops, shown, said = answer(list(stop)), [], []
    for piece in pieces:
        shown.append(stops.add(piece))
        said.append(stops.found)
        if said[-1]:
            break
    return {"shown": shown, "found": said, "last": stops.finish()}


@functools.cache
def _tokenizer():
    return tiny_tokenizer()


def run_choice(answer: Any, tokens: list, stop: list, size: int) -> dict:
    """The server's own `Choice` with this class. whole: the text of all tokens, of which it knows nothing."""
    choice = Choice(0, "r", 0, _tokenizer(), (1,), stop, (), stops=answer)
    text = ""
    for at in range(0, len(tokens), size):
        new = [NewToken(token, None, "target", "plain") for token in tokens[at : at + size]]
        piece = choice.add(new, "length" if at + size >= len(tokens) else None)
        text += "" if piece is None else piece.text
    plain = Detokenizer(_tokenizer(), (1,))
    whole = "".join(map(plain.add, tokens)) + plain.finish()
    return {"text": text, "finish_reason": choice.finish_reason, "whole": whole}


# --- server-events ---


def run_events(answer: Any, head: dict, include_usage: bool, calls: list) -> dict:
    """The bytes of each call, one character for each byte."""
    events, written = answer(dict(head), include_usage=include_usage), []
    for what, given in calls:
        if what == "pieces":
            given = [Piece(index, text, (), finish_reason) for index, text, finish_reason in given]
        data = getattr(events, what)(given)
        if not isinstance(data, bytes | bytearray):
            return {"call": what, "returned": type(data).__name__}
        written.append(bytes(data).decode("latin-1"))
    return {"written": written}


# --- server-admission ---


def run_wait(answer: Any, queue: list, running: list, max_running: int, token_budget: int, cost: dict) -> dict:
    """first_token_s, and the steps that it asked the time of."""
    if lacking := missing(answer, "first_token_s", "retry_after"):
        return lacking
    steps: list[list[int]] = []

    def step_s(rows: int, texts: int, contexts: int) -> float:
        steps.append([rows, texts, contexts])
        if len(steps) > MAX_STEPS:
            raise RuntimeError(f"step_s was called {len(steps):,} times, and the queue still has no first token")
        return cost["fixed"] + rows * cost["row"] + texts * cost["text"] + contexts * cost["context"]

    given = [tuple(text) for text in queue], [tuple(text) for text in running]
    before = [list(texts) for texts in given]
    seconds = answer["first_token_s"](*given, step_s, max_running, token_budget)
    return {"seconds": seconds, "steps": steps[:400], "changed": list(given) != before}


def run_retry(answer: Any, wait_s: float, deadline_s: float) -> dict:
    if lacking := missing(answer, "first_token_s", "retry_after"):
        return lacking
    return {"retry_after": answer["retry_after"](wait_s, deadline_s)}


# --- server-goodput ---


def run_goodput(answer: Any, rows: list, objectives: dict, start_s: float, end_s: float, duration_s: float) -> dict:
    """Everything that the four functions say of one run."""
    if lacking := missing(answer, "tpot_s", "is_good", "goodput", "vllm_goodput"):
        return lacking
    timed, limits = [Timed(**row) for row in rows], Objectives(**objectives)
    return {
        "tpot_s": [answer["tpot_s"](row) for row in timed],
        "is_good": [answer["is_good"](row, limits) for row in timed],
        "goodput": answer["goodput"](list(timed), limits, start_s, end_s),
        "vllm_goodput": answer["vllm_goodput"](list(timed), limits, duration_s),
    }


# --- server-policy ---


def run_order(answer: Any, sequences: list, now_s: float, patience_s: float) -> dict:
    """Names in the order of their keys. sequences: [name, arrival_s, cached tokens, number]."""
    made, cached = [], {}
    for name, arrival_s, tokens, number in sequences:
        sequence = Sequence.of(Request(name, (1,) * 40, 4, arrival_s=arrival_s), 0, number, [1] * 40)
        made.append(sequence)
        cached[sequence.id] = tokens
    keys = {s.id: answer(s, now_s, cached=lambda one: cached[one.id], patience_s=patience_s) for s in made}
    return {"order": [sequence.request.id for sequence in sorted(made, key=lambda sequence: keys[sequence.id])]}


def _requests(requests: list) -> list[Request]:
    """requests: [name, arrival in steps, prompt, tokens to come]."""
    return [
        Request(name, prompt, to_come, stop_token_ids=(), arrival_s=float(arrival))
        for name, arrival, prompt, to_come in requests
    ]


def run_policy(
    answer: Any,
    requests: list,
    patience: float,
    num_blocks: int,
    max_running: int = 1,
    token_budget: int = 64,
    limit: int = 600,
) -> dict:
    """The engine's scheduler and pool with this policy, a step after the other; the model writes nothing but sevens.

    waits: steps between a request's arrival and its first."""
    tables = BlockTables(num_blocks, 4, prefix_index("hash", 4))
    policy = answer
    if not isinstance(answer, str):
        policy = functools.partial(answer, cached=Cached(tables), patience_s=patience)
    settings = SchedulerSettings(max_running=max_running, token_budget=token_budget, policy=policy, watermark=0.0)
    scheduler, coming = Scheduler(tables, settings), sorted(_requests(requests), key=lambda one: one.arrival_s)
    waits: dict[Any, int] = {}
    errors: list[str] = []
    done: list[Any] = []
    step = 0
    while (coming or scheduler.waiting or scheduler.running) and step < limit:
        while coming and coming[0].arrival_s <= step:
            scheduler.add(coming.pop(0))
        plan = scheduler.schedule(float(step))
        raise_unwritten(sequence.error for sequence in plan.failed)
        errors += [f"{sequence.request.id}: {sequence.error}" for sequence in plan.failed]
        for sequence in plan.admitted:
            waits.setdefault(sequence.request.id, step - round(sequence.arrival_s))
        done += _compute(scheduler, tables, plan, float(step))
        step += 1
    return {"hit_tokens": scheduler.hit_tokens, "steps": step, "waits": waits, "done": sorted(done), "errors": errors}


def _compute(scheduler: Scheduler, tables: BlockTables, plan: Any, now_s: float) -> abc.Iterator[Any]:
    """Run a plan; the names of the requests that are done."""
    written = {}
    for work in plan.work:
        tables.grow({work.sequence.id: work.end})
        if work.writes:
            work.sequence.token_ids.append(7)
            written[work.sequence.id] = Written(1, None if work.sequence.remaining else "length")
    return (sequence.request.id for sequence in scheduler.postprocess(plan, written, now_s))


def run_engine(answer: Any, requests: list, patience: float, num_blocks: int, max_running: int) -> dict:
    """A real engine on a tiny model; beside the counts, what it wrote for each request."""
    policy, cached = answer, Cached()
    if not isinstance(answer, str):
        policy = functools.partial(answer, cached=cached, patience_s=patience)
    counted = serve(
        tiny_model(0, 1), policy, _requests(requests), cached=cached, max_running=max_running, num_blocks=num_blocks
    )
    return {
        "hit_tokens": counted.hit_tokens,
        "steps": counted.steps,
        "waits": counted.waits,
        "done": sorted(one.request_id for one in counted.ended if one.error is None),
        "errors": [f"{one.request_id}: {one.error}" for one in counted.ended if one.error is not None],
        "texts": {one.request_id: list(one.token_ids) for one in counted.ended},
    }


def run_demand(answer: Any, probe: str, given: dict, demand: str) -> Any:
    """Another probe of this module, by its name."""
    return globals()[probe](answer, **given)
