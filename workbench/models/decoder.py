"""The decoder: one forward for prompts, single steps, chunks, ragged batches and drafts.

    logits = model(batch, kv)

The model owns weights and nothing else. What decode remembers lives in `kv`, which every layer hands its
new queries, keys and values. So a new way to remember is a new kv class, never a branch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.models.batch import Batch
from workbench.models.config import ModelConfig
from workbench.models.experts import MixtureOfExperts
from workbench.models.latent import UpProjections
from workbench.models.layers import GELUMLP, GeGLU, RMSNorm, Rotary, SwiGLU, ZeroCenteredRMSNorm, rotate
from workbench.models.mixers import make_mixer
from workbench.models.mixers.contract import StateMixer
from workbench.models.state_shape import ATTENTION
from workbench.models.tokenizer import Tokenizer

Turn = tuple[torch.Tensor, torch.Tensor] | None
# of layers that turn as usual, and of windowed ones with a rotary base of their own
Turns = tuple[Turn, Turn]
LATENT_NORM_EPS = 1e-6  # of the norms inside latent attention, whatever norm_eps is (DeepSeek's own code)


class Shaped(Protocol):
    """What has the shape of a model, and its tensors somewhere."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


class Attends(Protocol):
    """What the model needs of a kv; the whole contract is `workbench.kv.contract.KV`."""

    def begin(self, batch: Batch) -> None: ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: Batch,
        up: UpProjections | None = None,
    ) -> torch.Tensor: ...


