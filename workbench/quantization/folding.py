"""Scaling a channel up and its consumer down: the same function with other numbers in between.

    norm -> x·g -> q, k, v, gate, up      g_j / s_j          and W[:, j] · s_j
    v    -> mix  -> o                     rows of W_v / s     and W_o[:, j] · s_j     if every query head has its own v
    up   -> ·    -> down                  rows of W_up / s    and W_down[:, j] · s_j  (silu(gate) ⊙ up is linear in up)

An expert of a mixture has the norm in common with the router and the other experts, so nothing is folded into it.

AWQ and SmoothQuant choose s so that the weights (or the activations) become easier to round; outliers are planted for
lab 05 the same way. A layer whose inputs come from nothing that can be divided keeps the divisor and divides at run
time.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.models.config import ModelConfig
from workbench.models.decoder import DecoderLayer
from workbench.models.experts import MixtureOfExperts
from workbench.models.layers import ZeroCenteredRMSNorm

NEVER = ("attention.k_up", "attention.v_up")  # folded into queries and results by `models.latent`


class LayerParts:
    """The linears of one decoder layer in the order they run, grouped by shared input."""

    def __init__(self, layer: DecoderLayer, config: ModelConfig) -> None:
        self.layer, self.config = layer, config
        there = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        self.stages: list[tuple[str, ...]] = []
        feeds = ["mlp"]
        if isinstance(layer.mlp, MixtureOfExperts):
            feeds = ["mlp.shared", *(f"mlp.experts.{number}" for number in range(layer.mlp.shape.num_experts))]
        for stage in (
            ("attention.q", "attention.k", "attention.v", "attention.q_down", "attention.kv_down"),
            ("attention.q_up",),
            ("attention.o",),
            *(stage for feed in feeds for stage in ((f"{feed}.gate", f"{feed}.up"), (f"{feed}.down",))),
        ):
            names = tuple(name for name in stage if name in there)
            if names:
                self.stages.append(names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for stage in self.stages for name in stage)

    def linear(self, name: str) -> nn.Linear:
        return cast(nn.Linear, self.layer.get_submodule(name))

    def replace(self, name: str, module: nn.Module) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(self.layer.get_submodule(owner), leaf, module)

    def scale_inputs(self, stage: tuple[str, ...], scale: torch.Tensor) -> bool:
        """Multiply the columns of the linears of a stage with `scale` [in], and divide their inputs by it where that
        can be done before them. Returns whether it was; if not, the caller divides at run time."""
        if not bool((scale > 0).all() and torch.isfinite(scale).all()):
            raise WorkbenchError("scales that are folded must be finite and above 0")
        for name in stage:
            linear = self.linear(name)
            _set(linear, "weight", linear.weight.float() * scale)
        return self._divide_before(stage, scale)

    def can_divide_before(self, stage: tuple[str, ...]) -> bool:
        if stage[0] in ("attention.q", "attention.q_down"):
            return True
        if stage[0] == "attention.q_up":
            return True
        if stage[0] == "attention.o":
            return (
                self.config.latent_attention is None
                and self._owns_v()
                and self.config.num_kv_heads == self.config.num_heads
            )
        if not stage[0].endswith(".down"):
            return stage[0] in ("mlp.gate", "mlp.up")
        return hasattr(self._feed_of(stage), "gate")  # behind silu(gate) · up; GELU(up) is not linear in up

    def _feed_of(self, stage: tuple[str, ...]) -> Any:
        """The feed-forward that a linear belongs to."""
        return self.layer.get_submodule(stage[0].rpartition(".")[0])

    def _owns_v(self) -> bool:
        """And nobody else attends over it."""
        return hasattr(self.layer.attention, "v") and self.config.kv_sources is None

    def _divide_before(self, stage: tuple[str, ...], scale: torch.Tensor) -> bool:
        if not self.can_divide_before(stage):
            return False
        layer = self.layer
        if stage[0] in ("attention.q", "attention.q_down"):
            _divide_norm(layer.attention_norm, scale)
        elif stage[0] == "attention.q_up":
            _divide_norm(layer.attention.q_norm, scale)
        elif stage[0] == "attention.o":
            _divide_rows(cast(nn.Linear, layer.attention.v), scale)
        elif stage[0] in ("mlp.gate", "mlp.up"):
            _divide_norm(layer.mlp_norm, scale)
        else:
            _divide_rows(self._feed_of(stage).up, scale)
        return True


def _divide_norm(norm: Any, scale: torch.Tensor) -> None:
    weight = norm.weight.float()
    if isinstance(norm, ZeroCenteredRMSNorm):
        _set(norm, "weight", (1 + weight) / scale - 1)
        return
    _set(norm, "weight", weight / scale)
    if getattr(norm, "bias", None) is not None:
        _set(norm, "bias", norm.bias.float() / scale)


def _divide_rows(linear: nn.Linear, scale: torch.Tensor) -> None:
    _set(linear, "weight", linear.weight.float() / scale[:, None])
    if linear.bias is not None:
        _set(linear, "bias", linear.bias.float() / scale)


def _set(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """A new parameter in the old one's type; the old tensor, which another model may share, stays as it is."""
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(value.to(old.dtype), requires_grad=False))
