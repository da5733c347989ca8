"""The engine over models with state layers, alone and among attention: what it writes is what the model writes alone,
which `generate` finds without any cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import every_pair, random_decoder
from test_engine import WARM, Engine, ragged, tokens
from test_kv_state import model_of

from workbench.decoding import SamplingSettings
from workbench.decoding.beam import generate_beam
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import Paged, State
from workbench.models import prepare
from workbench.serving import Request, SchedulerSettings
from workbench.speculation import ModelDraft
from workbench.speculation.drafts import NGramDraft
from workbench.speculation.drafts.lookup import PromptLookupDraft
from workbench.speculation.drafts.ngram_table import NGramTable
from workbench.speculation.lengths import Fixed

MODELS = {layers: model_of("linear_attention", layers, context_length=128) for layers in ("alone", "hybrid")}
SMALL = {
    "state": random_decoder(dataclasses.replace(MODELS["alone"].config), seed=1).double(),
    "attention": random_decoder(
        dataclasses.replace(MODELS["alone"].config, mixers=(), state_shape=None, intermediate_size=16), seed=1
    ).double(),
}
REQUESTS = ragged(10)


def alone(request: Request, model) -> tuple[int, ...]:
    sampling = request.sampling or SamplingSettings(temperature=0.0)
    given = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": request.seed}
    asked = {"max_new_tokens": request.max_new_tokens, "stop_token_ids": (), "kv": "recompute"}
    return tuple(generate(model, list(request.prompt_ids), **asked, **given).tokens)


ALONE = {layers: {r.id: alone(r, model) for r in REQUESTS} for layers, model in MODELS.items()}
TABLE = NGramTable.of([tokens(300, 5)], 64, order=3)
SWITCHES = {
    "as it comes": {},
    "nothing found again": {"prefix": None},
    "radix tree, swapped": {"prefix": "radix", "preemption": "swap"},
    "chunks of 5": {"chunk": 5},
    "chunks of 1, small budget": {"chunk": 1, "token_budget": 9},
    "blocks of 1": {"block_size": 1, "num_blocks": 100},
    "one step ahead": {"asynchronous": True, "preemption": "swap"},
    "static": {"batching": "static", "num_blocks": 130},
    "drafts of a state model": {"draft_tokens": 4, "draft": lambda model: ModelDraft(SMALL["state"])},
    "drafts of attention, swapped": {
        "draft_tokens": 3,
        "draft": lambda model: ModelDraft(SMALL["attention"]),
        "preemption": "swap",
    },
    "the model itself as draft": {"draft_tokens": 3, "draft": ModelDraft},
    "copies as draft": {"draft_tokens": 6, "draft": lambda model: PromptLookupDraft(model, min_ngram=1)},
    "n-grams in trees": {"draft_tokens": 5, "draft": lambda model: NGramDraft(TABLE, branching=(2, 2))},
}


def engine(model, *, num_blocks: int = 26, block_size: int = 4, **given) -> Engine:
    own = {name: given.pop(name) for name in ("prefix", "draft", "asynchronous", "draft_length") if name in given}
    if "draft" in own:
        own["draft"] = own["draft"](model)
    settings = SchedulerSettings(**{"max_running": 8} | given)
    return Engine(model, settings, num_blocks=num_blocks, block_size=block_size, **own)


def check_empty(it: Engine) -> None:
    kv = it.kv
    assert isinstance(kv, State)
    kv.tables.check()
    kv.cells.check(kv.lengths)
    assert it.idle and kv.tables.num_available == kv.tables.num_blocks and not kv.lengths and not kv.bytes_in_use
    assert not kv._swapped and not kv._swapped_states
    assert kv.cells.num_held() == kv.cells.num_checkpoints


@pytest.mark.parametrize(
    ("layers", "switch"),
    [("hybrid", switch) for switch in SWITCHES] + [("alone", switch) for switch in [*SWITCHES][::3]],
)
def test_every_text_is_what_it_would_be_alone_and_everything_is_given_back(layers, switch):
    it = engine(MODELS[layers], **SWITCHES[switch])
    came = it.run(REQUESTS)
    assert {f.request_id: f.token_ids for f in came} == ALONE[layers] and not it.draft_errors
    if switch not in ("static", "blocks of 1"):
        assert it.scheduler.preemptions > 0, "the pool was too large for this claim"
    check_empty(it)


def test_drafts_are_accepted_so_that_states_go_back_and_on():
    """A draft that is the model itself is right each time; of one that is wrong nothing stays."""
    for who, share in (("the model itself as draft", 1.0), ("drafts of a state model", 0.5)):
        it = engine(MODELS["hybrid"], num_blocks=200, **SWITCHES[who])
        reports = []
        it.run(REQUESTS, watch=reports.append)
        drafted, accepted = (sum(getattr(one, name) for one in reports) for name in ("drafted", "accepted"))
        assert drafted > 60 and (accepted == drafted if share == 1.0 else accepted < share * drafted)


@pytest.mark.parametrize("layers", MODELS)
def test_drawn_texts_and_samples_are_those_of_their_seeds(layers):
    requests = [dataclasses.replace(r, sampling=WARM, seed=i, n=1 + i % 3) for i, r in enumerate(REQUESTS[:6])]
    it = engine(MODELS[layers], preemption="swap", prefix="hash")
    came = {(f.request_id, f.sample): f.token_ids for f in it.run(requests)}
    for r in requests:
        for sample in range(r.n):
            again = dataclasses.replace(r, seed=r.seed + sample, n=1)
            assert came[r.id, sample] == alone(again, MODELS[layers])
    check_empty(it)


@pytest.mark.parametrize("layers", MODELS)
def test_a_prefix_is_found_as_far_as_there_is_a_state_and_said_so(layers):
    model, prompt = MODELS[layers], tokens(30, 1)
    it = engine(model, num_blocks=60)
    it.run([Request("before", tuple(prompt[:21]), 3, stop_token_ids=())])
    for name, shared, hit in (("a", 21, 20), ("b", 19, 0), ("c", 20, 20)):
        request = Request(name, (*prompt[:shared], *tokens(8, 9)), 5, stop_token_ids=())
        [result] = it.run([request])
        assert result.token_ids == alone(request, model)
        assert result.hit_tokens == hit, name
    check_empty(it)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_mixer_that_raises_in_mid_step_undoes_the_step(draft, asynchronous, monkeypatch):
    model = MODELS["hybrid"]
    given = {} if draft is None else SWITCHES["copies as draft"]
    it = engine(model, chunk=5, asynchronous=asynchronous, **given)
    for request in REQUESTS[:6]:
        it.add(request)
    mixer, finished = model.layers[2].mixer, []
    for at in (1, 2, 3, 5, 8):
        calls, honest = [], type(mixer).mix

        def interrupted(self, *given, calls=calls, honest=honest, at=at):
            calls.append(1)
            if len(calls) == at:
                raise KeyboardInterrupt
            return honest(self, *given)

        with monkeypatch.context() as patched:
            patched.setattr(type(mixer), "mix", interrupted)
            with pytest.raises(KeyboardInterrupt):
                for _ in range(8):
                    finished += it.step().finished
        assert not it.why_broken
        it.kv.tables.check()
    finished += it.run()
    assert {f.request_id: f.token_ids for f in finished} == {r.id: ALONE["hybrid"][r.id] for r in REQUESTS[:6]}
    check_empty(it)


def test_an_error_after_the_forward_undoes_the_step_as_well(monkeypatch):
    """The kv has taken the batch by then, and goes back to the lengths before it."""
    it = engine(MODELS["hybrid"])
    for request in REQUESTS[:6]:
        it.add(request)
    for _ in range(3):
        it.step()
    with monkeypatch.context() as patched:
        patched.setattr(type(it._step), "_chosen", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            it.step()
    assert {f.request_id: f.token_ids for f in it.run()} == {r.id: ALONE["hybrid"][r.id] for r in REQUESTS[:6]}
    check_empty(it)


@pytest.mark.parametrize("state", ["waiting", "in its prompt", "writing", "swapped"])
def test_abort_at_any_moment(state):
    it = engine(MODELS["hybrid"], chunk=7, preemption="swap", token_budget=16)
    for request in REQUESTS:
        it.add(request)
    here = {
        "waiting": lambda: it.scheduler.waiting,
        "in its prompt": lambda: [s for s in it.scheduler.running if s.unsent > 1 and s.computed],
        "writing": lambda: [s for s in it.scheduler.running if s.num_tokens > s.prompt_tokens],
        "swapped": lambda: it.scheduler.swapped,
    }[state]
    done = []
    while not here():
        done += it.step().finished
    victim = here()[0].request.id
    [gone] = it.abort(victim)
    assert gone.token_ids == ALONE["hybrid"][victim][: len(gone.token_ids)]
    done += it.run()
    assert {f.request_id: f.token_ids for f in done} == {
        r.id: ALONE["hybrid"][r.id] for r in REQUESTS if r.id != victim
    }
    check_empty(it)


@every_pair(layers=MODELS, length=[1, 4, "dynamic"], who=["state", "attention", "itself"])
def test_generate_with_a_draft_writes_what_it_writes_without(layers, length, who):
    model = MODELS[layers]
    draft = ModelDraft(model if who == "itself" else SMALL[who])
    asked = {"max_new_tokens": 16, "temperature": 0.0, "stop_token_ids": ()}
    came = generate(model, tokens(7, 3), **asked, draft=draft, draft_length=length)
    assert came.tokens == generate(model, tokens(7, 3), **asked).tokens
    assert not draft._kv.lengths


def test_a_state_model_drafts_further_than_it_can_go_back():
    """Its cache keeps 16 states; what it cannot cut it reads again."""
    target, draft = MODELS["hybrid"], ModelDraft(SMALL["state"])
    kv = State(target.config, dtype=torch.float64, rewind=20)
    asked = {"max_new_tokens": 24, "temperature": 0.0, "stop_token_ids": ()}
    came = generate(target, tokens(7, 3), **asked, draft=draft, draft_length=Fixed(20), kv=kv)
    assert came.tokens == generate(target, tokens(7, 3), **asked).tokens


def test_beams_are_forks_of_states():
    model = MODELS["hybrid"]
    asked = {"num_beams": 3, "max_new_tokens": 8, "stop_token_ids": ()}
    kv = State(model.config, max_sequences=12, max_tokens=64, block_size=4, dtype=torch.float64, rewind=0)
    came, plain = (generate_beam(model, tokens(9, 4), kv=one, **asked) for one in (kv, "recompute"))
    assert [one.tokens for one in came] == [one.tokens for one in plain]
    kv.cells.check(kv.lengths)
    assert not kv.lengths


def test_the_engine_takes_the_kv_that_the_model_needs():
    it = engine(MODELS["alone"], draft_tokens=3, draft=ModelDraft)
    assert isinstance(it.kv, State) and it.kv.rewind == 3
    assert engine(MODELS["alone"]).kv.rewind == 0
    assert type(engine(SMALL["attention"]).kv) is Paged
    with pytest.raises(WorkbenchError, match="not recorded"):
        Engine(MODELS["alone"], graphs=True)
    assert "not recorded" in engine(MODELS["alone"]).why_no_graphs
    with pytest.raises(WorkbenchError, match="prepare"):
        prepare(MODELS["alone"])


def test_a_token_costs_no_more_cells_however_long_the_text():
    """With the prefix cache off: the state before the step and the one after it."""
    it, held = engine(MODELS["alone"], num_blocks=100, prefix=None), set()
    it.run(
        [Request(0, tuple(tokens(30, 0)), 30, stop_token_ids=())], watch=lambda report: held.add(it.kv.cells.num_held())
    )
    assert held <= {0, 1, 2}
