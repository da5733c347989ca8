"""The parts of a model arranged for inference: its layers as functions of tensors, its rotary table, its norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends, Decoder, DecoderLayer, Shaped, Turns
from workbench.models.experts import MixtureOfExperts
from workbench.models.fast_experts import FastExperts
from workbench.models.latent import UpProjections
from workbench.models.layers import RMSNorm, ZeroCenteredRMSNorm, rotary_frequencies
from workbench.models.linear import Join, Linear, Matvec, SideBySide

MakeLinear = Callable[..., Linear]
MakeNorm = Callable[[Any, torch.dtype], Callable[..., torch.Tensor]]
Residual = Any  # x [N, d]; where the next norm adds, a Stream
Projected = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # q, k, v
RMS_NORMS = (RMSNorm, ZeroCenteredRMSNorm)
FIRST_TABLE = 2048  # positions in the rotary table to begin with; it doubles when a longer text comes


class Stream(NamedTuple):
    """The residual stream x [N, d], and what is still to be added to it. The next norm adds it, to x in place."""

    x: torch.Tensor
    added: torch.Tensor | None = None


class FastLayer:
    """One layer as two functions of tensors, with attention between them.

    `extra` goes to `kv.attend` with what `before` gives. A layer that attends over the keys of another has no k and v.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        join: Join,
        norm: MakeNorm,
        stream: torch.dtype,
        config: ModelConfig,
        *,
        local: bool,
        experts: type[FastExperts] = FastExperts,
    ) -> None:
        a, mlp = layer.attention, layer.mlp
        self.local = local  # which of the turns is this layer's
        self.post_norms = None
        if config.post_norms:
            self.post_norms = norm(layer.attention_post_norm, stream), norm(layer.mlp_post_norm, stream)
        self.activation = F.silu if config.activation == "silu" else gelu_tanh
        self.extra: dict[str, Any] = {}  # `up` of latent attention
        self._dtype = layer.attention_norm.weight.dtype
        self._prepare_attention(a, join, norm, config)
        self.attention_norm, self.mlp_norm = norm(layer.attention_norm, stream), norm(layer.mlp_norm, stream)
        self.o = join(a.o)
        self.experts: FastExperts | None = None
        if isinstance(mlp, MixtureOfExperts):
            self.experts = experts(mlp, join)
            return
        self.gated = hasattr(mlp, "gate")
        self.up = join(mlp.gate, mlp.up) if self.gated else join(mlp.up)
        self.down = join(mlp.down)

    def _prepare_attention(self, a: Any, join: Join, norm: MakeNorm, config: ModelConfig) -> None:
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.kv_heads = config.num_kv_heads if a.owns_kv else 0
        self._rotary_heads = [self.heads + self.kv_heads, self.kv_heads]  # heads that turn, and those of the values
        self._parted = [self.heads, self.kv_heads]
        self.qkv = join(a.q, a.k, a.v) if a.owns_kv else join(a.q)
        self.qk_norm: tuple[Any, Any] | None = None
        if config.qk_norm:
            k_norm = norm(a.k_norm, self._dtype) if a.owns_kv else None
            self.qk_norm = (norm(a.q_norm, self._dtype), k_norm)

    def attend(self, index: int, x: Residual, turns: Turns, batch: Batch, kv: Attends) -> torch.Tensor:
        """What attention of this layer, the index-th, gives for x: [N, H_q, D_v]."""
        return kv.attend(index, *self.before(x, turns), batch, **self.extra)

    def before(self, x: Residual, turns: Turns) -> Projected:
        """x [N, d] -> q [N, H_q, D], k [N, H_kv, D], v [N, H_kv, D], normed and rotated."""
        return self._ready(self.qkv(self.attention_norm(x)), turns)

    def _ready(self, projected: torch.Tensor, turns: Turns) -> Projected:
        """q, k and v of what their product gave, [N, (H_q + 2·H_kv)·D]."""
        heads = projected.view(projected.shape[0], -1, self.head_dim)
        qk, v = torch.split_with_sizes(heads, self._rotary_heads, 1)
        if self.qk_norm is not None:
            q_norm, k_norm = self.qk_norm
            q = q_norm(qk[:, : self.heads])
            qk = q if k_norm is None else torch.cat((q, k_norm(qk[:, self.heads :])), dim=1)
        if (turn := turns[self.local]) is not None:
            qk = rotated(qk, turn)
        if not self.kv_heads:
            return qk, None, None
        q, k = torch.split_with_sizes(qk, self._parted, 1)
        return q, k, v

    def after(self, x: Residual, mixed: torch.Tensor) -> Residual:
        """x [N, d] and what attention gave, [N, H_q·D] -> x [N, d] of the next layer, in place of the old one."""
        added = self.o(mixed)
        if self.post_norms is not None:
            added = self.post_norms[0](added)
        x = x.add_(added)  # in place: nobody else holds the residual stream
        added = self._fed(self.mlp_norm(x))
        return x.add_(added if self.post_norms is None else self.post_norms[1](added))

    def _fed(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, d], normed, through the feed-forward: [N, d]."""
        if self.experts is not None:
            return self.experts(x)
        wide = self.up(x)
        if self.gated:
            gate, up = wide.chunk(2, dim=-1)
            wide = self.activation(gate).mul_(up)
        else:
            wide = gelu_tanh(wide)
        return self.down(wide)

    @property
    def linears(self) -> dict[str, Linear]:
        return self._own_linears if self.experts is None else {**self._own_linears, **self.experts.linears}

    @property
    def _own_linears(self) -> dict[str, Linear]:
        return {"qkv": self.qkv, "o": self.o, **self._fed_linears}

    @property
    def _fed_linears(self) -> dict[str, Linear]:
        return {"up": self.up, "down": self.down} if self.experts is None else {}

    @property
    def weight_bytes(self) -> int:
        of_experts = 0 if self.experts is None else self.experts.weight_bytes
        return of_experts + sum(linear.weight_bytes for linear in self._own_linears.values())


class FastLatentLayer(FastLayer):
    """A layer with latent attention: the products from x are one, and so are the turns of q's parts and of k's."""

    def _prepare_attention(self, a: Any, join: Join, norm: MakeNorm, config: ModelConfig) -> None:
        shape, dtype = config.latent_shape, self._dtype
        self.heads, self.shape = config.num_heads, shape
        rank = shape.query_rank
        through = rank is not None
        self.down_x = join(a.q_down if through else a.q, a.kv_down)
        self.q_norm = norm(a.q_norm, dtype) if through else None
        self.q_up = join(a.q_up) if through else None
        self.kv_norm = norm(a.kv_norm, dtype)
        wide = self.heads * shape.key_head_dim if rank is None else rank
        self._downs = [wide, shape.kv_rank, shape.rotary_head_dim]
        self._key_parts = [shape.content_head_dim, shape.rotary_head_dim]
        self.extra = {"up": UpProjections(shape, a.k_up.weight.detach(), a.v_up.weight.detach())}

    def before(self, x: Residual, turns: Turns) -> Projected:
        """x [N, d] -> q [N, H_q, content + rotary], latents [N, 1, kv_rank + rotary], None."""
        q, latent, k_rotary = torch.split_with_sizes(self.down_x(self.attention_norm(x)), self._downs, -1)
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q))
        q = q.view(x.shape[0], self.heads, -1)
        content, q_rotary = torch.split_with_sizes(q, self._key_parts, -1)
        # [N, H_q + 1, rotary]
        turn = turns[self.local]
        assert turn is not None, "latent attention has rotary positions"
        rotary = rotated(torch.cat((q_rotary, k_rotary[:, None]), dim=1), turn)
        q = torch.cat((content, rotary[:, :-1]), dim=-1)
        return q, torch.cat((self.kv_norm(latent)[:, None], rotary[:, -1:]), dim=-1), None

    @property
    def _own_linears(self) -> dict[str, Linear]:
        through = {} if self.q_up is None else {"q_up": self.q_up}
        return {"down_x": self.down_x, **through, "o": self.o, **self._fed_linears}

    @property
    def weight_bytes(self) -> int:
        up = self.extra["up"]
        return super().weight_bytes + up.k_up.nbytes + up.v_up.nbytes


def fast_layers(
    model: Decoder,
    make: MakeLinear,
    norm: MakeNorm,
    stream: torch.dtype,
    kinds: tuple[type[FastLayer], type[FastLayer]] = (FastLayer, FastLatentLayer),
    experts: type[FastExperts] = FastExperts,
    inputs: str = "exact",
    dtype: torch.dtype | None = None,
) -> list[FastLayer]:
    """kinds: of a layer as most are, and of one with latent attention. inputs: of quantized linears, see `prepare`.
    dtype: of what these take and give, default the model's."""
    config, join = model.config, functools.partial(joined, make, dtype or model.dtype, inputs=inputs)
    kind = kinds[config.latent_attention is not None]
    return [
        kind(layer, join, norm, stream, config, local=config.turns_locally(index), experts=experts)
        for index, layer in enumerate(model.layers)
    ]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of x [N, H, D] by the table's cos and signed sin."""
    cos, signed_sin = turn
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), signed_sin)


