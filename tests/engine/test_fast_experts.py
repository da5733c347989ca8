"""Claims about the experts of a prepared model as one product for all: the same numbers, two launches per layer, and a
host that never asks where a row went."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import random_decoder, tiny_config
from kernel_claims import GPU, INTERPRETER
from test_experts import SHAPES
from test_fast import logits_of, text
from test_parity import relative_difference

from workbench.decoding.sequence import Request
from workbench.errors import WorkbenchError
from workbench.generation import generate
from workbench.kernels.launch import launches
from workbench.kv import kv_for
from workbench.models import Batch, prepare
from workbench.quantization import QuantizationRecipe, quantize
from workbench.serving.engine import Engine
from workbench.serving.settings import SchedulerSettings

DEVICES = pytest.mark.parametrize("device", [INTERPRETER, GPU])
WIDE = {"intermediate_size": 32}  # of an expert: the interpreter multiplies tile by tile
KINDS = {name: dataclasses.replace(SHAPES[name], **WIDE) for name in ("softmax", "shared, a dense layer")}
KINDS["sigmoid, bias, groups"] = dataclasses.replace(SHAPES["sigmoid, bias, groups"], **WIDE, dense_layers=0)
SHARED = KINDS["shared, a dense layer"]


def made(shape, dtype=torch.float32):
    return random_decoder(tiny_config(vocab_size=256, experts=shape), seed=3).to(dtype)


def both(shape, device: str, dtype=torch.float32):
    model = made(shape, dtype).to(device)
    return tuple(prepare(model, linear="plain", kernels="torch", experts=how) for how in ("loop", "grouped"))


def batches(device: str) -> list[Batch]:
    """A prompt beside another, then one row, then some of each."""
    return [
        Batch.of([text(9), text(6, 1)], sequences=["a", "b"], logits="all", device=device),
        Batch.of([text(1, 2)], first_positions=[9], sequences=["a"], logits="all", device=device),
        Batch.of([text(1, 3), text(4, 4)], first_positions=[10, 6], sequences=["a", "b"], logits="all", device=device),
    ]


@DEVICES
@pytest.mark.parametrize("shape", KINDS.values(), ids=KINDS)
def test_the_same_logits_in_two_launches_a_layer_whatever_was_chosen(shape, device):
    loop, grouped = both(shape, device)
    one, other = (kv_for("contiguous", model, max_sequences=2) for model in (loop, grouped))
    for batch in batches(device):
        expected = logits_of(loop, one, batch)
        with launches() as found:
            assert relative_difference(logits_of(grouped, other, batch), expected) < 1e-5
        assert sum(found.values()) == 2 * (2 - shape.dense_layers)
    assert grouped.weight_bytes == loop.weight_bytes


@DEVICES
def test_in_sixteen_bits_within_their_rounding(device):
    loop, grouped = both(SHARED, device, torch.float16)
    batch = batches(device)[0]
    found, expected = (logits_of(m, kv_for("contiguous", m, max_sequences=2), batch).float() for m in (grouped, loop))
    assert relative_difference(found, expected) < 0.02


@pytest.mark.parametrize("how", ["loop", "grouped"])
def test_the_host_never_asks_where_a_row_went(how):
    """On tensors that hold nothing any question of the host is an error; the loop asks."""
    experts = prepare(made(KINDS["softmax"]), linear="plain", experts=how)._layers[0].experts
    experts.router = experts.router.to("meta")
    x = torch.empty(5, 32, device="meta")
    if how == "loop":
        with pytest.raises(NotImplementedError, match="Meta"):
            experts(x)
        return
    experts.up, experts.down, experts._product = experts.up.to("meta"), experts.down.to("meta"), _product_of_shapes
    assert experts(x).shape == (5, 32)


def _product_of_shapes(x, weight, starts, *, rows=None):
    return torch.empty(len(x if rows is None else rows), weight.shape[1], device="meta")


def test_the_engine_writes_the_plain_loops_tokens():
    model = made(SHARED)
    prompts = [text(6), text(9, 1), text(4, 2)]
    settings = {"max_new_tokens": 3, "stop_token_ids": ()}
    expected = [generate(model, ids, kv="recompute", **settings).tokens for ids in prompts]
    grouped = prepare(model, linear="plain", experts="grouped")
    engine = Engine(grouped, SchedulerSettings(max_running=2, token_budget=16), num_blocks=24, block_size=4)
    requests = [Request(number, tuple(ids), 3, stop_token_ids=()) for number, ids in enumerate(prompts)]
    assert [list(ended.token_ids) for ended in engine.run(requests)] == expected


def test_what_the_kernel_cannot_run_is_refused():
    dense, softmax = random_decoder(tiny_config(vocab_size=256)), KINDS["softmax"]
    rounded = quantize(made(softmax), QuantizationRecipe("rtn", 4, 16))
    for model, reason in (
        (dense, "tiny: it has none"),
        (made(softmax, torch.float64), "the weights are float64"),
        (rounded, "its experts are quantized"),
    ):
        with pytest.raises(WorkbenchError, match=reason):
            prepare(model, experts="grouped")
    with pytest.raises(WorkbenchError, match="way to run experts"):
        prepare(made(softmax), experts="together")
    with pytest.raises(WorkbenchError, match="way to run experts"):
        prepare(made(softmax), experts=["grouped"])


def test_the_router_of_a_bfloat16_model_has_float32_weights():
    model = made(KINDS["softmax"], torch.bfloat16)
    routers = [layer.experts.router for layer in prepare(model)._layers if layer.experts is not None]
    assert routers and all(router.weight.dtype == torch.float32 for router in routers)
