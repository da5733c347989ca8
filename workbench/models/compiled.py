"""Steps of one row through torch.compile: one graph a step where that can be, else three pieces for all layers.

whole    every layer and the attention between them in one graph. On a CPU this becomes one loop nest inside one
         parallel region: no operation has to be started, and weights are read at the memory's speed. It needs a
         kv that shows what it remembers at once (`before_step`, `put_step`), and a compilation that grows with L.
pieces   what lies between two attentions is one graph, the same for all layers ("piecewise", as vLLM compiles
         its models), because it depends on nothing but x. Attention stays with the kv, whatever kv it is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

import torch

from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends, Turns
from workbench.models.fast_layers import FastLayer, Projected
from workbench.models.linear import Linear

Norm = Callable[..., torch.Tensor]
Stepped = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits, and k, v of all layers
WHOLE_LAYERS = 16  # a graph of more layers takes minutes to compile
# Inductor computes a value again wherever it is used unless that takes more operations than this: at its default of 30
# the norm of x is computed again for every row of the weights. 6 are what it takes to make a number of half a byte and
# multiply it, which is to stay in registers.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"realize_opcount_threshold": 6}


def why_not_whole(config: ModelConfig) -> str:
    """Why a step of this shape is not compiled as one graph; "" where it is."""
    if config.latent_attention is not None or config.kv_sources is not None:
        return "latent attention and shared layers are compiled in pieces"
    if config.sliding_window is not None and (config.global_layers or config.attention_sinks):
        return "layers that differ in what they see are compiled in pieces"
    if config.num_layers > WHOLE_LAYERS:
        return f"{config.num_layers} layers would take minutes to compile at once"
    return ""


class ShowsAll(Attends, Protocol):
    """A kv that returns the cached keys and values of all layers at once; see `workbench.kv.contract.KV`."""

    def before_step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]: ...
    def put_step(self, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None: ...


class CompiledSteps:
    """`logits = steps(x, turns, batch, kv)` for a batch of one token that the kv has accepted.

    layers: `FastLayer`s whose linears are `Matvec`. Everything is compiled when it is first used.
    """

    def __init__(self, layers: list[FastLayer], norm: Norm, head: Linear, config: ModelConfig) -> None:
        self.layers, self.norm, self.head, self.config = layers, norm, head, config
        self._can_be_whole = not why_not_whole(config)
        self._whole = torch.compile(self._whole_step, options=OPTIONS)
        self._before, self._between, self._ending = (
            torch.compile(piece, dynamic=False, options=OPTIONS) for piece in PIECES
        )

    def __call__(self, x: torch.Tensor, turns: Turns, batch: Batch, kv: Attends) -> torch.Tensor:
        if self._can_be_whole and batch.first_positions[0] > 1 and self._shows_all(kv):
            keys, values = kv.before_step(batch)
            for tensor in (keys, values):
                torch._dynamo.maybe_mark_dynamic(tensor, 2)  # one graph for all lengths, from the first
            logits, k, v = self._whole(x, turns, keys, values)
            kv.put_step(k, v, batch)
            return logits
        return self._in_pieces(x, turns, batch, kv)

    def _shows_all(self, kv: Attends) -> TypeGuard[ShowsAll]:
        """A kv of another shape does not: layer by layer it says what is wrong."""
        return hasattr(kv, "before_step") and getattr(kv, "config", None) == self.config

    def _whole_step(self, x: torch.Tensor, turns: Turns, keys: torch.Tensor, values: torch.Tensor) -> Stepped:
        """x [1, d], keys and values [L, H_kv, S, D] -> logits [1, V] and the new k, v [L, H_kv, D]."""
        new_keys, new_values = [], []
        for layer, kept, kept_values in zip(self.layers, keys.unbind(0), values.unbind(0)):
            q, k, v = layer.before(x, turns)
            assert k is not None and v is not None, "every layer has keys of its own"
            mixed = attend_one(q[0], k[0], v[0], kept, kept_values, self.config.attention_scale)
            x = layer.after(x, mixed.reshape(1, -1).to(q.dtype))
            new_keys.append(k[0])
            new_values.append(v[0])
        return self.head(self.norm(x)), torch.stack(new_keys), torch.stack(new_values)

    def _in_pieces(self, x: torch.Tensor, turns: Turns, batch: Batch, kv: Attends) -> torch.Tensor:
        layers = self.layers
        q, k, v = self._before(layers[0], x, turns)
        for index, (layer, following) in enumerate(pairwise(layers)):
            mixed = kv.attend(index, q, k, v, batch, **layer.extra).reshape(1, -1)
            x, q, k, v = self._between(layer, following, x, mixed, turns)
        mixed = kv.attend(len(layers) - 1, q, k, v, batch, **layers[-1].extra).reshape(1, -1)
        return self._ending(layers[-1], self.norm, self.head, x, mixed)


def attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one query over the cached tokens and itself, written as sums that the compiler turns into loops.

    q [H_q, D], k, v [H_kv, D] of the new token; keys, values [H_kv, S, D] -> [H_q, D] float32. The new token is no
    row of the cache yet: its weight is added to the sums, so that the graph writes into nothing it was given.
    """
    heads, width = k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).view(heads, -1, 1, width) * scale  # [H_kv, G, 1, D]
    kept = (q * keys[:, None]).sum(-1)  # [H_kv, G, S]
    own = (q * k[:, None, None]).sum(-1)  # [H_kv, G, 1]
    top = torch.maximum(kept.amax(-1, keepdim=True), own)
    kept, own = torch.exp(kept - top), torch.exp(own - top)
    mixed = (kept[..., None] * values[:, None]).sum(-2) + own * v[:, None].to(wide)  # [H_kv, G, D]
    return (mixed / (kept.sum(-1, keepdim=True) + own)).flatten(0, 1)


def before(layer: FastLayer, x: torch.Tensor, turns: Turns) -> Projected:
    """All that lies before the attention of a layer: q, k, v."""
    return layer.before(x, turns)


def between(
    layer: FastLayer, following: FastLayer, x: torch.Tensor, mixed: torch.Tensor, turns: Turns
) -> tuple[torch.Tensor, *Projected]:
    """All that lies between the attention of one layer and that of the next: (x, q, k, v)."""
    x = layer.after(x, mixed)
    return x, *following.before(x, turns)


def ending(layer: FastLayer, norm: Norm, head: Linear, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """After the last attention: logits [N, V]."""
    return head(norm(layer.after(x, mixed)))


PIECES: tuple[Callable[..., Any], ...] = (before, between, ending)
