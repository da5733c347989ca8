"""config.json of families with layers that keep a state: Mamba, Mamba-2, Jamba, Qwen3.5 (gated DeltaNet).

Read and written as transformers 5 does; `layout` has the other families. What their layers would need beyond that is
refused by name: a mixture of experts, another activation, limits of Mamba-2's step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from workbench.errors import WorkbenchError
from workbench.models.config import ModelConfig
from workbench.models.layout_values import block_to_hf, divide, few, need, only
from workbench.models.state_shape import ATTENTION, StateShape

STATE_ARCHITECTURES = {
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "jamba": "JambaForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
_TRAINED_CONTEXT = 2048  # of Mamba's and Mamba-2's models, whose config.json names none
_STATE, _FULL = "linear_attention", "full_attention"  # as layer_types calls them


def _size(values: dict[str, Any], key: str, default: int | None = None) -> int:
    size = need(values if default is None else {key: default, **values}, key)
    if not isinstance(size, int) or not 1 <= size <= 2**40:
        raise WorkbenchError(f"config.json: {key} must be a whole number of at least 1, got {few(size)}")
    return size


def _layers(values: dict[str, Any]) -> int:
    layers = _size(values, "num_hidden_layers")
    if layers > 10_000:
        raise WorkbenchError(f"config.json: no model has {layers:,} layers")
    return layers


def _rank(values: dict[str, Any], key: str, hidden: int) -> int:
    return math.ceil(hidden / 16) if values.get(key, "auto") == "auto" else _size(values, key)


def _pure(values: dict[str, Any], kind: str, shape: StateShape, *, tied: bool) -> dict[str, Any]:
    """A model without attention and feed-forward."""
    only(values, "hidden_act", ("silu",), "another activation", default="silu")
    hidden, layers = _size(values, "hidden_size"), _layers(values)
    return {
        "vocab_size": need(values, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": hidden,
        "intermediate_size": 0,
        "context_length": _size(values, "max_position_embeddings", _TRAINED_CONTEXT),
        "norm_eps": float(need({"layer_norm_epsilon": 1e-5, **values}, "layer_norm_epsilon")),
        "tie_embeddings": bool(values.get("tie_word_embeddings", tied)),
        "mixers": (kind,) * layers,
        "state_shape": shape,
    }


def _mamba_values(family: str, values: dict[str, Any]) -> dict[str, Any]:
    hidden = _size(values, "hidden_size")
    shape = StateShape(
        inner_size=_size(values, "expand", 2) * hidden,
        state_size=_size(values, "state_size", 16),
        conv_width=_size(values, "conv_kernel", 4),
        rank=_rank(values, "time_step_rank", hidden),
        conv_bias=bool(values.get("use_conv_bias", True)),
        bias=bool(values.get("use_bias", False)),
    )
    return _pure(values, "mamba", shape, tied=True)


def _mamba2_values(family: str, values: dict[str, Any]) -> dict[str, Any]:
    limit = values.get("time_step_limit", (0.0, math.inf))
    none = [0.0, math.inf], [0.0, {"__float__": "Infinity"}]  # the second as transformers writes infinity in JSON
    if not isinstance(limit, (list, tuple)) or list(limit) not in none:
        raise WorkbenchError(f"config.json: time_step_limit = {few(limit)} bounds the step, which is not computed here")
    heads, head_dim = _size(values, "num_heads", 128), _size(values, "head_dim", 64)
    inner = _size(values, "expand", 2) * _size(values, "hidden_size")
    if inner != heads * head_dim:
        raise WorkbenchError(
            f"config.json: expand · hidden_size is {inner}, and num_heads {heads} of head_dim {head_dim} are "
            f"{heads * head_dim}; they must be the same"
        )
    shape = StateShape(
        inner_size=inner,
        state_size=_size(values, "state_size", 128),
        num_heads=heads,
        num_groups=_size(values, "n_groups", 8),
        conv_width=_size(values, "conv_kernel", 4),
        chunk_size=_size(values, "chunk_size", 256),
        conv_bias=bool(values.get("use_conv_bias", True)),
        bias=bool(values.get("use_bias", False)),
    )
    return _pure(values, "mamba2", shape, tied=False)


def _with_attention(values: dict[str, Any], default_context: int) -> dict[str, Any]:
    """What Jamba and Qwen3.5 call the same."""
    only(values, "hidden_act", ("silu",), "another activation", default="silu")
    heads = _size(values, "num_attention_heads")
    kv_heads = values.get("num_key_value_heads")
    return {
        "vocab_size": need(values, "vocab_size"),
        "hidden_size": _size(values, "hidden_size"),
        "num_layers": _layers(values),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else _size(values, "num_key_value_heads"),
        "intermediate_size": _size(values, "intermediate_size"),
        "context_length": _size(values, "max_position_embeddings", default_context),
        "norm_eps": float(need({"rms_norm_eps": 1e-6, **values}, "rms_norm_eps")),
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
    }


def _jamba_values(family: str, values: dict[str, Any]) -> dict[str, Any]:
    if values.get("num_experts", 16) != 1:
        raise WorkbenchError(
            f"config.json: num_experts = {few(values.get('num_experts', 16))} asks for a mixture of experts, which is "
            "not computed here; a Jamba of 1 expert has plain feed-forwards"
        )
    block = _with_attention({"num_key_value_heads": 8, **values}, 262_144)
    period, offset = (
        _size(values, "attn_layer_period", 8),
        need({"attn_layer_offset": 4, **values}, "attn_layer_offset"),
    )
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise WorkbenchError(f"config.json: attn_layer_offset must be from 0 to {period - 1}, got {few(offset)}")
    mixers = tuple(ATTENTION if i % period == offset else "mamba" for i in range(block["num_layers"]))
    hidden = block["hidden_size"]
    shape = StateShape(
        inner_size=_size(values, "mamba_expand", 2) * hidden,
        state_size=_size(values, "mamba_d_state", 16),
        conv_width=_size(values, "mamba_d_conv", 4),
        rank=_rank(values, "mamba_dt_rank", hidden),
        conv_bias=bool(values.get("mamba_conv_bias", True)),
        bias=bool(values.get("mamba_proj_bias", False)),
        inner_norms=True,
    )
    return block | {
        "head_dim": divide(hidden, block["num_heads"]),
        "mixers": mixers,
        "state_shape": shape if "mamba" in mixers else None,
        "rotary_dim": 0,
    }


def _qwen_values(family: str, values: dict[str, Any]) -> dict[str, Any]:
    block = _with_attention({"num_attention_heads": 16, "num_key_value_heads": 4, **values}, 32_768)
    head_dim, layers = _size(values, "head_dim", 256), block["num_layers"]
    every = _size(values, "full_attention_interval", 4)
    kinds = values.get("layer_types")
    if kinds is None:
        kinds = [_FULL if (i + 1) % every == 0 else _STATE for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_STATE, _FULL) for kind in kinds):
        raise WorkbenchError(
            f"config.json: layer_types must be a list of {layers}, each {_STATE!r} or {_FULL!r}, got {few(kinds)}"
        )
    rope = values.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise WorkbenchError(f"config.json: rope_parameters must be an object, got {few(rope)}")
    only(rope, "rope_type", ("default",), "a scaling of rotary embedding in this family", default="default")
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 0.25))
    turned = int(head_dim * need({"partial_rotary_factor": share}, "partial_rotary_factor", "rope_parameters"))
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    heads, groups = _size(values, "linear_num_value_heads", 32), _size(values, "linear_num_key_heads", 16)
    shape = StateShape(
        inner_size=heads * _size(values, "linear_value_head_dim", 128),
        state_size=_size(values, "linear_key_head_dim", 128),
        num_heads=heads,
        num_groups=groups,
        conv_width=_size(values, "linear_conv_kernel_dim", 4),
    )
    bias = bool(values.get("attention_bias", False))
    return block | {
        "head_dim": head_dim,
        "rope_theta": float(need({"rope_theta": theta}, "rope_theta")),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": True,
        "zero_centered_norms": True,
        "mixers": tuple(ATTENTION if kind == _FULL else "gated_delta" for kind in kinds),
        "state_shape": shape if _STATE in kinds else None,
        "rotary_dim": turned,
        "attention_gate": True,
    }


STATE_READERS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "mamba": _mamba_values,
    "mamba2": _mamba2_values,
    "jamba": _jamba_values,
    "qwen3_5_text": _qwen_values,
}


# -- ModelConfig -> config.json ---------------------------------------------------------------------------


def _sizes(config: ModelConfig) -> StateShape:
    """The state's sizes; of a model whose layers all attend, any."""
    return config.state_shape or StateShape(inner_size=2 * config.hidden_size)


