"""Steps as one function in C++ against the plain decoder: the same logits, the same cache, for every shape, weight,
cache and batch that they take; and what they do not take runs as it did."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import time

import pytest
import test_fast
import torch
from conftest import random_decoder, tiny_config
from test_fast import SHAPES, needs_compiler
from test_parity import TOLERANCE, relative_difference

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kernels.cpu import step as loop
from workbench.kv import Contiguous, Paged, Recompute
from workbench.models import Batch, Decoder, native_steps, prepare
from workbench.models.fast import FastDecoder
from workbench.models.linear import torch_multiplies
from workbench.models.native_steps import MAX_ROWS, MAX_ROWS_OF_CODES, MAX_ROWS_OF_Q8, PIECE, rows_limit
from workbench.native import build
from workbench.native.compiler import OFF
from workbench.quantization import QuantizationRecipe, quantize
from workbench.serving import Engine, Request, SchedulerSettings

LATENT = [name for name in SHAPES if name.startswith("latent")]
TAKEN = [name for name in SHAPES if name not in LATENT]
KVS = {
    "contiguous": lambda config, **settings: Contiguous(config, max_sequences=4, **settings),
    "paged": lambda config, **settings: Paged(config, max_sequences=4, block_size=4, **settings),
}
THREADS = (1, 2, 5)  # five of them share the keys of two heads


@pytest.fixture(params=THREADS)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def native(model: Decoder, **settings) -> FastDecoder:
    made = prepare(model, native=True, say=lambda line: None, **settings)
    assert not made.why_not_native
    return made


def text(count: int, seed: int = 0, vocab_size: int = 64) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def batches() -> list[Batch]:
    """Prompts beside decodes, single rows, chunks, drafts; one with more rows than are taken in float32."""
    return [
        *test_fast.batches(),
        Batch.of([text(16, 9)], first_positions=[30], sequences=["a"], logits=[3]),
        Batch.of([text(33, 13)], sequences=["d"], logits="all"),
        Batch.of([text(1, 10), text(1, 11), text(2, 12)], first_positions=[46, 17, 0], sequences=["a", "b", "c"]),
    ]


def is_one(fast: FastDecoder, batch: Batch) -> bool:
    """Whether the last batch, this one, was one function; it is where it has no more rows than that takes."""
    limit = fast._native.max_rows
    taken = "one function in C++" in fast.native_reason
    assert taken == (limit is None or batch.num_tokens <= limit)
    return taken


@torch.inference_mode()
def same_logits(model: Decoder, fast: FastDecoder, make, near: float = TOLERANCE) -> None:
    mine, plain = make(model.config, dtype=model.dtype), make(model.config, dtype=model.dtype)
    for batch in batches():
        got, expected = fast(batch, mine), model(batch, plain)
        is_one(fast, batch)
        assert got.shape == expected.shape and relative_difference(got.double(), expected.double()) < near
        assert dict(mine.lengths) == dict(plain.lengths) and mine.bytes_in_use == plain.bytes_in_use


# -- the same numbers --------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("kv", KVS)
def test_every_shape_and_batch_gives_the_decoders_logits(name, kv, threads):
    model = random_decoder(SHAPES[name])
    same_logits(model, native(model), KVS[kv])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama GQA, tied", "qwen3, norm on q, k", "gemma 3"])
@torch.inference_mode()
def test_in_16_bits_they_are_closer_to_float32_than_the_decoders(name, dtype):
    model = random_decoder(SHAPES[name]).to(dtype)
    for make in KVS.values():
        closer_to_float32(model, native(model), make)


@torch.inference_mode()
def closer_to_float32(model: Decoder, fast: FastDecoder, make) -> None:
    """Of a model in 16 bits: over chunks of a text, than the plain decoder in that type."""
    wide, ids = copy.deepcopy(model).float(), text(48)
    caches = [make(model.config, dtype=one) for one in (model.dtype, model.dtype, torch.float32)]
    rows: list[list[torch.Tensor]] = [[], [], []]
    for at in range(0, 48, 4):
        batch = Batch.of([ids[at : at + 4]], first_positions=[at], sequences=["a"], logits="all")
        for of_one, one, kv in zip(rows, (fast, model, wide), caches):
            of_one.append(one(batch, kv).float())
        assert fast.kernels == "c++" or "one function" in fast.native_reason
    got, rounded, expected = map(torch.cat, rows)
    assert relative_difference(got, expected) < relative_difference(rounded, expected) < 0.1
    assert (got - expected).square().mean() < 0.5 * (rounded - expected).square().mean()


FORMS = [
    ("rtn", 8, None, True),
    ("rtn", 8, 32, True),
    ("rtn", 8, 32, False),
    ("rtn", 4, 32, True),
    ("rtn", 4, 64, False),
]
FORMS += [("rtn", 6, 32, True), ("rtn", 3, 32, False)]


def rounded(method: str, bits: int, group: int | None, symmetric: bool, **changes) -> Decoder:
    """Of 64 inputs or 128, so that there are groups; with biases."""
    config = tiny_config(vocab_size=64, hidden_size=64, intermediate_size=128, head_dim=16, qkv_bias=True, **changes)
    options = {"symmetric": symmetric} | ({"whole_rows": True} if group is None else {})
    return quantize(random_decoder(config), QuantizationRecipe(method, bits, group, options))


@needs_compiler
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_codes_give_the_logits_of_the_dequantized_weights(form, threads):
    model = rounded(*form)
    same_logits(model, native(model), KVS["contiguous"])


@needs_compiler
@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.inference_mode()
def test_inputs_rounded_to_8_bits_give_what_the_eager_products_of_such_inputs_give(form):
    """Those have a bound of their error, and tests of it."""
    model = rounded(*form)
    fast, eager = native(model, inputs="q8"), prepare(model, inputs="q8")
    mine, theirs, exact = (KVS["contiguous"](model.config) for _ in range(3))
    at = 0
    for rows in (16, 1, 1, 5, 2, 9, 3):  # eagerly more than 16 are multiplied as they are
        batch = Batch.of([text(rows, at)], first_positions=[at], sequences=["a"], logits="all")
        got, expected, without = fast(batch, mine), eager(batch, theirs), model(batch, exact)
        # an input between two codes is rounded as its last bits say, so not all are equal
        assert is_one(fast, batch) and relative_difference(got, expected) < 0.02
        assert 1e-5 < relative_difference(got, without) < 0.2
        at += rows


@needs_compiler
def test_divisors_of_inputs_are_taken_and_matrices_of_several_kinds_stand_side_by_side():
    model = rounded("rtn", 8, 32, True)
    first, second = model.layers[0], model.layers[1]
    first.attention.k.divisor = 0.5 + torch.rand(64, generator=torch.Generator().manual_seed(1))
    first.attention.v.divisor = 0.5 + torch.rand(64, generator=torch.Generator().manual_seed(2))
    second.mlp.down.divisor = 0.5 + torch.rand(128, generator=torch.Generator().manual_seed(3))
    other = rounded("rtn", 4, 32, False)
    first.mlp.up, second.attention.q = other.layers[0].mlp.up, other.layers[1].attention.q
    plain = random_decoder(model.config, seed=1)
    second.mlp.gate, first.attention.o = plain.layers[1].mlp.gate, plain.layers[0].attention.o
    same_logits(model, native(model), KVS["paged"])


@needs_compiler
@pytest.mark.parametrize("hidden, size, group", [(44, 8, 1), (52, 24, 3), (100, 40, 2)])
def test_sizes_that_no_register_divides(hidden, size, group, threads):
    config = tiny_config(
        vocab_size=67,
        hidden_size=hidden,
        head_dim=size,
        num_heads=2 * group,
        num_kv_heads=2,
        intermediate_size=3 * hidden // 4,
    )
    model = random_decoder(config)
    same_logits(model, native(model), KVS["contiguous"], 2 * TOLERANCE)


@needs_compiler
@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("window", [None, 300])
@torch.inference_mode()
def test_threads_share_the_keys_of_a_long_text(kv, window, threads):
    """One key-value head and 700 tokens: five threads have a fifth of them each."""
    shape = {"vocab_size": 64, "context_length": 1024, "num_kv_heads": 1, "sliding_window": window}
    model = random_decoder(tiny_config(**shape, attention_sinks=2 if window else 0))
    fast, caches = native(model), [KVS[kv](model.config) for _ in "ab"]
    for cache in caches:
        model(Batch.of([text(700)], sequences=["a"]), cache)
    for at, rows in ((700, 1), (701, 5), (706, 1)):
        batch = Batch.of([text(rows, at)], first_positions=[at], sequences=["a"], logits="all")
        got, expected = fast(batch, caches[0]), model(batch, caches[1])
        assert is_one(fast, batch) and relative_difference(got, expected) < TOLERANCE


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_keys_and_values_are_rounded_to_the_caches_type_as_torch_rounds(dtype):
    model = random_decoder(tiny_config(vocab_size=64))
    fast, ids = native(model), text(12)
    narrow, wide = (Contiguous(model.config, dtype=torch.float32) for _ in "ab")
    narrow._keys, narrow._values = narrow._keys.to(dtype), narrow._values.to(dtype)
    narrow.dtype = dtype
    for kv in (narrow, wide):
        fast(Batch.of([ids], sequences=["a"]), kv)
    for mine, theirs in ((narrow._keys, wide._keys), (narrow._values, wide._values)):
        # the first layer's come from the same numbers, the second's from attention over rounded ones
        assert torch.equal(mine[0], theirs[0].to(dtype))
        assert relative_difference(mine[1].float(), theirs[1]) < 0.02


EDGES = [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 1e-8, 5.96e-8, 2.98e-8, 2.99e-8, 6.1e-5, -6.09e-5, 1e38, 3.4e38]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_every_kind_of_number_is_rounded_as_torch_rounds_it(dtype):
    """Through the values of a cache: v = W·x with one input that is 1."""
    config = tiny_config(vocab_size=64, hidden_size=64, num_layers=1, num_kv_heads=4)
    model = random_decoder(config)
    draw = torch.Generator().manual_seed(0)
    numbers = torch.cat((torch.tensor(EDGES), 2.0 ** (40 * torch.rand(18, generator=draw) - 25)))
    model.layers[0].attention.v.weight.zero_()
    model.layers[0].attention.v.weight[:, 0] = numbers
    model.layers[0].attention_norm.weight.zero_()
    model.embed.weight.copy_(torch.zeros_like(model.embed.weight))
    model.embed.weight[:, 0] = 1
    model.layers[0].attention_norm.weight[0] = 1 / 8  # the root mean square of a single 1 among 64
    model.layers[0].attention_norm.eps = 0.0
    kv = Contiguous(config)
    kv._keys, kv._values, kv.dtype = kv._keys.to(dtype), kv._values.to(dtype), dtype
    native(model)(Batch.of([[3]], sequences=["a"]), kv)
    assert torch.equal(kv._values[0, 0, :, 0].flatten(), numbers.to(dtype))


@needs_compiler
@pytest.mark.parametrize("kv", KVS)
@torch.inference_mode()
def test_many_rows_go_through_a_piece_at_a_time_and_sequences_may_be_cut(kv, monkeypatch, threads):
    model = random_decoder(SHAPES["windows on some layers, one sink"])
    fast = native(model)
    fast._native.max_rows = None
    for piece in (1, 5, 16):
        monkeypatch.setattr(native_steps, "PIECE", piece)
        same_logits(model, fast, KVS[kv])


def test_rows_are_limited_where_a_product_of_matrices_is_faster():
    model = random_decoder(tiny_config(vocab_size=64))
    in_codes = rounded("rtn", 8, 32, True)
    assert (rows_limit(model), rows_limit(in_codes)) == (MAX_ROWS, MAX_ROWS_OF_CODES)
    assert PIECE < rows_limit(in_codes, "q8") == MAX_ROWS_OF_Q8
    for dtype in (torch.bfloat16, torch.float16):
        narrow = copy.deepcopy(model).to(dtype)
        assert rows_limit(narrow) == (MAX_ROWS if torch_multiplies(dtype) else None)


# -- what is said ------------------------------------------------------------------------------------------------------


@needs_compiler
@torch.inference_mode()
def test_a_step_says_its_token_and_its_probability(threads):
    model = random_decoder(tiny_config(vocab_size=61))
    fast, kv, ids = native(model), Contiguous(model.config), text(30, vocab_size=61)
    fast(Batch.of([ids[:2]], sequences=["a"]), kv)
    for at in range(2, 30):
        logits, said = fast.step(ids[at], at, "a", kv)
        token, log_prob, top = said.tolist()
        assert token == logits[0].argmax() and top == logits[0].max()
        assert log_prob == pytest.approx(float(logits[0].double().log_softmax(-1).max()), abs=1e-6)


@needs_compiler
def test_equal_logits_give_the_first_token_of_them(threads):
    model = random_decoder(tiny_config(vocab_size=64, tie_embeddings=False))
    model.head.weight[40:] = model.head.weight[:24]
    fast, kv = native(model), Contiguous(model.config)
    with torch.inference_mode():
        fast(Batch.of([[5, 6]], sequences=["a"]), kv)
        tokens = {at: fast.step(7 + at, at, "a", kv)[1][0] for at in range(2, 40)}
    assert all(token < 40 for token in tokens.values())


@needs_compiler
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_is_no_distribution_says_so(broken, threads):
    model = random_decoder(tiny_config(vocab_size=64, tie_embeddings=False))
    model.head.weight[50, 3], model.head.weight[51, 3] = broken, -broken
    fast, kv = native(model), Contiguous(model.config)
    with torch.inference_mode():
        fast(Batch.of([[5, 6]], sequences=["a"]), kv)
        _, said = fast.step(7, 2, "a", kv)
    assert not torch.isfinite(said[2])
    with pytest.raises(WorkbenchError, match="logits"):
        generate(fast, [5, 6], max_new_tokens=3, kv="contiguous")


@needs_compiler
@pytest.mark.parametrize("kv", ["contiguous", "paged"])
def test_greedy_and_sampled_texts_are_the_decoders(kv):
    model = random_decoder(tiny_config(vocab_size=64))
    fast, prompt = native(model), text(17, 1)
    for settings in ({}, {"temperature": 0.8, "seed": 3}, {"draft": "prompt_lookup"}, {"repetition_penalty": 1.4}):
        got, expected = (generate(one, prompt, max_new_tokens=50, kv=kv, **settings) for one in (fast, model))
        assert got.tokens == expected.tokens
        assert got.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


@needs_compiler
def test_an_engine_serves_what_the_decoder_generates():
    model = random_decoder(tiny_config(vocab_size=64))
    requests = [Request(index, tuple(text(3 + 5 * index, index)), 12 + index) for index in range(6)]
    fast = native(model)
    seen, rows = [], fast._native.rows
    fast._native.rows = lambda *given: _noted(seen, rows, given)
    engine = Engine(fast, SchedulerSettings(max_running=4), num_blocks=64, block_size=4)
    results = {one.request_id: one for one in engine.run(requests)}
    for one in requests:
        expected = generate(model, one.prompt_ids, max_new_tokens=one.max_new_tokens, kv="recompute").tokens
        assert list(results[one.id].token_ids) == list(expected)
    assert sum(seen) > 10


def _noted(seen, rows, given):
    logits = rows(*given)
    seen.append(logits is not None)
    return logits


# -- what it does not take ---------------------------------------------------------------------------------------------


class OfItsOwn(Contiguous):
    """May attend in another way."""


@needs_compiler
@torch.inference_mode()
def test_larger_batches_and_other_caches_run_as_they_did():
    model = random_decoder(tiny_config(vocab_size=64))
    fast = native(model)
    cases = {
        f"up to {MAX_ROWS}": (Batch.of([text(MAX_ROWS + 1)], logits="all"), Contiguous(model.config)),
        "Recompute": (Batch.of([text(5)], logits="all"), Recompute(model.config)),
        "another form": (Batch.of([text(5)], logits="all"), OfItsOwn(model.config)),
        "float64": (Batch.of([text(5)], logits="all"), Contiguous(model.config, dtype=torch.float64)),
    }
    for words, (batch, kv) in cases.items():
        twin = copy.deepcopy(kv)
        assert relative_difference(fast(batch, kv), model(batch, twin)) < TOLERANCE
        assert words in fast.native_reason


@needs_compiler
@torch.inference_mode()
def test_what_is_refused_is_refused_as_before_and_leaves_no_trace():
    model = random_decoder(tiny_config(vocab_size=64))
    fast = native(model)
    for make in KVS.values():
        kv = make(model.config, max_tokens=12)
        fast(Batch.of([text(10)], sequences=["a"]), kv)
        for batch, error in (
            (Batch.of([text(3)], first_positions=[10], sequences=["a"]), WorkbenchError),  # no room
            (Batch.of([text(1)], first_positions=[9], sequences=["a"]), WorkbenchError),  # another position
            (Batch.of([[64]], first_positions=[10], sequences=["a"]), IndexError),  # no such token
            (Batch.of([[-1]], first_positions=[10], sequences=["a"]), IndexError),
        ):
            with pytest.raises(error):
                fast(batch, kv)
        with torch.inference_mode():
            got = fast(Batch.of([text(2, 5)], first_positions=[10], sequences=["a"]), kv)
            plain = make(model.config, max_tokens=12)
            model(Batch.of([text(10)], sequences=["a"]), plain)
            expected = model(Batch.of([text(2, 5)], first_positions=[10], sequences=["a"]), plain)
        assert relative_difference(got, expected) < TOLERANCE


NOT_TAKEN = {
    "latents": ({"latent": True}, {}),
    "multiple of 8": ({"head_dim": 6}, {}),
    "float64": ({}, {"dtype": torch.float64}),
}


@pytest.mark.parametrize("words", NOT_TAKEN)
def test_models_that_have_no_such_steps_say_why_and_run_as_they_are(words):
    changes, others = NOT_TAKEN[words]
    config = SHAPES[LATENT[0]] if changes.pop("latent", False) else tiny_config(vocab_size=64, **changes)
    model, said = random_decoder(config).to(others.get("dtype", torch.float32)), []
    fast = prepare(model, native=True, say=said.append)
    assert words in fast.why_not_native == fast.native_reason and words in said[0] and len(said) == 1
    prompt = text(9)
    got = generate(fast, prompt, max_new_tokens=8, kv="contiguous").tokens
    assert got == generate(model, prompt, max_new_tokens=8, kv="contiguous").tokens


def test_weights_without_a_loop_say_why():
    plain = random_decoder(tiny_config(vocab_size=64, hidden_size=64, head_dim=16, intermediate_size=128))
    model = quantize(plain, QuantizationRecipe("nf4"))
    fast = prepare(model, native=True, say=lambda line: None)
    assert "no form for steps as one function" in fast.why_not_native
    assert generate(fast, text(5), max_new_tokens=5, kv="contiguous").tokens


def test_without_a_compiler_steps_run_as_they_are(monkeypatch):
    monkeypatch.setenv(OFF, "1")
    build.library.cache_clear()
    loop.why_not_here.cache_clear()
    try:
        said, model = [], random_decoder(tiny_config(vocab_size=64))
        fast = prepare(model, native=True, say=said.append)
        assert OFF in said[0] and OFF in fast.why_not_native
        assert generate(fast, text(5), max_new_tokens=5, kv="contiguous").tokens
    finally:
        build.library.cache_clear()
        loop.why_not_here.cache_clear()


def test_two_ways_to_take_the_same_steps_are_refused(tiny_model):
    with pytest.raises(WorkbenchError, match="two ways"):
        prepare(tiny_model, native=True, compile=True)
    with pytest.raises(WorkbenchError, match="native"):
        prepare(tiny_model, native="yes")


# -- counted -----------------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_step_reads_every_weight_once_in_its_own_bytes():
    model = random_decoder(tiny_config(vocab_size=64))
    matrices = sum(one.numel() for one in model.layers.parameters() if one.dim() == 2) + model.head.weight.numel()
    assert native(model).step_weight_bytes == 4 * matrices
    assert native(copy.deepcopy(model).bfloat16()).step_weight_bytes == 2 * matrices
    eight = rounded("rtn", 8, 32, True)
    layers = sum(one.in_features * one.out_features for one in eight.modules() if hasattr(one, "stored"))
    biases = sum(4 * one.bias.numel() for one in eight.modules() if hasattr(one, "stored") and one.bias is not None)
    assert native(eight).step_weight_bytes == layers * 34 // 32 + biases + eight.head.weight.nbytes


@needs_compiler
def test_several_threads_of_python_step_at_once():
    model = random_decoder(tiny_config(vocab_size=64))
    fast, prompts = native(model), [text(5 + index, index) for index in range(6)]
    texts: dict[int, list[int]] = {}

    def work(index: int) -> None:
        texts[index] = generate(fast, prompts[index], max_new_tokens=60, kv="contiguous").tokens

    workers = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    for index, prompt in enumerate(prompts):
        assert texts[index] == generate(model, prompt, max_new_tokens=60, kv="contiguous").tokens


@needs_compiler
@pytest.mark.parametrize("kv", KVS)
@torch.inference_mode()
def test_a_batch_that_was_interrupted_never_came(kv, monkeypatch):
    """Between two pieces, as Ctrl-C would."""
    model = random_decoder(tiny_config(vocab_size=64))
    fast, cache, plain = native(model), KVS[kv](model.config), KVS[kv](model.config)
    for one, its in ((fast, cache), (model, plain)):
        one(Batch.of([text(5)], sequences=["a"]), its)
    run, pieces = loop.run, []

    def interrupted(*given):
        pieces.append(run(*given))
        if len(pieces) == 2:
            raise KeyboardInterrupt
        return pieces[-1]

    monkeypatch.setattr(native_steps, "PIECE", 4)
    monkeypatch.setattr(loop, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fast(Batch.of([text(12, 1), text(3, 2)], first_positions=[5, 0], sequences=["a", "b"]), cache)
    monkeypatch.undo()
    again = Batch.of([text(2, 3), text(4, 4)], first_positions=[5, 0], sequences=["a", "b"], logits="all")
    assert relative_difference(fast(again, cache), model(again, plain)) < TOLERANCE
    assert dict(cache.lengths) == dict(plain.lengths) == {"a": 7, "b": 4}


# -- at the edges ------------------------------------------------------------------------------------------------------


@needs_compiler
@torch.inference_mode()
def test_a_step_with_the_kv_of_another_model_or_kind_is_none():
    model, other = (random_decoder(tiny_config(vocab_size=64, num_layers=layers)) for layers in (2, 1))
    fast, kv = native(model), Contiguous(other.config)
    other(Batch.of([[1, 2]], sequences=["a"]), kv)
    before = kv._keys.clone()
    assert fast.step(3, 2, "a", kv) is None and torch.equal(kv._keys, before) and kv.lengths["a"] == 2
    assert fast.step(3, 0, "a", Paged(model.config)) is None
    with pytest.raises(RuntimeError):  # torch's own word, as without native steps
        fast(Batch.of([[1, 2, 3]]), Contiguous(model.config, device="meta"))


@needs_compiler
@torch.inference_mode()
def test_rows_that_a_batch_does_not_have_get_no_logits():
    model = random_decoder(tiny_config(vocab_size=64))
    fast, kv, batch = native(model), Contiguous(model.config), Batch.of([[1, 2, 3]])
    for row in (3, -1):
        with pytest.raises(WorkbenchError, match="a batch of 3 rows wants logits of rows"):
            fast(dataclasses.replace(batch, logit_rows=torch.tensor([row])), kv)
    assert not kv.lengths and fast(batch, kv).shape == (1, 64)


@needs_compiler
@torch.inference_mode()
def test_tokens_that_never_come_are_no_broken_row(threads):
    """A share of the vocabulary of which no token is possible."""
    model = random_decoder(tiny_config(vocab_size=64, tie_embeddings=False))
    fast, kv = native(model), Contiguous(model.config)
    model.layers[1].mlp.down.weight[0] = 1e6  # so that the first value of x is large, and of one sign
    model.head.weight[8:, 0] = float("inf")
    fast(Batch.of([[1, 2]], sequences=["a"]), kv)
    sign = float(model.hidden(Batch.of([[1, 2, 3]]), Recompute(model.config))[-1, 0].sign())
    model.head.weight[8:, 0] *= -sign
    logits, said = fast.step(3, 2, "a", kv)
    assert torch.isneginf(logits[0, 8:]).all() and torch.isfinite(logits[0, :8]).all()
    token, log_prob, top = said.tolist()
    assert token == logits[0].argmax() and top == logits[0].max()
    assert log_prob == pytest.approx(float(logits[0].double().log_softmax(-1).max()), abs=1e-6)


@needs_compiler
def test_tables_that_another_thread_lengthens_or_shortens_reach_far_enough(monkeypatch):
    model = random_decoder(SHAPES["gemma 3"])
    fast, steps = native(model), native(model)._native
    short, long = ([torch.zeros(n, 2, 8, dtype=torch.float64)] * 2 for n in (4, 400))
    fast._native._in_floats(short)
    made = fast._table._make

    def made_late(positions: int) -> torch.Tensor:
        """While this one is made, another thread makes a longer one."""
        monkeypatch.setattr(fast._table, "_make", made)
        fast._table.reach_length(4 * positions)
        return made(positions)

    monkeypatch.setattr(fast._table, "_make", made_late)
    assert len(fast._table.reach_length(5000)) >= 5000
    assert len(fast._table.rows) >= 4 * 5000
    stop, wrong = threading.Event(), list[int]()

    def work(tables: list[torch.Tensor]) -> None:
        while not stop.is_set():
            wrong.extend(len(one) for one in steps._in_floats(tables) if len(one) != len(tables[0]))

    workers = [threading.Thread(target=work, args=(tables,)) for tables in (short, long, short, long)]
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        [worker.start() for worker in workers]
        time.sleep(0.5)
    finally:
        stop.set()
        [worker.join() for worker in workers]
        sys.setswitchinterval(switching)
    assert not wrong


@pytest.mark.parametrize("part", ["matrix", "head", "positions"])
def test_parts_in_another_type_are_a_reason(part):
    model = random_decoder(SHAPES["gpt2" if part == "positions" else "llama MHA, untied"])
    if part == "positions":
        model.bfloat16().embed_positions.float()
    else:
        (model.head if part == "head" else model.layers[0].mlp.up).double()
    fast = prepare(model, native=True, linear="plain", say=lambda line: None)
    assert ("float64" in fast.why_not_native) or (
        part == "positions" and "positions are embedded in float32" in fast.why_not_native
    )


@needs_compiler
@pytest.mark.parametrize("hidden", [4, 12, 20, 36])
def test_short_rows_of_whole_bytes_are_right_to_the_last(hidden):
    """Fewer inputs than a chunk has: several of the last rows have less than one behind them."""
    config = tiny_config(vocab_size=64, intermediate_size=hidden)
    model = quantize(random_decoder(config), QuantizationRecipe("rtn", 8, None, {"whole_rows": True}))
    same_logits(model, native(model), KVS["contiguous"])
