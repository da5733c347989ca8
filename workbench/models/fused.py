"""What a FastDecoder does between its matrices, in kernels of our own (workbench.kernels): each a launch, where torch
takes several and moves the rows as often.

    torch                                       kernels
    add, then norm (5 operations)               one launch: the norm adds what came before on the way
    norms of q and k, join, products, roll      one launch over the joined q, k and v, in place; the table of cos and
                                                sin is looked up inside, and v is not touched. With a paged cache it
                                                writes k and v to their places as well (stack, index_copy)
    activation, product                         one launch

With up to 32 rows, where the weights go through our kernel (linear="triton"), a product does more than multiply: it
norms what it reads, up's gates, and those of o and down add to the residual stream. A layer of Llama's block is then
its 4 products, its attention and the launch that turns; norms after attention and feed-forward (Gemma) stay launches,
and so do those before, which add what those give.

A layer of Llama's block launches 4 (its products and its attention not counted), one with norms after attention and
feed-forward (Gemma) 6, one with latent attention 6, and 7 where q goes through a latent too; the norm at the end is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from workbench.errors import WorkbenchError, unknown
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends, Decoder, Turns
from workbench.models.fast_layers import (
    FastLatentLayer,
    FastLayer,
    MakeNorm,
    Projected,
    RotaryTable,
    Stream,
    norm_weight,
)
from workbench.models.linear import Join, Linear, TritonMatvec

KINDS = ("torch", "triton", "c++")


# -- which of the two ------------------------------------------------------------------------------------------------


def choose_kernels(model: Decoder, kernels: str, *, compiled: bool) -> tuple[str, str]:
    """("torch", "triton" or "c++", why). kernels: one of these, or "auto": triton on a CUDA device that runs it.

    A shape that there are no kernels for is arranged with torch, whichever was asked, and the reason says so; so it is
    with "c++" without a compiler. Raises WorkbenchError where "triton" was asked and this device, this dtype or
    torch.compile rules it out, and where "c++" goes with torch.compile.
    """
    if kernels not in ("auto", *KINDS):
        raise unknown("kind of kernels", kernels, ["auto", *KINDS])
    if kernels == "torch":
        return "torch", "as asked"
    asked = kernels != "auto"
    if compiled:
        if asked:
            raise WorkbenchError(
                f'torch.compile fuses these operations itself; give compile=True or kernels="{kernels}", not both'
            )
        return "torch", "steps go through torch.compile, which fuses these operations itself"
    if kernels == "c++":
        from workbench.models.looped import why_not_loops

        reason = why_not_loops(model)
        return ("torch", reason) if reason else ("c++", "as asked")
    if not asked and model.device.type != "cuda":
        return "torch", f"the model is on {model.device}; kernels are compiled for CUDA devices"
    reason = why_not_here(model)
    if reason and asked:
        raise WorkbenchError(f'kernels cannot run {model.name}: {reason}; use kernels="auto" or "torch"')
    reason = reason or why_not_shape(model.config)
    if reason:
        return "torch", reason
    return "triton", "as asked" if asked else f"{model.device} runs Triton kernels, and they have this shape"


def why_not_here(model: Decoder) -> str:
    """Why kernels do not run with this dtype on this device; "" where they do."""
    from workbench.kernels.launch import FLOATS, why_not

    if model.dtype not in FLOATS:
        names = ", ".join(str(one).removeprefix("torch.") for one in FLOATS)
        return f"they have {names}, the weights are {str(model.dtype).removeprefix('torch.')}"
    return why_not(model.device)


def why_not_shape(config: ModelConfig) -> str:
    """Why there are no kernels for a model of this shape; "" where there are."""
    from workbench.kernels.rotary import LARGEST_HEAD

    if config.is_gpt2:
        return "GPT-2's block has LayerNorm and one matrix before its GELU; the kernels are for RMSNorm and gates"
    if config.experts is not None:
        return "a layer with experts sorts its rows by expert first; the kernels are for one feed-forward of all rows"
    if config.rotary_head_dim > LARGEST_HEAD:
        return f"heads turn {config.rotary_head_dim} values; the kernel has up to {LARGEST_HEAD}"
    return ""


# -- the parts -------------------------------------------------------------------------------------------------------


class FusedNorm:
    """An RMSNorm in one launch. Of a Stream, it adds what is to be added first, to the stream in place."""

    def __init__(self, module: Any, stream: torch.dtype) -> None:
        from workbench.kernels.norm import rms_norm

        self._rms_norm, self._dtype = rms_norm, module.weight.dtype
        self.weight, self.eps = norm_weight(module, torch.float32).contiguous(), module.eps
        # for products, which read it once per program, in the type it came in
        self.in_product = norm_weight(module, self._dtype).contiguous(), self.eps

    def __call__(self, x: torch.Tensor | Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, d], in the type of the weights, or in `out`."""
        x, added = (x, None) if isinstance(x, torch.Tensor) else x
        if added is None:
            return cast(torch.Tensor, self._rms_norm(x, self.weight, self.eps, out=out, dtype=self._dtype))
        return self._rms_norm(added, self.weight, self.eps, x, out, dtype=self._dtype, in_place=True)[0]


