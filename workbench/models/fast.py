"""The decoder arranged for inference: the same numbers in fewer and larger operations.

    Decoder (training, the oracle)              FastDecoder (inference)
    q, k, v: three products                     one, with the matrices one below the other
    gate, up: two products                      one
    rotary: products, differences, joins        a table of cos and sin, made once; two products and a roll
    F.linear                                    a Linear (workbench.models.linear), packed where that can be
    modules in modules                          two functions a layer: before its attention, and after it

On one row these small operations, not the weights, would be a large part of a step of a small model. What of them is
left, torch.compile takes away (workbench.models.compiled), or kernels of our own (workbench.models.fused); and a recorded
step starts them all at once (workbench.models.graphs).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.models.batch import Batch
from workbench.models.compiled import CompiledSteps
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attends, Decoder, DecoderLayer, Turns
from workbench.models.graphs import check_graphs
from workbench.models.latent import UpProjections
from workbench.models.layers import RMSNorm, ZeroCenteredRMSNorm, rotary_frequencies
from workbench.models.linear import Linear, Matvec, SideBySide, chosen_linear, linear_class

MakeLinear = Callable[..., Linear]
Join = Callable[..., Linear]  # of modules: one Linear with the outputs of all
MakeNorm = Callable[[torch.nn.Module, torch.dtype], Callable[[torch.Tensor], torch.Tensor]]
RMS_NORMS = (RMSNorm, ZeroCenteredRMSNorm)
FIRST_TABLE = 2048  # positions in the rotary table to begin with; it doubles when a longer text comes


def prepare(
    model: Decoder,
    *,
    linear: str = "auto",
    compile: bool = False,
    kernels: str = "auto",
    graphs: bool | str = "auto",
) -> FastDecoder:
    """The model arranged for inference. `model` stays as it was and may be dropped; weights that need no rearranging
    (embedding, norms, and with plain linears the matrices that stand alone) are shared with it.

    linear: "packed" (CPU), "triton" (CUDA), "plain", or "auto": packed on a CPU and our kernel on a GPU where that can be;
    `linear_because` of the result says why. compile: steps of one row run through
    torch.compile, which needs a C++ compiler and takes some seconds at the first step; they read the weights
    unpacked, so both forms are kept, twice the memory. kernels: "torch", "triton" (workbench.models.fused; on a CPU in
    Triton's interpreter, which is for tests), or "auto": triton on a CUDA device where there are kernels for the model's
    shape. What came of it, and why, are `kernels` and `kernels_because` of the result. graphs: whether an `Engine` records
    its decode steps with this model and replays them (workbench.models.graphs): True, False, or "auto", on a CUDA device
    where kernels attend; not with compile.
    Raises WorkbenchError for a linear or kernels that this dtype or device does not have.
    """
    if isinstance(model, FastDecoder):
        raise WorkbenchError(f"{model.name} is prepared already; prepare takes the model that `load` gives")
    check_graphs(graphs, compiled=compile)
    make, because = linear_class(linear, model.dtype, model.device), "as asked"
    if linear == "auto":
        make, because = chosen_linear(model.dtype, model.device)
    made = FastDecoder(model, make, compile_steps=compile, kernels=kernels)
    made.linear_because, made.graphs = because, graphs
    return made


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
    ) -> None:
        a, mlp = layer.attention, layer.mlp
        self.local = local  # which of the turns is this layer's
        self.post_norms = None
        if config.post_norms:
            self.post_norms = norm(layer.attention_post_norm, stream), norm(layer.mlp_post_norm, stream)
        self.activation = F.silu if config.activation == "silu" else gelu_tanh
        self.extra: dict[str, UpProjections] = {}
        self._dtype = layer.attention_norm.weight.dtype
        self._prepare_attention(a, join, norm, config)
        self.attention_norm, self.mlp_norm = norm(layer.attention_norm, stream), norm(layer.mlp_norm, stream)
        self.o = join(a.o)
        self.gated = hasattr(mlp, "gate")
        self.up = join(mlp.gate, mlp.up) if self.gated else join(mlp.up)
        self.down = join(mlp.down)

    def _prepare_attention(self, a, join: Join, norm: MakeNorm, config: ModelConfig) -> None:
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.kv_heads = config.num_kv_heads if a.owns_kv else 0
        self._turned = [self.heads + self.kv_heads, self.kv_heads]  # heads that turn, and those of the values
        self._parted = [self.heads, self.kv_heads]
        self.qkv = join(a.q, a.k, a.v) if a.owns_kv else join(a.q)
        self.qk_norm = None
        if config.qk_norm:
            k_norm = norm(a.k_norm, self._dtype) if a.owns_kv else None
            self.qk_norm = (norm(a.q_norm, self._dtype), k_norm)

    def before(self, x: torch.Tensor, turns: Turns):
        """x [N, d] -> q [N, H_q, D], k [N, H_kv, D], v [N, H_kv, D], normed and turned."""
        heads = self.qkv(self.attention_norm(x)).view(x.shape[0], -1, self.head_dim)  # [N, H_q + 2·H_kv, D]
        qk, v = torch.split_with_sizes(heads, self._turned, 1)
        if self.qk_norm is not None:
            q_norm, k_norm = self.qk_norm
            q = q_norm(qk[:, : self.heads])
            qk = q if k_norm is None else torch.cat((q, k_norm(qk[:, self.heads :])), dim=1)
        if turns[self.local] is not None:
            qk = turned(qk, turns[self.local])
        if not self.kv_heads:
            return qk, None, None
        q, k = torch.split_with_sizes(qk, self._parted, 1)
        return q, k, v

    def after(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """x [N, d] and what attention gave, [N, H_q·D] -> x [N, d] of the next layer, in place of the old one."""
        added = self.o(mixed)
        if self.post_norms is not None:
            added = self.post_norms[0](added)
        x = x.add_(added)  # in place: nobody else holds the residual stream
        wide = self.up(self.mlp_norm(x))
        if self.gated:
            gate, up = wide.chunk(2, dim=-1)
            wide = self.activation(gate).mul_(up)
        else:
            wide = gelu_tanh(wide)
        added = self.down(wide)
        return x.add_(added if self.post_norms is None else self.post_norms[1](added))

    @property
    def linears(self) -> dict[str, Linear]:
        return {"qkv": self.qkv, "o": self.o, "up": self.up, "down": self.down}

    @property
    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes for linear in self.linears.values())


class FastLatentLayer(FastLayer):
    """A layer with latent attention: the products from x are one, and so are the turns of q's parts and of k's."""

    def _prepare_attention(self, a, join: Join, norm: MakeNorm, config: ModelConfig) -> None:
        shape, dtype = config.latent_attention, self._dtype
        self.heads, self.shape = config.num_heads, shape
        through = shape.query_rank is not None
        self.down_x = join(a.q_down if through else a.q, a.kv_down)
        self.q_norm = norm(a.q_norm, dtype) if through else None
        self.q_up = join(a.q_up) if through else None
        self.kv_norm = norm(a.kv_norm, dtype)
        wide = shape.query_rank if through else self.heads * shape.key_head_dim
        self._downs = [wide, shape.kv_rank, shape.rotary_head_dim]
        self._key_parts = [shape.content_head_dim, shape.rotary_head_dim]
        self.extra = {"up": UpProjections(shape, a.k_up.weight.detach(), a.v_up.weight.detach())}

    def before(self, x: torch.Tensor, turns: Turns):
        """x [N, d] -> q [N, H_q, content + rotary], latents [N, 1, kv_rank + rotary], None."""
        q, latent, k_rotary = torch.split_with_sizes(self.down_x(self.attention_norm(x)), self._downs, -1)
        if self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q = q.view(x.shape[0], self.heads, -1)
        content, q_rotary = torch.split_with_sizes(q, self._key_parts, -1)
        # [N, H_q + 1, rotary]
        rotary = turned(torch.cat((q_rotary, k_rotary[:, None]), dim=1), turns[self.local])
        q = torch.cat((content, rotary[:, :-1]), dim=-1)
        return q, torch.cat((self.kv_norm(latent)[:, None], rotary[:, -1:]), dim=-1), None

    @property
    def linears(self) -> dict[str, Linear]:
        through = {} if self.q_up is None else {"q_up": self.q_up}
        return {"down_x": self.down_x, **through, "o": self.o, "up": self.up, "down": self.down}

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
) -> list[FastLayer]:
    """kinds: of a layer as most are, and of one with latent attention."""
    config, join = model.config, functools.partial(joined, make, model.dtype)
    kind = kinds[config.latent_attention is not None]
    return [
        kind(layer, join, norm, stream, config, local=config.turns_locally(index))
        for index, layer in enumerate(model.layers)
    ]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of x [N, H, D] by the table's cos and signed sin."""
    cos, signed_sin = turn
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), signed_sin)


