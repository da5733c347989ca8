"""The decoder with kernels of our own between its matrices: the same numbers as the decoder it was made from, a fixed
number of launches, and a choice that says why."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import random_decoder
from kernel_claims import GPU, GPU_ALONE, INTERPRETER
from test_fast import SHAPES, logits_of, text
from test_parity import relative_difference

from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kernels import matvec
from workbench.kernels.launch import launches
from workbench.kv import Paged, Recompute, kv_for
from workbench.models import Batch, prepare
from workbench.models.fast_layers import FastLayer
from workbench.models.fused import FusedLatentLayer, FusedLayer, choose_kernels, launches_per_layer

FUSED = {  # launches in a layer, counted by hand
    "llama GQA, tied": 4,
    "llama with biases": 4,
    "qwen3, norm on q, k": 4,
    "mistral window 8": 4,
    "layers that share keys": 4,
    "sharing layers, norm on q, k": 4,
    "gemma 3": 6,
    "latent attention": 7,
    "latent attention, q at once": 6,
}
IN_PRODUCTS = {name: 5 if name == "gemma 3" else 3 if name.startswith("latent") else 1 for name in FUSED}  # of those
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=FUSED)
def shape_name(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=[INTERPRETER, GPU])
def device(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(shape_name, device):
    return random_decoder(SHAPES[shape_name]).to(device)


@pytest.fixture(scope="module")
def fused(model):
    return prepare(model, linear="plain", kernels="triton")


def batches(device: str) -> list[Batch]:
    """A prompt beside another, a decode step beside a chunk, drafts."""
    return [
        Batch.of([text(5), text(3, 1)], sequences=["a", "b"], logits="all", device=device),
        Batch.of([text(1, 2), text(4, 3)], first_positions=[5, 3], sequences=["a", "b"], device=device),
        Batch.of([text(3, 4)], first_positions=[6], sequences=["a"], logits="all", device=device),
    ]


def cache(model):
    kind = "latent" if model.config.latent_attention is not None else "contiguous"
    return kv_for(kind, model, max_sequences=2)


def test_logits_are_those_of_the_decoder(model, fused, device):
    assert fused.kernels == "triton" and fused.kernels_reason == "as asked"
    expected = logits_of(model, cache(model), *batches(device))
    assert relative_difference(logits_of(fused, cache(model), *batches(device)), expected) < TOLERANCE


def test_greedy_tokens_are_those_of_the_decoder(model, fused):
    asked = {"max_new_tokens": 3, "temperature": 0.0, "stop_token_ids": ()}
    expected = generate(model, text(4), **asked)
    assert generate(fused, text(4), kv="contiguous", **asked).tokens == expected.tokens


def test_a_layer_launches_so_often_and_no_more(shape_name, model, fused, device):
    batch = Batch.of([text(3)], device=device)
    with launches() as counted, torch.no_grad():
        fused(batch, Recompute(model.config))
    assert launches_per_layer(model.config) == FUSED[shape_name]
    assert counted.total() == FUSED[shape_name] * model.config.num_layers + 1  # and the norm at the end
    latent = model.config.latent_attention is not None
    assert counted["_gated"] == model.config.num_layers
    assert counted["_turn"] == (1 + latent) * model.config.num_layers
    assert {type(layer) for layer in fused._layers} == {FusedLatentLayer if latent else FusedLayer}


def test_a_paged_cache_is_written_as_keys_turn(shape_name, model, fused, device):
    """The same numbers in the cache and in the logits, and no other write; latents are written as ever."""
    latent, came = model.config.latent_attention is not None, {}
    for asked in (False, True):
        for layer in fused._layers:
            layer.writes_as_it_turns = asked and not latent
        kv = kv_for("paged", model, max_sequences=2, max_tokens=16, block_size=4)
        with launches() as counted, mock.patch.object(kv.store, "write", wraps=kv.store.write) as written:
            logits = logits_of(fused, kv, *batches(device))
        came[asked] = logits, kv.store.tensors, counted, written.call_count
    for layer in fused._layers:
        del layer.writes_as_it_turns
    (apart, kept, before, calls), (together, written_by_kernel, after, none) = came[False], came[True]
    assert relative_difference(together, apart) < TOLERANCE
    for ours, truth in zip(written_by_kernel, kept):
        assert relative_difference(ours, truth) < TOLERANCE
    assert calls == 3 * len(model.config.kv_layers) and none == (calls if latent else 0)
    assert after == before


def test_a_paged_cache_of_another_type_or_model_is_written_by_itself(device):
    model = random_decoder(SHAPES["llama GQA, tied"]).to(device)
    fused = prepare(model, linear="plain", kernels="triton")
    batch = Batch.of([text(3)], logits="all", device=device)
    settings = {"max_tokens": 16, "block_size": 4, "device": device}
    half = Paged(model.config, dtype=torch.float16, **settings)
    with mock.patch.object(half.store, "write", wraps=half.store.write) as written:
        got = logits_of(fused, half, batch)
    assert written.call_count == model.config.num_layers
    assert relative_difference(got, logits_of(model, Recompute(model.config), batch)) < 1e-2
    other = Paged(random_decoder(SHAPES["qwen3, norm on q, k"]).config, **settings)
    with pytest.raises(WorkbenchError, match="was it made with another model's config"):
        logits_of(fused, other, batch)
    assert dict(other.lengths) == {}


def test_a_paged_cache_with_an_attend_of_its_own_sees_keys_and_values(device):
    class Watched(Paged):
        seen = 0

        def attend(self, layer, q, k, v, batch, up=None):
            self.seen += k is not None
            return super().attend(layer, q, k, v, batch, up)

    model = random_decoder(SHAPES["llama GQA, tied"]).to(device)
    kv = Watched(model.config, max_tokens=16, device=device)
    logits_of(prepare(model, linear="plain", kernels="triton"), kv, Batch.of([text(3)], device=device))
    assert kv.seen == model.config.num_layers


@pytest.fixture(scope="module")
def few_programs(device):
    """The interpreter takes a product's programs one by one, in the same time whatever their size: fewer and larger
    ones. What a product is with each of its block sizes is claimed of the kernel (tests/kernels)."""
    chosen = matvec.chosen

    def larger(*asked):
        config = chosen(*asked)
        return replace(config, blocks=tuple((name, max(size, 32)) for name, size in config.blocks))

    with mock.patch.object(matvec, "chosen", larger if device == "cpu" else chosen):
        yield


@pytest.fixture(scope="module")
def through_kernels(model, few_programs):
    """Matrices go through our kernel, too."""
    return prepare(model, linear="triton", kernels="triton")


@pytest.fixture(scope="module")
def switched(through_kernels, model, device):
    """switched(gates=…, adds=…, norms=…): logits of a step and its launches, with these switches of every layer on or
    off. Each such step is taken once for all tests of the model."""

    @functools.cache
    def step(*, gates: bool = True, adds: bool = True, norms: bool = True):
        switches = {"gates_in_product": gates, "adds_in_product": adds, "norms_in_product": norms}
        batch = Batch.of([text(3)], logits="all", device=device)
        try:
            for layer in through_kernels._layers:
                assert all(getattr(layer, name) for name in switches), "by default all are on"
                vars(layer).update(switches)
            with launches() as counted:
                return logits_of(through_kernels, Recompute(model.config), batch), counted
        finally:
            for layer in through_kernels._layers:
                for name in switches:
                    delattr(layer, name)

    return step


def test_a_gate_in_the_product_launches_once_less_a_layer(model, switched):
    """In whole steps, products counted, with the switch off and on: the same logits."""
    (separate, before), (fused, after) = switched(gates=False, norms=False), switched(norms=False)
    assert relative_difference(fused, separate) < TOLERANCE
    assert before["_gated"] == model.config.num_layers and after["_gated"] == 0
    assert before.total() - after.total() == model.config.num_layers


def test_norms_are_part_of_the_products_that_read_them(shape_name, model, switched):
    """In whole steps, with the switch off and on: the same logits, and only the last norm left of Llama's."""
    (separate, before), (fused, after) = switched(norms=False), switched()
    config = model.config
    assert relative_difference(fused, separate) < TOLERANCE
    own = launches_per_layer(config, in_products=True)
    assert own == IN_PRODUCTS[shape_name]
    splits = after["sum_of_splits"] + after["gated_sum_of_splits"]
    products = sum(count for kernel, count in after.items() if kernel.startswith("matvec"))
    assert after.total() - products - splits == own * config.num_layers + 1
    latent = config.latent_attention
    taken = 0 if config.post_norms else 2 + (latent is not None and latent.query_rank is not None)
    assert before["_norm_one_pass"] - after["_norm_one_pass"] == taken * config.num_layers
    if latent is None and not config.post_norms:
        assert after["_norm_one_pass"] == 1