class RotaryTable:
    """cos and signed sin of every position, [positions, 2, D]: the first half of sin is negative, so that
    turning is x · cos + roll(x, D/2) · sin."""

    def __init__(self, model: Shaped, *, local: bool = False) -> None:
        self._config, self._dtype, self._device = model.config, model.dtype, model.device
        self._local, self._amplitude = local, 1.0 if local else model.config.rotary_amplitude
        self._table = self._make(min(FIRST_TABLE, model.config.context_length))

    def _make(self, positions: int) -> torch.Tensor:
        frequencies = rotary_frequencies(self._config, local=self._local)
        angle = torch.arange(positions).float()[:, None] * frequencies[None, :]
        cos, sin = angle.cos() * self._amplitude, angle.sin() * self._amplitude
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        return both.to(self._device, self._dtype)

    def turn(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, each [N, 1, D]."""
        self.reach(batch)
        rows = self._table.index_select(0, batch.positions)
        return rows[:, :1], rows[:, 1:]

    @property
    def rows(self) -> torch.Tensor:
        """[positions, 2, D], as it is now."""
        return self._table

    def reach(self, batch: Batch) -> None:
        """Make the table as long as the batch's texts; a longer one is another tensor."""
        self.reach_length(max(batch.lengths_after()))

    def reach_length(self, needed: int) -> torch.Tensor:
        """The table, now so long at least; another thread may put a longer one in its place, and never a shorter."""
        table = self._table
        if needed > len(table):
            table = self._make(max(needed, 2 * len(table)))
            if len(table) > len(self._table):
                self._table = table
        return table


class TorchNorm:
    """The norm as torch's own function of x, for torch.compile, which fuses it with what comes before.

    x comes in `stream`, the type of the residual stream, and leaves in that of the weights.
    """

    def __init__(self, module: Any, stream: torch.dtype) -> None:
        self.eps, self.dtype = module.eps, module.weight.dtype
        self.weight, self.converts = norm_weight(module, stream), self.dtype != stream
        self.bias = None if isinstance(module, RMS_NORMS) else module.bias.detach().to(stream)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        else:
            y = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return y.to(self.dtype) if self.converts else y


def norm_weight(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """What an RMSNorm multiplies with, in `dtype`."""
    weight = module.weight.detach().to(dtype)
    return 1 + weight if isinstance(module, ZeroCenteredRMSNorm) else weight


def small_norm(module: Any, stream: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same in as few operations as it takes, computed in float32.

    RMSNorm is x · weight / √(mean(x²) + eps) = x / hypot(‖x‖, √(d·eps)) · √d·weight: four operations that torch
    has, where its own rms_norm is made of seven on a CPU.
    """
    if not isinstance(module, RMS_NORMS):
        return TorchNorm(module, stream)
    dtype, wide = module.weight.dtype, torch.promote_types(stream, torch.float32)
    weight = norm_weight(module, wide)
    size = len(weight)
    floor = torch.tensor([math.sqrt(size * module.eps)], dtype=wide, device=weight.device)
    scale = weight * math.sqrt(size)

    def rms_norm(x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=wide)
        y = torch.div(x, torch.hypot(length, floor)).mul_(scale)
        return y if dtype == wide else y.to(dtype)

    return rms_norm


def joined(make: MakeLinear, dtype: torch.dtype, *linears: Any, inputs: str = "exact") -> Linear:
    """One Linear that gives the outputs of all, one after the other.

    A quantized linear is not rearranged here but asked (`for_inference`), joined with the others where it can be.
    """
    if any(hasattr(one, "for_inference") for one in linears):
        return _asked(make, dtype, linears, inputs)
    weight = linears[0].weight if len(linears) == 1 else torch.cat([one.weight for one in linears])
    bias = None if linears[0].bias is None else torch.cat([one.bias.detach() for one in linears])
    return make(weight.detach(), bias)


def _asked(make: MakeLinear, dtype: torch.dtype, linears: tuple[Any, ...], inputs: str) -> Linear:
    first, *others = linears
    asked: dict[str, Any] = {"one_row": make is Matvec} | ({} if inputs == "exact" else {"inputs": inputs})
    whole = first.joined_with(*others) if others and hasattr(first, "joined_with") else None
    ready = [
        (
            one.for_inference(dtype, **asked)
            if hasattr(one, "for_inference")
            else make(one.weight.detach(), detached(one.bias))
        )
        for one in (linears if whole is None else [whole])
    ]
    return ready[0] if len(ready) == 1 else SideBySide(ready)


def detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()
