"""What comes to the engine from outside: odd requests are served, and what fails later ends its request alone."""

from __future__ import annotations

import copy

import pytest
import torch
from test_engine import ALONE, MODEL, REQUESTS, WARM, alone, check_empty, engine, tokens
from test_engine_threads import SWITCHES
from test_engine_threads import engine as switched

from workbench.decoding.sampling import SamplingSettings
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv.blocks import BlockTables
from workbench.kv.prefix import HashChain, prefix_index, tenant_bytes
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.serving.policies import POLICIES
from workbench.speculation.lengths import Fixed

ODD = [
    {"tenant": "\ud800"},
    {"tenant": b"\xff\x00"},
    {"priority": 0.5},
    {"priority": 10**300},
    {"priority": -(10**300)},
    {"arrival_s": -1e300},
    {"deadline_s": 1e308},
    {"seed": 2**63 - 1},
    {"seed": 2**63 - 3, "n": 3},
    {"id": "padding"},
    {"id": ("padding", 1)},
    {"id": frozenset({1})},
    {"id": None},
]


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("policy", POLICIES)
def test_any_finite_number_id_and_tenant_is_served(policy, batching):
    """Each of these stopped every step, or was refused."""
    for aging_s, prefix in ((None, "hash"), (1e-9, "radix")):
        requests = [
            Request(**({"id": i, "prompt_ids": REQUESTS[i].prompt_ids, "max_new_tokens": 3} | odd))
            for i, odd in enumerate(ODD)
        ]
        it = engine(policy=policy, prefix=prefix, aging_s=aging_s, batching=batching, num_blocks=130)
        ended = it.run(requests)
        expected = {request.id: ALONE[i][:3] for i, request in enumerate(requests)}
        assert all(expected[one.request_id][: len(one.token_ids)] == one.token_ids for one in ended)
        assert len(ended) == len(requests) + 2 and all(one.error is None for one in ended)
        check_empty(it)


def test_tenants_are_kept_apart_whatever_they_are_named():
    names = ["", "a", b"", b"a", "\ud800", b"\xed\xa0\x80", "\xff", b"\xff"]
    assert len({tenant_bytes(name) for name in names}) == len(names)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("what", ["policy key", "match", "insert"])
def test_what_fails_for_one_request_ends_that_one_alone(what, asynchronous, monkeypatch):
    """A policy's key, and the hashing of its tokens, when it is admitted and when a block is full."""

    def spoiled(of):
        return of == b"spoiled"

    if what == "policy key":
        honest = POLICIES["priority"]

        def key(sequence, now_s):
            if spoiled(sequence.request.tenant) and len(sequence.generated_ids) >= 2:
                raise ZeroDivisionError("a key")
            return honest(sequence, now_s)

        monkeypatch.setitem(POLICIES, "priority", key)
    else:
        call = getattr(HashChain, what)

        def failing(self, *given):
            if spoiled(given[-1]):
                raise ZeroDivisionError(f"a hash in {what}")
            return call(self, *given)

        monkeypatch.setattr(HashChain, what, failing)
    it = engine(policy="priority", num_blocks=60)
    if asynchronous:
        from workbench.serving import Engine

        it = Engine(it.model, it.scheduler.settings, num_blocks=60, block_size=4, asynchronous=True)
    bad = [
        Request("bad", tuple(tokens(3, 5)), 20, tenant=b"spoiled"),
        Request("worse", tuple(tokens(9, 6)), 20, tenant=b"spoiled", n=2),
    ]
    ended = it.run([*REQUESTS[:4], *bad, *REQUESTS[4:8]])
    assert {one.request_id for one in ended if one.finish_reason == "error"} == {"bad", "worse"}
    for one in ended:
        if one.request_id in ("bad", "worse"):
            assert isinstance(one.error, ZeroDivisionError) and one.finish_reason == "error"
            assert len(one.token_times_s) == len(one.token_ids) < 20
        else:
            assert one.token_ids == ALONE[one.request_id]
    check_empty(it)


# -- static batching -----------------------------------------------------------------------------------------------


def test_a_static_groups_padding_ends_at_the_context():
    """One text fills the context in a few steps, and another of its group goes on: the first was padded beyond."""
    context = 256
    requests = [
        Request("long", tuple(tokens(context - 4, 1)), 4, stop_token_ids=()),
        Request("short", tuple(tokens(5, 2)), 40, stop_token_ids=()),
    ]
    it = engine(batching="static", num_blocks=150)
    longest: list[int] = []
    ended = it.run(requests, watch=lambda report: longest.append(max(it.kv.lengths.values(), default=0)))
    assert {one.request_id: one.token_ids for one in ended} == {r.id: alone(r) for r in requests}
    assert max(longest) == context and it.scheduler.padding_rows == (context - 4 - 5) + 36
    check_empty(it)


