"""ModelConfig: everything about a decoder's shape, and nothing about its weights. No torch.

Symbols used everywhere: N tokens in a step, B sequences, S context length, L layers, H_q / H_kv heads,
D head size, d model width, F feed-forward width, V vocabulary, b bytes an element.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from workbench.errors import WorkbenchError, check_settings

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's stretching of rotary wavelengths to a longer context (Llama 3 Herd of Models, §3.4.2)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_length: int


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
    """A mixture of experts in place of the feed-forward (DeepSeekMoE, arXiv 2401.06066)."""

    num_experts: int
    experts_per_token: int
    shared_experts: int
    intermediate_size: int
    dense_layers: int  # the first layers keep an ordinary feed-forward
    router_bias: bool = False


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
    intermediate_size: int  # F
    context_length: int  # longest S the model was made for
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None  # a token sees the last W tokens, itself included
    global_layers: tuple[int, ...] = ()  # layers that see everything although there is a window
    attention_sinks: int = 0  # first tokens of a text that every windowed token sees as well
    kv_sources: tuple[int, ...] | None = None  # layer i attends over the keys of layer kv_sources[i] ≤ i
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    latent_attention: LatentAttentionShape | None = None
    experts: ExpertsShape | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            from workbench.errors import unknown

            raise unknown("model family", self.family, FAMILIES)
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            self._positive(field)
        self._positive("intermediate_size")
        self._positive("context_length")
        if self.num_heads % self.num_kv_heads:
            raise WorkbenchError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}: "
                "each key-value head serves a whole group of query heads"
            )
        if self.uses_rotary and self.head_dim % 2:
            raise WorkbenchError(f"head_dim {self.head_dim} must be even: rotary embedding turns pairs")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise WorkbenchError(
                f"sliding_window {self.sliding_window} must be at least 1 (or None for no window)"
            )
        self._check_windows()
        self._check_kv_sources()
        if self.latent_attention is not None:
            self._check_latent_attention()

    def _check_windows(self) -> None:
        if (self.global_layers or self.attention_sinks) and self.sliding_window is None:
            raise WorkbenchError(
                "global_layers and attention_sinks go with a sliding_window; this shape has none"
            )
        if not isinstance(self.attention_sinks, int) or self.attention_sinks < 0:
            raise WorkbenchError(
                f"attention_sinks must be a whole number from 0, got {self.attention_sinks!r}"
            )
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
        shape = self.latent_attention
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

    def _positive(self, field: str) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WorkbenchError(f"{field} must be a whole number of at least 1, got {value!r}")

    # -- what kind of model this is ---------------------------------------------------------------

    @property
    def is_gpt2(self) -> bool:
        """GPT-2's block: LayerNorm, learned positions, GELU; everything else here is Llama's block."""
        return self.family == "gpt2"

    @property
    def uses_rotary(self) -> bool:
        return not self.is_gpt2

    @property
    def runnable(self) -> bool:
        """False for shapes that only the calculators know (mixtures of experts)."""
        return self.experts is None

    # -- attention, layer by layer -------------------------------------------------------------------

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied with before the softmax."""
        return self.head_dim**-0.5

    @property
    def value_head_dim(self) -> int:
        """D of a value: that of a key, but for latent attention."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.value_head_dim

    @property
    def rotary_head_dim(self) -> int:
        """Values of a head that rotary embedding turns."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.rotary_head_dim

    def window_of(self, layer: int) -> int | None:
        """W of this layer, or None where it sees everything."""
        return None if layer in self.global_layers else self.sliding_window

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values this one attends over: its own, unless `kv_sources` says otherwise."""
        return layer if self.kv_sources is None else self.kv_sources[layer]

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own, ascending."""
        return tuple(i for i in range(self.num_layers) if self.kv_source(i) == i)

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
        return (
            self._attention_parameters(layer)
            + self._mlp_parameters(layer, active_only)
            + 2 * self._norm_parameters()
        )

    def _attention_parameters(self, layer: int) -> int:
        d = self.hidden_size
        if self.latent_attention is not None:
            a, heads = self.latent_attention, self.num_heads
            wide = heads * a.key_head_dim
            query = (
                d * wide if a.query_rank is None else d * a.query_rank + a.query_rank + a.query_rank * wide
            )
            latent = d * a.cached_dim + a.kv_rank
            expand = a.kv_rank * heads * (a.content_head_dim + a.value_head_dim)
            return query + latent + expand + heads * a.value_head_dim * d
        owns = self.kv_source(layer) == layer
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim if owns else 0
        weights = d * q + 2 * d * kv + q * d
        biases = (q + 2 * kv if self.qkv_bias else 0) + (d if self.attention_output_bias else 0)
        return weights + biases + ((1 + owns) * self.head_dim if self.qk_norm else 0)

    def _mlp_parameters(self, layer: int, active_only: bool) -> int:
        d = self.hidden_size
        if self.experts is not None and layer >= self.experts.dense_layers:
            e = self.experts
            routed = e.experts_per_token if active_only else e.num_experts
            router = d * e.num_experts + (e.num_experts if e.router_bias else 0)
            return router + (routed + e.shared_experts) * 3 * d * e.intermediate_size
        matrices = 2 if self.is_gpt2 else 3
        biases = 0
        if self.mlp_bias:
            biases = (matrices - 1) * self.intermediate_size + d
        return matrices * d * self.intermediate_size + biases

    # -- as data ---------------------------------------------------------------------------------------

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> ModelConfig:
        """The inverse of `to_dict`. An unknown key is an error that names the nearest known one."""
        check_settings("ModelConfig", values, [f.name for f in dataclasses.fields(cls)])
        values = dict(values)
        for key, kind in (
            ("rope_scaling", RotaryScaling),
            ("latent_attention", LatentAttentionShape),
            ("experts", ExpertsShape),
        ):
            if isinstance(values.get(key), dict):
                values[key] = kind(**values[key])
        for key in ("eos_token_ids", "global_layers"):
            values[key] = tuple(values.get(key) or ())
        if values.get("kv_sources") is not None:
            values["kv_sources"] = tuple(values["kv_sources"])
        return cls(**values)


def readable_count(number: float) -> str:
    """12_345_678 -> '12.3 M'."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= factor:
            digits = max(0, 2 - math.floor(math.log10(number / factor)))
            return f"{number / factor:.{digits}f} {suffix}"
    return f"{number:g}"
