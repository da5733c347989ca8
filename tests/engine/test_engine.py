"""The engine writes for every request what it would get alone, whatever goes on beside it, and gives everything
back."""

from __future__ import annotations

import dataclasses
import gc
import random

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.decoding import SamplingSettings
from workbench.decoding.beam import generate_beam
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import KINDS
from workbench.models import prepare
from workbench.serving import Engine, Request, SchedulerSettings, Status, requests_of
from workbench.serving.load import prompt_ids, workload
from workbench.speculation import ModelDraft
from workbench.speculation.drafts.lookup import PromptLookupDraft

V = 64
MODEL = random_decoder(tiny_config(vocab_size=V), seed=0).double()
SMALL = random_decoder(tiny_config(vocab_size=V, num_layers=1), seed=1).double()
WARM = SamplingSettings(temperature=1.0, top_p=0.9)


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(V) for _ in range(count)]


def ragged(count: int, seed: int = 0, **given) -> list[Request]:
    """Half of them begin with the same 20 tokens."""
    rng, shared = random.Random(seed), tokens(20, 99)
    return [
        Request(
            i,
            tuple((shared if i % 2 else []) + tokens(rng.randint(1, 30), i)),
            rng.randint(1, 24),
            **{"stop_token_ids": (), **given},
        )
        for i in range(count)
    ]


def alone(request: Request, model=MODEL) -> tuple[int, ...]:
    sampling = request.sampling or SamplingSettings(temperature=0.0)
    given = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": request.seed}
    return tuple(
        generate(
            model,
            list(request.prompt_ids),
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=(),
            kv="contiguous",
            **given,
        ).tokens
    )


def engine(model=MODEL, *, num_blocks: int = 30, block_size: int = 4, **given) -> Engine:
    own = {name: given.pop(name) for name in ("prefix", "draft", "draft_length", "format", "clock") if name in given}
    return Engine(
        model, SchedulerSettings(**{"max_running": 8} | given), num_blocks=num_blocks, block_size=block_size, **own
    )


def check_empty(it: Engine) -> None:
    tables = it.kv.tables
    tables.check()
    assert it.idle and tables.num_available == tables.num_blocks and not tables.tables and not tables.swapped
    assert not it.kv.lengths and not it.kv._swapped and not it.scheduler.alive() and not it.kv.bytes_in_use


REQUESTS = ragged(40)
ALONE = {request.id: alone(request) for request in REQUESTS}
SWITCHES = {
    "as it comes": {},
    "nothing found again": {"prefix": None},
    "radix tree": {"prefix": "radix"},
    "swapped": {"preemption": "swap"},
    "shortest first": {"policy": "shortest_remaining"},
    "chunks of 5": {"chunk": 5},
    "small budget": {"token_budget": 9},
    "blocks of 1": {"block_size": 1, "num_blocks": 100},
    "one at a time": {"max_running": 1},
    "static": {"batching": "static", "num_blocks": 130},
    "a draft": {"draft_tokens": 4, "draft": lambda: ModelDraft(SMALL, max_sequences=20)},
    "the model itself as draft": {"draft_tokens": 3, "draft": lambda: ModelDraft(MODEL, max_sequences=20)},
    "copies as draft, swapped": {
        "draft_tokens": 3,
        "draft": lambda: PromptLookupDraft(MODEL, min_ngram=1),
        "preemption": "swap",
    },
    "drafts in trees": {"draft_tokens": 6, "draft": lambda: ModelDraft(SMALL, branching=(2, 2), max_sequences=20)},
}


