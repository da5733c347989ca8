"""ModelConfig: everything about a decoder's shape, and nothing about its weights. No torch.

Symbols used everywhere: N tokens in a step, B sequences, S context length, L layers, H_q / H_kv heads,
D head size, d model width, F feed-forward width, V vocabulary, b bytes per element.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError, check_settings, is_whole, unknown
from workbench.models.state_shape import (
    ATTENTION,
    MIXERS,
    STATE_BYTES,
    StateShape,
    check_state_shape,
    mixer_parameters,
    state_shapes,
)

STATE_FAMILIES = ("mamba", "mamba2", "jamba", "qwen3_5_text")  # with layers that keep a state
EXPERT_FAMILIES = ("mixtral", "qwen3_moe")  # with experts in every layer; deepseek_v2 and _v3 may have them
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "deepseek_v2", "deepseek_v3"),
    *EXPERT_FAMILIES,
    *STATE_FAMILIES,
)
SCORINGS = ("softmax", "sigmoid")
ACTIVATIONS = ("silu", "gelu_tanh")
_ABOVE = {"norm_eps": 0, "rope_theta": 1, "local_rope_theta": 1, "embedding_scale": 0, "query_pre_attn_scalar": 0}


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's stretching of rotary wavelengths to a longer context (Llama 3 Herd of Models, §3.4.2)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_length: int

    amplitude = 1.0  # what cosines and sines are multiplied with
    latent_softmax_factor = 1.0  # what latent attention's q·k is multiplied with beside its scale

    def __post_init__(self) -> None:
        _check_scaling(self, "factor", "low_frequency_factor", "high_frequency_factor")
        _check_scaling(self, "original_context_length")
        if self.low_frequency_factor == self.high_frequency_factor:
            raise WorkbenchError(
                f"rope_scaling: low_frequency_factor and high_frequency_factor are both {self.low_frequency_factor}; "
                "they are the two ends of a range"
            )


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al., arXiv 2306.15595): every wave turns `factor` times slower."""

    factor: float

    amplitude = 1.0
    latent_softmax_factor = 1.0

    def __post_init__(self) -> None:
        _check_scaling(self, "factor")


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv 2309.00071): slow waves turn `factor` times slower, fast ones stay, others blend.

    Slow are those of up to `beta_slow` turns over the original context, fast those of `beta_fast` and more. Longer
    contexts also want a sharper softmax: cosines and sines are multiplied with `amplitude`; latent attention, whose
    content keys do not turn, multiplies its scale with `latent_softmax_factor` (DeepSeek-V2, §3.1.4).
    """

    factor: float
    original_context_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # the amplitude, where it is not to follow from the factor
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        _check_scaling(self, "factor", "original_context_length", "beta_fast", "beta_slow")
        if self.beta_fast < self.beta_slow:
            raise WorkbenchError(
                f"rope_scaling: beta_fast {self.beta_fast} must not be below beta_slow {self.beta_slow}: "
                "waves of more turns are the fast ones"
            )
        for field in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, field) is not None:
                _check_scaling(self, field)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharper(self.mscale) / self._sharper(self.mscale_all_dim)
        return self._sharper(1.0)

    @property
    def latent_softmax_factor(self) -> float:
        return self._sharper(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _sharper(self, mscale: float) -> float:
        """0.1·mscale·ln(factor) + 1, YaRN's equation 22 for the root of the temperature."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


Scaling = RotaryScaling | LinearScaling | YarnScaling


def _check_scaling(scaling: object, *fields: str) -> None:
    for field in fields:
        value = getattr(scaling, field)
        whole = field == "original_context_length"
        if not _is_number(value) or not 1e-6 <= value <= 1e9 or (whole and not isinstance(value, int)):
            kind = "whole number" if whole else "number"
            raise WorkbenchError(f"rope_scaling.{field} must be a {kind} from 1e-6 to 1e9, got {value!r}")


