"""Drafted trees and hidden states in steps that are one function in C++: what the plain decoder gives, in slots and in
blocks, for windows and sinks, several sequences, any number of threads."""

from __future__ import annotations

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import SHAPES, needs_compiler, text
from test_native_steps import KVS, TAKEN, is_one, native, rounded, threads
from test_parity import TOLERANCE, relative_difference

from workbench.decoding.step import Step
from workbench.kernels.cpu import step as loop
from workbench.kv import Contiguous, Recompute
from workbench.models import Batch, Decoder, native_steps, prepare
from workbench.models.native_steps import MAX_ROWS

__all__ = ["threads"]
pytestmark = needs_compiler

BUSHY = [-1, 0, 1, 1, 0, 4, 3, 6, 2, 8, 4]  # branches of several depths; a text of three at the beginning
ROOTS = [-1, -1, 0, 1, 1, 4]  # no text at the beginning, from the second token on
DEEP = [-1, 0, 1, 2, *[3] * 2, *range(4, 12), 12, 13]  # two branches taking turns, deeper than a window of 8


def rounds() -> list[tuple[Batch, dict[str, tuple[int, list[int]]]]]:
    """(a batch, which branch each sequence keeps of it: the text before, places) one after the other."""
    prompts = Batch.of([text(11), text(3, 1), text(9, 2)], sequences=["a", "b", "c"])
    trees = Batch.of(
        [text(len(BUSHY), 3), text(2, 4), text(len(ROOTS), 5)],
        first_positions=[11, 3, 9],
        sequences=["a", "b", "c"],
        parents=[BUSHY, None, ROOTS],
        logits="all",
    )
    after = Batch.of(
        [text(1, 6), text(len(DEEP), 7), text(2, 8)],
        first_positions=[16, 5, 10],
        sequences=["a", "b", "c"],
        parents=[None, DEEP, [-1, -1]],
        logits=[1, 5, 2],
    )
    last = Batch.of([text(2, 9), text(1, 10)], first_positions=[14, 17], sequences=["b", "a"], logits="all")
    kept = {"a": (11, [11, 12, 14, 17, 18]), "c": (9, [10])}
    return [
        (prompts, {}),
        (trees, kept),
        (after, {"b": (5, [5, 6, 7, 8, 9, 11, 13, 15, 17]), "c": (10, [11])}),
        (last, {}),
    ]


@torch.inference_mode()
def same_rounds(model: Decoder, fast, make, near: float = TOLERANCE) -> None:
    mine, plain = make(model.config), make(model.config, attention="eager")
    for batch, kept in rounds():
        hidden, logits = fast.hidden_and_logits(batch, mine)
        assert is_one(fast, batch)
        expected = model.hidden(batch, plain)
        wanted = model.logits_of(expected if batch.logit_rows is None else expected[batch.logit_rows])
        assert relative_difference(hidden, expected) < near and relative_difference(logits, wanted) < near
        for kv in (mine, plain):
            for sequence, (length, places) in kept.items():
                kv.keep(sequence, length, places)
        assert dict(mine.lengths) == dict(plain.lengths)


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("kv", KVS)
def test_trees_beside_texts_give_the_decoders_logits_and_hidden_states(name, kv):
    model = random_decoder(SHAPES[name])
    same_rounds(model, native(model), KVS[kv])


@pytest.mark.parametrize("kv", KVS)
def test_windows_and_sinks_follow_the_branch_whatever_the_threads(kv, threads):
    for window, sinks in ((3, 0), (3, 2), (8, 13), (1, 1)):
        config = tiny_config(vocab_size=64, sliding_window=window, attention_sinks=sinks, num_kv_heads=1)
        model = random_decoder(config)
        same_rounds(model, native(model), KVS[kv])


def test_trees_through_matrices_of_codes():
    model = rounded("rtn", 8, 32, True)
    same_rounds(model, native(model), KVS["paged"])


@pytest.mark.parametrize("window", [None, 300])
@torch.inference_mode()
def test_threads_that_share_the_keys_of_a_long_text_see_the_branch_once(window, threads):
    shape = {"vocab_size": 64, "context_length": 1024, "num_kv_heads": 1, "sliding_window": window}
    model = random_decoder(tiny_config(**shape, attention_sinks=2 if window else 0))
    fast, caches = native(model), [Contiguous(model.config) for _ in "ab"]
    for cache in caches:
        model(Batch.of([text(700)], sequences=["a"]), cache)
    batch = Batch.of([text(16, 1)], first_positions=[700], sequences=["a"], parents=[DEEP], logits="all")
    got, expected = fast(batch, caches[0]), model(batch, caches[1])
    assert is_one(fast, batch) and relative_difference(got, expected) < TOLERANCE