@pytest.mark.parametrize("max_running", [3, 4, 8])
def test_static_samples_are_sequences_each_with_its_seed(max_running):
    requests = [
        Request("a", tuple(tokens(6, 3)), 7, WARM, seed=5, n=3),
        Request("b", tuple(tokens(11, 4)), 4, WARM, seed=9),
        Request("c", tuple(tokens(2, 5)), 9, n=2),
    ]
    it = engine(batching="static", num_blocks=130, max_running=max_running)
    ended = {(one.request_id, one.sample): one.token_ids for one in it.run(requests)}
    assert len(ended) == 6
    for request in requests[:2]:
        for sample in range(request.n):
            settings = {"temperature": 1.0, "top_p": 0.9, "seed": request.seed + sample}
            same = generate(
                it.model, request.prompt_ids, max_new_tokens=request.max_new_tokens, stop_token_ids=(), **settings
            )
            assert ended[request.id, sample] == tuple(same.tokens)
    assert ended["c", 0] == ended["c", 1] == alone(requests[2])
    check_empty(it)
    it.add(Request("gone", tuple(tokens(6, 3)), 7, n=3))
    it.step()
    assert {one.sample for one in it.abort("gone")} == {0, 1, 2}
    it.run()
    check_empty(it)


def poisoned(big: float):
    """The model, with keys and values of about this size in its first layer for token 7, and for no other token."""
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.embed.weight[:, 0] = 0
        model.embed.weight[7] = 0
        model.embed.weight[7, 0] = 4
        for part in (model.layers[0].attention.k, model.layers[0].attention.v):
            part.weight[:, 0] = big
    return model


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("prefix", ["hash", "radix"])
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_keys_beyond_what_few_bits_can_hold_end_their_own_request_with_words(format, prefix, asynchronous):
    """They are NaN when read, and so were, by 0 · NaN, the blocks before them, which a later prompt then took."""
    model, ids = poisoned(1e30), [t for t in tokens(30, 3) if t != 7]
    scheduler = SchedulerSettings(max_running=4)
    settings = {"format": format, "prefix": prefix, "asynchronous": asynchronous, "block_size": 4, "num_blocks": 30}
    clean = Engine(model, scheduler, **settings).run([Request("good", ids[:14], 1)])[0].token_ids
    it = Engine(model, scheduler, **settings)
    for count in (1, 5):
        [bad] = it.run([Request(f"bad{count}", [*ids[:12], 7, *ids[12:]], count)])
        assert bad.finish_reason == "error" and "float16" in str(bad.error) and "65,504" in str(bad.error)
        [good] = it.run([Request(f"good{count}", ids[:14], 1)])
        assert good.error is None and good.token_ids == clean
    check_empty(it)


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_forgotten_prefix_is_hit_no_more_and_no_block_is_lost(index):
    tables = BlockTables(8, 2, prefix_index(index, 2))
    for name, ids in (("a", [1, 2, 3, 4, 5, 6]), ("b", [1, 2, 3, 4, 7, 8])):
        hit = tables.open(name, ids)
        tables.grow({name: len(ids)})
        tables.remember(name, ids)
    assert hit == 4
    tables.release("a")
    tables.forget_prefix([1, 2, 3, 4, 5, 6])
    tables.check()
    assert tables.open("c", [1, 2, 3, 4, 9]) == 0 and len(tables.tables["b"]) == 3
    tables.release("b")
    tables.release("c")
    tables.check()
    assert tables.num_available == 8


# -- what was given is the owner's; the engine keeps its own ---------------------------------------------------------


class Contrary(float):
    """A number that compares and divides in its own way."""

    def __lt__(self, other):
        raise ZeroDivisionError("compared")

    __gt__ = __le__ = __ge__ = __truediv__ = __rtruediv__ = __lt__


@pytest.mark.parametrize("policy", POLICIES)
def test_a_number_of_another_class_is_taken_for_the_float_that_it_is(policy):
    """Two of them stopped every step: the queue could not be sorted."""
    odd = {"priority": Contrary(1), "arrival_s": Contrary(0), "deadline_s": Contrary(9)}
    requests = [Request(i, REQUESTS[i].prompt_ids, 3, WARM, seed=i, **odd) for i in range(3)]
    warm = SamplingSettings(Contrary(0.7), top_p=Contrary(0.9), presence_penalty=Contrary(0.1))
    requests.append(Request("warm", REQUESTS[3].prompt_ids, 3, warm, seed=3))
    assert all(one.error is None for one in engine(policy=policy).run(requests))
    with pytest.raises(WorkbenchError, match="priority must be"):
        Request("no number", (1,), 1, priority=type("Finite", (float,), {"__abs__": lambda self: 0})("nan"))