def _is_number(value: object) -> bool:
    """A finite number; whole ones beyond all floats are none either."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


@dataclass(frozen=True)
class LatentAttentionShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1): what one layer projects to."""

    query_rank: int | None  # q is d -> query_rank -> H_q * (content + rotary); None: d -> H_q * (…) at once
    kv_rank: int  # the cached latent
    rotary_head_dim: int  # the cached key that carries the position, shared by all heads
    content_head_dim: int
    value_head_dim: int

    @property
    def key_head_dim(self) -> int:
        """D of a whole key, content and rotary part."""
        return self.content_head_dim + self.rotary_head_dim

    @property
    def cached_dim(self) -> int:
        """Values that one token leaves in the cache of one layer."""
        return self.kv_rank + self.rotary_head_dim


@dataclass(frozen=True)
class ExpertsShape:
    """A mixture of experts in place of the feed-forward (DeepSeekMoE, arXiv 2401.06066); see `models.experts`."""

    num_experts: int  # E
    experts_per_token: int  # k
    shared_experts: int  # through which every token goes; together one feed-forward of so many times the width
    intermediate_size: int  # F of one expert
    dense_layers: int  # the first layers keep an ordinary feed-forward
    router_bias: bool = False  # added to the scores when experts are chosen, and not to their weights
    scoring: str = "softmax"  # or "sigmoid"
    normalize: bool = True  # the weights of a token's experts sum to `scaling`
    scaling: float = 1.0
    num_groups: int = 1  # of neighbouring experts
    groups_per_token: int = 1  # from which a token's experts come

    def check(self, num_layers: int) -> None:
        """Raise WorkbenchError for numbers that do not fit together."""
        for field, least in (
            *(("num_experts", 1), ("experts_per_token", 1), ("shared_experts", 0), ("intermediate_size", 1)),
            *(("dense_layers", 0), ("num_groups", 1), ("groups_per_token", 1)),
        ):
            value = getattr(self, field)
            if not is_whole(value) or value < least:
                raise WorkbenchError(f"experts.{field} must be a whole number of at least {least}, got {value!r:.80}")
        if self.scoring not in SCORINGS:
            raise unknown("scoring of experts", self.scoring, SCORINGS)
        if not _is_number(self.scaling) or self.scaling <= 0:
            raise WorkbenchError(f"experts.scaling must be a number above 0, got {self.scaling!r:.80}")
        if self.dense_layers >= num_layers:
            raise WorkbenchError(
                f"experts.dense_layers {self.dense_layers} leaves none of {num_layers} layers with experts; take a "
                "shape without experts"
            )
        if self.num_experts % self.num_groups or self.groups_per_token > self.num_groups:
            raise WorkbenchError(
                f"experts: {self.groups_per_token} of {self.num_groups} groups of {self.num_experts} experts; groups "
                "divide the experts, and a token takes no more of them than there are"
            )
        group = self.num_experts // self.num_groups
        if self.experts_per_token > self.groups_per_token * group:
            raise WorkbenchError(
                f"experts.experts_per_token {self.experts_per_token} is more than the {self.groups_per_token * group} "
                "experts that a token can choose from"
            )
        if self.scoring == "sigmoid" and self.groups_per_token < self.num_groups and group < 2:
            raise WorkbenchError("experts: groups are scored by their two best experts, and these have one each")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Frozen; change one with `dataclasses.replace`.

    Raises WorkbenchError when the numbers do not fit together (heads that do not divide, sizes below one).
    """

    family: str
    vocab_size: int  # V
    hidden_size: int  # d
    num_layers: int  # L
    num_heads: int  # H_q
    num_kv_heads: int  # H_kv
    head_dim: int  # D
    intermediate_size: int  # F; 0 where no layer has a feed-forward, only a mixer
    context_length: int  # longest S the model was made for
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    local_rope_theta: float | None = None  # of windowed layers, then without rope_scaling (Gemma 3)
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # attention and feed-forward are normed once more before they are added
    zero_centered_norms: bool = False  # norms multiply with 1 + weight
    activation: str = "silu"  # of the gated feed-forward: "silu" (SwiGLU) or "gelu_tanh" (GeGLU)
    embedding_scale: float = 1.0  # what embeddings are multiplied with, rounded to their dtype
    query_pre_attn_scalar: float | None = None  # q·k is multiplied with its −1/2 power; None: head_dim's
    tie_embeddings: bool = False
    sliding_window: int | None = None  # a token sees the last W tokens, itself included
    global_layers: tuple[int, ...] = ()  # layers that see everything although there is a window
    attention_sinks: int = 0  # first tokens of a text that every windowed token sees as well
    kv_sources: tuple[int, ...] | None = None  # layer i attends over the keys of layer kv_sources[i] ≤ i
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    latent_attention: LatentAttentionShape | None = None
    experts: ExpertsShape | None = None
    mixers: tuple[str, ...] = ()  # of each layer "attention" or a kind of state_shape.MIXERS; empty: attention
    state_shape: StateShape | None = None  # sizes of the layers that keep a state
    rotary_dim: int | None = None  # first values of a head that turn, 0: none; None: all. With `mixers` alone
    attention_gate: bool = False  # what a head attends to is multiplied with a sigmoid. With `mixers` alone

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise unknown("model family", self.family, FAMILIES)
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            self._positive(field)
        self._check_mixer_kinds()
        if self.intermediate_size != 0 or self.has_attention:
            self._positive("intermediate_size")
        self._positive("context_length")
        if self.num_heads % self.num_kv_heads:
            raise WorkbenchError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}: "
                "each key-value head serves a whole group of query heads"
            )
        if self.uses_rotary and self.latent_attention is None and self.head_dim % 2:
            raise WorkbenchError(f"head_dim {self.head_dim} must be even: rotary embedding turns pairs")
        window = self.sliding_window
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise WorkbenchError(
                f"sliding_window {window!r} must be a whole number of at least 1 (or None for no window)"
            )
        self._check_numbers()
        self._check_windows()
        self._check_kv_sources()
        if self.latent_attention is not None:
            self._check_latent_attention()
        self._check_experts()
        self._check_mixers()

    def _check_experts(self) -> None:
        if self.experts is not None:
            self.experts.check(self.num_layers)
            if self.mlp_bias or self.activation != "silu" or self.post_norms or self.is_gpt2:
                raise WorkbenchError(
                    "experts are feed-forwards without biases, gated by silu, in a block without norms behind it"
                )
        elif self.family in EXPERT_FAMILIES:
            raise WorkbenchError(f"a {self.family} has experts; this shape names none")

    def _check_numbers(self) -> None:
        for field, least in _ABOVE.items():
            value = getattr(self, field)
            if value is None and field in ("local_rope_theta", "query_pre_attn_scalar"):
                continue
            if not _is_number(value) or value <= least:
                raise WorkbenchError(f"{field} must be a number above {least}, got {value!r}")
        if self.activation not in ACTIVATIONS:
            raise unknown("activation", self.activation, ACTIVATIONS)
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
                raise WorkbenchError(f"bos_token_id and eos_token_ids must be whole numbers, got {token!r}")

    def _check_windows(self) -> None:
        if self.local_rope_theta is not None and self.sliding_window is None:
            raise WorkbenchError("local_rope_theta goes with a sliding_window; this shape has none")
        if (self.global_layers or self.attention_sinks) and self.sliding_window is None:
            raise WorkbenchError("global_layers and attention_sinks go with a sliding_window; this shape has none")
        if not isinstance(self.attention_sinks, int) or self.attention_sinks < 0:
            raise WorkbenchError(f"attention_sinks must be a whole number from 0, got {self.attention_sinks!r}")
        wrong = [i for i in self.global_layers if not 0 <= i < self.num_layers]
        if wrong or list(self.global_layers) != sorted(set(self.global_layers)):
            raise WorkbenchError(
                f"global_layers must be different layers from 0 to {self.num_layers - 1}, ascending; "
                f"got {self.global_layers}"
            )

    def _check_kv_sources(self) -> None:
        sources = self.kv_sources
        if sources is None:
            return
        if len(sources) != self.num_layers:
            raise WorkbenchError(
                f"kv_sources needs one layer for each of the {self.num_layers} layers, got {len(sources)}: {sources}"
            )
        if self.latent_attention is not None:
            raise WorkbenchError("kv_sources: layers with latent attention do not share their latents here")
        for layer, source in enumerate(sources):
            if not 0 <= source <= layer:
                raise WorkbenchError(
                    f"kv_sources[{layer}] = {source}: a layer can attend over its own keys or those of a layer before "
                    "it, which are there when it runs"
                )
            if sources[source] != source:
                raise WorkbenchError(
                    f"kv_sources[{layer}] = {source}, but layer {source} has no keys of its own: it takes those of "
                    f"layer {sources[source]}; name that layer"
                )
            if self.window_of(layer) != self.window_of(source):
                raise WorkbenchError(
                    f"kv_sources[{layer}] = {source}: layer {layer} sees {self.window_of(layer) or 'everything'} and "
                    f"layer {source} {self.window_of(source) or 'everything'}; sharing layers need the same window"
                )

    def _check_latent_attention(self) -> None:
        shape = self.latent_shape
        for field in dataclasses.fields(shape):
            value = getattr(shape, field.name)
            if value is None and field.name == "query_rank":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise WorkbenchError(
                    f"latent_attention.{field.name} must be a whole number of at least 1, got {value!r}"
                )
        if shape.rotary_head_dim % 2:
            raise WorkbenchError(
                f"latent_attention.rotary_head_dim {shape.rotary_head_dim} must be even: rotary embedding turns pairs"
            )
        if self.num_kv_heads != self.num_heads:
            raise WorkbenchError(
                f"latent attention gives every query head its own key: num_kv_heads {self.num_kv_heads} must be "
                f"num_heads {self.num_heads}"
            )
        if self.head_dim != shape.key_head_dim:
            raise WorkbenchError(
                f"head_dim {self.head_dim} must be latent_attention's content + rotary size, {shape.key_head_dim}"
            )

    def _check_mixer_kinds(self) -> None:
        if self.mixers and len(self.mixers) != self.num_layers:
            raise WorkbenchError(
                f"mixers needs one kind for each of the {self.num_layers} layers, got {len(self.mixers)}"
            )
        for kind in self.mixers:
            if kind not in MIXERS:
                raise unknown("mixer", kind, MIXERS)

    def _check_mixers(self) -> None:
        if not self.mixers:
            for field, default in (("state_shape", None), ("rotary_dim", None), ("attention_gate", False)):
                if getattr(self, field) != default:
                    raise WorkbenchError(f"{field} goes with mixers, and this shape has attention everywhere")
            return
        kinds = tuple(sorted({*self.mixers} - {ATTENTION}))
        if (self.state_shape is None) != (not kinds):
            raise WorkbenchError(
                "state_shape has the sizes of layers that keep a state: "
                + (f"{', '.join(kinds)} needs one" if kinds else "with attention everywhere there is none to give")
            )
        if self.state_shape is not None:
            check_state_shape(self.state_shape, kinds, self.hidden_size)
        if self.is_gpt2 or self.latent_attention is not None or self.kv_sources is not None or self.post_norms:
            raise WorkbenchError(
                "mixers: layers that keep a state stand beside plain attention alone, not beside GPT-2's block, latent "
                "attention, kv_sources or post_norms"
            )
        if self.experts is not None:
            raise WorkbenchError("mixers: a mixture of experts beside layers that keep a state is not known here")
        turned = self.rotary_dim
        if turned is not None and (not is_whole(turned) or not 0 <= turned <= self.head_dim or turned % 2):
            raise WorkbenchError(
                f"rotary_dim must be an even number from 0 to head_dim {self.head_dim}, got {turned!r:.80}"
            )
        if not isinstance(self.attention_gate, bool):
            raise WorkbenchError(f"attention_gate must be True or False, got {self.attention_gate!r:.80}")

    def _positive(self, field: str) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WorkbenchError(f"{field} must be a whole number of at least 1, got {value!r}")

    # -- what kind of model this is ---------------------------------------------------------------

    @property
    def latent_shape(self) -> LatentAttentionShape:
        """`latent_attention` of a model that has it (asserted)."""
        assert self.latent_attention is not None, "a model without latent attention"
        return self.latent_attention

    @property
    def is_gpt2(self) -> bool:
        """GPT-2's block: LayerNorm, learned positions, GELU; everything else here is Llama's block."""
        return self.family == "gpt2"

    @property
    def uses_rotary(self) -> bool:
        return not self.is_gpt2 and self.rotary_dim != 0 and self.has_attention

    @property
    def experts_shape(self) -> ExpertsShape:
        """`experts` of a model that has them (asserted)."""
        assert self.experts is not None, "a model without experts"
        return self.experts

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts, ascending."""
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    # -- attention, layer by layer -------------------------------------------------------------------

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied with before the softmax."""
        scale = (self.query_pre_attn_scalar or self.head_dim) ** -0.5
        if self.latent_attention is not None and self.rope_scaling is not None:
            scale *= self.rope_scaling.latent_softmax_factor
        return scale

    @property
    def rotary_amplitude(self) -> float:
        """What cosines and sines are multiplied with: above 1 with YaRN, but for local layers."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.amplitude

    @property
    def value_head_dim(self) -> int:
        """D of a value: that of a key, but for latent attention."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.value_head_dim

    @property
    def rotary_head_dim(self) -> int:
        """Values of a head that rotary embedding turns."""
        if self.latent_attention is not None:
            return self.latent_attention.rotary_head_dim
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def window_of(self, layer: int) -> int | None:
        """W of this layer, or None where it sees everything."""
        return None if layer in self.global_layers else self.sliding_window

    def turns_locally(self, layer: int) -> bool:
        """Whether this layer's heads turn with `local_rope_theta`."""
        return self.local_rope_theta is not None and self.window_of(layer) is not None

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values this one attends over: its own, unless `kv_sources` says otherwise."""
        return layer if self.kv_sources is None else self.kv_sources[layer]

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own, ascending."""
        return tuple(i for i in self.attention_layers if self.kv_source(i) == i)

    # -- states, layer by layer --------------------------------------------------------------------------

    def mixer_of(self, layer: int) -> str:
        """What mixes tokens in this layer: "attention" or a kind of state mixer."""
        return self.mixers[layer] if self.mixers else ATTENTION

    @property
    def has_attention(self) -> bool:
        """Whether any layer attends. Of no length: `num_layers` of a file may be any number until it is checked."""
        return not self.mixers or ATTENTION in self.mixers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend, ascending."""
        return tuple(i for i in range(self.num_layers) if self.mixer_of(i) == ATTENTION)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a state of constant size instead, ascending."""
        return tuple(i for i, kind in enumerate(self.mixers) if kind != ATTENTION)

    def state_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """What one sequence keeps in this layer beside keys and values: name -> shape; empty where it attends."""
        if self.mixer_of(layer) == ATTENTION:
            return {}
        assert self.state_shape is not None, "state layers have sizes"
        return state_shapes(self.mixer_of(layer), self.state_shape, self.hidden_size, self.context_length)

    # -- counting ------------------------------------------------------------------------------------

    def kv_values_per_token(self) -> int:
        """Values one token leaves in a cache over all layers: 2·L·H_kv·D, or L·(kv_rank + rotary) for MLA.

        L counts the layers that have keys of their own. A window bounds how many tokens are kept, not this.
        """
        if self.latent_attention is not None:
            return self.num_layers * self.latent_attention.cached_dim
        return self.expanded_kv_values_per_token()

    def expanded_kv_values_per_token(self) -> int:
        """The same where every head's key and value is kept, which for latent attention is far more."""
        return len(self.kv_layers) * self.num_kv_heads * (self.head_dim + self.value_head_dim)

    def state_values(self) -> int:
        """Values that one sequence keeps in all layers beside keys and values, however long it is."""
        shapes = [shape for layer in self.state_layers for shape in self.state_shapes(layer).values()]
        return sum(math.prod(shape) for shape in shapes)

    def state_bytes(self) -> int:
        """Bytes of the same: states are float32 whatever the dtype of weights and keys."""
        return self.state_values() * STATE_BYTES

    def num_parameters(self) -> int:
        """Parameters in all, a tied output head counted once. Equal to the built module's, exactly."""
        return self._embedding_parameters() + sum(self._layer_parameters(i) for i in range(self.num_layers))

    def num_active_parameters(self) -> int:
        """Parameters one token passes through: only the chosen experts of a mixture."""
        return self._embedding_parameters() + sum(
            self._layer_parameters(i, active_only=True) for i in range(self.num_layers)
        )

    def _embedding_parameters(self) -> int:
        d, vocabulary = self.hidden_size, self.vocab_size
        embedding = vocabulary * d + (self.context_length * d if self.is_gpt2 else 0)
        head = 0 if self.tie_embeddings else vocabulary * d
        return embedding + head + self._norm_parameters()

    def _norm_parameters(self) -> int:
        return (2 if self.is_gpt2 else 1) * self.hidden_size

    def _layer_parameters(self, layer: int, active_only: bool = False) -> int:
        if self.mixer_of(layer) != ATTENTION:
            assert self.state_shape is not None, "state layers have sizes"
            mixed = mixer_parameters(self.mixer_of(layer), self.state_shape, self.hidden_size)
            mixed += self._norm_parameters()
            feeds = self.intermediate_size > 0
            return mixed + (self._mlp_parameters(layer, active_only) + self._norm_parameters() if feeds else 0)
        return (
            self._attention_parameters(layer)
            + self._mlp_parameters(layer, active_only)
            + (4 if self.post_norms else 2) * self._norm_parameters()
        )

    def _attention_parameters(self, layer: int) -> int:
        d = self.hidden_size
        if self.latent_attention is not None:
            a, heads = self.latent_attention, self.num_heads
            wide = heads * a.key_head_dim
            query = d * wide if a.query_rank is None else d * a.query_rank + a.query_rank + a.query_rank * wide
            latent = d * a.cached_dim + a.kv_rank
            expand = a.kv_rank * heads * (a.content_head_dim + a.value_head_dim)
            return query + latent + expand + heads * a.value_head_dim * d
        owns = self.kv_source(layer) == layer
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim if owns else 0
        gate = q if self.attention_gate else 0
        weights = d * (q + gate) + 2 * d * kv + q * d
        biases = (q + gate + 2 * kv if self.qkv_bias else 0) + (d if self.attention_output_bias else 0)
        return weights + biases + ((1 + owns) * self.head_dim if self.qk_norm else 0)

    def _mlp_parameters(self, layer: int, active_only: bool) -> int:
        d = self.hidden_size
        if self.has_experts(layer):
            e = self.experts_shape
            routed = e.experts_per_token if active_only else e.num_experts
            router = d * e.num_experts + (e.num_experts if e.router_bias else 0)
            return router + (routed + e.shared_experts) * 3 * d * e.intermediate_size
        matrices = 2 if self.is_gpt2 else 3
        biases = 0
        if self.mlp_bias:
            biases = (matrices - 1) * self.intermediate_size + d
        return matrices * d * self.intermediate_size + biases

    # -- as data ---------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`, tuples as lists too. Raises WorkbenchError that names an unknown key (with the
        nearest known one), a missing one, or a value of another type."""
        return _from_data(cls, values, "")


def _from_data(kind: Any, values: dict[str, Any], where: str) -> Any:
    """A dataclass from plain data: no unknown key, none missing, every value of its type."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    check_settings(kind.__name__, values, fields)
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise WorkbenchError(f"{kind.__name__} needs {where}{name}, which is missing")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _typed(hints[name], value, where + name) for name, value in values.items()})


