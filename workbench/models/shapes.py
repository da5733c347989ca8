"""The shapes of public models, for calculators and for random weights. No torch.

Each is what the model's own config.json on the Hugging Face hub says (HUB_IDS); the tests hold the parameter
counts against the published totals and against the built modules.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import unknown
from workbench.models.config import (
    ExpertsShape,
    LatentAttentionShape,
    LinearScaling,
    ModelConfig,
    RotaryScaling,
    YarnScaling,
)


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, wide: int, *, family: str = "llama", **other: Any
) -> ModelConfig:
    """Llama's block; the head size is d / H_q unless given."""
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=other.pop("head_dim", hidden // heads),
        intermediate_size=wide,
        **other,
    )


def _stretched(factor: float) -> dict[str, Any]:
    """What Llama 3.1 and 3.2 share beyond Llama 3: 128K tokens by slower long waves."""
    scaling = RotaryScaling(factor, 1.0, 4.0, original_context_length=8192)
    return {**_LLAMA_3, "context_length": 131_072, "rope_scaling": scaling}


def _gpt2(hidden: int, layers: int, heads: int) -> ModelConfig:
    return _llama(
        hidden,
        layers,
        heads,
        heads,
        4 * hidden,
        family="gpt2",
        vocab_size=50_257,
        context_length=1024,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
        bos_token_id=50_256,
        eos_token_ids=(50_256,),
    )


def _gemma3(hidden: int, layers: int, heads: int, kv_heads: int, wide: int, **other: Any) -> ModelConfig:
    """Five layers with a window, then one that sees everything; the two kinds turn by different thetas."""
    return _llama(
        hidden,
        layers,
        heads,
        kv_heads,
        wide,
        family="gemma3_text",
        head_dim=256,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        global_layers=tuple(range(5, layers, 6)),
        qk_norm=True,
        post_norms=True,
        zero_centered_norms=True,
        activation="gelu_tanh",
        embedding_scale=hidden**0.5,
        tie_embeddings=True,
        bos_token_id=2,
        eos_token_ids=(1,),
        **other,
    )


def _deepseek(
    family: str,
    hidden: int,
    layers: int,
    heads: int,
    wide: int,
    experts: ExpertsShape,
    *,
    query_rank: int | None,
    mscale: float,
    **other: Any,
) -> ModelConfig:
    """Latent attention: 512 + 64 values a token a layer are cached, however many heads there are.

    mscale: of YaRN, 0.1·mscale·ln(40) + 1 for the root of the temperature (0.707: DeepSeek-V2, §3.1.4).
    """
    latent = LatentAttentionShape(
        query_rank=query_rank, kv_rank=512, rotary_head_dim=64, content_head_dim=128, value_head_dim=128
    )
    return _llama(
        hidden,
        layers,
        heads,
        heads,
        wide,
        family=family,
        head_dim=latent.key_head_dim,
        context_length=163_840,
        norm_eps=1e-6,
        rope_scaling=YarnScaling(40.0, 4096, mscale=mscale, mscale_all_dim=mscale),
        latent_attention=latent,
        experts=experts,
        **other,
    )


_LLAMA_2: dict[str, Any] = {"vocab_size": 32_000, "context_length": 4096, "bos_token_id": 1, "eos_token_ids": (2,)}
_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128_256,
    "context_length": 8192,
    "rope_theta": 500_000.0,
    "bos_token_id": 128_000,
    "eos_token_ids": (128_001,),
}
_QWEN: dict[str, Any] = {"vocab_size": 151_936, "norm_eps": 1e-6, "rope_theta": 1_000_000.0, "bos_token_id": 151_643}
_QWEN_25: dict[str, Any] = {
    **_QWEN,
    "family": "qwen2",
    "context_length": 32_768,
    "qkv_bias": True,
    "eos_token_ids": (151_643,),
}
_QWEN_3: dict[str, Any] = {
    **_QWEN,
    "family": "qwen3",
    "context_length": 40_960,
    "head_dim": 128,
    "qk_norm": True,
    "eos_token_ids": (151_645,),
}
_DEEPSEEK_V2: dict[str, Any] = {"vocab_size": 102_400, "bos_token_id": 100_000, "eos_token_ids": (100_001,)}
_TIED: dict[str, Any] = {"tie_embeddings": True}
_LONG: dict[str, Any] = {"context_length": 131_072}

