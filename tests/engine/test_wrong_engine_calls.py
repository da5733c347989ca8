"""Wrong calls of the engine and of generate: each is refused with a WorkbenchError that says why, and changes nothing.

A table: what is called, what wrong values it gets, words of the message.
"""

from __future__ import annotations

import math
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.decoding.sampling import SamplingSettings
from workbench.errors import WorkbenchError, shown
from workbench.generation import generate
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.serving.scheduler import PADDING

V = 64
MODEL = random_decoder(tiny_config(vocab_size=V), seed=0).double()
CONTEXT = MODEL.config.context_length
PROMPT = (3, 1, 4, 1, 5)
TEXT = tuple(generate(MODEL, PROMPT, max_new_tokens=6, stop_token_ids=()).tokens)
NO_WHOLE = (0, -1, 2.5, True, "3", math.nan, [1])
NO_NUMBER = (math.nan, math.inf, "0", True, 1j, [0.0])
NO_NAME = (3, 2.5, b"x", ["hash"], {"hash": 1})
NO_IDS = (None, 5, "12", b"12", {1: 2}, {1, 2}, [True], [1.0], ["a"], [-1], [[1]], object())
NO_TOP = (-1, 21, 2.0, True, "3", math.nan, [1])
NO_MODEL = (None, 3, "stdlib-10m", ["a"])


class Whole(int):
    """Counts in its own way."""

    def __add__(self, other):
        raise ZeroDivisionError("add")

    __radd__ = __add__


class Unshown:
    """Nobody can say what it is."""

    def __repr__(self):
        raise ZeroDivisionError("repr")


class Text(str):
    def encode(self, *given):
        raise ZeroDivisionError("encode")


def lying(**methods):
    return type("Lying", (), {"__hash__": lambda self: hash("waits"), "__repr__": lambda self: "id", **methods})


def fails(*given):
    raise ZeroDivisionError("a lie")


TIMES = count()
LYING = [
    lying(__eq__=lambda self, other: True),
    lying(__eq__=lambda self, other: False),
    lying(__eq__=fails),
    lying(__eq__=lambda self, other: torch.ones(2)),
    lying(__hash__=lambda self: next(TIMES)),
    lying(__hash__=fails),
    lying(__repr__=fails),
    lying(__repr__=lambda self: 3),
    lying(__repr__=lambda self: "a" if next(TIMES) % 2 else fails()),
]


def deep():
    nested: tuple = ()
    for _ in range(100_000):
        nested = (nested,)
    return nested


def make(**given) -> Engine:
    return Engine(given.pop("model", MODEL), given.pop("settings", SchedulerSettings()), **{"num_blocks": 8} | given)


def request(**given) -> Request:
    return Request(**{"id": "wrong", "prompt_ids": PROMPT, "max_new_tokens": 3} | given)


def write(prompt=PROMPT, model=MODEL, **given):
    return generate(model, prompt, **{"max_new_tokens": 2} | given)