def test_what_an_owner_changes_after_add_changes_nothing():
    it = engine()
    sampling = SamplingSettings(1.0)
    request = Request("a", REQUESTS[0].prompt_ids, 5, sampling, seed=3, stop_token_ids=())
    expected = tuple(
        generate(it.model, request.prompt_ids, max_new_tokens=5, temperature=1.0, seed=3, stop_token_ids=()).tokens
    )
    it.add(request)
    it.step()
    object.__setattr__(sampling, "temperature", "warm")
    for name, value in {"id": ["b"], "n": 3, "tenant": 3, "max_new_tokens": "x", "prompt_ids": ()}.items():
        object.__setattr__(request, name, value)
    [ended] = it.run()
    assert ended.request_id == "a" and ended.token_ids == expected
    for changed in (lambda: request, lambda: Request("b", (1,), 1, sampling)):
        with pytest.raises(WorkbenchError):
            it.add(changed())
    check_empty(it)


def test_a_request_of_another_class_is_served():
    class Mine(Request):
        def __init__(self, prompt_ids):
            super().__init__("mine", prompt_ids, 3)

    assert engine().run([Mine(REQUESTS[0].prompt_ids)])[0].token_ids == ALONE[0][:3]


@pytest.mark.parametrize("wrong", [lambda: 1 / 0, lambda: None])
def test_a_length_policy_that_cannot_be_copied_turns_drafts_off_and_ends_no_request(wrong):
    """It raised in `add`, where the request was in the queue already, without a sampler."""

    class Once(Fixed):
        def copy(self):
            once = Fixed(3)
            once.copy = wrong
            return once

    settings = SchedulerSettings(draft_tokens=3)
    it = Engine(MODEL, settings, num_blocks=60, block_size=4, draft="prompt_lookup", draft_length=Once(3))
    reports = []
    ended = it.run(REQUESTS[:3], watch=reports.append)
    assert {one.request_id: one.token_ids for one in ended} == {i: ALONE[i] for i in range(3)}
    assert it.why_no_drafts and it.draft_errors == sum(len(one.draft_errors) for one in reports) > 0
    check_empty(it)


# -- an error in the middle of a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 9, 14])
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_step_that_the_model_did_not_end_is_undone_and_planned_again(switch, at, monkeypatch):
    """The engine could go on where a request was admitted next, by luck; else no step worked again."""
    given = dict(SWITCHES[switch])
    if "draft" in given:
        given["draft"] = given["draft"]()
    it, calls, honest = switched(**given), [], type(MODEL.layers[1]).forward

    def interrupted(self, *args, **kwargs):
        calls.extend([1] * (self in list(MODEL.layers)))
        if len(calls) == at:
            raise KeyboardInterrupt
        return honest(self, *args, **kwargs)

    for request in REQUESTS[:6]:
        it.add(request)
    ended = []
    with monkeypatch.context() as patched:
        patched.setattr(type(MODEL.layers[1]), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            while True:
                ended += it.step().finished
    ended += it.run()
    assert {one.request_id: one.token_ids for one in ended} == {i: ALONE[i] for i in range(6)} and len(ended) == 6
    assert not it.draft_errors
    check_empty(it)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_with_a_step_half_done_refuses_to_go_on_and_says_why(asynchronous, monkeypatch):
    """Its texts had a token too many, or went on after a stop token."""
    it = Engine(MODEL, SchedulerSettings(), num_blocks=60, block_size=4, asynchronous=asynchronous)
    it.add(REQUESTS[0])
    it.step()
    it.step()

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(it.scheduler, "arrived" if asynchronous else "postprocess", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.step()
    assert it.why_broken == "KeyboardInterrupt"
    for call in (it.step, it.run, lambda: it.add(REQUESTS[1])):
        with pytest.raises(WorkbenchError, match=r"half done \(KeyboardInterrupt"):
            call()
    [ended] = it.abort(0)
    assert ended.token_ids == ALONE[0][: len(ended.token_ids)]
    check_empty(it)


def test_one_sample_is_aborted_and_the_others_go_on(tiny_model):
    engine = Engine(tiny_model, SchedulerSettings(max_running=4))
    engine.add(Request("a", (1, 2, 3), 12, n=3, sampling=SamplingSettings(temperature=1.0), seed=1))
    with pytest.raises(WorkbenchError, match="have not been started"):
        engine.abort("a", 0)
    for _ in range(4):
        engine.step()
    [ended] = engine.abort("a", 1)
    assert (ended.sample, ended.finish_reason) == (1, "abort") and ended.token_ids
    for wrong in (1, 7, -1):
        with pytest.raises(WorkbenchError, match=f"sample {wrong} of request 'a' has ended"):
            engine.abort("a", wrong)
    rest = engine.run()
    assert sorted((one.sample, one.finish_reason, len(one.token_ids)) for one in rest) == [
        (0, "length", 12),
        (2, "length", 12),
    ]
    assert not engine.kv.lengths