PUBLIC_SHAPES: dict[str, ModelConfig] = {
    "llama-2-7b": _llama(4096, 32, 32, 32, 11_008, **_LLAMA_2),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13_824, **_LLAMA_2),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28_672, **_LLAMA_2),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14_336, **_LLAMA_3),
    "llama-3-70b": _llama(8192, 80, 64, 8, 28_672, **_LLAMA_3),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14_336, **_stretched(8.0)),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28_672, **_stretched(8.0)),
    "llama-3.1-405b": _llama(16_384, 126, 128, 8, 53_248, **_stretched(8.0)),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, **_stretched(32.0), **_TIED),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, **_stretched(32.0), **_TIED),
    # v0.1, the one with the window; v0.2 and v0.3 have none
    "mistral-7b": _llama(
        4096,
        32,
        32,
        8,
        14_336,
        family="mistral",
        vocab_size=32_000,
        context_length=32_768,
        sliding_window=4096,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "qwen2.5-0.5b": _llama(896, 24, 14, 2, 4864, **_QWEN_25, **_TIED),
    "qwen2.5-1.5b": _llama(1536, 28, 12, 2, 8960, **{**_QWEN_25, **_LONG}, **_TIED),
    "qwen2.5-3b": _llama(2048, 36, 16, 2, 11_008, **_QWEN_25, **_TIED),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 18_944, **{**_QWEN_25, **_LONG, "vocab_size": 152_064}),
    "qwen3-0.6b": _llama(1024, 28, 16, 8, 3072, **_QWEN_3, **_TIED),
    "qwen3-1.7b": _llama(2048, 28, 16, 8, 6144, **_QWEN_3, **_TIED),
    "qwen3-4b": _llama(2560, 36, 32, 8, 9728, **_QWEN_3, **_TIED),
    "qwen3-8b": _llama(4096, 36, 32, 8, 12_288, **_QWEN_3),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gemma-3-1b": _gemma3(1152, 26, 4, 1, 6912, vocab_size=262_144, context_length=32_768, sliding_window=512),
    # the text model alone, without the 420 M parameters that look at images
    "gemma-3-4b": _gemma3(
        2560,
        34,
        8,
        4,
        10_240,
        vocab_size=262_208,
        context_length=131_072,
        sliding_window=1024,
        rope_scaling=LinearScaling(8.0),
    ),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2",
        2048,
        27,
        16,
        10_944,
        ExpertsShape(64, 6, shared_experts=2, intermediate_size=1408, dense_layers=1, normalize=False),
        query_rank=None,
        mscale=0.707,
        **_DEEPSEEK_V2,
    ),
    "deepseek-v2": _deepseek(
        "deepseek_v2",
        5120,
        60,
        128,
        12_288,
        ExpertsShape(
            160,
            6,
            shared_experts=2,
            intermediate_size=1536,
            dense_layers=1,
            normalize=False,
            scaling=16.0,
            num_groups=8,
            groups_per_token=3,
        ),
        query_rank=1536,
        mscale=0.707,
        **_DEEPSEEK_V2,
    ),
    # without the extra layer that predicts a second token ahead
    "deepseek-v3": _deepseek(
        "deepseek_v3",
        7168,
        61,
        128,
        18_432,
        ExpertsShape(
            256,
            8,
            shared_experts=1,
            intermediate_size=2048,
            dense_layers=3,
            router_bias=True,
            scoring="sigmoid",
            scaling=2.5,
            num_groups=8,
            groups_per_token=4,
        ),
        query_rank=1536,
        mscale=1.0,
        vocab_size=129_280,
        bos_token_id=0,
        eos_token_ids=(1,),
    ),
}

HUB_IDS: dict[str, str] = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "gemma-3-4b": "google/gemma-3-4b-pt",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v2": "deepseek-ai/DeepSeek-V2",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}


# Nobody's models, for timing: the size of GPT-2 with Llama's block, and nearly the same with almost all of it in its
# layers. Their weights are far beyond a CPU's cache.
TIMING_SHAPES: dict[str, ModelConfig] = {
    "random-110m": _llama(768, 12, 12, 12, 2048, vocab_size=32_000, context_length=2048, **_TIED),
    "random-116m": _llama(768, 16, 12, 12, 2048, vocab_size=4096, context_length=2048, **_TIED),
}


def _spellings() -> dict[str, str]:
    """Every accepted name in lower case -> ours: ours, the hub's id, and the hub's id without its owner."""
    names = {"llama-3-405b": "llama-3.1-405b"}  # Llama 3 had no 405B before 3.1
    names.update({name: name for name in TIMING_SHAPES})
    for name, hub_id in HUB_IDS.items():
        for spelling in (name, hub_id, hub_id.split("/")[1], f"{hub_id.split('/')[0]}/{name}"):
            names[spelling.lower()] = name
    return names


SPELLINGS = _spellings()


def public_name(name: str) -> str | None:
    """Our name for a public model however it is spelled (case, hub id), or None for one we do not know."""
    return SPELLINGS.get(str(name).strip().lower())


def public_shape(name: str) -> ModelConfig:
    """The shape of a public model. Raises WorkbenchError naming the nearest known one.

    >>> public_shape("meta-llama/Llama-3.1-8B") is public_shape("llama-3.1-8b")
    True
    """
    ours = public_name(name)
    if ours is None:
        raise unknown("public model", name, [*PUBLIC_SHAPES, *TIMING_SHAPES])
    return (PUBLIC_SHAPES | TIMING_SHAPES)[ours]