def test_rows_and_types_that_a_product_does_not_norm_are_normed_before(device):
    """Half precision on tensor cores: x · norm weight might be too large before it is scaled."""
    model = random_decoder(SHAPES["llama GQA, tied"]).to(device).half()
    fused, oracle = prepare(model, linear="triton", kernels="triton"), prepare(model, linear="plain", kernels="torch")
    for rows, norms in ((2, 1), (5, 1 + 2 * model.config.num_layers)):
        batch = Batch.of([text(rows)], logits="all", device=device)
        with launches() as counted:
            got = logits_of(fused, Recompute(model.config), batch)
        assert counted["_norm_one_pass"] == norms
        expected = logits_of(oracle, Recompute(model.config), batch)
        assert got.dtype == torch.float16 and relative_difference(got.float(), expected.float()) < 1e-2


def test_products_of_o_and_down_add_to_the_stream(model, through_kernels, switched, device):
    """Then no norm adds; with norms after attention and feed-forward everything stays as it was."""
    (separate, before), (fused, after) = switched(adds=False, norms=False), switched(norms=False)
    assert relative_difference(fused, separate) < TOLERANCE
    assert before == after  # a norm that adds is one launch as well
    layer = through_kernels._layers[0]
    stream = torch.ones(2, model.config.hidden_size, device=device)
    y = torch.full((2, layer.o.in_features), 0.1, device=device)
    stream_after = layer._added(stream, layer.o, y, 0)
    if model.config.post_norms:
        assert stream_after.added is not None and stream.eq(1).all()
    else:
        assert stream_after.x is stream and stream_after.added is None
        assert relative_difference(stream, 1 + layer.o(y)) < TOLERANCE


