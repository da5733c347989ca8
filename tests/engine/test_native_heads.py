"""EAGLE heads as one function in C++: the hidden states, logits and proposals of the head arranged with torch, a call a
level; and what has no such form runs as it did, and says why."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import SHAPES, needs_compiler, text
from test_heads import tiny_eagle, tiny_medusa
from test_native_steps import native, rounded, threads
from test_parity import TOLERANCE, relative_difference

from workbench.decoding.draws import BestDraws, RandomDraws
from workbench.decoding.sampling import SamplingSettings, TokenDistribution
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kernels.cpu import step as loop
from workbench.kv import Contiguous
from workbench.models import Batch, Decoder, prepare
from workbench.models.fast_heads import FastEagle
from workbench.serving import Engine, Request, SchedulerSettings
from workbench.speculation import Ask
from workbench.speculation.drafts import eagle as drafts_eagle
from workbench.speculation.drafts.eagle import EagleDraft
from workbench.speculation.drafts.medusa import MedusaDraft

__all__ = ["threads"]
HEADS = {
    "llama GQA": {},
    "a window and sinks": {"sliding_window": 4, "attention_sinks": 2},
    "qwen3, norm on q, k": {"family": "qwen3", "qk_norm": True, "head_dim": 16},
    "a window that would turn locally": {"sliding_window": 4, "global_layers": (), "local_rope_theta": 100.0},
    "biases, another activation": {"qkv_bias": True, "mlp_bias": True, "activation": "gelu_tanh"},
}


def eagle_of(target: Decoder, **changes):
    if not changes:
        return tiny_eagle(target)
    config = dataclasses.replace(target.config, num_layers=1, **changes)
    return tiny_eagle(random_decoder(config, name=target.name))


def batches() -> list[tuple[Batch, int]]:
    """(a batch, to where sequence a is cut after it)."""
    return [
        (Batch.of([text(9), text(4, 1)], sequences=["a", "b"]), 9),
        (Batch.of([text(1, 2), text(1, 3)], first_positions=[9, 4], sequences=["a", "b"]), 10),
        (Batch.of([text(5, 4)], first_positions=[10], sequences=["a"], parents=[[-1, 0, 0, 1, 2]], logits=[2]), 10),
        (Batch.of([text(3, 5)], first_positions=[10], sequences=["a"], logits="all"), 12),
        (Batch.of([text(1, 6)], first_positions=[12], sequences=["a"]), 13),
    ]


@needs_compiler
@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_hidden_states_and_logits_are_those_of_the_head_arranged_with_torch(name, threads):
    target = random_decoder(SHAPES["llama GQA, tied"], name="tiny")
    head = eagle_of(target, **HEADS[name])
    mine, plain = FastEagle(head, native(target)), FastEagle(head, target)
    kvs = Contiguous(head.config, max_sequences=2), Contiguous(head.config, max_sequences=2, attention="eager")
    draw = torch.Generator().manual_seed(0)
    for batch, length in batches():
        hidden_states = torch.randn(batch.num_tokens, 32, generator=draw)
        got, expected = (one.guesses(batch, hidden_states, kv) for one, kv in zip((mine, plain), kvs))
        assert "one function in C++" in mine.native_reason and expected.said is None
        assert relative_difference(got.hidden_states, expected.hidden_states) < TOLERANCE
        assert relative_difference(got.logits, expected.logits) < TOLERANCE
        assert got.said[:, 0].tolist() == expected.logits.argmax(-1).tolist()
        for kv in kvs:
            kv.truncate("a", length)
    state = torch.randn(32, generator=draw)
    stepped = mine.step(7, 13, "a", state, kvs[0])
    expected = plain.guesses(Batch.of([[7]], first_positions=[13], sequences=["a"]), state[None], kvs[1])
    assert relative_difference(stepped.hidden_states, expected.hidden_states) < TOLERANCE
    assert relative_difference(stepped.logits, expected.logits) < TOLERANCE
    assert kvs[0].lengths == kvs[1].lengths and plain.step(7, 14, "a", state, kvs[1]) is None
    assert mine.step(7, 0, "new", state, kvs[0]) is None and "new" not in kvs[0].lengths


@needs_compiler
@pytest.mark.parametrize("inputs", ["exact", "q8"])
@torch.inference_mode()
def test_the_output_head_is_the_targets_in_its_codes_and_with_its_inputs(inputs):
    target = rounded("rtn", 8, 32, True)
    target.name = "tiny"
    head = eagle_of(target)
    fast = native(target, inputs=inputs)
    batch, hidden_states = Batch.of([text(6)], logits="all"), torch.randn(6, 64)
    got = FastEagle(head, fast).guesses(batch, hidden_states, Contiguous(head.config))
    assert relative_difference(got.logits, fast.logits_of(got.hidden_states)) < (0.02 if inputs == "q8" else TOLERANCE)
    assert fast.native.parts.head is FastEagle(head, fast)._native.parts.head


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_in_16_bits_they_are_closer_to_float32(dtype):
    target = random_decoder(SHAPES["llama GQA, tied"], name="tiny").to(dtype)
    head, batch = tiny_eagle(target).to(dtype), Batch.of([text(16)], logits="all")
    hidden_states = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    fast = native(target)
    got, narrow = (
        FastEagle(head, one).guesses(batch, hidden_states, Contiguous(head.config)) for one in (fast, target)
    )
    wide = FastEagle(head.float(), target.float()).guesses(batch, hidden_states.float(), Contiguous(head.config))
    for mine, theirs, exact in zip(got[:2], narrow[:2], wide[:2]):
        assert relative_difference(mine, exact) < relative_difference(theirs.float(), exact) < 0.1


# -- drafting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def target() -> Decoder:
    return random_decoder(tiny_config(vocab_size=64), name="tiny")


@torch.inference_mode()
def ask(
    target: Decoder, ids: list[int], known: int = 0, name: str = "s", limit: int = 4, go_on=lambda sure: True, **of
):
    hidden_states = target.hidden(Batch.of([ids]), Contiguous(target.config))[known:-1]
    distribution = TokenDistribution(SamplingSettings(**of), ids)
    draws = RandomDraws(torch.Generator().manual_seed(len(ids))) if of else BestDraws()
    return Ask(name, ids, limit, 16, distribution, draws, go_on, hidden_states)


@needs_compiler
def test_chains_are_those_that_distributions_give_round_after_round(target):
    head, ids, known = tiny_eagle(target), text(9), 0
    mine, theirs = EagleDraft(native(target), head), EagleDraft(target, head)
    for limit, kept in ((4, 4), (4, 2), (1, 1), (3, 0), (4, 1), (4, 4)):
        [got], [expected] = (one.propose([ask(target, ids, known, limit=limit)]) for one in (mine, theirs))
        assert got.tokens == expected.tokens and got.is_chain and len(got) == limit
        assert got.confidences == pytest.approx([float(one) for one in expected.confidences], rel=1e-4)
        assert not got.distributions and len(expected.distributions) == limit
        assert (mine.model_calls, mine.rows_processed) == (theirs.model_calls, theirs.rows_processed)
        assert mine._kv.lengths == theirs._kv.lengths and not mine._guesses
        known = len(ids) - 1
        ids = [*ids, *got.tokens[:kept], (got.tokens[min(kept, limit - 1)] + 1) % 64]


def noted(seen: list[float], enough: int, sure: float) -> bool:
    seen.append(float(sure))
    return len(seen) % 5 < enough


@needs_compiler
def test_chains_end_where_the_draft_is_not_sure_enough(target):
    head, asked = tiny_eagle(target), ([], [])
    for draft, seen in zip((EagleDraft(native(target), head), EagleDraft(target, head)), asked):
        for enough in (2, 0, 9):
            go_on = functools.partial(noted, seen, enough)
            [proposal] = draft.propose([ask(target, text(9 + enough), name=str(enough), go_on=go_on)])
            seen.append(len(proposal))
            draft.release(str(enough))
    assert asked[0] == pytest.approx(asked[1], rel=1e-4)


@needs_compiler
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9}])
@pytest.mark.parametrize("branching", [None, (3, 2, 1)])
def test_several_texts_get_what_each_gets_alone(target, branching, settings):
    head = tiny_eagle(target)
    texts = {"a": text(9, 1), "b": text(5, 2), "c": text(20, 3)}
    both = [EagleDraft(one, head, branching=branching, max_sequences=3) for one in (native(target), target)]
    asks = [ask(target, ids, 0, name, limit, **settings) for (name, ids), limit in zip(texts.items(), (4, 1, 3))]
    mine, theirs = (draft.propose(asks_again(asks)) for draft in both)
    for got, expected in zip(mine, theirs, strict=True):
        assert got.tokens == expected.tokens and got.parents == expected.parents and len(got)
    assert both[0].model_calls == both[1].model_calls == (4 if branching is None else 3)


def asks_again(asks: list[Ask]) -> list[Ask]:
    """With the same random numbers."""
    return [
        one if isinstance(one.draws, BestDraws) else dataclasses.replace(one, draws=RandomDraws(_seeded(one)))
        for one in asks
    ]


def _seeded(one: Ask) -> torch.Generator:
    return torch.Generator().manual_seed(len(one.token_ids))


@needs_compiler
def test_a_level_is_one_call_and_nothing_is_drawn(target, monkeypatch):
    draft, calls, run = EagleDraft(native(target), tiny_eagle(target)), [], loop.run

    def refused(*_):
        raise AssertionError("torch was asked")

    monkeypatch.setattr(loop, "run", lambda *given: calls.append(len(given[2].token_ids)) or run(*given))
    monkeypatch.setattr(drafts_eagle, "grow_together", refused)
    monkeypatch.setattr(FastEagle, "__call__", refused)
    monkeypatch.setattr(FastEagle, "logits_of", refused)
    asked = ask(target, text(9))
    [proposal] = draft.propose([asked])
    assert calls == [8, 1, 1, 1] and len(proposal) == 4
    assert draft.listen(ask(target, [*text(9), *proposal.tokens], 8), 3) and calls[4:] == [4]


@needs_compiler
def test_a_long_text_is_read_with_torch_and_drafted_for_natively(target):
    draft, plain = (EagleDraft(one, tiny_eagle(target)) for one in (native(target), target))
    [got], [expected] = (one.propose([ask(target, text(60))]) for one in (draft, plain))
    assert got.tokens == expected.tokens
    assert got.confidences == pytest.approx(list(map(float, expected.confidences)), rel=1e-4)
    assert draft._fast.native_reason == "a step is one function in C++"


@needs_compiler
def test_a_row_that_is_no_distribution_is_the_sequences_error(target):
    head = tiny_eagle(target)
    head.norm.weight[3] = float("nan")
    with pytest.raises(WorkbenchError, match="NaN"):
        EagleDraft(native(target), head).propose([ask(target, text(9))])
    assert generate(native(target), text(9), max_new_tokens=4, draft=None).tokens


REASONS = {
    "those of its target do not": lambda target: FastEagle(tiny_eagle(target), prepare(target)),
    "multiple of 8": lambda target: FastEagle(eagle_of(target, head_dim=4), native(target)),
    "float64": lambda target: FastEagle(tiny_eagle(target).double(), native(target)),
}


@needs_compiler
@pytest.mark.parametrize("words", REASONS)
def test_heads_that_are_not_one_function_say_why_and_run_as_they_are(target, words):
    made = REASONS[words](target)
    assert words in made.why_not_native and made.why_not_native == made.native_reason
    kv = Contiguous(made.config, dtype=made.dtype)
    got = made.guesses(Batch.of([text(5)]), torch.randn(5, 32), kv)
    assert got.said is None and got.logits.shape == (1, 64) and kv.lengths == {0: 5}


# -- texts -------------------------------------------------------------------------------------------------------------


def drafts_of(model, target: Decoder) -> list:
    return [
        EagleDraft(model, tiny_eagle(target)),
        EagleDraft(model, tiny_eagle(target), branching=(3, 2, 1)),
        MedusaDraft(model, tiny_medusa(target)),
        MedusaDraft(model, tiny_medusa(target), tree="chain"),
    ]


@needs_compiler
@pytest.mark.parametrize("kv", ["contiguous", "paged"])
def test_greedy_texts_are_plain_decodings_and_sampled_ones_those_of_drafts_on_the_decoder(target, kv):
    fast, prompt = native(target), text(17, 1)
    for mine, theirs in zip(drafts_of(fast, target), drafts_of(target, target)):
        got = generate(fast, prompt, max_new_tokens=40, kv=kv, draft=mine, draft_length=3)
        assert got.tokens == generate(target, prompt, max_new_tokens=40, kv="recompute").tokens
        assert sum(got.speculation.drafted) and "one function" in fast.native_reason
        sampled = {"max_new_tokens": 24, "kv": kv, "temperature": 0.8, "seed": 5, "draft_length": 3}
        assert generate(fast, prompt, draft=mine, **sampled).tokens == (
            generate(target, prompt, draft=theirs, **sampled).tokens
        )


@needs_compiler
def test_an_engine_with_heads_serves_what_the_decoder_generates(target):
    fast = native(target)
    requests = [Request(index, tuple(text(3 + 5 * index, index)), 12 + index) for index in range(4)]
    settings = SchedulerSettings(max_running=4, draft_tokens=3)
    for draft in drafts_of(fast, target):
        engine = Engine(fast, settings, num_blocks=64, block_size=4, draft=draft, draft_length=3)
        results = {one.request_id: one for one in engine.run(requests)}
        for one in requests:
            expected = generate(target, one.prompt_ids, max_new_tokens=one.max_new_tokens, kv="recompute").tokens
            assert list(results[one.id].token_ids) == list(expected)
