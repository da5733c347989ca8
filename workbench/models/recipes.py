"""The shipped models as data: shape, data order, optimizer and schedule of each. `training` runs a recipe."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from workbench.models.config import ExpertsShape, LatentAttentionShape, ModelConfig
from workbench.models.state_shape import StateShape

TOKENIZER_NAME = "stdlib-tokenizer"
VOCAB_SIZE = 4096


@dataclass(frozen=True)
class Recipe:
    """A training run, whole: shape, data order, optimizer and schedule."""

    name: str
    role: str
    config: ModelConfig
    steps: int
    sequences_per_step: int = 8
    sequence_length: int = 1024
    peak_learning_rate: float = 2e-3
    warmup_steps: int = 40
    decay_share: float = 0.4  # the last part of the run, in which the rate falls linearly to 0
    weight_decay: float = 0.1
    seed: int = 0
    checkpoint_every: int = 50
    teacher: str | None = None  # learn this model's distribution (distillation) instead of the text alone

    @property
    def tokens(self) -> int:
        return self.steps * self.sequences_per_step * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """Warm up, hold, decay to zero (Hägele et al., arXiv 2405.18392)."""
        decay_from = self.steps * (1 - self.decay_share)
        rising = min(1.0, (step + 1) / self.warmup_steps)
        falling = min(1.0, (self.steps - step) / (self.steps - decay_from))
        return self.peak_learning_rate * min(rising, falling)

    def digest(self) -> str:
        """Changes with anything that changes the run."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ExpertsRecipe(Recipe):
    """A run with a second loss that keeps the load of the experts even (`experts.load_balancing_loss`)."""

    balance: float = 0.01  # its weight (Switch Transformer, arXiv 2101.03961, §2.2)


def _experts_config(wide: int, experts: ExpertsShape | None = None) -> ModelConfig:
    """One of the pair of lab 13. A token goes through two experts of F = 48, or through one feed-forward of F = 96."""
    return ModelConfig(
        family="qwen3" if experts is None else "qwen3_moe",
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        num_layers=4,
        num_heads=3,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=wide,
        context_length=1024,
        norm_eps=1e-6,
        qk_norm=True,
        tie_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(0,),
        experts=experts,
    )


def _stdlib_config(hidden: int, layers: int, heads: int, kv_heads: int, wide: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=wide,
        context_length=1024,
        tie_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(0,),
    )


def _cache_variant(wide: int, *, kv_heads: int = 6, **other: Any) -> ModelConfig:
    """One of lab 04's variants: the same but for what it remembers. F is chosen so that all have as many parameters."""
    return ModelConfig(
        family=other.pop("family", "qwen3"),
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        num_layers=6,
        num_heads=6,
        num_kv_heads=kv_heads,
        head_dim=other.pop("head_dim", 32),
        intermediate_size=wide,
        context_length=1024,
        norm_eps=1e-6,
        qk_norm=other.pop("qk_norm", True),
        tie_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(0,),
        **other,
    )


_LATENT = LatentAttentionShape(query_rank=None, kv_rank=48, rotary_head_dim=16, content_head_dim=32, value_head_dim=32)
CACHE_VARIANTS: dict[str, ModelConfig] = {  # values a token leaves in the cache of a layer:
    "stdlib-3m-mha": _cache_variant(288),  # 384
    "stdlib-3m-gqa": _cache_variant(376, kv_heads=2),  # 128
    "stdlib-3m-mqa": _cache_variant(392, kv_heads=1),  # 64
    # 64
    "stdlib-3m-mla": _cache_variant(328, family="deepseek_v3", head_dim=48, qk_norm=False, latent_attention=_LATENT),
    # 384, of the last 128 tokens
    "stdlib-3m-hybrid": _cache_variant(288, sliding_window=128, global_layers=(2, 5)),
    "stdlib-3m-shared": _cache_variant(352, kv_sources=(0, 0, 2, 2, 4, 4)),  # 384, in every second layer
}