CALLS = {
    "engine, model": (lambda e, v: make(model=v), NO_MODEL, "takes a loaded model"),
    "engine, settings": (lambda e, v: make(settings=v), (3, "a", {}, SchedulerSettings), "are SchedulerSettings"),
    "engine, num_blocks": (lambda e, v: make(num_blocks=v), NO_WHOLE, "num_blocks must be"),
    "engine, block_size": (lambda e, v: make(block_size=v), (None, *NO_WHOLE), "block_size must be"),
    "engine, prefix": (lambda e, v: make(prefix=v), (*NO_NAME, "hsh", ""), "prefix"),
    "engine, format": (lambda e, v: make(format=v), (*NO_NAME, "int5"), "format"),
    "engine, attention": (lambda e, v: make(attention=v), (None, *NO_NAME, "sdap"), "attention"),
    "engine, graphs": (lambda e, v: make(graphs=v), (3, "yes", [True]), "graphs must be"),
    "engine, asynchronous": (lambda e, v: make(asynchronous=v), (None, 1, "yes"), "asynchronous must be True or"),
    "engine, clock": (lambda e, v: make(clock=v), (None, 1.0, "now"), "clock must be a function"),
    "engine, draft": (
        lambda e, v: make(draft=v, settings=SchedulerSettings(draft_tokens=2)),
        (3, "lokup", ["lookup"]),
        "draft",
    ),
    "engine, a draft without rows": (lambda e, v: make(draft=v), ("prompt_lookup", MODEL), "draft_tokens=K"),
    "engine, draft_length": (
        lambda e, v: make(draft="prompt_lookup", draft_length=v, settings=SchedulerSettings(draft_tokens=2)),
        (0, -1, 2.5, "long", [4], True),
        "",
    ),
    "engine, draft_length without a draft": (
        lambda e, v: make(draft_length=v),
        (4, "dynamic", 0),
        "is for a draft, and none is given",
    ),
    "engine, an index that finds nothing": (
        lambda e, v: make(prefix=v, settings=SchedulerSettings(remember=False)),
        ("radix",),
        "remember=False",
    ),
    "settings, max_running": (lambda e, v: SchedulerSettings(max_running=v), NO_WHOLE, "max_running must be"),
    "settings, token_budget": (lambda e, v: SchedulerSettings(token_budget=v), NO_WHOLE, "token_budget must be"),
    "settings, a small budget": (lambda e, v: SchedulerSettings(token_budget=v), (1, 15), "less than a token for each"),
    "settings, chunk": (lambda e, v: SchedulerSettings(chunk=v), NO_WHOLE, "chunk must be"),
    "settings, policy": (lambda e, v: SchedulerSettings(policy=v), (None, *NO_NAME, "first"), "unknown policy"),
    "settings, aging_s": (lambda e, v: SchedulerSettings(aging_s=v), (0, -1.0, *NO_NUMBER), "aging_s must be"),
    "settings, preemption": (lambda e, v: SchedulerSettings(preemption=v), (None, *NO_NAME), "unknown preemption"),
    "settings, watermark": (lambda e, v: SchedulerSettings(watermark=v), (-0.1, 1.1, *NO_NUMBER), "watermark must be"),
    "settings, batching": (lambda e, v: SchedulerSettings(batching=v), (None, *NO_NAME), "unknown batching"),
    "settings, draft_tokens": (lambda e, v: SchedulerSettings(draft_tokens=v), (-1, 1.5, "3"), "draft_tokens must be"),
    "settings, static": (
        lambda e, v: SchedulerSettings(batching="static", **v),
        ({"chunk": 8}, {"preemption": "swap"}, {"draft_tokens": 2}),
        "has no effect with batching='static'",
    ),
    "settings, remember": (lambda e, v: SchedulerSettings(remember=v), (None, 1, "no", []), "remember must be True"),
    "request, id": (lambda e, v: request(id=v), ([], {}, {1}, ([],)), "must be hashable"),
    "request, an id that is no plain value": (
        lambda e, v: e.add(request(id=v())),
        (*LYING, lambda: torch.ones(2), lambda: np.int64(3), lambda: ("a", Whole(3)), lambda: PADDING),
        "must be hashable and plain",
    ),
    "request, a long id": (
        lambda e, v: e.add(request(id=v())),
        (lambda: "x" * 10**6, lambda: tuple(range(2000)), lambda: 10**5000, deep),
        "shorter",
    ),
    "request, another class of number": (
        lambda e, v: e.add(request(**{v: Whole(3)})),
        ("max_new_tokens", "n", "seed", "priority", "arrival_s", "deadline_s"),
        "must be a",
    ),
    "request, numbers of others": (
        lambda e, v: e.add(request(**{v[0]: v[1]})),
        [
            (name, value)
            for name in ("max_new_tokens", "n", "seed", "priority", "arrival_s", "deadline_s")
            for value in (np.int64(3), np.bool_(True), np.array(3), np.float32(3), torch.tensor(3), math.nan)
        ],
        "must be",
    ),
    "request, a prompt without end": (lambda e, v: request(prompt_ids=v()), (count, lambda: range(10**15)), "shorter"),
    "request, NaN in its id": (lambda e, v: request(id=v), (math.nan, ("a", math.nan)), "NaN"),
    "request, what cannot be shown": (
        lambda e, v: request(**{v[0]: v[1]}),
        [
            (name, value)
            for name in ("max_new_tokens", "n", "seed", "priority", "arrival_s", "deadline_s", "tenant")
            for value in (Unshown(), 10**5000, -(10**5000))
        ],
        "cannot be shown",
    ),
    "request, a token that cannot be shown": (
        lambda e, v: e.add(request(prompt_ids=[v])),
        (Unshown(), 10**5000, -(10**5000)),
        "cannot be shown",
    ),
    "sampling, what cannot be shown": (
        lambda e, v: SamplingSettings(**{v[0]: v[1]}),
        [
            (name, value)
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
            for value in (Unshown(), 10**5000, -(10**5000))
        ],
        "cannot be shown",
    ),
    "sampling, penalties that overflow": (
        lambda e, v: SamplingSettings(**{v[0]: v[1]}),
        [("repetition_penalty", value) for value in (1e300, 1e-300, 10**300, 1.1e6, 0.9e-6)]
        + [
            (name, value)
            for name in ("presence_penalty", "frequency_penalty")
            for value in (1e300, -1e300, 10**300, -(10**30), 1.1e6)
        ],
        "a number from",
    ),
    "engine, what a clock reads": (lambda e, v: make(clock=lambda: v), (None, "now", math.nan, [1], True), "seconds"),
    "request, another class of text": (lambda e, v: e.add(request(tenant=v)), (Text("a"),), "tenant must be"),
    "request, prompt": (lambda e, v: request(prompt_ids=v), (*NO_IDS, ()), ""),
    "request, max_new_tokens": (lambda e, v: request(max_new_tokens=v), (None, *NO_WHOLE), "max_new_tokens must be"),
    "request, n": (lambda e, v: request(n=v), (None, *NO_WHOLE), "n must be"),
    "request, seed": (lambda e, v: request(seed=v), (-1, 2**63, 0.5, "7", True), "seed must be"),
    "request, sampling": (lambda e, v: request(sampling=v), (0.5, "warm", {}, SamplingSettings), "SamplingSettings"),
    "request, stop_token_ids": (lambda e, v: request(stop_token_ids=v), NO_IDS[1:], "token"),
    "request, priority": (lambda e, v: request(priority=v), NO_NUMBER, "priority must be"),
    "request, deadline_s": (lambda e, v: request(deadline_s=v), (0, -1, *NO_NUMBER), "deadline_s must be"),
    "request, tenant": (lambda e, v: request(tenant=v), (None, 3, ["a"]), "tenant must be"),
    "request, log_probs": (lambda e, v: request(log_probs=v), NO_TOP, "log_probs must be None or"),
    "request, logit_bias": (
        lambda e, v: request(sampling=SamplingSettings(logit_bias=v)),
        ({3: 101}, {3: math.nan}, {-1: 1}, [(3, 1), (3, 2)], "3"),
        "logit_bias must be",
    ),
    "add, logit_bias": (lambda e, v: e.add(request(sampling=SamplingSettings(logit_bias={v: 1}))), (V,), "lie in 0 …"),
    "request, guide": (lambda e, v: request(guide=v), (3, "json", {}, object(), type), "guide takes a"),
    "request, jump": (lambda e, v: request(jump=v), ("tokens", 3), "is for a grammar, and none is given"),
    "request, prompt_log_probs": (lambda e, v: request(prompt_log_probs=v), NO_TOP, "prompt_log_probs must be None"),
    "add": (lambda e, v: e.add(v), (None, 3, "a", {}, [request()], Request), "only a Request can be added"),
    "add, a name twice": (lambda e, v: e.add(request(id=v)), ("waits", "done"), "was added before"),
    "add, prompt": (lambda e, v: e.add(request(prompt_ids=v)), ([V], [2**70]), "lie in 0 …"),
    "add, stop_token_ids": (lambda e, v: e.add(request(stop_token_ids=v)), ([V], [10**9]), "lie in 0 …"),
    "add, beyond the context": (lambda e, v: e.add(request(max_new_tokens=v)), (CONTEXT, 10**9), "the context"),
    "add, beyond the pool": (lambda e, v: e.add(request(max_new_tokens=v)), (130, 200), "can never fit"),
    "add, too many samples": (lambda e, v: e.add(request(n=v)), (17, 10**6), "can never run"),
    "abort": (lambda e, v: e.abort(v), (None, "nobody", 7), "is unknown"),
    "abort, one that is done": (lambda e, v: e.abort(v), ("done",), "has finished already"),
    "abort, no name": (lambda e, v: e.abort(v), ([], {}, {1}), "must be hashable"),
    "run": (lambda e, v: e.run(v), (None, 3, request()), "requests come as a list"),
    "run, no requests": (lambda e, v: e.run([request(), v]), (None, "a", 3), "only a Request can be added"),
    "run, a name twice": (lambda e, v: e.run([request(), request(id=v)]), ("wrong", "waits", "done"), "was added"),
    "run, watch": (lambda e, v: e.run([request()], watch=v), (3, "a", []), "watch must be a function"),
    "generate, model": (lambda e, v: write(model=v), NO_MODEL, "takes a loaded model"),
    "generate, prompt": (lambda e, v: write(v), (None, 5, b"12", {1: 2}, {1}, [True], [-1], [V], []), ""),
    "generate, a prompt as a text": (lambda e, v: write(v), ("text",), "no tokenizer"),
    "generate, max_new_tokens": (lambda e, v: write(max_new_tokens=v), NO_WHOLE, "max_new_tokens must be"),
    "generate, a setting": (lambda e, v: write(**{v: 1}), ("temprature", "draft_lenght", "n"), "generate setting"),
    "generate, temperature": (lambda e, v: write(temperature=v), (-1, *NO_NUMBER), "temperature"),
    "generate, seed": (lambda e, v: write(seed=v), (-1, 2**63, 0.5, True), "seed must be"),
    "generate, stop": (lambda e, v: write(stop=v), (3, b"a", [3], [""], {"a": 1}, ["\n"]), "stop"),
    "generate, stop_token_ids": (lambda e, v: write(stop_token_ids=v), (5, "1", {1: 2}, [V], [-1]), "token"),
    "generate, kv": (lambda e, v: write(kv=v), ([], {}, 0, False, "", "page", b"x", object()), "kv"),
    "generate, kv beside a draft": (lambda e, v: write(kv=v, draft="prompt_lookup"), ([], 0, "", "page"), "kv"),
    "generate, draft": (lambda e, v: write(draft=v), (3, "lokup", [], False, ""), "draft"),
    "generate, draft_length without a draft": (lambda e, v: write(draft_length=v), (4, 0, "dynamic"), "is for a draft"),
    "generate, draft_length": (
        lambda e, v: write(draft="prompt_lookup", draft_length=v),
        (0, 2.5, "long", [], CONTEXT),
        "",
    ),
    "generate, jump without a guide": (lambda e, v: write(jump=v), ("tokens", "never", 3), "is for a grammar"),
    "generate, guide": (lambda e, v: write(guide=v), (3, "a+", []), "guide takes a"),
    "generate, filters": (lambda e, v: write(filters=v), ([], 0, "", {"top_k": 3}, {"topk": max}), "filter"),
    "generate, filters without effect": (lambda e, v: write(filters={v: max}), ("top_k", "min_p"), "none of them"),
    "generate, loop": (lambda e, v: write(loop=v), (None, 3, "loop"), "loop must be a function"),
    "generate, cancel": (lambda e, v: write(cancel=v), (3, "now", []), "cancel must be"),
}
WRONG = [(name, value) for name, (_, values, _) in CALLS.items() for value in values]