def test_greedy_tokens_with_norms_and_gates_in_products_are_those_of_the_decoder(model, through_kernels):
    asked = {"max_new_tokens": 2, "temperature": 0.0, "stop_token_ids": ()}
    expected = generate(model, text(4), **asked)
    assert generate(through_kernels, text(4), kv="contiguous", **asked).tokens == expected.tokens


def test_more_rows_than_the_kernel_has_are_gated_after_the_product(device):
    model = random_decoder(SHAPES["llama GQA, tied"]).to(device)
    fused = prepare(model, linear="triton", kernels="triton")
    batch = Batch.of([text(33)], logits="all", device=device)
    with launches() as counted:
        got = logits_of(fused, Recompute(model.config), batch)
    assert counted["_gated"] == model.config.num_layers
    assert relative_difference(got, logits_of(model, Recompute(model.config), batch)) < TOLERANCE


def test_the_residual_stream_may_be_wider_than_the_weights(device):
    """On a CPU it is float32 beside float16 weights; what the norm gives is float16."""
    model = random_decoder(SHAPES["gemma 3"]).to(device)
    half = model.half()
    fused = prepare(half, linear="plain", kernels="triton")
    plain = prepare(half, linear="plain", kernels="torch")
    batch = Batch.of([text(4)], logits="all", device=device)
    got, expected = (logits_of(one, Recompute(half.config), batch) for one in (fused, plain))
    assert got.dtype == torch.float16
    assert relative_difference(got.float(), expected.float()) < 1e-2


