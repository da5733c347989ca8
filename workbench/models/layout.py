"""Hugging Face's way to write a decoder down: config.json to and from ModelConfig (tensors: tensor_layout.py).

What this package cannot compute exactly as `transformers` does is refused by the name of the setting that
asks for it; nothing is skipped in silence. A shape that no family of Hugging Face has is written in the same
files with model_type "workbench", which only this package reads.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch

from workbench.errors import WorkbenchError, check_settings, unknown
from workbench.models.config import (
    LatentAttentionShape,
    LinearScaling,
    ModelConfig,
    RotaryScaling,
    Scaling,
    YarnScaling,
)
from workbench.models.expert_layout import EXPERT_ARCHITECTURES, experts_from_hf, experts_to_hf, published_code
from workbench.models.layout_values import block_to_hf, divide, few, need, only
from workbench.models.state_layout import STATE_ARCHITECTURES, STATE_READERS, STATE_WRITERS

WORKBENCH = "workbench"  # our own model_type, whose config.json has
SHAPE_KEY = "model_config"  # ModelConfig.to_dict() under this key
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    **EXPERT_ARCHITECTURES,
    **STATE_ARCHITECTURES,
}
# What transformers takes for a key that config.json leaves out.
_CONTEXT = {
    "llama": 2048,
    "mistral": 131_072,
    "mixtral": 131_072,
    "qwen2": 32_768,
    "qwen3": 32_768,
    "qwen3_moe": 32_768,
    "gemma3_text": 131_072,
    "deepseek_v2": 2048,
    "deepseek_v3": 4096,
}
_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen3_moe": 4}  # where the key is left out
_MAX_LAYERS, _MAX_SIZE, _MAX_PARAMETERS = 10_000, 2**40, 10**15  # beyond these a file is nonsense
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")


# -- config.json -> ModelConfig ---------------------------------------------------------------------------


def config_from_hf(values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """The ModelConfig of a config.json, in transformers 5's form (rope_parameters), the older one, or our own.

    generation: generation_config.json, whose end-of-text ids come first when it has any.
    Raises WorkbenchError that names the key: one that is missing, one of a wrong type, or one that asks for what
    is not computed here (another rotary scaling, experts, quantized weights, …).
    """
    family = values.get("model_type")
    eos = (generation or {}).get("eos_token_id")
    if family == WORKBENCH:
        config = _workbench_config(values, eos)
    else:
        config = _hf_config(family, values, values.get("eos_token_id") if eos is None else eos)
    sizes = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for name, size in sizes.items():
        if isinstance(size, int) and size > (_MAX_LAYERS if name == "num_layers" else _MAX_SIZE):
            raise WorkbenchError(f"config.json: no model has a {name} of {few(size)}")
    if config.num_parameters() > _MAX_PARAMETERS:
        raise WorkbenchError(f"config.json: no model has {config.num_parameters():,} parameters")
    return _with_own_end_tokens(config)


def _with_own_end_tokens(config: ModelConfig) -> ModelConfig:
    """Without end-of-text ids outside the vocabulary, of which it warns: no text could ever end with them.

    transformers writes GPT-2's 50256 for every GPT-2, however small its vocabulary; others write −1 for none.
    """
    inside = tuple(token for token in config.eos_token_ids if 0 <= token < config.vocab_size)
    if inside == config.eos_token_ids:
        return config
    outside = ", ".join(few(token) for token in config.eos_token_ids if token not in inside)
    warnings.warn(
        f"eos_token_id {outside} is outside 0 … {config.vocab_size - 1} and is left out; where the model has a token"
        " that ends a text, name it in stop_token_ids",
        stacklevel=2,
    )
    return dataclasses.replace(config, eos_token_ids=inside)


def _hf_config(family: object, values: dict[str, Any], eos: Any) -> ModelConfig:
    if family == "gemma3":
        raise WorkbenchError(
            "model_type 'gemma3' is a model of text and images; only its text part alone, 'gemma3_text', is read here"
        )
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise unknown("model_type", family, (*ARCHITECTURES, WORKBENCH))
    only(values, "quantization_config", (None,), "quantized weights")
    if not published_code(family, values.get("auto_map")):
        only(values, "auto_map", (None,), "the checkpoint's own code")
    read = _READERS.get(family, _llama_values)
    block = read(family, values)
    return ModelConfig(
        family=family,
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        **block,
        **experts_from_hf(family, values, block["num_layers"]),
    )


def _workbench_config(values: dict[str, Any], eos: object) -> ModelConfig:
    check_settings("config.json", values, ("model_type", "dtype", SHAPE_KEY))
    shape = values.get(SHAPE_KEY)
    if not isinstance(shape, dict):
        raise WorkbenchError(
            f"config.json: model_type {WORKBENCH!r} needs the shape under {SHAPE_KEY!r}, got {type(shape).__name__}"
        )
    if eos is not None:
        shape = shape | {"eos_token_ids": eos if isinstance(eos, list) else [eos]}
    return ModelConfig.from_dict(shape)


def _gpt2_values(family: str, values: dict[str, Any]) -> dict[str, Any]:
    only(values, "activation_function", _GELU_TANH, "another activation", default="gelu_new")
    only(values, "scale_attn_weights", (True,), "unscaled attention", default=True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        only(values, key, (False, None), "another attention")
    hidden, heads = need(values, "n_embd"), need(values, "n_head")
    return {
        "vocab_size": need(values, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": need(values, "n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": divide(hidden, heads),
        "intermediate_size": values.get("n_inner") or 4 * hidden,
        "context_length": values.get("n_positions", 1024),
        "norm_eps": float(need({"layer_norm_epsilon": 1e-5, **values}, "layer_norm_epsilon")),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tie_embeddings": bool(values.get("tie_word_embeddings", True)),
    }


def _llama_values(family: str, values: dict[str, Any]) -> dict[str, Any]:
    only(values, "hidden_act", ("silu",), "another activation", default="silu")
    if family in ("mistral", "mixtral", "qwen2"):  # transformers ignores the key there: the file means something else
        only(values, "attention_bias", (False, None), f"biases that {family} does not have")
    if family != "llama":
        only(values, "mlp_bias", (False, None), f"biases that {family} does not have")
    kv_heads = values.get("num_key_value_heads", _KV_HEADS.get(family))
    head_dim = values.get("head_dim", 128 if family == "qwen3" else None)
    bias = bool(values.get("attention_bias", False))
    block = _block_values(family, values)
    window, global_layers = _windows(family, values)
    if family == "mixtral":
        values = {"rope_theta": 1e6, **values}  # what transformers takes where there is none
    return block | {
        "num_kv_heads": block["num_heads"] if kv_heads is None else kv_heads,
        "head_dim": divide(block["hidden_size"], block["num_heads"]) if head_dim is None else head_dim,
        **_rotary(values, block["context_length"]),
        "qkv_bias": bias or family == "qwen2",
        "attention_output_bias": bias,
        "mlp_bias": bool(values.get("mlp_bias", False)),
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "sliding_window": window,
        "global_layers": global_layers,
    }


def _gemma_values(family: str, values: dict[str, Any]) -> dict[str, Any]:
    only(values, "hidden_activation", ("gelu_pytorch_tanh",), "another activation", default="gelu_pytorch_tanh")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        only(values, key, (None,), "a soft cap")
    only(values, "use_bidirectional_attention", (False, None), "attention in both directions")
    only(values, "mlp_bias", (False, None), f"biases that {family} does not have")
    bias = bool(values.get("attention_bias", False))
    block = _block_values(family, values)
    window, global_layers = _windows(family, values)
    head_dim = need({"head_dim": 256, **values}, "head_dim")
    scalar = need({"query_pre_attn_scalar": 256, **values}, "query_pre_attn_scalar")
    return block | {
        "num_kv_heads": need({"num_key_value_heads": 4, **values}, "num_key_value_heads"),
        "head_dim": head_dim,
        **_gemma_rotary(values, block["context_length"], windowed=window is not None),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": True,
        "post_norms": True,
        "zero_centered_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": block["hidden_size"] ** 0.5,
        "query_pre_attn_scalar": None if scalar == head_dim else float(scalar),
        "tie_embeddings": bool(values.get("tie_word_embeddings", True)),
        "sliding_window": window,
        "global_layers": global_layers,
    }


def _deepseek_values(family: str, values: dict[str, Any]) -> dict[str, Any]:
    """Latent attention."""
    only(values, "hidden_act", ("silu",), "another activation", default="silu")
    only(values, "attention_bias", (False, None), "biases in latent attention")
    if family == "deepseek_v3":
        only(values, "mlp_bias", (False, None), f"biases that {family} does not have")
        only(values, "rope_interleave", (True,), "rotary pairs of halves", default=True)
    only(values, "sliding_window", (None,), f"a window, which transformers leaves out of {family}")
    ranks = {
        "kv_rank": ("kv_lora_rank", 512),
        "rotary_head_dim": ("qk_rope_head_dim", 64),
        "content_head_dim": ("qk_nope_head_dim", 128),
        "value_head_dim": ("v_head_dim", 128),
    }
    query_rank = values.get("q_lora_rank", 1536)
    latent = LatentAttentionShape(
        query_rank=None if query_rank is None else need({"q_lora_rank": query_rank}, "q_lora_rank"),
        **{ours: need({theirs: default, **values}, theirs) for ours, (theirs, default) in ranks.items()},
    )
    block = _block_values(family, values)
    kv_heads = values.get("num_key_value_heads", 128 if family == "deepseek_v3" else None)
    return block | {
        "num_kv_heads": block["num_heads"] if kv_heads is None else kv_heads,
        "head_dim": latent.key_head_dim,
        **_rotary(values, block["context_length"]),
        "mlp_bias": bool(values.get("mlp_bias", False)),
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "latent_attention": latent,
    }


_READERS = {
    "gpt2": _gpt2_values,
    "gemma3_text": _gemma_values,
    "deepseek_v2": _deepseek_values,
    "deepseek_v3": _deepseek_values,
    **STATE_READERS,
}


def _block_values(family: str, values: dict[str, Any]) -> dict[str, Any]:
    """What every family but GPT-2 calls the same."""
    return {
        "vocab_size": need(values, "vocab_size"),
        "hidden_size": need(values, "hidden_size"),
        "num_layers": _num_layers(values),
        "num_heads": need(values, "num_attention_heads"),
        "intermediate_size": need(values, "intermediate_size"),
        "context_length": values.get("max_position_embeddings", _CONTEXT[family]),
        "norm_eps": float(need({"rms_norm_eps": 1e-6, **values}, "rms_norm_eps")),
    }


def _num_layers(values: dict[str, Any]) -> int:
    layers = need(values, "num_hidden_layers")
    if not isinstance(layers, int) or not 1 <= layers <= _MAX_LAYERS:
        raise WorkbenchError(
            f"config.json: num_hidden_layers must be a whole number from 1 to {_MAX_LAYERS:,}, got {layers!r}"
        )
    return layers


# -- positions ---------------------------------------------------------------------------------------------


def _rotary(values: dict[str, Any], context: int) -> dict[str, Any]:
    """rope_theta and rope_scaling, the same for all layers."""
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise WorkbenchError(f"config.json: {key} differs from layer to layer, which is not computed here")
    only(values, "partial_rotary_factor", (None, 1, 1.0), "rotary embedding of a part of each head")
    theta = rope.get("rope_theta") or values.get("rope_theta") or 10_000.0
    return {
        "rope_theta": float(need({"rope_theta": theta}, "rope_theta")),
        "rope_scaling": _scaling(rope, key, values.get("original_max_position_embeddings"), context),
    }


def _gemma_rotary(values: dict[str, Any], context: int, *, windowed: bool) -> dict[str, Any]:
    """One rotary embedding for the layers that see everything, another for those with a window."""
    kinds = values.get("rope_parameters") or {}
    if not isinstance(kinds, dict) or not all(isinstance(kinds.get(key) or {}, dict) for key in (_FULL, _SLIDING)):
        raise WorkbenchError(f"config.json: rope_parameters must hold objects {_FULL} and {_SLIDING}")
    if kinds.keys() - {_FULL, _SLIDING}:
        raise WorkbenchError(
            f"config.json: rope_parameters has {', '.join(kinds.keys() - {_FULL, _SLIDING})} beside {_FULL} and "
            f"{_SLIDING}, which gemma3_text does not read"
        )
    older = values.get("rope_scaling") or {}
    if not isinstance(older, dict):
        raise WorkbenchError(f"config.json: rope_scaling must be an object, got {older!r}")
    if "rope_type" not in older:  # transformers would take its own default for the type
        only(older, "type", (None,), "a scaling under the older key, which gemma3_text does not read")
    full, local = (kinds.get(_FULL) or {}) | older, kinds.get(_SLIDING) or {}
    only(local, "rope_type", ("default",), "a scaling of layers with a window", default="default")
    for rope in (values, local):
        only(rope, "partial_rotary_factor", (None, 1, 1.0), "rotary embedding of a part of each head")
    theta = full.get("rope_theta", values.get("rope_theta", 1_000_000.0))
    local_theta = local.get("rope_theta", values.get("rope_local_base_freq", 10_000.0))
    return {
        "rope_theta": float(need({"rope_theta": theta}, "rope_theta")),
        "rope_scaling": _scaling(full, f"rope_parameters.{_FULL}", None, context),
        "local_rope_theta": float(need({"rope_theta": local_theta}, "rope_theta")) if windowed else None,
    }


def _scaling(rope: dict[str, Any], key: str, original: Any, context: int) -> Scaling | None:
    """original: the length before the stretching where it stands outside of `rope`."""
    only(rope, "partial_rotary_factor", (None, 1, 1.0), "rotary embedding of a part of each head")
    only(rope, "mrope_section", (None,), "rotary embedding in sections")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise WorkbenchError(
            f"config.json: {key} asks for rope_type {kind!r}; computed here are 'default', 'linear', 'llama3' "
            "and 'yarn'"
        )
    factor = float(need(rope, "factor", key))
    original = original or rope.get("original_max_position_embeddings") or context
    if kind == "yarn":
        only(rope, "truncate", (True,), "YaRN between pairs", default=True)
        # transformers takes an mscale of 0 for none, and an attention_factor of 0 as it is
        given = {name: rope[name] for name in ("mscale", "mscale_all_dim") if rope.get(name)}
        given |= {name: rope[name] for name in ("attention_factor",) if rope.get(name) is not None}
        return YarnScaling(
            factor=factor,
            original_context_length=original,
            beta_fast=float(need({"beta_fast": rope.get("beta_fast") or 32}, "beta_fast", key)),
            beta_slow=float(need({"beta_slow": rope.get("beta_slow") or 1}, "beta_slow", key)),
            **{name: float(need(rope, name, key)) for name in given},
        )
    only(rope, "mscale_all_dim", (None, 0), "another scale of latent attention")
    if kind == "linear":
        return LinearScaling(factor)
    return RotaryScaling(
        factor=factor,
        low_frequency_factor=float(need(rope, "low_freq_factor", key)),
        high_frequency_factor=float(need(rope, "high_freq_factor", key)),
        original_context_length=original,
    )


# -- windows -----------------------------------------------------------------------------------------------


def _windows(family: str, values: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The window, or None, and the layers that have none although there is one."""
    layers, kinds = _num_layers(values), values.get("layer_types")
    if family == "gemma3_text":
        window = values.get("sliding_window", 4096)
        every = values.get("sliding_window_pattern", 6)
        if not isinstance(every, int) or every < 1:
            raise WorkbenchError(f"config.json: sliding_window_pattern must be at least 1, got {every!r}")
        default = [_SLIDING if (i + 1) % every else _FULL for i in range(layers)]
    elif family in ("qwen2", "qwen3"):
        window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
        first = need({"max_window_layers": 28, **values}, "max_window_layers")
        default = [_SLIDING if window is not None and i >= first else _FULL for i in range(layers)]
    else:  # transformers gives all layers the same and does not read layer_types
        if family == "mixtral":
            window = values.get("sliding_window")
        elif family == "qwen3_moe" and not values.get("use_sliding_window"):
            window = None
        elif family == "mistral":
            window = values.get("sliding_window", 4096)
        else:
            only(values, "sliding_window", (None,), f"a window, which transformers leaves out of {family}")
            window = None
        default = [_FULL if window is None else _SLIDING] * layers
        if kinds not in (None, default):
            raise WorkbenchError(
                f"config.json: layer_types asks for {few(kinds)} beside a window of {window}; a {family} has the same "
                "attention in all layers"
            )
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise WorkbenchError(f"config.json: layer_types must be a list of {layers}, got {few(kinds)}")
    for layer, kind in enumerate(kinds):
        if kind not in (_SLIDING, _FULL):
            raise WorkbenchError(
                f"config.json: layer_types[{layer}] is {few(kind)}; computed here are {_SLIDING!r} and {_FULL!r}"
            )
    global_layers = tuple(i for i, kind in enumerate(kinds) if kind == _FULL)
    if len(global_layers) == layers:
        return None, ()
    if window is None:
        raise WorkbenchError(
            f"config.json: layer_types asks for {_SLIDING}, and sliding_window / use_sliding_window for none"
        )
    return window, global_layers