def engine() -> Engine:
    """One request is done, one waits."""
    made = make()
    made.run([Request("done", PROMPT, 2)])
    made.add(Request("waits", PROMPT, 6))
    return made


def state(it: Engine) -> SimpleNamespace:
    scheduler, tables = it.scheduler, it.kv.tables
    return SimpleNamespace(
        alive=[(one.id, tuple(one.token_ids), one.status, one.computed) for one in scheduler.alive()],
        queues=(len(scheduler.waiting), len(scheduler.running), len(scheduler.swapped)),
        steps=scheduler.steps,
        blocks=(tables.num_free, tables.num_available, dict(tables.tables)),
        coming=(set(it._coming), len(it._inbox), it._turn.locked()),
        ended=list(scheduler._ended),
    )


@pytest.mark.parametrize(
    "name, value", WRONG, ids=[f"{name}: {shown(value)}".partition(" at 0x")[0] for name, value in WRONG]
)
def test_a_wrong_call_is_refused_and_changes_nothing(name, value):
    call, _, words = CALLS[name]
    it = engine()
    before = state(it)
    with pytest.raises(WorkbenchError) as refused:
        call(it, value)
    assert words in str(refused.value) and len(str(refused.value)) > 20
    assert state(it) == before
    ended = {one.request_id: one.token_ids for one in it.run([Request("good", PROMPT, 6)])}
    assert ended == {"waits": TEXT, "good": TEXT}
    tables = it.kv.tables
    assert it.idle and tables.num_available == tables.num_blocks and not it.kv.bytes_in_use


def test_there_are_hundreds_of_wrong_calls():
    assert len(WRONG) >= 200