class FastDecoder:
    """Stands wherever a `Decoder` does: `logits = model(batch, kv)`, with its config, tokenizer and name.

    On a CPU the residual stream is float32 even where the weights are bfloat16: small operations cost the same in
    both, and converting costs one more.

    kernels: "torch" or "triton", what does the norms, turns and gates; kernels_because: why, in words. linear_because: why
    the matrices are held as they are (`forms`).
    """

    def __init__(
        self, model: Decoder, make: MakeLinear, *, compile_steps: bool = False, kernels: str = "auto"
    ) -> None:
        from workbench.models import fused

        self.config, self.tokenizer, self.name = model.config, model.tokenizer, model.name
        self.device, self.dtype = model.device, model.dtype
        self.compiled = compile_steps
        self.graphs: bool | str = "auto"  # see `prepare`
        self.linear_because = ""
        self.kernels, self.kernels_because = fused.choose_kernels(model, kernels, compiled=compile_steps)
        self._fused = self.kernels == "triton"
        norm, kinds, table = small_norm, (FastLayer, FastLatentLayer), RotaryTable
        if self._fused:
            norm, kinds = fused.FusedNorm, (fused.FusedLayer, fused.FusedLatentLayer)
            table = fused.FusedRotaryTable
        self._stream = fused.Stream
        self._parameters = model.num_parameters()
        with torch.no_grad():
            self._embedding = model.embed.weight.detach()
            self._position_embedding = _detached(model.embed_positions and model.embed_positions.weight)
            self._wide = (
                torch.promote_types(model.dtype, torch.float32) if model.device.type == "cpu" else model.dtype
            )
            self._table = None if model.rotary is None else table(model)
            self._local_table = None if model.local_rotary is None else table(model, local=True)
            self._embedding_scale = model.embedding_scale
            self._norm = norm(model.norm, self._wide)
            self._layers = fast_layers(model, make, norm, self._wide, kinds)
            self._head = make(model.head.weight.detach(), None)
            self._steps = self._compiled(model) if compile_steps else None

    def __call__(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """[M, V] logits, one row for each of `batch.logit_rows` (or for all N tokens)."""
        if self._steps is not None and batch.num_tokens == 1:
            return self._steps(*self._start(batch, kv), batch, kv)
        x = self.hidden(batch, kv)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return self.logits_of(x)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] logits of n rows [n, d] that `hidden` gave, or of rows that stand for such."""
        return self._head(hidden)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n, d] rows of the embedding, as they are stored."""
        return F.embedding(token_ids, self._embedding)

    def hidden(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """[N, d]: every row after the last layer and its norm. `kv.begin` may refuse the batch whole."""
        x, turns = self._start(batch, kv)
        if self._fused:
            x = self._stream(x)
        for index, layer in enumerate(self._layers):
            mixed = kv.attend(index, *layer.before(x, turns), batch, **layer.extra)
            x = layer.after(x, mixed.reshape(batch.num_tokens, -1))
        return self._norm(x)

    def _compiled(self, model: Decoder) -> CompiledSteps:
        layers = fast_layers(model, Matvec, torch_norm, self._wide)
        head = Matvec(model.head.weight.detach())
        return CompiledSteps(layers, torch_norm(model.norm, self._wide), head, self.config)

    def _start(self, batch: Batch, kv: Attends) -> tuple[torch.Tensor, Turns]:
        kv.begin(batch)
        x = F.embedding(batch.token_ids, self._embedding)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        x = x.to(self._wide)
        if self._table is None:
            return x + F.embedding(batch.positions, self._position_embedding), (None, None)
        return x, (self._table.turn(batch), self._local_table and self._local_table.turn(batch))

    def reserve_positions(self, positions: int) -> list[torch.Tensor]:
        """Make the rotary tables this long, and return them: a recorded step reads them where they are, so whoever records
        it has to keep them."""
        last = Batch.of([[0]], first_positions=(positions - 1,))
        tables = [table for table in (self._table, self._local_table) if table is not None]
        for table in tables:
            table.reach(last)
        return [table.rows for table in tables]

    def num_parameters(self) -> int:
        """A tied output head is counted once."""
        return self._parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step with logits reads: every matrix once, whatever N is."""
        return sum(layer.weight_bytes for layer in self._layers) + self._head.weight_bytes

    @property
    def forms(self) -> dict[str, str]:
        """How each matrix is held, in a few words: {"layers.0.qkv": "packed", …, "head": "packed"}."""
        found = {
            f"layers.{index}.{name}": linear.form
            for index, layer in enumerate(self._layers)
            for name, linear in layer.linears.items()
        }
        return found | {"head": self._head.form}


class RotaryTable:
    """cos and signed sin of every position, [positions, 2, D]: the first half of sin is negative, so that
    turning is x · cos + roll(x, D/2) · sin."""

    def __init__(self, model: Decoder, *, local: bool = False) -> None:
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
        needed = max(batch.lengths_after())
        if needed > len(self._table):
            self._table = self._make(max(needed, 2 * len(self._table)))


def torch_norm(module: torch.nn.Module, stream: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm as torch's own function of x, for torch.compile, which fuses it with what comes before.

    x comes in `stream`, the type of the residual stream, and leaves in that of the weights.
    """
    dtype, weight = module.weight.dtype, norm_weight(module, stream)
    bias = None if isinstance(module, RMS_NORMS) else module.bias.detach().to(stream)

    def norm(x: torch.Tensor) -> torch.Tensor:
        if bias is None:
            y = F.rms_norm(x, weight.shape, weight, module.eps)
        else:
            y = F.layer_norm(x, weight.shape, weight, bias, module.eps)
        return y if dtype == stream else y.to(dtype)

    return norm


def norm_weight(module: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """What an RMSNorm multiplies with, in `dtype`."""
    weight = module.weight.detach().to(dtype)
    return 1 + weight if isinstance(module, ZeroCenteredRMSNorm) else weight


def small_norm(module: torch.nn.Module, stream: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same in as few operations as it takes, computed in float32.

    RMSNorm is x · weight / √(mean(x²) + eps) = x / hypot(‖x‖, √(d·eps)) · √d·weight: four operations that torch
    has, where its own rms_norm is made of seven on a CPU.
    """
    if not isinstance(module, RMS_NORMS):
        return torch_norm(module, stream)
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


def joined(make: MakeLinear, dtype: torch.dtype, *linears: torch.nn.Module) -> Linear:
    """One Linear that gives the outputs of all, one after the other.

    A quantized linear is not rearranged here but asked (`for_inference`), joined with the others where it can be.
    """
    if any(hasattr(one, "for_inference") for one in linears):
        return _asked(make, dtype, linears)
    weight = linears[0].weight if len(linears) == 1 else torch.cat([one.weight for one in linears])
    bias = None if linears[0].bias is None else torch.cat([one.bias.detach() for one in linears])
    return make(weight.detach(), bias)


def _asked(make: MakeLinear, dtype: torch.dtype, linears: tuple[torch.nn.Module, ...]) -> Linear:
    first, *others = linears
    whole = first.joined_with(*others) if others and hasattr(first, "joined_with") else None
    ready = [
        one.for_inference(dtype, one_row=make is Matvec)
        if hasattr(one, "for_inference")
        else make(one.weight.detach(), _detached(one.bias))
        for one in (linears if whole is None else [whole])
    ]
    return ready[0] if len(ready) == 1 else SideBySide(ready)


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()