def _typed(hint: Any, value: object, where: str) -> object:
    """`value` as the type it should have: int, float, bool, str, None, a tuple of int or str, or a dataclass from a
    dict."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is tuple:
            kind = typing.get_args(option)[0]
            if isinstance(value, (list, tuple)) and all(type(item) is kind for item in value):
                return tuple(value)
        elif dataclasses.is_dataclass(option):
            if isinstance(value, typing.cast(type, option)):
                return value
            if isinstance(value, dict) and (len(options) <= 2 or _has_keys_of(option, value)):
                return _from_data(option, value, f"{where}.")
        elif type(value) is option or (option is float and _is_number(value)):
            return value
    raise WorkbenchError(f"{where} must be {', or '.join(map(_type_in_words, options))}; got {str(value)[:80]!r}")


def _type_in_words(option: Any) -> str:
    if dataclasses.is_dataclass(option):
        return f"an object with {', '.join(field.name for field in dataclasses.fields(option))}"
    if typing.get_args(option)[:1] == (str,):
        return "a list of strings"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return "None" if option is types.NoneType else words.get(option, "a list of whole numbers")


def _has_keys_of(kind: Any, values: dict[str, Any]) -> bool:
    fields = dataclasses.fields(kind)
    needed = {f.name for f in fields if f.default is dataclasses.MISSING}
    return needed <= values.keys() <= {f.name for f in fields}


def readable_count(number: float) -> str:
    """12_345_678 -> '12.3 M'."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= factor:
            digits = max(0, 2 - math.floor(math.log10(number / factor)))
            return f"{number / factor:.{digits}f} {suffix}"
    return f"{number:g}"