def _state_variant(wide: int, mixers: tuple[str, ...] = (), **shape: Any) -> ModelConfig:
    """One of those that differ in how they mix tokens. Eight layers, so that one attention in 8 and one in 4 are exact,
    each with a feed-forward, whose F is chosen so that all have as many parameters as the twin with attention alone."""
    return ModelConfig(
        family="qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=160,
        num_layers=8,
        num_heads=5,
        num_kv_heads=5,
        head_dim=32,
        intermediate_size=wide,
        context_length=1024,
        norm_eps=1e-6,
        qk_norm=True,
        tie_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(0,),
        mixers=mixers,
        state_shape=StateShape(**shape) if mixers else None,
    )


_MAMBA2 = {"inner_size": 320, "state_size": 64, "num_heads": 10, "conv_bias": True}
_JAMBA8 = ("mamba2",) * 4 + ("attention",) + ("mamba2",) * 3  # the offset of Jamba, arXiv 2403.19887
_JAMBA4 = (("mamba2",) * 2 + ("attention", "mamba2")) * 2
STATE_VARIANTS: dict[str, ModelConfig] = {  # values of state a sequence has, and those a token adds:
    "stdlib-3m-attention8": _state_variant(320),  # 0 and 2,560
    "stdlib-3m-s4d": _state_variant(400, ("s4d",) * 8, inner_size=160, state_size=32),  # 40,960 and 0
    # 53,760 and 0
    "stdlib-3m-linear": _state_variant(320, ("linear_attention",) * 8, inner_size=160, state_size=32, num_heads=5),
    "stdlib-3m-mamba2": _state_variant(160, ("mamba2",) * 8, **_MAMBA2),  # 174,592 and 0
    "stdlib-3m-delta": _state_variant(  # 101,120 and 0
        152, ("gated_delta",) * 8, inner_size=160, state_size=64, num_heads=5, num_groups=5
    ),
    # 42,240 and 0
    "stdlib-3m-rwkv7": _state_variant(276, ("rwkv7",) * 8, inner_size=160, num_heads=5, rank=16, chunk_size=32),
    "stdlib-3m-jamba8": _state_variant(176, _JAMBA8, **_MAMBA2),  # 152,768 and 320
    "stdlib-3m-jamba4": _state_variant(200, _JAMBA4, **_MAMBA2),  # 130,944 and 640
}

EXPERTS = _experts_config(96, ExpertsShape(8, 2, shared_experts=0, intermediate_size=48, dense_layers=0))
_EXPERTS_RUN: dict[str, Any] = {"sequences_per_step": 2, "peak_learning_rate": 4e-3}

# Recipes whose weights are not among the shipped ones: `workbench train NAME` makes them.
NOT_SHIPPED = frozenset(f"stdlib-3m-{name}" for name in ("linear", "jamba8"))

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("stdlib-10m", "target", _stdlib_config(384, 6, 6, 2, 1024), steps=1250),
        Recipe(
            "stdlib-1m",
            "draft",
            _stdlib_config(128, 2, 4, 2, 384),
            steps=1500,
            sequences_per_step=4,
            peak_learning_rate=4e-3,
            teacher="stdlib-10m",
        ),
        *(
            Recipe(name, "variant", config, steps=900, sequences_per_step=2, peak_learning_rate=2.5e-3)
            for name, config in CACHE_VARIANTS.items()
        ),
        *(
            Recipe(name, "state variant", config, steps=900, sequences_per_step=2, peak_learning_rate=2.5e-3)
            for name, config in STATE_VARIANTS.items()
        ),
        ExpertsRecipe("stdlib-1m-experts", "experts", EXPERTS, steps=3000, **_EXPERTS_RUN),
        Recipe("stdlib-1m-dense", "dense twin", _experts_config(96), steps=3000, **_EXPERTS_RUN),
    )
}