class FusedRotaryTable(RotaryTable):
    """The table as it is, for a kernel that looks its rows up."""

    def turn(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [N] and the table [P, 2, D]."""
        self.reach(batch)
        return batch.positions, self._table


class FusedLayer(FastLayer):
    """`before` and `after` of a Stream. What `before` was given is added when `after` is called: `after` begins with
    the x of the same Stream. What a product through our kernel does besides, with few rows: `gates_in_product`, the
    gate in up's; `adds_in_product`, the addition to the stream in those of o and down; `norms_in_product`, the norm
    before a product. `writes_as_it_turns`: k and v go to their places in a paged cache in the launch in which q and k
    turn."""

    norms_in_product = True
    gates_in_product = True
    adds_in_product = True
    writes_as_it_turns = True

    def _prepare_attention(self, a: Any, join: Join, norm: MakeNorm, config: ModelConfig) -> None:
        from workbench.kernels.rotary import rotate_and_write, rotate_rows
        from workbench.kernels.swiglu import swiglu

        super()._prepare_attention(a, join, norm, config)
        self._rotate_rows: Callable[..., torch.Tensor] = rotate_rows
        self._rotate_and_write = rotate_and_write
        self._swiglu, self._activation = swiglu, config.activation
        self._head_norms: dict[str, Any] = {}
        if config.latent_attention is None and self.qk_norm is not None:
            weights = [one.weight.expand(n, -1) for one, n in zip(self.qk_norm, self._parted) if n]
            self._head_norms = {"norm_weights": torch.cat(weights).contiguous(), "eps": self.qk_norm[0].eps}

    def attend(self, index: int, x: Stream, turns: Turns, batch: Batch, kv: Attends) -> torch.Tensor:
        """With a cache that says where its new keys and values belong they are written as they turn."""
        paged: Any = kv
        room = self._room(index, batch, paged)
        if room is None:
            return super().attend(index, x, turns, batch, kv)
        q = self._rotate_and_write(self._heads(x), *_turn(turns, self.local), *room, **self._head_norms)
        return paged.attend_written(index, q, batch)

    def _room(self, index: int, batch: Batch, kv: Any) -> Any:
        """A `kv.paged.Room`; None where this layer has no keys of its own, or they would be rounded once more."""
        if not (self.writes_as_it_turns and self.kv_heads and hasattr(type(kv), "room_for")):
            return None
        room = kv.room_for(index, batch)
        shape = (self.kv_heads, self.head_dim)
        fits = room is not None and all(
            one.shape[1:] == shape and one.dtype == self._dtype for one in (room.keys, room.values)
        )
        return room if fits else None

    def _heads(self, x: Stream) -> torch.Tensor:
        """q, k and v [N, H_q + 2·H_kv, D] as the product leaves them."""
        return self._normed(self.qkv, self.attention_norm, x).view(len(x.x), -1, self.head_dim)

    def _normed(self, linear: Linear, norm: Any, x: Stream, activation: str | None = None) -> torch.Tensor:
        """linear(norm(x)); with an activation gated."""
        kernel = few_rows_kernel(linear, x.x)
        gates = activation is None or self.gates_in_product
        if kernel is not None and self._norms_in(kernel, x) and gates:
            return kernel.fused(x.x, activation=activation, norm=norm.in_product)
        y = norm(x)
        if activation is None:
            return linear(y)
        if kernel is not None and gates:
            return kernel.fused(y, activation=activation)
        return self._swiglu(linear(y), activation=activation)

    def _norms_in(self, kernel: TritonMatvec, x: Stream) -> bool:
        """Whether the norm before this product is part of it: where that norm has nothing to add."""
        return self.norms_in_product and self.post_norms is None and x.added is None and kernel.norms(len(x.x))

    def before(self, x: Stream, turns: Turns) -> Projected:
        """q [N, H_q, D], k and v [N, H_kv, D], normed and rotated where the product left them."""
        heads = self._heads(x)
        self._rotate_rows(heads, *_turn(turns, self.local), self._rotary_heads[0], heads, **self._head_norms)
        if not self.kv_heads:
            return heads, None, None
        q, k, v = torch.split_with_sizes(heads, (*self._parted, self.kv_heads), 1)
        return q, k, v

    def after(self, x: Stream, mixed: torch.Tensor) -> Stream:
        """The stream of the next layer, with what the feed-forward gave still to be added."""
        x = self._added(x.x, self.o, mixed, 0)
        y = self._normed(self.up, self.mlp_norm, x, self._activation)  # act(gate) · up [N, F]
        return self._added(x.x, self.down, y, 1)

    def _added(self, x: torch.Tensor, linear: Linear, y: torch.Tensor, which: int) -> Stream:
        """The stream with linear(y): added, or to be added; normed before where the model does that."""
        if self.adds_in_product and self.post_norms is None and (kernel := few_rows_kernel(linear, y)) is not None:
            kernel.fused(y, residual=x)
            return Stream(x)
        added = linear(y)
        return Stream(x, added if self.post_norms is None else self.post_norms[which](added))


class FusedLatentLayer(FusedLayer, FastLatentLayer):
    """A layer with latent attention: q turns where the product left it, the latents are written where they belong."""

    writes_as_it_turns = False

    def before(self, x: Stream, turns: Turns) -> Projected:
        """q [N, H_q, content + rotary], latents [N, 1, kv_rank + rotary], None."""
        turn, shape, rows = _turn(turns, self.local), self.shape, len(x.x)
        down = self._normed(self.down_x, self.attention_norm, x)
        q, latent, k_rotary = torch.split_with_sizes(down, self._downs, -1)
        if self.q_up is not None and self.q_norm is not None:
            q = self._normed(self.q_up, self.q_norm, Stream(q))
        q = q.view(rows, self.heads, -1)
        turning = q[..., shape.content_head_dim :]
        self._rotate_rows(turning, *turn, out=turning)
        latents = torch.empty(rows, 1, shape.cached_dim, dtype=latent.dtype, device=latent.device)
        self.kv_norm(latent, out=latents[:, 0, : shape.kv_rank])
        self._rotate_rows(k_rotary[:, None], *turn, out=latents[..., shape.kv_rank :])
        return q, latents, None


def few_rows_kernel(linear: Linear, x: torch.Tensor) -> TritonMatvec | None:
    """The linear, where its product of these rows goes through our kernel."""
    return linear if isinstance(linear, TritonMatvec) and len(x) <= TritonMatvec.MAX_ROWS else None


def _turn(turns: Turns, local: bool) -> tuple[torch.Tensor, torch.Tensor]:
    turn = turns[local]
    assert turn is not None, "a shape that there are kernels for has rotary positions"
    return turn


def launches_per_layer(config: ModelConfig, *, in_products: bool = False) -> int:
    """Launches of our kernels in a layer, its products and attention not counted: the norms, the turns, the gate.
    in_products: without those norms and the gate that products through our kernel take in."""
    count = 4 + 2 * config.post_norms
    if config.latent_attention is not None:
        count += 2 + (config.latent_attention.query_rank is not None and not in_products)
    if in_products:
        count -= 1 if config.post_norms else 3
    return count