@pytest.mark.parametrize("kv", KVS)
def test_texts_are_cut_into_pieces_and_trees_are_not(kv, monkeypatch):
    model = random_decoder(SHAPES["windows on some layers, one sink"])
    fast, run, pieces = native(model), loop.run, list[list[int]]()

    def noted(parts, where, rows, *given):
        pieces.append(list(rows.starts))
        return run(parts, where, rows, *given)

    monkeypatch.setattr(loop, "run", noted)
    for piece in (1, 4, 12):
        monkeypatch.setattr(native_steps, "PIECE", piece)
        same_rounds(model, fast, KVS[kv])
    prompts, trees = (batch for batch, _ in rounds()[:2])
    monkeypatch.setattr(native_steps, "PIECE", 4)
    cache = KVS[kv](model.config)
    fast(prompts, cache)
    pieces.clear()
    fast(trees, cache)
    assert pieces == [[0, 11], [0, 2, 8]]  # the tree of 11; the text of 2 and the tree of 6, which would be cut


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_in_16_bits_hidden_states_are_closer_to_float32_than_the_decoders(dtype):
    model = random_decoder(SHAPES["llama GQA, tied"]).to(dtype)
    wide = random_decoder(SHAPES["llama GQA, tied"]).to(dtype).float()
    fast, caches = native(model), [Contiguous(model.config, dtype=one) for one in (dtype, dtype, torch.float32)]
    batch = Batch.of([text(16)], sequences=["a"], parents=[DEEP], logits=[2])
    got, rounded_ = fast.hidden_and_logits(batch, caches[0]), model.hidden(batch, caches[1])
    expected = wide.hidden(batch, caches[2])
    assert got[0].dtype == torch.float32 and got[1].shape == (2, 64)
    assert relative_difference(got[0], expected) < relative_difference(rounded_.float(), expected)
    assert relative_difference(got[1], wide.logits_of(expected[-2:])) < 0.1


@torch.inference_mode()
def test_where_a_batch_runs_as_it_is_so_do_its_hidden_states():
    model = random_decoder(SHAPES["llama GQA, tied"])
    fast = native(model)
    tall = list(range(-1, MAX_ROWS - 1))
    for words, batch, kv in (
        (f"up to {MAX_ROWS}", Batch.of([text(MAX_ROWS + 1)], parents=[[*tall, 3]]), Contiguous(model.config)),
        ("Recompute", Batch.of([text(5)], parents=[[-1, 0, 0, 1, 2]], logits="all"), Recompute(model.config)),
    ):
        hidden, logits = fast.hidden_and_logits(batch, kv)
        assert words in fast.native_reason
        expected = model.hidden(batch, Recompute(model.config))
        assert relative_difference(hidden, expected) < TOLERANCE
        wanted = expected if batch.logit_rows is None else expected[batch.logit_rows]
        assert relative_difference(logits, model.logits_of(wanted)) < TOLERANCE
    assert native_steps.NativeSteps is type(fast.native) and prepare(model).native is None


@pytest.mark.parametrize("kv", KVS)
@torch.inference_mode()
def test_a_tree_that_was_interrupted_never_came(kv, monkeypatch):
    model = random_decoder(SHAPES["llama GQA, tied"])
    fast, mine, plain = native(model), KVS[kv](model.config), KVS[kv](model.config)
    first, trees = rounds()[0][0], rounds()[1][0]
    fast(first, mine), model(first, plain)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "run", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fast(trees, mine)
    assert relative_difference(fast(trees, mine), model(trees, plain)) < TOLERANCE


def test_a_step_asks_for_both_in_one_call(monkeypatch):
    model = random_decoder(SHAPES["llama GQA, tied"])
    fast, calls = native(model), []
    run = loop.run
    monkeypatch.setattr(loop, "run", lambda *given: calls.append(len(given[2].token_ids)) or run(*given))
    monkeypatch.setattr(fast, "hidden", None)
    monkeypatch.setattr(fast, "logits_of", None)
    for one in (Step(fast, Contiguous(model.config, max_sequences=3)), Step(model, Recompute(model.config))):
        batch = rounds()[0][0]
        logits, hidden = one.forward_with_hidden(batch)
        assert [len(of_one) for of_one in hidden] == [11, 3, 9] and logits.shape == (3, 64)
        assert relative_difference(model.logits_of(hidden[2][-1:]), logits[2:]) < TOLERANCE
        assert (one.model_calls, one.rows_processed) == (1, 23)
    assert calls == [23]
