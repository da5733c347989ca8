"""Hugging Face's way to write a decoder down: config.json to and from ModelConfig, tensor names to ours.

What this package cannot compute exactly as `transformers` does is refused by the name of the setting that
asks for it; nothing is skipped in silence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from workbench.errors import WorkbenchError, unknown
from workbench.models.config import ModelConfig, RotaryScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# What transformers takes for a key that config.json leaves out.
_CONTEXT = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")


# -- config.json -> ModelConfig ---------------------------------------------------------------------------


def config_from_hf(values: dict, generation: dict | None = None) -> ModelConfig:
    """The ModelConfig of a config.json, in transformers 5's form (rope_parameters) or the older one.

    generation: generation_config.json, whose end-of-text ids come first when it has any.
    Raises WorkbenchError that names the key: one that is missing, or one that asks for what is not computed
    here (another rotary scaling, windows on some layers only, quantized weights, …).
    """
    family = values.get("model_type")
    if family in ("deepseek_v2", "deepseek_v3"):
        raise WorkbenchError(
            f"model_type {family!r}: latent attention with experts is known to the calculators only; "
            "public_shape('deepseek-v3') gives its counts"
        )
    if family not in ARCHITECTURES:
        raise unknown("model_type", family, ARCHITECTURES)
    for key in ("quantization_config", "auto_map"):
        _only(values, key, (None,), "quantized weights" if key[0] == "q" else "the checkpoint's own code")
    read = _gpt2_values if family == "gpt2" else _llama_values
    eos = (generation or {}).get("eos_token_id")
    eos = values.get("eos_token_id") if eos is None else eos
    return ModelConfig(
        family=family,
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        **read(family, values),
    )


def _gpt2_values(family: str, values: dict) -> dict:
    _only(values, "activation_function", _GELU_TANH, "another activation", default="gelu_new")
    _only(values, "scale_attn_weights", (True,), "unscaled attention", default=True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        _only(values, key, (False, None), "another attention")
    hidden, heads = _need(values, "n_embd"), _need(values, "n_head")
    return {
        "vocab_size": _need(values, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": _need(values, "n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": _divide(hidden, heads),
        "intermediate_size": values.get("n_inner") or 4 * hidden,
        "context_length": values.get("n_positions", 1024),
        "norm_eps": float(_need({"layer_norm_epsilon": 1e-5, **values}, "layer_norm_epsilon")),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tie_embeddings": values.get("tie_word_embeddings", True),
    }


def _llama_values(family: str, values: dict) -> dict:
    _only(values, "hidden_act", ("silu",), "another activation", default="silu")
    if family in ("mistral", "qwen2"):  # transformers ignores the key there: the file means something else
        _only(values, "attention_bias", (False, None), f"biases that {family} does not have")
    if family != "llama":
        _only(values, "mlp_bias", (False, None), f"biases that {family} does not have")
    hidden, heads = _need(values, "hidden_size"), _need(values, "num_attention_heads")
    kv_heads = values.get("num_key_value_heads", 8 if family == "mistral" else None)
    head_dim = values.get("head_dim", 128 if family == "qwen3" else None)
    context = values.get("max_position_embeddings", _CONTEXT[family])
    theta, scaling = _rotary(values, context)
    bias = bool(values.get("attention_bias", False))
    return {
        "vocab_size": _need(values, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": _need(values, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": _divide(hidden, heads) if head_dim is None else head_dim,
        "intermediate_size": _need(values, "intermediate_size"),
        "context_length": context,
        "norm_eps": float(_need({"rms_norm_eps": 1e-6, **values}, "rms_norm_eps")),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qkv_bias": bias or family == "qwen2",
        "attention_output_bias": bias,
        "mlp_bias": bool(values.get("mlp_bias", False)),
        "qk_norm": family == "qwen3",
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "sliding_window": _window(family, values),
    }


def _rotary(values: dict, context: int) -> tuple[float, RotaryScaling | None]:
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise WorkbenchError(f"config.json: {key} differs from layer to layer, which is not computed here")
    for source in (rope, values):
        _only(source, "partial_rotary_factor", (None, 1, 1.0), "rotary embedding of a part of each head")
    _only(rope, "mrope_section", (None,), "rotary embedding in sections")
    theta = float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise WorkbenchError(
            f"config.json: {key} asks for rope_type {kind!r}; computed here are 'default' and 'llama3'"
        )
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return theta, RotaryScaling(
        factor=float(_need(rope, "factor", key)),
        low_frequency_factor=float(_need(rope, "low_freq_factor", key)),
        high_frequency_factor=float(_need(rope, "high_freq_factor", key)),
        original_context_length=original or context,
    )


def _window(family: str, values: dict) -> int | None:
    """The window all layers share, or None. A window on some layers only is refused."""
    kinds = set(values.get("layer_types") or ())
    if family == "mistral":
        window = values.get("sliding_window", 4096)
        expected = "full_attention" if window is None else "sliding_attention"
    elif family in ("qwen2", "qwen3"):
        window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
        if window is not None and not kinds:
            first, layers = values.get("max_window_layers", 28), _need(values, "num_hidden_layers")
            kinds = {"sliding_attention" if i >= first else "full_attention" for i in range(layers)}
        if kinds == {"full_attention"}:
            window = None
        expected = "full_attention" if window is None else "sliding_attention"
    else:
        _only(values, "sliding_window", (None,), f"a window, which transformers leaves out of {family}")
        window, expected = None, "full_attention"
    if kinds - {expected}:
        raise WorkbenchError(
            f"config.json: layer_types / max_window_layers / sliding_window ask for {sorted(kinds)} beside "
            f"a window of {window}; computed here is one kind of attention for all layers"
        )
    return window


def _only(values: dict, key: str, allowed: tuple, what: str, default=None) -> None:
    value = values.get(key, default)
    if value not in allowed:
        raise WorkbenchError(
            f"config.json: {key} = {value!r} asks for {what}, which is not computed here; "
            f"supported: {', '.join(map(repr, allowed))}"
        )


def _need(values: dict, key: str, where: str = "") -> int | float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WorkbenchError(
            f"config.json: {where + '.' if where else ''}{key} must be a number, got {value!r}"
        )
    return value


def _divide(hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise WorkbenchError(f"config.json: a width of {hidden} does not divide into {heads} heads")
    return hidden // heads


# -- ModelConfig -> config.json ---------------------------------------------------------------------------


def config_to_hf(config: ModelConfig, dtype: torch.dtype) -> dict:
    """config.json in transformers 5's form. Raises WorkbenchError for what the family's form cannot say."""
    if config.family not in ARCHITECTURES:
        raise WorkbenchError(f"family {config.family!r} is known to the calculators only and cannot be saved")
    eos = list(config.eos_token_ids)
    values = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else eos) if eos else None,
        "tie_word_embeddings": config.tie_embeddings,
        **(_gpt2_to_hf(config) if config.is_gpt2 else _llama_to_hf(config)),
    }
    back = config_from_hf(values)
    lost = [
        f"{f.name} = {getattr(config, f.name)!r}"
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != getattr(back, f.name)
    ]
    if lost:
        raise WorkbenchError(
            f"Hugging Face's {config.family!r} layout cannot say {', '.join(lost)}; "
            "save it as a family that has it, or change the shape"
        )
    return values


def _gpt2_to_hf(config: ModelConfig) -> dict:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.context_length,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
    }


def _llama_to_hf(config: ModelConfig) -> dict:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        }
    values = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_parameters": rope,
    }
    if config.family in ("llama", "qwen3"):
        values["attention_bias"] = config.attention_output_bias
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        values["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3") and config.sliding_window is not None:
        values |= {
            "use_sliding_window": True,
            "sliding_window": config.sliding_window,
            "max_window_layers": 0,
        }
    return values


# -- tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file and the parameters of ours that it holds, joined along the output axis."""

    name: str  # without the "model." or "transformer." that some files put before it
    parts: tuple[str, ...]  # parameter names of Decoder
    rows: tuple[int, ...]  # outputs of each part
    shape: tuple[int, ...]
    transposed: bool  # GPT-2's Conv1D keeps [inputs, outputs]

    def split(self, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The file's tensor as our parameters; views of it."""
        tensor = tensor.T if self.transposed else tensor
        return list(zip(self.parts, tensor.split(self.rows)))

    def join(self, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`; contiguous, on the CPU."""
        tensors = [parameters[part].detach().cpu() for part in self.parts]
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return (joined.T if self.transposed else joined).contiguous()


_LLAMA_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_GPT2_LAYER = {
    "ln_1": ("attention_norm",),
    "attn.c_attn": ("attention.q", "attention.k", "attention.v"),
    "attn.c_proj": ("attention.o",),
    "ln_2": ("mlp_norm",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
}


def stored_tensors(config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> list[StoredTensor]:
    """Every tensor of a checkpoint. shapes: our parameter names -> shapes, a tied head left out."""
    if config.is_gpt2:
        ends = {"wte": ("embed",), "wpe": ("embed_positions",), "ln_f": ("norm",), "lm_head": ("head",)}
        prefix, layer = "h", _GPT2_LAYER
    else:
        ends = {"embed_tokens": ("embed",), "norm": ("norm",), "lm_head": ("head",)}
        prefix, layer = "layers", {theirs: (ours,) for theirs, ours in _LLAMA_LAYER.items()}
    modules = dict(ends)
    for index in range(config.num_layers):
        for theirs, ours in layer.items():
            modules[f"{prefix}.{index}.{theirs}"] = tuple(f"layers.{index}.{o}" for o in ours)
    stored = []
    for theirs, ours in modules.items():
        for kind in ("weight", "bias"):
            parts = tuple(f"{o}.{kind}" for o in ours)
            if parts[0] not in shapes:
                continue
            rows = tuple(shapes[part][0] for part in parts)
            shape = (sum(rows), *shapes[parts[0]][1:])
            conv1d = config.is_gpt2 and kind == "weight" and ".c_" in theirs
            stored.append(
                StoredTensor(f"{theirs}.{kind}", parts, rows, shape[::-1] if conv1d else shape, conv1d)
            )
    return stored


def bare_name(name: str) -> str:
    """A tensor's name without the base model's prefix."""
    return name.removeprefix("model.").removeprefix("transformer.")


def full_name(config: ModelConfig, name: str) -> str:
    """A tensor's name as transformers writes it."""
    if name.startswith("lm_head"):
        return name
    return ("transformer." if config.is_gpt2 else "model.") + name


def is_derived(name: str) -> bool:
    """Buffers that older files carry beside the weights: causal masks and rotary frequencies."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))