def made(switch: str, **more) -> Engine:
    given = dict(SWITCHES[switch]) | more
    if "draft" in given:
        given["draft"] = given["draft"]()
    return engine(**given)


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_text_is_what_it_would_be_alone_and_everything_is_given_back(switch):
    it = made(switch)
    found = it.run(REQUESTS)
    assert {f.request_id: f.token_ids for f in found} == ALONE and len(found) == len(REQUESTS)
    assert all(f.finish_reason == "length" and len(f.token_times_s) == len(f.token_ids) for f in found)
    if switch not in ("one at a time", "static", "blocks of 1"):
        assert it.scheduler.preemptions > 0, "the pool was too large for this claim"
    if it._speculator is not None and hasattr(it._speculator.draft, "_kv"):
        assert not it._speculator.draft._kv.lengths
    check_empty(it)


@pytest.mark.parametrize("num_blocks", range(16, 20))
def test_a_static_group_has_room_for_its_padding_whose_blocks_are_its_own(num_blocks):
    """30 tokens take 8 blocks of 4, and so do 25 and 5 of padding to their ends; but 25 take 7, and 5 take 2."""
    it = engine(batching="static", num_blocks=num_blocks)
    requests = [Request(length, tuple(tokens(length, length)), 2) for length in (30, 25)]
    assert {f.request_id: f.token_ids for f in it.run(requests)} == {r.id: alone(r) for r in requests}
    check_empty(it)


@pytest.mark.parametrize("switch", ["as it comes", "swapped", "a draft", "chunks of 5"])
def test_drawn_texts_are_those_of_their_seeds(switch):
    """Without a draft token for token those of `generate`; with one, the same ones whoever else is served."""
    requests = [dataclasses.replace(r, sampling=WARM, seed=i) for i, r in enumerate(REQUESTS[:16])]
    found = {f.request_id: f.token_ids for f in made(switch).run(requests)}
    if switch != "a draft":
        assert found == {r.id: alone(r) for r in requests}
    else:
        assert all(len(found[r.id]) == r.max_new_tokens for r in requests)


HEADS = {
    "GQA": {},
    "MHA": {"num_kv_heads": 4},
    "windows": {"sliding_window": 6, "global_layers": (1,)},
    "sinks": {"sliding_window": 6, "attention_sinks": 2},
    "shared layers": {"kv_sources": (0, 0)},
}


@pytest.mark.parametrize("heads", HEADS)
def test_every_shape_of_attention_is_served(heads):
    model = prepare(random_decoder(tiny_config(vocab_size=V, **HEADS[heads]), seed=2).double())
    it = engine(model)
    found = {f.request_id: f.token_ids for f in it.run(REQUESTS[:12])}
    assert found == {r.id: alone(r, model) for r in REQUESTS[:12]}
    check_empty(it)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_in_few_bits_it_is_exact_to_itself_alone(format):
    """A text in few bits does not depend on who is served beside it, on preemption, or on what was found."""
    requests = REQUESTS[:12]
    single = {
        r.id: engine(format=format, max_running=1, prefix=None, token_budget=512).run([r])[0].token_ids
        for r in requests
    }
    it = engine(format=format, num_blocks=24)
    assert {f.request_id: f.token_ids for f in it.run(requests)} == single and it.scheduler.preemptions
    check_empty(it)


