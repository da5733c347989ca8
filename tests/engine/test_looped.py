"""kernels="c++": norms, gates and attention in loops of our own, a call each, against the plain decoder; and what they
do not take runs with torch's operations, and says so."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_fast import SHAPES, needs_compiler
from test_native_steps import FORMS, KVS, TAKEN, batches, closer_to_float32, rounded, text, threads  # noqa: F401
from test_parity import TOLERANCE, relative_difference

from workbench.errors import WorkbenchError
from workbench.experiments.loops import Loops
from workbench.generation import generate
from workbench.instruments.costs import decode_costs
from workbench.kv import Contiguous, Paged, Recompute, kv_for
from workbench.models import Batch, Decoder, prepare
from workbench.models.fast import FastDecoder
from workbench.models.layers import RMSNorm
from workbench.models.looped import MAX_ROWS, LoopedAttention
from workbench.serving import Engine, Request, SchedulerSettings

LLAMAS = [name for name in TAKEN if not name.startswith("gpt2")]


def looped(model: Decoder, **settings) -> FastDecoder:
    made = prepare(model, kernels="c++", **settings)
    assert (made.kernels, made.kernels_reason) == ("c++", "as asked")
    return made


@pytest.fixture
def attended(monkeypatch):
    """For each batch whether its attention was a loop."""
    seen: list[bool] = []
    begin = LoopedAttention.begin

    def noted(self, batch):
        begin(self, batch)
        seen.append(self.attends)

    monkeypatch.setattr(LoopedAttention, "begin", noted)
    return seen


@torch.inference_mode()
def same_logits(model: Decoder, fast: FastDecoder, make, attended, near: float = TOLERANCE) -> None:
    mine, plain = make(model.config, dtype=model.dtype), make(model.config, dtype=model.dtype)
    for batch in batches():
        got, expected = fast(batch, mine), model(batch, plain)
        assert attended.pop() == (batch.num_tokens <= MAX_ROWS)
        assert got.shape == expected.shape and relative_difference(got.double(), expected.double()) < near
        assert dict(mine.lengths) == dict(plain.lengths) and mine.bytes_in_use == plain.bytes_in_use


# -- the same numbers --------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("kv", KVS)
def test_every_shape_and_batch_gives_the_decoders_logits(name, kv, threads, attended):  # noqa: F811
    model = random_decoder(SHAPES[name])
    same_logits(model, looped(model), KVS[kv], attended)


@needs_compiler
@pytest.mark.parametrize("name", LLAMAS)
@torch.inference_mode()
def test_a_batch_of_many_rows_attends_as_the_cache_does_and_the_next_one_goes_on(name, attended):
    model = random_decoder(SHAPES[name])
    fast, rows = looped(model), min(MAX_ROWS + 1, model.config.context_length - 8)
    for make in KVS.values():
        mine, plain = make(model.config), make(model.config)
        for at, count in ((0, rows), (rows, 1), (rows + 1, 3)):
            batch = Batch.of([text(count, at)], first_positions=[at], sequences=["a"], logits="all")
            assert relative_difference(fast(batch, mine), model(batch, plain)) < TOLERANCE
        assert attended[-3:] == [rows <= MAX_ROWS, True, True]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama GQA, tied", "qwen3, norm on q, k", "gemma 3"])
@torch.inference_mode()
def test_in_16_bits_they_are_closer_to_float32_than_the_decoders(name, dtype, attended):
    model = random_decoder(SHAPES[name]).to(dtype)
    for make in KVS.values():
        closer_to_float32(model, looped(model), make)
    assert all(attended)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_in_16_bits_a_cache_that_attends_itself_is_handed_its_own_type(dtype, attended, monkeypatch):
    model = random_decoder(SHAPES["qwen3, norm on q, k"]).to(dtype)
    monkeypatch.setattr("workbench.models.looped.MAX_ROWS", 1)
    fast, wide = looped(model), copy.deepcopy(model).float()
    caches = [Contiguous(model.config, dtype=one) for one in (dtype, dtype, torch.float32)]
    batch = Batch.of([text(40)], sequences=["a"], logits="all")
    got, near, expected = (one(batch, kv).float() for one, kv in zip((fast, model, wide), caches))
    assert attended == [False]
    assert relative_difference(got, expected) < 1.5 * relative_difference(near, expected) < 0.1


@needs_compiler
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_codes_give_the_logits_of_the_dequantized_weights(form, threads, attended):  # noqa: F811
    model = rounded(*form)
    same_logits(model, looped(model), KVS["contiguous"], attended)


@needs_compiler
@torch.inference_mode()
def test_codes_with_inputs_in_8_bits_are_those_of_eager_products():
    model = rounded("rtn", 8, 32, True)
    mine, theirs = Contiguous(model.config), Contiguous(model.config)
    fast, eager = looped(model, inputs="q8"), prepare(model, inputs="q8")
    for at, rows in ((0, 9), (9, 1), (10, 3)):
        batch = Batch.of([text(rows, at)], first_positions=[at], sequences=["a"], logits="all")
        assert relative_difference(fast(batch, mine), eager(batch, theirs)) < 0.02


@needs_compiler
@pytest.mark.parametrize("hidden, size, group", [(44, 8, 1), (52, 24, 3), (100, 40, 2)])
def test_sizes_that_no_register_divides(hidden, size, group, threads, attended):  # noqa: F811
    sizes = {"hidden_size": hidden, "head_dim": size, "num_heads": 2 * group, "intermediate_size": 3 * hidden // 4}
    model = random_decoder(tiny_config(vocab_size=67, num_kv_heads=2, **sizes))
    same_logits(model, looped(model), KVS["contiguous"], attended, 2 * TOLERANCE)


@needs_compiler
def test_many_rows_are_normed_and_gated_by_all_threads(threads):  # noqa: F811
    from workbench.kernels.cpu import step as loop
    from workbench.models.native_steps import norm_of

    draw = torch.Generator().manual_seed(0)
    x, added = torch.randn(2, 300, 130, generator=draw)
    module = RMSNorm(130, 1e-5)
    torch.nn.init.normal_(module.weight, generator=draw)
    expected = module(x + added).detach()
    got = loop.RowNorm(norm_of(module))(moved := x.clone(), added, threads)
    assert torch.equal(moved, x + added) and relative_difference(got, expected) < TOLERANCE
    gate, up = torch.randn(2, 300, 130, generator=draw)
    for gelu, act in ((False, torch.nn.functional.silu), (True, torch.nn.GELU("tanh"))):
        made = loop.RowGate(gelu=gelu)(torch.cat((gate, up), dim=1), threads)
        assert relative_difference(made, act(gate) * up) < TOLERANCE


# -- every cache, drafts, the engine -----------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "kind, settings",
    [
        ("contiguous", {}),
        ("paged", {"block_size": 4}),
        ("paged", {"block_size": 4, "format": "int8"}),
        ("window", {"window": 8, "sinks": 2}),
        ("quantized", {"format": "int8", "group": 8}),
        ("quantized", {"format": "int4", "group": 8, "attention": "codes"}),
        ("recompute", {}),
    ],
    ids=str,
)
def test_texts_over_every_kind_of_cache_are_those_of_torchs_operations(kind, settings):
    model = random_decoder(tiny_config(vocab_size=64, head_dim=16))
    caches = [kv_for(kind, model, max_sequences=1, **settings) for _ in "ab"]
    got, expected = (
        generate(one, text(17, 1), max_new_tokens=40, kv=kv)
        for one, kv in zip((looped(model), prepare(model, linear="looped", kernels="torch")), caches)
    )
    assert got.tokens == expected.tokens
    assert got.log_probs == pytest.approx(expected.log_probs, abs=2e-3 if "format" in settings else 1e-4)
    assert caches[0].bytes_in_use == caches[1].bytes_in_use


@needs_compiler
def test_greedy_and_sampled_texts_are_the_decoders():
    model = random_decoder(tiny_config(vocab_size=64))
    fast, prompt = looped(model), text(17, 1)
    for settings in ({}, {"temperature": 0.8, "seed": 3}, {"draft": "prompt_lookup"}, {"repetition_penalty": 1.4}):
        got, expected = (generate(one, prompt, max_new_tokens=50, kv="contiguous", **settings) for one in (fast, model))
        assert got.tokens == expected.tokens
        assert got.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


@needs_compiler
@pytest.mark.parametrize("name", ["llama GQA, tied", "windows on some layers, one sink"])
@pytest.mark.parametrize("kv", KVS)
@torch.inference_mode()
def test_trees_see_their_own_branch(name, kv, attended):
    model = random_decoder(SHAPES[name])
    mine, plain = (KVS[kv](model.config) for _ in "ab")
    fast = looped(model)
    parents = [-1, 0, 0, 1, 1, 2, 5, 5]
    for batch in (
        Batch.of([text(20)], sequences=["a"]),
        Batch.of([text(8, 1)], first_positions=[20], sequences=["a"], parents=[parents], logits="all"),
    ):
        assert relative_difference(fast(batch, mine), model(batch, plain)) < TOLERANCE
    assert attended == [True, True]


@needs_compiler
@pytest.mark.parametrize("settings", [{"kernels": "c++"}, {"native": True}], ids=str)
@torch.inference_mode()
def test_a_tree_over_one_cache_leaves_nothing_to_the_next_one_whose_blocks_hold_codes(settings):
    model = random_decoder(tiny_config(vocab_size=64, head_dim=16))
    fast, tree = prepare(model, **settings), Contiguous(model.config)
    fast(Batch.of([text(20)], sequences=["a"]), tree)
    fast(Batch.of([text(8)], first_positions=[20], sequences=["a"], parents=[[-1, 0, 0, 1, 1, 2, 5, 5]]), tree)
    mine, plain = (Paged(model.config, block_size=4, format="int8") for _ in "ab")
    for at, rows in ((0, 9), (9, 1)):
        batch = Batch.of([text(rows, at)], first_positions=[at], sequences=["a"], logits="all")
        assert relative_difference(fast(batch, mine), model(batch, plain)) < TOLERANCE


@needs_compiler
@pytest.mark.parametrize("name", LLAMAS)
@torch.inference_mode()
def test_calls_and_operations_of_a_step_are_as_many_as_predicted(name, monkeypatch):
    from workbench.kernels.cpu import floats, step

    model = random_decoder(SHAPES[name])
    fast, kv, called = looped(model), Contiguous(model.config), []
    for kind in (step.RowNorm, step.RowGate, step.Attention, floats.FloatProduct):
        call = kind.__call__
        monkeypatch.setattr(
            kind, "__call__", lambda self, *given, _call=call: called.append(type(self)) or _call(self, *given)
        )
    fast(Batch.of([text(9)], sequences=["a"]), kv)
    called.clear()
    batch = Batch.of([text(1)], first_positions=[9], sequences=["a"], logits="all")
    with torch.autograd.profiler.profile() as recorded:
        fast(batch, kv)
    started = [one.name for one in recorded.function_events if one.name in ("aten::mul", "aten::index_select")]
    embeds = 1 + (model.embedding_scale != 1)  # torch's: a row of the table, found by index_select, and its scale
    assert len(started) == embeds
    costs = decode_costs(model.config, batch=1, context=10, weight_bytes_per_element=4)
    predicted = Loops("looped", torch.float32).counted(costs)
    assert sum(one.launches for one in predicted.operations) == len(called) + embeds


@needs_compiler
def test_an_engine_serves_what_the_decoder_generates(attended):
    model = random_decoder(tiny_config(vocab_size=64))
    requests = [Request(index, tuple(text(3 + 5 * index, index)), 12 + index) for index in range(6)]
    engine = Engine(looped(model), SchedulerSettings(max_running=4), num_blocks=64, block_size=4)
    results = {one.request_id: one for one in engine.run(requests)}
    for one in requests:
        expected = generate(model, one.prompt_ids, max_new_tokens=one.max_new_tokens, kv="recompute").tokens
        assert list(results[one.id].token_ids) == list(expected)
    assert attended and all(attended)


@needs_compiler
@torch.inference_mode()
def test_a_batch_that_was_interrupted_never_came(monkeypatch):
    model = random_decoder(tiny_config(vocab_size=64))
    fast = looped(model)
    for make in KVS.values():
        mine, plain = make(model.config), make(model.config)
        first, second = Batch.of([text(9)], sequences=["a"]), Batch.of([[3]], first_positions=[9], sequences=["a"])
        for one, kv in ((fast, mine), (model, plain)):
            one(first, kv)
        with monkeypatch.context() as patched:
            patched.setattr(fast._layers[1], "after", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                fast(second, mine)
        assert relative_difference(fast(second, mine), model(second, plain)) < TOLERANCE
        assert dict(mine.lengths) == {"a": 10}


@needs_compiler
@torch.inference_mode()
def test_native_steps_go_with_it_and_what_they_leave_runs_in_loops(attended):
    model = random_decoder(tiny_config(vocab_size=64))
    fast, mine, plain = (
        looped(model, native=True, say=lambda _: None),
        Contiguous(model.config),
        Contiguous(model.config),
    )
    fast._native.max_rows = 4
    for at, rows in ((0, 9), (9, 1), (10, 5)):
        batch = Batch.of([text(rows, at)], first_positions=[at], sequences=["a"], logits="all")
        assert relative_difference(fast(batch, mine), model(batch, plain)) < TOLERANCE
    assert attended == [True, True]  # the single row was native


# -- what it does not take ---------------------------------------------------------------------------------------------


@needs_compiler
@torch.inference_mode()
def test_a_cache_that_says_no_place_and_one_of_another_shape_attend_themselves(attended):
    model = random_decoder(tiny_config(vocab_size=64))
    fast = looped(model)
    batch = Batch.of([text(9)], sequences=[0])
    kv = Recompute(model.config)
    assert relative_difference(fast(batch, kv), model(batch, Recompute(model.config))) < TOLERANCE
    assert attended == [False]


@needs_compiler
def test_shapes_without_loops_run_with_torchs_operations_and_say_so():
    for name, word in (("gpt2", "LayerNorm"), *((one, "latents") for one in SHAPES if one.startswith("latent"))):
        lines: list[str] = []
        made = prepare(random_decoder(SHAPES[name]), kernels="c++", say=lines.append)
        assert made.kernels == "torch" and word in made.kernels_reason
        assert len(lines) == 1 and made.kernels_reason in lines[0]


def test_without_a_compiler_one_sentence_and_torchs_operations(monkeypatch):
    from workbench.kernels.cpu import step as loop

    monkeypatch.setattr(loop, "why_not_here", lambda: "no C++ compiler was found")
    model, lines = random_decoder(tiny_config(vocab_size=64)), []
    made = prepare(model, kernels="c++", say=lines.append)
    assert made.kernels == "torch" and len(lines) == 1 and "no C++ compiler" in lines[0]
    assert generate(made, [3, 4], max_new_tokens=5).tokens == generate(model, [3, 4], max_new_tokens=5).tokens


@needs_compiler
def test_what_does_not_go_together_is_refused():
    model = random_decoder(tiny_config(vocab_size=64))
    with pytest.raises(WorkbenchError, match=r'compile=True or kernels="c\+\+"'):
        prepare(model, kernels="c++", compile=True)
    for linear in ("plain", "packed"):
        with pytest.raises(WorkbenchError, match=f'linear="looped", got linear=.{linear}'):
            prepare(model, kernels="c++", linear=linear)
    with pytest.raises(WorkbenchError, match=r"c\+\+"):
        prepare(model, kernels="cpp")
    with pytest.raises(WorkbenchError, match=r'kernels="triton".*arranged with kernels="c\+\+"'):
        prepare(model, kernels="c++", dependent_launches=True)
    chosen = prepare(model, kernels="c++", native="auto")
    assert chosen.steps == "eager" and 'kernels="c++" was asked for' in chosen.native_reason
    assert prepare(model).kernels == "torch"