class Advances(Attends, Protocol):
    """What a model with state layers needs of a kv besides."""

    def advance(self, layer: int, mixer: StateMixer, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The rows x [N, d] of a layer that keeps a state, mixed: [N, d]. The states are the kv's."""
        ...


class CausalModel(Shaped, Protocol):
    """A model as it was loaded, or arranged for inference (`models.fast`)."""

    def __call__(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """[M, V] logits, one row for each of `batch.logit_rows` (or for all N tokens)."""
        ...

    def hidden(self, batch: Batch, kv: Attends) -> torch.Tensor: ...
    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor: ...


def check_all_attend(model: Shaped, what: str) -> None:
    """Raise WorkbenchError for a model with layers that keep a state, which `what` knows nothing of."""
    kinds = ", ".join(dict.fromkeys(model.config.mixers))
    if model.config.state_layers:
        raise WorkbenchError(
            f"{what} knows layers that attend and no others, and {model.name} has layers of {kinds}; take a model with "
            "attention alone"
        )


def make_norm(config: ModelConfig) -> RMSNorm | ZeroCenteredRMSNorm | nn.LayerNorm:
    """The norm over a whole row."""
    if config.is_gpt2:
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return make_rms_norm(config, config.hidden_size)


def make_rms_norm(config: ModelConfig, size: int) -> RMSNorm | ZeroCenteredRMSNorm:
    return (ZeroCenteredRMSNorm if config.zero_centered_norms else RMSNorm)(size, config.norm_eps)


def make_mlp(config: ModelConfig, layer: int) -> GELUMLP | SwiGLU | MixtureOfExperts:
    if config.has_experts(layer):
        return MixtureOfExperts(config)
    if config.is_gpt2:
        return GELUMLP(config)
    return (GeGLU if config.activation == "gelu_tanh" else SwiGLU)(config)


class Attention(nn.Module):
    """Project, normalize, rotate, hand over to the kv, project back. Any H_kv that divides H_q.

    A layer that attends over the keys of another (`kv_sources`) has no k and v, and hands over None.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.owns_kv = config.kv_source(layer) == layer
        d, head = config.hidden_size, config.head_dim
        self.q = nn.Linear(d, config.num_heads * head, bias=config.qkv_bias)
        if self.owns_kv:
            self.k = nn.Linear(d, config.num_kv_heads * head, bias=config.qkv_bias)
            self.v = nn.Linear(d, config.num_kv_heads * head, bias=config.qkv_bias)
        if config.attention_gate:
            self.gate = nn.Linear(d, config.num_heads * head, bias=config.qkv_bias)
        self.o = nn.Linear(config.num_heads * head, d, bias=config.attention_output_bias)
        self.q_norm = make_rms_norm(config, head) if config.qk_norm else nn.Identity()
        self.k_norm = make_rms_norm(config, head) if config.qk_norm and self.owns_kv else nn.Identity()

    def forward(self, x: torch.Tensor, turn: Turn, layer: int, batch: Batch, kv: Attends) -> torch.Tensor:
        rows, head = x.shape[0], self.config.head_dim
        q, k, v = self.q_norm(self.q(x).view(rows, self.config.num_heads, head)), None, None  # [N, H_q, D]
        if self.owns_kv:
            k = self.k_norm(self.k(x).view(rows, self.config.num_kv_heads, head))  # [N, H_kv, D]
            v = self.v(x).view(rows, self.config.num_kv_heads, head)
        if turn is not None:
            q, k = self._turned(q, turn), None if k is None else self._turned(k, turn)
        mixed = kv.attend(layer, q, k, v, batch).reshape(rows, -1)  # [N, H_q·D]
        if self.config.attention_gate:
            mixed = mixed * torch.sigmoid(self.gate(x))
        return self.o(mixed)

    def _turned(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        turned = self.config.rotary_head_dim
        if turned == x.shape[-1]:
            return rotate(x, *turn)
        return torch.cat((rotate(x[..., :turned], *turn), x[..., turned:]), dim=-1)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1, equations 9 to 19).

        x -> latent c [kv_rank] -> normed ------ k_up, v_up (a head each) --> content keys, values
          -> rotary key k_r [rotary], one for all heads, rotated by its position
          -> q: H_q × (content, rotary), through a latent of its own (query_rank)

    What a token leaves behind is (c, k_r), `cached_dim` values however many heads there are. The position has to
    go its own way ("decoupled"): were the content keys rotated, k_up would stand behind a turn that differs from
    position to position and could not be folded into q. The kv is handed the latents and `up`, the maps from
    them to keys and values; which of the two equal forms it takes (see UpProjections) is its affair.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, shape = config, config.latent_shape
        d, heads = config.hidden_size, config.num_heads
        if shape.query_rank is None:
            self.q = nn.Linear(d, heads * shape.key_head_dim, bias=False)
        else:
            self.q_down = nn.Linear(d, shape.query_rank, bias=False)
            self.q_norm = RMSNorm(shape.query_rank, LATENT_NORM_EPS)
            self.q_up = nn.Linear(shape.query_rank, heads * shape.key_head_dim, bias=False)
        self.kv_down = nn.Linear(d, shape.cached_dim, bias=False)
        self.kv_norm = RMSNorm(shape.kv_rank, LATENT_NORM_EPS)
        self.k_up = nn.Linear(shape.kv_rank, heads * shape.content_head_dim, bias=False)
        self.v_up = nn.Linear(shape.kv_rank, heads * shape.value_head_dim, bias=False)
        self.o = nn.Linear(heads * shape.value_head_dim, d, bias=False)

    def forward(self, x: torch.Tensor, turn: Turn, layer: int, batch: Batch, kv: Attends) -> torch.Tensor:
        shape, rows = self.config.latent_shape, x.shape[0]
        assert turn is not None, "latent attention has rotary positions"
        q = self.q(x) if shape.query_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        content, q_rotary = q.view(rows, -1, shape.key_head_dim).split(
            (shape.content_head_dim, shape.rotary_head_dim), dim=-1
        )
        latent, k_rotary = self.kv_down(x).split((shape.kv_rank, shape.rotary_head_dim), dim=-1)
        q = torch.cat((content, rotate(q_rotary, *turn)), dim=-1)  # [N, H_q, content + rotary]
        latent = torch.cat((self.kv_norm(latent)[:, None], rotate(k_rotary[:, None], *turn)), dim=-1)
        up = UpProjections(shape, self.k_up.weight, self.v_up.weight)
        mixed = kv.attend(layer, q, latent, None, batch, up=up)  # [N, H_q, value]
        return self.o(mixed.reshape(rows, -1))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `post_norms` what is added is normed once more."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer) if config.latent_attention is None else LatentAttention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config, layer)
        self.attention_post_norm = make_norm(config) if config.post_norms else nn.Identity()
        self.mlp_post_norm = make_norm(config) if config.post_norms else nn.Identity()

    def forward(self, x: torch.Tensor, turn: Turn, layer: int, batch: Batch, kv: Attends) -> torch.Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), turn, layer, batch, kv))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


class StateLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) where the family has a feed-forward beside the mixer (F > 0).

    The mixer goes to the kv with the rows, as q, k and v do: the kv has the states.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = make_norm(config)
        self.mixer = make_mixer(config, layer)
        self.feeds = config.intermediate_size > 0
        if self.feeds:
            self.mlp_norm = make_norm(config)
            self.mlp = make_mlp(config, layer)

    def forward(self, x: torch.Tensor, turn: Turn, layer: int, batch: Batch, kv: Attends) -> torch.Tensor:
        x = x + cast("Advances", kv).advance(layer, self.mixer, self.mixer_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x)) if self.feeds else x


class Decoder(nn.Module):
    """A decoder-only model over flat batches, of layers that attend or keep a state (`config.mixers`).

    Weights are float32 until `.to(dtype)`.

    `tokenizer` (workbench.models.tokenizer.Tokenizer or None) and `name` travel with the weights, so that a
    loaded model is one object to hand around.
    """

    quantization: Any  # of a quantized one: its quantization.pipeline.QuantizationReport

    def __init__(self, config: ModelConfig, *, tokenizer: Tokenizer | None = None, name: str = "unnamed") -> None:
        super().__init__()
        self.config = config
        self.tokenizer: Any = tokenizer  # a Tokenizer, or None
        self.name = name
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.context_length, config.hidden_size) if config.is_gpt2 else None
        self.rotary = Rotary(config) if config.uses_rotary else None
        self.local_rotary = Rotary(config, local=True) if config.local_rope_theta is not None else None
        kinds = [DecoderLayer if config.mixer_of(i) == ATTENTION else StateLayer for i in range(config.num_layers)]
        layers = nn.ModuleList(kind(config, i) for i, kind in enumerate(kinds))
        # whoever looks into the layers of attention has no state layers, or asks `config.mixer_of` first
        self.layers = cast("Sequence[DecoderLayer]", layers)
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied with, rounded to their dtype as Gemma does: √3072, 55.43, is 55.5 in bf16."""
        return torch.tensor(self.config.embedding_scale, dtype=torch.float32).to(self.dtype).item()

    def hidden(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """[N, d]: every row after the last layer and its norm. `kv.begin` may refuse the batch whole."""
        if self.config.state_layers and not hasattr(kv, "advance"):
            raise WorkbenchError(
                f"{self.name} has layers that keep a state, and a {type(kv).__name__} has no `advance` for them; use "
                "kv='state'"
            )
        kv.begin(batch)
        x, turns = self.start(batch)
        for index in range(len(self.layers)):
            x = self.run_layer(index, x, turns, batch, kv)
        return self.norm(x)

    def start(self, batch: Batch) -> tuple[torch.Tensor, Turns]:
        """Before the first layer: x [N, d], and the turns of the positions, one for all layers and one for local
        ones."""
        x = self.embed(batch.token_ids)
        if self.config.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.embed_positions is not None:
            x = x + self.embed_positions(batch.positions)
        return x, self.turns_of(batch, x.dtype)

    def turns_of(self, batch: Batch, dtype: torch.dtype) -> Turns:
        """Of the batch's positions, in `dtype`; None where positions are embedded or there are none."""
        if self.rotary is None:
            return None, None
        local = None if self.local_rotary is None else self.local_rotary(batch.positions, dtype)
        return self.rotary(batch.positions, dtype), local

    def run_layer(self, index: int, x: torch.Tensor, turns: Turns, batch: Batch, kv: Attends) -> torch.Tensor:
        """x [N, d] through one layer."""
        return self.layers[index](x, turns[self.config.turns_locally(index)], index, batch, kv)

    def forward(self, batch: Batch, kv: Attends) -> torch.Tensor:
        """[M, V] logits, one row for each of `batch.logit_rows` (or for all N tokens)."""
        x = self.hidden(batch, kv)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return self.logits_of(x)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] logits of n rows [n, d] that `hidden` gave, or of rows that stand for such."""
        return self.head(hidden)

    def num_parameters(self) -> int:
        """A tied output head is counted once."""
        return sum(p.numel() for p in self.parameters())