# -- edges of blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, "self"], ids=["plain", "drafted"])
@pytest.mark.parametrize("found", ["nothing", "a part", "all"])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_prompts_at_the_edge_of_a_block(beyond, found, draft):
    """Lengths k · block − 1, 0, + 1; before and after a preemption."""
    size = 4
    given = {} if draft is None else {"draft": ModelDraft(SMALL, max_sequences=20), "draft_tokens": 3}
    for blocks in (1, 2, 5):
        prompt = tokens(blocks * size + beyond, blocks)
        before = {"nothing": tokens(9, 1234), "a part": [*prompt[: size * (blocks // 2)], 5, 6, 7], "all": prompt}[
            found
        ]
        requests = [Request("before", tuple(before), 3), Request("x", tuple(prompt), 9)]
        it = engine(num_blocks=40, block_size=size, **given)
        it.run(requests[:1])
        [result] = it.run(requests[1:])
        assert result.token_ids == alone(requests[1])
        most = (len(prompt) - 1) // size * size
        expected = {"nothing": 0, "a part": min(most, size * (blocks // 2)), "all": most}[found]
        assert result.hit_tokens == expected
        it.add(requests[1].__class__("y", tuple(prompt), 9))
        for _ in range(3):
            it.step()
        sequence = it.scheduler.running[0]
        plan = type(it.step().plan)()
        it.scheduler._preempt(plan, sequence)
        it._follow(plan)
        assert sequence.status is Status.WAITING and sequence.preemptions == 1
        [result] = it.run()
        assert result.token_ids == alone(requests[1]) and result.preemptions == 1
        check_empty(it)


# -- churn ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_many_requests_three_in_ten_aborted(preemption):
    """Half of them begin alike, the pool is tight; every text that ends is the one it would be alone."""
    count, rng, shared = 400, random.Random(7), [tokens(12, s) for s in range(5)]
    kinds = [
        (tuple((rng.choice(shared) if i % 2 else []) + tokens(rng.randint(1, 8), i)), rng.randint(1, 8))
        for i in range(60)
    ]
    requests = [Request(i, *rng.choice(kinds), stop_token_ids=()) for i in range(count)]
    expected = {kind: alone(Request("x", *kind)) for kind in kinds}
    it = engine(num_blocks=14, block_size=3, max_running=8, token_budget=40, chunk=11, preemption=preemption)
    waiting, aborted, done = list(requests), 0, []
    doomed = set(rng.sample(range(count), 132))
    while waiting or not it.idle:
        for _ in range(rng.randint(0, 3)):
            if waiting:
                it.add(waiting.pop(0))
        done += it.step().finished
        for sequence in it.scheduler.alive():
            if sequence.request.id in doomed and rng.random() < 0.25:
                [ended] = it.abort(sequence.request.id)
                doomed.discard(sequence.request.id)
                aborted += 1
                whole = expected[sequence.request.prompt_ids, sequence.request.max_new_tokens]
                assert ended.finish_reason == "abort" and ended.token_ids == whole[: len(ended.token_ids)]
        it.kv.tables.check()
    assert len(done) + aborted == count and aborted >= 120
    assert it.scheduler.preemptions >= 40 and it.scheduler.hit_tokens > 200
    for result in done:
        request = requests[result.request_id]
        assert result.token_ids == expected[request.prompt_ids, request.max_new_tokens]
    check_empty(it)


def test_memory_goes_back_to_where_it_was():
    it = engine(num_blocks=22)
    it.run(ragged(20, seed=1))
    gc.collect()
    before = sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor))
    it.run([Request(("again", r.id), r.prompt_ids, r.max_new_tokens) for r in ragged(60, seed=2)])
    gc.collect()
    assert sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor)) == before
    check_empty(it)


# -- several texts of one prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_tokens", [1, 3, 4, 5, 20])
def test_samples_share_their_prompt_and_are_those_of_their_seeds(prompt_tokens):
    prompt = tokens(prompt_tokens, 3)
    it = engine(num_blocks=60)
    it.add(Request("a", tuple(prompt), 10, n=4, sampling=WARM, seed=3, stop_token_ids=()))
    held, results = [], []
    while not it.idle:
        report = it.step()
        results += report.finished
        held.append(report.blocks_used)
    assert len(results) == 4
    for result in results:
        given = {"temperature": WARM.temperature, "top_p": WARM.top_p, "seed": 3 + result.sample}
        same = generate(MODEL, prompt, max_new_tokens=10, stop_token_ids=(), kv="contiguous", **given)
        assert result.token_ids == tuple(same.tokens)
    most = -(-(prompt_tokens + 9) // 4)
    assert max(held) <= (prompt_tokens - 1) // 4 + 4 * (most - (prompt_tokens - 1) // 4), (
        "whole blocks of the prompt once"
    )
    assert it.kv.tables.copies == (0 if (prompt_tokens - 1) % 4 == 0 else 3), "the last writer keeps the block"
    check_empty(it)


@pytest.mark.slow
def test_nearly_all_of_the_room_that_is_taken_holds_tokens():
    """Conversations of their real lengths. Beside it what a slot of the whole context for each would hold of them."""
    config = tiny_config(num_layers=1, context_length=16_384)
    it = engine(random_decoder(config), num_blocks=1600, block_size=16, max_running=8, token_budget=2048, prefix=None)
    for number, one in enumerate(workload("conversation").draw(16, seed=0)):
        it.add(Request(number, tuple(prompt_ids(one, config.vocab_size, seed=0)), one.new_tokens))
    useful = taken = reserved = 0
    while not it.idle:
        report = it.step()
        useful += report.useful_tokens
        taken += report.blocks_used * it.kv.block_size
        reserved += report.running * config.context_length
    assert useful / taken >= 0.96
    assert useful / reserved < 0.2
    check_empty(it)


def test_samples_survive_preemption_and_abort():
    requests = [Request(i, tuple(tokens(10, i)), 12, n=3, sampling=WARM, seed=i, stop_token_ids=()) for i in range(6)]
    it = engine(num_blocks=14, max_running=6)
    found = it.run(requests)
    ample = engine(num_blocks=200, max_running=6).run(requests)
    assert it.scheduler.preemptions and len(found) == 18
    texts = [{(f.request_id, f.sample): f.token_ids for f in each} for each in (found, ample)]
    assert texts[0] == texts[1]
    it.add(Request("gone", tuple(tokens(10, 50)), 12, n=3))
    for _ in range(3):
        it.step()
    assert [f.sample for f in it.abort("gone")] == [0, 1, 2]
    check_empty(it)


def test_beams_are_forks_that_share_their_blocks():
    prompt = tokens(18, 5)
    paged = KINDS["paged"](MODEL.config, max_sequences=12, max_tokens=64, block_size=4, dtype=torch.float64)
    found = generate_beam(MODEL, prompt, num_beams=4, max_new_tokens=10, kv=paged)
    plain = generate_beam(MODEL, prompt, num_beams=4, max_new_tokens=10)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert paged.tables.copies > 0 and not paged.lengths
    paged.tables.check()


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_text_and_only_that():
    whole = {r.id: alone(r) for r in REQUESTS[:10]}
    stop = whole[3][len(whole[3]) // 2]
    found = engine().run([Request(r.id, r.prompt_ids, r.max_new_tokens, stop_token_ids=(stop,)) for r in REQUESTS[:10]])
    for result in found:
        text = whole[result.request_id]
        end = text.index(stop) + 1 if stop in text else len(text)
        assert result.token_ids == text[:end]
        assert result.finish_reason == ("stop" if stop in text else "length")


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_request_ends_at_the_models_end_of_text_as_generate_does_unless_it_names_its_own_stops(batching, monkeypatch):
    """A `Request` went on beyond it, and `generate` did not."""
    end_of_text = ALONE[3][len(ALONE[3]) // 2]
    monkeypatch.setattr(MODEL, "config", dataclasses.replace(MODEL.config, eos_token_ids=(end_of_text,)))
    given = [dataclasses.replace(request, stop_token_ids=None, n=1 + request.id % 2) for request in REQUESTS[:10]]
    it = engine(batching=batching, num_blocks=60)
    ended = it.run(given)
    for result in ended:
        request = REQUESTS[result.request_id]
        how = {"max_new_tokens": request.max_new_tokens, "kv": "contiguous"}
        assert result.token_ids == tuple(generate(MODEL, list(request.prompt_ids), **how).tokens)
        assert (result.finish_reason == "stop") == (result.token_ids[-1] == end_of_text)
    assert {result.finish_reason for result in ended} == {"stop", "length"} and len(ended) == 15
    own = it.run([dataclasses.replace(request, id=f"own {request.id}") for request in REQUESTS[:10]])
    assert {f.request_id: f.token_ids for f in own} == {f"own {r.id}": ALONE[r.id] for r in REQUESTS[:10]}


class Spoiled(SamplingSettings):
    """Settings whose filters raise after some tokens: what a learner's own filter may do."""

    def active(self):
        self.__dict__["asked"] = self.__dict__.get("asked", 0) + 1
        if self.__dict__["asked"] > 6:
            raise ZeroDivisionError("in a filter")
        return super().active()


@pytest.mark.parametrize("draft", [None, "self"])
def test_a_request_whose_settings_raise_in_mid_run_fails_alone(draft):
    given = {} if draft is None else {"draft": ModelDraft(SMALL, max_sequences=20), "draft_tokens": 3}
    it = engine(num_blocks=60, **given)
    spoiled = Request("spoiled", tuple(tokens(9, 1)), 20, Spoiled(temperature=1.0), seed=0, stop_token_ids=())
    found = {f.request_id: f for f in it.run([*REQUESTS[:6], spoiled, *REQUESTS[6:10]])}
    failed = found.pop("spoiled")
    assert failed.finish_reason == "error" and isinstance(failed.error, ZeroDivisionError)
    assert len(failed.token_ids) < 20
    assert {i: f.token_ids for i, f in found.items()} == {r.id: ALONE[r.id] for r in REQUESTS[:10]}
    check_empty(it)


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_request_for_which_the_model_gives_nan_fails_alone(draft):
    """A token whose embedding overflowed: every text with it has NaN in its rows, keys and values, and nobody
    else's."""
    model = random_decoder(tiny_config(tie_embeddings=False, num_layers=2))
    broken = 4095
    with torch.no_grad():
        model.embed.weight[broken] = float("nan")
    given = {} if draft is None else {"draft": "prompt_lookup", "draft_tokens": 3}
    it = engine(model, num_blocks=34, **given)  # its blocks are taken by others soon
    bad = Request("bad", (5, 6, broken, 7, 8), 20)
    found = {f.request_id: f for f in it.run([*REQUESTS[:4], bad, *REQUESTS[4:20]])}
    failed = found.pop("bad")
    assert failed.finish_reason == "error" and failed.token_ids == () and "gave NaN logits" in str(failed.error)
    assert {i: f.token_ids for i, f in found.items()} == {r.id: alone(r, model) for r in REQUESTS[:20]}
    check_empty(it)
    with pytest.raises(WorkbenchError, match="gave NaN logits"):
        generate(model, [5, 6, broken], max_new_tokens=3, draft="prompt_lookup")


@pytest.mark.parametrize("state", ["waiting", "in its prompt", "writing", "swapped", "padding"])
def test_abort_at_any_moment(state):
    continuous, static = {"chunk": 3, "preemption": "swap"}, {"batching": "static", "num_blocks": 130}
    it = engine(max_running=2, **(static if state == "padding" else continuous))
    for request in REQUESTS[:4]:
        it.add(request)
    steps = {"waiting": 0, "in its prompt": 1, "writing": 14, "swapped": 14, "padding": 4}[state]
    done = {f.request_id for _ in range(steps) for f in it.step().finished}
    target = next(r.id for r in REQUESTS[:4] if r.id not in done)
    if state == "swapped":
        plan = type(it.step().plan)()
        sequence = next(t for t in it.scheduler.running if t.computed)
        it.scheduler._preempt(plan, sequence)
        it._follow(plan)
        assert sequence.status is Status.SWAPPED
        target = sequence.request.id
    [ended] = it.abort(target)
    assert ended.finish_reason == "abort" and ended.token_ids == ALONE[target][: len(ended.token_ids)]
    for again in (target, "never added"):
        with pytest.raises(WorkbenchError, match=r"finished already|unknown"):
            it.abort(again)
    rest = {f.request_id: f.token_ids for f in it.run()}
    assert all(ALONE[i] == text for i, text in rest.items())
    check_empty(it)


# -- refused at the door -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_ids": (1,) * 100, "max_new_tokens": 30}, r"take 33 blocks of 4, and the pool has 30"),
        ({"prompt_ids": (1,) * 200, "max_new_tokens": 90}, r"make 290, and the context of model .* holds 256"),
        ({"prompt_ids": ()}, "the prompt of request 'x' is empty"),
        ({"prompt_ids": (1, -1)}, "whole numbers of at least 0, .* is -1"),
        ({"prompt_ids": (1, V)}, f"lie in 0 … {V - 1}, the prompt of request 'x'.1. is {V}"),
        ({"prompt_ids": 7}, "must be a list of token ids, got 7"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": -3}, "max_new_tokens must be a whole number of at least 1, got -3"),
        ({"n": 0}, "n must be a whole number of at least 1"),
        ({"n": 9}, r"n=9 sequences at a time, and max_running=8"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"arrival_s": "now"}, "arrival_s must be a finite number"),
        ({"seed": 2**63}, r"seed must be below 2\*\*63"),
        ({"seed": 2**63 - 2, "n": 3}, r"seed must be below 2\*\*63"),
        ({"seed": -1}, "seed"),
        ({"tenant": 3}, "tenant must be text or bytes"),
        ({"sampling": 0.5}, "sampling takes SamplingSettings, got float"),
        ({"stop_token_ids": (V,)}, "the stop_token_ids of request"),
        ({"id": 0}, "request 0 was added before"),
    ],
)
def test_what_can_never_be_served_is_refused_and_nothing_changes(given, message):
    it = engine()
    it.add(REQUESTS[0])
    before = (len(it.scheduler.waiting), it.scheduler.alive(), it.kv.tables.num_available)
    with pytest.raises(WorkbenchError, match=message):
        it.add(Request(**{"id": "x", "prompt_ids": (1, 2, 3), "max_new_tokens": 4} | given))
    assert before == (len(it.scheduler.waiting), it.scheduler.alive(), it.kv.tables.num_available)
    assert it.run()[0].token_ids == ALONE[0]
    check_empty(it)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_running": 0}, "max_running must be"),
        ({"token_budget": 0}, "token_budget must be"),
        ({"token_budget": 4}, "less than a token for each of max_running=8"),
        ({"chunk": 0}, "chunk must be"),
        ({"watermark": 1.5}, "watermark"),
        ({"policy": "first_came"}, "did you mean 'first_come'"),
        ({"preemption": "copy"}, "preemption"),
        ({"batching": "padded"}, "batching"),
        ({"aging_s": 0}, "aging_s"),
        ({"num_blocks": 0}, "num_blocks must be"),
        ({"block_size": 0}, "block_size must be"),
        ({"prefix": "tree"}, "prefix index"),
        ({"draft_tokens": 3}, "draft_tokens needs a draft"),
        ({"draft": "prompt_lookup"}, "a draft needs SchedulerSettings"),
        ({"draft": "prompt_lookup", "draft_tokens": 2, "batching": "static"}, "no effect with batching='static'"),
        ({"draft": "prompt_lockup", "draft_tokens": 2}, "did you mean 'prompt_lookup'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, message):
    with pytest.raises(WorkbenchError, match=message):
        engine(**given)


def test_a_pool_that_holds_one_text_serves_them_one_after_the_other():
    requests = requests_of([tokens(9, i) for i in range(5)], 7)
    it = engine(num_blocks=4)
    assert {f.request_id: f.token_ids for f in it.run(requests)} == {r.id: alone(r) for r in requests}
    check_empty(it)


def test_an_interrupted_step_leaves_the_engine_able_to_go_on(monkeypatch):
    it = engine()
    for request in REQUESTS[:6]:
        it.add(request)
    for _ in range(4):
        it.step()
    honest = type(MODEL.layers[1]).forward
    calls = []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return honest(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(type(MODEL.layers[1]), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.step()
    assert {f.request_id: f.token_ids for f in it.run()} == {r.id: ALONE[r.id] for r in REQUESTS[:6]}
    check_empty(it)