# -- ModelConfig -> config.json ---------------------------------------------------------------------------


def config_to_hf(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json in transformers 5's form, or with model_type "workbench" where no family of theirs has the shape.

    Raises WorkbenchError for a shape that the family it goes by cannot say and another one can.
    """
    values, lost = _in_family(config, dtype)
    if not lost:
        return values
    families = [f for f in ARCHITECTURES if (f == "gpt2") == config.is_gpt2]
    if config.experts is None:
        families = [f for f in families if f not in EXPERT_ARCHITECTURES]
    others = (dataclasses.replace(config, family=f) for f in families)
    for other in others:
        if not _in_family(other, dtype)[1]:
            raise WorkbenchError(
                f"Hugging Face's {config.family!r} layout cannot say {', '.join(lost)}, and {other.family!r} can; "
                f"save it as that family, dataclasses.replace(config, family={other.family!r})"
            )
    return {"model_type": WORKBENCH, "dtype": _dtype_name(dtype), SHAPE_KEY: config.to_dict()}


def _in_family(config: ModelConfig, dtype: torch.dtype) -> tuple[dict[str, Any], list[str]]:
    """config.json of its family, and what of the shape is not found there again."""
    if config.is_gpt2:
        block = _gpt2_to_hf(config)
    elif config.latent_attention is not None:
        block = _deepseek_to_hf(config)
    elif config.family in STATE_WRITERS:
        block = STATE_WRITERS[config.family](config)
    else:
        block = _gemma_to_hf(config) if config.family == "gemma3_text" else _llama_to_hf(config)
    values = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "dtype": _dtype_name(dtype),
        "vocab_size": config.vocab_size,
        **generation_to_hf(config),
        "tie_word_embeddings": config.tie_embeddings,
        **block,
        **experts_to_hf(config),
    }
    try:
        back = config_from_hf(values)
    except WorkbenchError as error:
        return values, [str(error)]
    fields = [f.name for f in dataclasses.fields(config)]
    lost = [f"{f} = {getattr(config, f)!r}" for f in fields if getattr(config, f) != getattr(back, f)]
    return values, lost


def generation_to_hf(config: ModelConfig) -> dict[str, Any]:
    """generation_config.json: the tokens that begin and end a text."""
    eos = list(config.eos_token_ids)
    return {"bos_token_id": config.bos_token_id, "eos_token_id": (eos[0] if len(eos) == 1 else eos) if eos else None}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gpt2_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.context_length,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
    }


def _llama_to_hf(config: ModelConfig) -> dict[str, Any]:
    values = {
        **block_to_hf(config),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_parameters": _rope_to_hf(config.rope_theta, config.rope_scaling),
    }
    if config.family in ("llama", "qwen3", "qwen3_moe"):
        values["attention_bias"] = config.attention_output_bias
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if config.family in ("mistral", "mixtral"):
        values["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3") and config.sliding_window is not None:
        kinds = _layer_types(config)
        values |= {
            "use_sliding_window": True,
            "sliding_window": config.sliding_window,
            "max_window_layers": kinds.index(_SLIDING) if _SLIDING in kinds else len(kinds),
            "layer_types": kinds,
        }
    return values


def _gemma_to_hf(config: ModelConfig) -> dict[str, Any]:
    local = config.rope_theta if config.local_rope_theta is None else config.local_rope_theta
    scalar = config.head_dim if config.query_pre_attn_scalar is None else config.query_pre_attn_scalar
    return {
        **block_to_hf(config),
        "head_dim": config.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": config.attention_output_bias,
        "query_pre_attn_scalar": int(scalar),
        "sliding_window": config.sliding_window,
        "layer_types": _layer_types(config),
        "rope_parameters": {
            _FULL: _rope_to_hf(config.rope_theta, config.rope_scaling),
            _SLIDING: _rope_to_hf(local, None),
        },
    }


def _deepseek_to_hf(config: ModelConfig) -> dict[str, Any]:
    latent = config.latent_shape
    values = {
        **block_to_hf(config),
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_rope_head_dim": latent.rotary_head_dim,
        "qk_nope_head_dim": latent.content_head_dim,
        "v_head_dim": latent.value_head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": _rope_to_hf(config.rope_theta, config.rope_scaling),
    }
    if config.family == "deepseek_v2":
        values["mlp_bias"] = config.mlp_bias
    if config.family == "deepseek_v3":
        values |= {"rope_interleave": True, "num_nextn_predict_layers": 0}
    return values


def _layer_types(config: ModelConfig) -> list[str]:
    return [_FULL if config.window_of(i) is None else _SLIDING for i in range(config.num_layers)]


def _rope_to_hf(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta}
    match scaling:
        case RotaryScaling():
            rope |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_context_length,
            }
        case LinearScaling():
            rope |= {"rope_type": "linear", "factor": scaling.factor}
        case YarnScaling():
            rope |= {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_context_length,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
            }
            for name in ("attention_factor", "mscale", "mscale_all_dim"):
                if getattr(scaling, name) is not None:
                    rope[name] = getattr(scaling, name)
    return rope