def _pure_to_hf(config: ModelConfig) -> dict[str, Any]:
    shape = _sizes(config)
    values = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "layer_norm_epsilon": config.norm_eps,
        "max_position_embeddings": config.context_length,
        "hidden_act": "silu",
        "expand": shape.inner_size // config.hidden_size,
        "state_size": shape.state_size,
        "conv_kernel": shape.conv_width,
        "use_conv_bias": shape.conv_bias,
        "use_bias": shape.bias,
    }
    if config.family == "mamba":
        return values | {"time_step_rank": shape.rank}
    return values | {
        "num_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "n_groups": shape.num_groups,
        "chunk_size": shape.chunk_size,
    }


def _jamba_to_hf(config: ModelConfig) -> dict[str, Any]:
    shape, attend = _sizes(config), config.attention_layers
    period = attend[1] - attend[0] if len(attend) > 1 else config.num_layers
    offset = attend[0] if attend else period
    return {
        **block_to_hf(config),
        "hidden_act": "silu",
        "num_experts": 1,
        "attn_layer_period": period if attend else period + 1,
        "attn_layer_offset": offset,
        "mamba_expand": shape.inner_size // config.hidden_size,
        "mamba_d_state": shape.state_size,
        "mamba_d_conv": shape.conv_width,
        "mamba_dt_rank": shape.rank,
        "mamba_conv_bias": shape.conv_bias,
        "mamba_proj_bias": shape.bias,
    }


def _qwen_to_hf(config: ModelConfig) -> dict[str, Any]:
    shape = _sizes(config)
    turned = config.head_dim if config.rotary_dim is None else config.rotary_dim
    return {
        **block_to_hf(config),
        "hidden_act": "silu",
        "head_dim": config.head_dim,
        "attention_bias": config.attention_output_bias,
        "layer_types": [_FULL if config.mixer_of(i) == ATTENTION else _STATE for i in range(config.num_layers)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": turned / config.head_dim,
        },
        "linear_num_value_heads": shape.num_heads,
        "linear_num_key_heads": shape.num_groups,
        "linear_value_head_dim": shape.head_dim,
        "linear_key_head_dim": shape.state_size,
        "linear_conv_kernel_dim": shape.conv_width,
    }


STATE_WRITERS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "mamba": _pure_to_hf,
    "mamba2": _pure_to_hf,
    "jamba": _jamba_to_hf,
    "qwen3_5_text": _qwen_to_hf,
}
