"""A smaller model from a larger one: rows and columns go, and what is left is an ordinary model.

    part       what goes
    layer      all of its tensors
    channel    columns of embedding (and head) and of all that reads the stream; rows of all that writes to it
    neuron     rows of gate and up, a column of down
    KV group   rows of k and v, rows of q and columns of o of the query heads that read them

Layers, neurons and groups: the smaller model equals the larger one with these parts zeroed. Channels: a norm divides by
the root of the mean square over all d channels. Over the d' that stay the mean is d/d' times as large, so the weights
of the norms over the stream are multiplied with √(d/d'); then the two are equal but for ε inside the root.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from workbench.errors import WorkbenchError
from workbench.models.assembly import fill, hollow_decoder
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.pruning.importance import check_plain
from workbench.pruning.plans import Plan

# Of each parameter of a layer, what its rows and its columns are; a name that is missing is copied whole.
AXES = {
    "attention.q.weight": ("queries", "channels"),
    "attention.q.bias": ("queries",),
    "attention.k.weight": ("keys", "channels"),
    "attention.k.bias": ("keys",),
    "attention.v.weight": ("keys", "channels"),
    "attention.v.bias": ("keys",),
    "attention.o.weight": ("channels", "values"),
    "attention.o.bias": ("channels",),
    "attention.q_down.weight": (None, "channels"),
    "attention.q_up.weight": ("queries", None),
    "attention.kv_down.weight": (None, "channels"),
    "attention.k_up.weight": ("contents", None),
    "attention.v_up.weight": ("values", None),
    "mlp.gate.weight": ("neurons", "channels"),
    "mlp.gate.bias": ("neurons",),
    "mlp.up.weight": ("neurons", "channels"),
    "mlp.up.bias": ("neurons",),
    "mlp.down.weight": ("channels", "neurons"),
    "mlp.down.bias": ("channels",),
    "attention_norm.weight": ("channels",),
    "attention_norm.bias": ("channels",),
    "attention_post_norm.weight": ("channels",),
    "mlp_norm.weight": ("channels",),
    "mlp_norm.bias": ("channels",),
    "mlp_post_norm.weight": ("channels",),
}
ENDS = {
    "embed.weight": (None, "channels"),
    "embed_positions.weight": (None, "channels"),
    "head.weight": (None, "channels"),
    "norm.weight": ("channels",),
    "norm.bias": ("channels",),
}


def prune(model: Decoder, plan: Plan, *, name: str | None = None) -> Decoder:
    """A new, smaller model with what the plan keeps; the old one is left as it is, and no tensor is shared.

    Raises WorkbenchError for a plan that does not fit the model, before anything is made.
    """
    check_plain(model)
    if not isinstance(plan, Plan):
        raise WorkbenchError(f"prune takes a Plan, got {type(plan).__name__}; Plan.from_dict reads one from JSON")
    small = hollow_decoder(plan.config_of(model.config), name=name or f"{model.name}-pruned", tokenizer=model.tokenizer)
    return fill(small, _tensors(model, small, plan), model.device)


def _tensors(model: Decoder, small: Decoder, plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter of the smaller model, cut from the larger one's."""
    config = model.config
    stretch = math.sqrt(config.hidden_size / len(plan.channels))
    for name, wanted in small.named_parameters():
        if name.startswith("layers."):
            _, number, within = name.split(".", 2)
            place = int(number)
            kept = _kept(config, plan, place)
            tensor, axes = model.get_parameter(f"layers.{plan.layers[place]}.{within}"), AXES.get(within, ())
        else:
            kept, within = {"channels": plan.channels}, name
            tensor, axes = model.get_parameter(name), ENDS[name]
        cut = _cut(tensor.detach(), axes, kept)
        if within.endswith("norm.weight") and axes == ("channels",) and stretch != 1:
            cut = (1 + cut) * stretch - 1 if config.zero_centered_norms else cut * stretch
        assert cut.shape == wanted.shape, f"{name}: {list(cut.shape)} for {list(wanted.shape)}"
        yield name, cut


def _kept(config: ModelConfig, plan: Plan, place: int) -> dict[str, tuple[int, ...]]:
    """Indices that stay along each kind of axis, in the layer at `place` of the smaller model."""
    groups, heads_of = plan.kv_groups[place], config.num_heads // config.num_kv_heads
    heads = [group * heads_of + i for group in groups for i in range(heads_of)]
    kept = {"channels": plan.channels, "neurons": plan.neurons[place]}
    if config.latent_attention is None:
        of_heads, of_groups = _stretches(heads, config.head_dim), _stretches(groups, config.head_dim)
        return kept | {"queries": of_heads, "values": of_heads, "keys": of_groups}
    shape = config.latent_shape
    return kept | {
        "queries": _stretches(heads, shape.key_head_dim),
        "contents": _stretches(heads, shape.content_head_dim),
        "values": _stretches(heads, shape.value_head_dim),
    }


def _stretches(heads: list[int] | tuple[int, ...], size: int) -> tuple[int, ...]:
    """The indices of these heads, each a stretch of `size`."""
    return tuple(head * size + i for head in heads for i in range(size))


def _cut(tensor: torch.Tensor, axes: tuple, kept: dict[str, tuple[int, ...]]) -> torch.Tensor:
    """A copy with the kept indices along each axis; None keeps all."""
    for dimension, axis in enumerate(axes):
        if axis is not None:
            tensor = tensor.index_select(dimension, torch.tensor(kept[axis], device=tensor.device))
    return tensor.clone().contiguous()
