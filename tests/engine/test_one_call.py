"""A decode step as one compiled call against the plain decoder: the same tokens and the same cache, at every length."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import SHAPES, needs_compiler
from test_parity import TOLERANCE, relative_difference

from workbench.decoding.greedy import GreedyRunner
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kv import Contiguous, Recompute
from workbench.models import Batch, Decoder, parts, prepare
from workbench.models.config import ModelConfig
from workbench.models.fast import FastDecoder

LENGTH = 40
CASES = {  # shape, type of the weights, how far logits may be from the plain decoder's, of the
    # largest; None: from those of the same weights in float64 no further than the plain decoder's are
    "GQA, float32": (tiny_config(vocab_size=64, context_length=4096), torch.float32, TOLERANCE),
    "MHA, window 8, float64": (SHAPES["mistral window 8"], torch.float64, 1e-12),
    "norm on q and k, bfloat16": (SHAPES["qwen3, norm on q, k"], torch.bfloat16, None),
    "positions embedded, biases, float32": (SHAPES["gpt2"], torch.float32, TOLERANCE),
}
ALL = [pytest.param(name, marks=[pytest.mark.slow] * (index > 0)) for index, name in enumerate(CASES)]
FIRST = next(iter(CASES))


def case(name: str) -> tuple[Decoder, FastDecoder, float | None]:
    config, dtype, near = CASES[name]
    model = random_decoder(config).to(dtype)
    return model, prepare(model, compile=True, say=lambda line: None), near


def text(count: int, config: ModelConfig, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=draw).tolist()


def stepped(fast: FastDecoder, ids: list[int], kv: Contiguous, name: str = "a") -> torch.Tensor:
    """[n, V] logits of all tokens, sent one by one; all but the first by one call each."""
    rows = [fast(Batch.of([ids[:1]], sequences=[name]), kv)]
    for at in range(1, len(ids)):
        stepped = fast.step(ids[at], at, name, kv)
        assert stepped is not None, fast.compiled_reason
        assert not fast.why_not_compiled and kv.lengths[name] == at + 1
        logits, said = stepped
        rows.append(logits)
        assert (said is None) == (logits.dtype == torch.bfloat16)  # whose numbers are chosen from when rounded
        if said is not None:
            token, log_prob, top = said.tolist()
            assert token == logits[0].argmax() and top == logits[0].max()
            assert log_prob == pytest.approx(float(logits[0].log_softmax(-1).max()), abs=1e-5)
    return torch.cat(rows)


@needs_compiler
@pytest.mark.parametrize("name", ALL)
def test_at_every_length_the_logits_and_the_cache_are_the_decoders(name):
    model, fast, near = case(name)
    ids = text(LENGTH, model.config)
    for slots, room in ((1, LENGTH), (3, 97)):  # the last token fills the first cache
        kv, plain = (Contiguous(model.config, max_sequences=slots, max_tokens=room, dtype=model.dtype) for _ in "ab")
        with torch.inference_mode():
            if slots > 1:
                for cache in (kv, plain):  # so that the text has the second slot
                    model(Batch.of([ids[:3]], sequences=["other"]), cache)
            expected = model(Batch.of([ids], sequences=["a"], logits="all"), plain)
            got = stepped(fast, ids, kv)
        bound, apart = near, near
        if near is None:  # 16 bits: both are held against the same weights in float64
            with torch.inference_mode():
                wide = copy.deepcopy(model).double()
                exact = wide(Batch.of([ids], logits="all"), Recompute(model.config))
            bound = relative_difference(expected.double(), exact)
            apart = 2 * bound
            assert relative_difference(got.double(), exact) <= bound
        assert relative_difference(got.double(), expected.double()) < apart
        slot = kv._slots["a"]
        for mine, theirs in ((kv._keys, plain._keys), (kv._values, plain._values)):
            assert relative_difference(mine[:, slot, :, :LENGTH], theirs[:, slot, :, :LENGTH]) < max(bound, TOLERANCE)
            assert torch.equal(mine[:, slot, :, LENGTH:], theirs[:, slot, :, LENGTH:])  # nothing else was written
            assert slots == 1 or torch.equal(mine[:, 1 - slot], theirs[:, 1 - slot])


@needs_compiler
def test_greedy_decoding_is_the_plain_decoders_and_one_call_a_token():
    model, fast, _ = case(FIRST)
    calls, step = [], fast._steps.one_call

    def counted(*given):
        stepped = step(*given)
        if stepped is not None:
            calls.append(given)
        return stepped

    fast._steps.one_call = counted
    for prompt, count in (([5], 30), (text(17, model.config, 1), 50)):
        calls.clear()
        got = generate(fast, prompt, max_new_tokens=count, kv="contiguous")
        expected = generate(model, prompt, max_new_tokens=count, kv="recompute")
        assert got.tokens == expected.tokens and len(calls) == count - 1
        assert got.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
        assert got.model_calls == count and got.rows_processed == len(prompt) + count - 1
        stop = expected.tokens[count // 2]
        until = generate(fast, prompt, max_new_tokens=count, kv="contiguous", stop_token_ids=[stop])
        assert until.tokens == expected.tokens[: expected.tokens.index(stop) + 1]


@needs_compiler
def test_who_wants_logits_has_them_from_the_same_call():
    model, fast, _ = case(FIRST)
    settings = {"max_new_tokens": 20, "temperature": 0.8, "top_k": 5, "seed": 3, "kv": "contiguous"}
    assert generate(fast, [5, 6], **settings).tokens == generate(model, [5, 6], **settings).tokens
    beside = {"max_new_tokens": 20, "repetition_penalty": 1.5, "kv": "contiguous"}
    assert generate(fast, [5, 6], **beside).tokens == generate(model, [5, 6], **beside).tokens
    drafted = {"max_new_tokens": 20, "draft": "prompt_lookup", "kv": "contiguous"}
    assert generate(fast, [5, 6] * 4, **drafted).tokens == generate(model, [5, 6] * 4, **drafted).tokens


@needs_compiler
def test_tables_of_cos_and_sin_grow_with_the_text():
    model, fast, near = case(FIRST)
    ids, kv = text(2060, model.config), Contiguous(model.config)
    before = len(fast._table.rows)
    with torch.inference_mode():
        fast(Batch.of([ids[:2040]], sequences=["a"]), kv)
        got = [fast.step(ids[at], at, "a", kv)[0] for at in range(2040, 2060)]
        expected = model(Batch.of([ids], logits="all"), Recompute(model.config))[2040:]
    assert before == 2048 < len(fast._table.rows)
    assert relative_difference(torch.cat(got), expected) < near


@needs_compiler
def test_what_is_no_step_goes_the_ordinary_way_and_changes_nothing():
    model, fast, _ = case(FIRST)
    ids, kv = text(12, model.config), Contiguous(model.config, max_tokens=8)
    with torch.inference_mode():
        assert fast.step(ids[0], 0, "a", kv) is None and not kv.lengths
        fast(Batch.of([ids[:6]], sequences=["a"]), kv)
        for token, position in ((ids[6], 5), (ids[6], 7), (64, 6), (-1, 6)):
            assert fast.step(token, position, "a", kv) is None and kv.lengths["a"] == 6
        assert fast.step(ids[6], 6, "a", kv) is not None and fast.step(ids[7], 7, "a", kv) is not None
        assert fast.step(ids[8], 8, "a", kv) is None
        with pytest.raises(WorkbenchError, match="would grow to 9 tokens"):
            fast(Batch.of([ids[8:9]], first_positions=[8], sequences=["a"]), kv)
        kv.truncate("a", 5)
        kv.fork("a", "b") if kv._free else kv.truncate("a", 4)
        assert fast.step(ids[5], kv.lengths["a"], "a", kv) is not None
    assert not fast.may_step(Recompute(model.config))
    assert not fast.may_step(Contiguous(tiny_config(vocab_size=65)))


class Rounds(Contiguous):
    """One that attends in a way of its own."""


@needs_compiler
def test_a_kv_on_top_of_another_is_asked_as_before():
    model, fast, near = case(FIRST)
    kv = Rounds(model.config)
    ids = text(4, model.config)
    with torch.inference_mode():
        fast(Batch.of([ids[:3]], sequences=["a"]), kv)
        assert kv.step_storage("a") is None
        got = fast(Batch.of([ids[3:]], first_positions=[3], sequences=["a"]), kv)
        expected = model(Batch.of([ids]), Recompute(model.config))
    assert relative_difference(got, expected) < near


@needs_compiler
def test_logits_that_are_no_distribution_are_said():
    model, fast, _ = case(FIRST)
    kv = Contiguous(model.config)
    runner = GreedyRunner(fast, kv)
    tokens = runner.tokens([5, 6, 7], lambda logits, ids: _checked(logits), 10)
    next(tokens)
    kv._values[:, 0, :, 1] = float("nan")
    with pytest.raises(WorkbenchError, match="NaN logits"):
        next(tokens)
    runner.release()
    assert not kv.lengths


def _checked(logits: torch.Tensor) -> int:
    from workbench.decoding.filters import check_logits

    check_logits(logits, "the model")
    return int(logits.argmax())


# -- tensors by name ---------------------------------------------------------------------------------------------


def test_tensors_are_found_once_and_put_back():
    from workbench.models.linear import Matvec, SideBySide

    weight, bias = torch.ones(3, 2), torch.zeros(3)
    both = [SideBySide([Matvec(weight, bias), Matvec(torch.ones(1, 2))]), {"again": weight, "size": 4}, (None, 0.5)]
    tensors = parts.tensors_of(both)
    assert list(tensors) == ["0.linears.0.bias", "0.linears.0.weight", "0.linears.1.weight"]
    lines = parts.described(both)
    assert "1.again is 0.linears.0.weight" in lines and "1.size 4" in lines and "2.1 0.5" in lines
    twice = parts.with_tensors(both, {name: 2 * tensor for name, tensor in tensors.items()})
    assert torch.equal(twice[0](torch.ones(1, 2)), torch.tensor([[4.0, 4.0, 4.0, 4.0]])) and twice[1]["size"] == 4
    assert (
        torch.equal(both[0](torch.ones(1, 2)), torch.full((1, 4), 2.0))
        and twice[1]["again"] is twice[0].linears[0].weight
    )
    changed = [both[0], {"again": weight.clone(), "size": 4}, (None, 0.5)]
    assert parts.described(changed) != lines and len(parts.tensors_of(changed)) == 4


def test_what_cannot_be_looked_into_is_named():
    kept = torch.ones(1)
    for strange in ({1: 2}, torch.nn.Linear(2, 2), lambda x: x + kept, object()):
        with pytest.raises(WorkbenchError, match=r"1 is a .* cannot be found by name"):
            parts.tensors_of([0, strange])
