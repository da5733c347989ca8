"""Claims about what state layers cost: weights, states and FLOPs as counted are those of the real tensors."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from test_mixers import config_of, every_kind, mixer_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import WorkbenchError
from workbench.instruments.costs import step_costs, weights_read
from workbench.models.decoder import Decoder, StateLayer
from workbench.models.mixers import gated_delta, linear_attention, mamba2, rwkv7
from workbench.models.state_shape import mixer_matrices, scan_flops
from workbench.models.training import initialize

STEP: dict[str, Any] = {"new_tokens": [1, 1], "contexts": [9, 5], "logit_rows": 2, "weight_bytes_per_element": 4}


@every_kind
@pytest.mark.parametrize("wide", [16, 0])
def test_a_step_reads_every_weight_once_and_every_state_and_writes_it(kind: str, wide: int) -> None:
    config = config_of(kind, intermediate_size=wide, mixers=(kind, "attention" if wide else kind, kind))
    costs = step_costs(config, **STEP, kv="state")
    assert costs.bytes_by_part["weights"] == 4 * weights_read(config, 2, 2)
    assert costs.operation("scan").kv_bytes == 2 * 2 * config.state_bytes()
    keys = sum(context + 2 for context in STEP["contexts"])  # all are read, the new one written first
    assert costs.bytes_by_part["kv"] - costs.operation("scan").kv_bytes == 4 * keys * config.kv_values_per_token()


@every_kind
def test_the_states_that_are_counted_are_those_that_a_step_takes_and_gives(kind: str) -> None:
    config = config_of(kind, mixers=(kind,) * 3)
    model = Decoder(config)
    initialize(model, 0)
    x, moved = torch.randn(2, 12), 0
    for layer in model.layers:
        mixer = cast("StateLayer", layer).mixer
        before = mixer.initial_state(x, 2)
        _, after = mixer.step(x, before)
        moved += sum(state.nbytes for states in (before, after) for state in states.values())
    assert step_costs(config, **STEP, kv="state").operation("scan").kv_bytes == moved


@every_kind
def test_the_matrices_that_are_counted_are_those_of_the_module(kind: str) -> None:
    mixer = mixer_of(kind)
    matrices = [
        (m.in_features, m.out_features)
        for n, m in mixer.named_modules()
        if isinstance(m, nn.Linear)
        if "filter" not in n
    ]
    if kind == "recurrent_memory":  # the memory's own, once a segment
        d, inner = 12, mixer.shape.inner_size
        for once in ((d, inner), (inner, d)):
            matrices.remove(once)
    assert sorted(matrices) == sorted(mixer_matrices(kind, mixer.shape, 12))


class Counting(TorchDispatchMode):
    """Products and sums of whole states (and einsum's, 2 for a multiply and its add)."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.flops = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if name == "bmm":
            batch, rows, inner = args[0].shape
            if inner * args[1].shape[2] * batch >= self.least:
                self.flops += 2 * batch * rows * inner * args[1].shape[2]
        elif name in ("mul", "add") and out.numel() >= self.least:
            self.flops += out.numel()
        return out


def random(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["linear_attention", "mamba2", "gated_delta", "rwkv7"])
def test_the_flops_of_a_scan_are_those_of_its_recurrence(kind: str) -> None:
    """Those of whole states; a convolution's 2·W a channel are beside it."""
    shape = mixer_of(kind).shape
    heads, keys, size = shape.num_heads, shape.state_size if kind != "rwkv7" else shape.head_dim, shape.head_dim
    q, k, v = random(1, 1, heads, keys), random(1, 1, heads, keys), random(1, 1, heads, size)
    state, a_head = random(1, heads, keys, size), random(1, 1, heads)
    with Counting(heads * keys * size) as counted:
        match kind:
            case "linear_attention":
                linear_attention.recurrent(q, k, v, (state, random(1, heads, keys)))
            case "mamba2":
                mamba2.recurrent(q, k, v, -a_head, state)
            case "gated_delta":
                gated_delta.recurrent(q, k, v, -a_head, a_head, state)
            case "rwkv7":
                rwkv7.recurrent(q, -q, k, v, k, q, state)
    channels = {"linear_attention": 2 * heads * keys + shape.inner_size, "rwkv7": 0}
    convolved = channels.get(kind, 2 * shape.num_groups * keys + shape.inner_size)
    assert counted.flops + 2 * shape.conv_width * convolved == scan_flops(kind, shape, 12, 24)


def test_a_states_bytes_do_not_depend_on_the_context_and_those_of_attention_do() -> None:
    config = config_of("mamba2", context_length=4096)
    short, long = (step_costs(config, **STEP | {"contexts": [n, n]}, kv="state") for n in (16, 4000))
    assert short.operation("scan") == long.operation("scan")
    assert short.operation("attention").kv_bytes < long.operation("attention").kv_bytes / 100


def test_a_prepared_form_of_state_layers_is_not_counted_and_gates_are_refused_by_name() -> None:
    config = config_of("mamba2")
    with pytest.raises(WorkbenchError, match="count arrangement 'plain'"):
        step_costs(config, **STEP, kv="state", arrangement="fast")
    with pytest.raises(WorkbenchError, match="attention_gate"):
        step_costs(config_of("mamba2", attention_gate=True), **STEP, kv="state")
    with pytest.raises(WorkbenchError, match="kv 'state'"):
        step_costs(config, **STEP, kv="contiguous")