def test_neither_the_model_nor_its_embedding_is_written(model, fused, device):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    logits_of(fused, Recompute(model.config), Batch.of([text(3)], device=device))
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())


def test_the_table_grows_with_the_text(device):
    model = random_decoder(SHAPES["llama GQA, tied"]).to(device)
    fused = prepare(model, linear="plain", kernels="triton")
    batch = Batch.of([text(2)], first_positions=[2047], device=device)
    kv, own = kv_for("contiguous", model), kv_for("contiguous", model)
    start = Batch.of([text(2047)], device=device)
    logits_of(model, kv, start), logits_of(model, own, start)
    assert relative_difference(logits_of(fused, own, batch), logits_of(model, kv, batch)) < TOLERANCE


# -- which it is, and why
# -----------------------------------------------------------------------------------------------


def test_gpt2_is_arranged_with_torch_and_says_so():
    model = random_decoder(SHAPES["gpt2"])
    fast = prepare(model, kernels="triton")
    assert fast.kernels == "torch" and "LayerNorm" in fast.kernels_reason
    with launches() as counted:
        logits_of(fast, Recompute(model.config), Batch.of([text(3)]))
    assert counted.total() == 0


def test_on_a_cpu_auto_is_torch():
    model = random_decoder(SHAPES["llama GQA, tied"])
    fast = prepare(model)
    assert fast.kernels == "torch"
    assert fast.kernels_reason == "the model is on cpu; kernels are compiled for CUDA devices"
    assert {type(layer) for layer in fast._layers} == {FastLayer}
    asked = prepare(model, kernels="torch")
    assert (asked.kernels, asked.kernels_reason) == ("torch", "as asked")
    kernels, because = choose_kernels(model, "auto", compiled=True)
    assert kernels == "torch" and "torch.compile" in because


@pytest.mark.parametrize("device", [GPU_ALONE])
def test_on_a_gpu_auto_is_triton(device):
    fast = prepare(random_decoder(SHAPES["llama GQA, tied"]).to(device))
    assert fast.kernels == "triton" and "Triton" in fast.kernels_reason


def test_dependent_launches_are_refused_where_they_cannot_be():
    model = random_decoder(SHAPES["llama GQA, tied"])
    with pytest.raises(WorkbenchError, match="for CUDA devices; the model is on cpu"):
        prepare(model, kernels="triton", dependent_launches=True)
    with pytest.raises(WorkbenchError, match='arranged with kernels="torch": as asked'):
        prepare(model, kernels="torch", dependent_launches=True)
    with pytest.raises(WorkbenchError, match="dependent_launches must be True or False"):
        prepare(model, dependent_launches=1)


@pytest.mark.parametrize("device", [GPU_ALONE])
def test_dependent_launches_change_no_logit(device):
    """Every kernel reads what the one before it wrote: one that does not wait is seen sooner or later."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch came with compute capability 9.0")
    model = random_decoder(SHAPES["qwen3, norm on q, k"]).to(device)
    batch = Batch.of([text(1), text(1, 1)], logits="all", device=device)
    expected, got = prepare(model, graphs=False), prepare(model, graphs=False, dependent_launches=True)
    for _ in range(50):
        kvs = [kv_for("paged", model, max_sequences=2, max_tokens=16, block_size=4) for _ in range(2)]
        assert logits_of(got, kvs[0], batch).equal(logits_of(expected, kvs[1], batch))


def test_what_cannot_be_is_refused():
    model = random_decoder(SHAPES["llama GQA, tied"])
    with pytest.raises(WorkbenchError, match="unknown kind of kernels 'tritn'; did you mean 'triton'"):
        prepare(model, kernels="tritn")
    with pytest.raises(WorkbenchError, match="the weights are float64; use kernels="):
        prepare(random_decoder(SHAPES["llama GQA, tied"]).double(), kernels="triton")
    with pytest.raises(WorkbenchError, match="not both"):
        prepare(model, compile=True, kernels="triton")
