"""Hugging Face's tensors and ours: names, which are joined, and in which order their rows are.

transformers                                           Decoder
GPT-2     c_attn, [inputs, outputs]                    attention.q, .k, .v
DeepSeek  kv_b_proj: key and value of each head        attention.k_up: all keys; .v_up: all values
          rotary rows as neighbours, 0 1 2 3 …         as halves, 0 2 4 … 1 3 5 …
Gemma 3   post_attention_layernorm                     attention_post_norm (elsewhere it is mlp_norm)
Qwen3.5   q_proj: query and gate of each head          attention.q: all queries; .gate: all gates
experts   see expert_layout
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from workbench.models.config import ModelConfig
from workbench.models.expert_layout import expert_modules
from workbench.models.state_shape import ATTENTION


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of the file and the parameters of ours that it holds, joined along the output axis."""

    name: str  # without the "model." or "transformer." that some files put before it
    parts: tuple[str, ...]  # parameter names of Decoder
    rows: tuple[int, ...]  # outputs of each part
    shape: tuple[int, ...]
    transposed: bool = False  # GPT-2's Conv1D keeps [inputs, outputs]
    # row of the file that is each row of ours, where they differ; made when it is needed, because the plan is drawn
    # before anybody has seen whether the file is as large as its config.json says
    order: Callable[[], torch.Tensor] | None = None

    def split(self, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The file's tensor as our parameters; views of it where the order is the same."""
        tensor = tensor.T if self.transposed else tensor
        tensor = tensor if self.order is None else tensor[self.order()]
        return list(zip(self.parts, tensor.split(self.rows)))

    def join(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`; contiguous, on the CPU."""
        tensors = [parameters[part].detach().cpu() for part in self.parts]
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        joined = joined if self.order is None else joined[self.order().argsort()]
        return (joined.T if self.transposed else joined).contiguous()


_ATTENTION = {
    "self_attn.q_proj": ("attention.q",),
    "self_attn.k_proj": ("attention.k",),
    "self_attn.v_proj": ("attention.v",),
    "self_attn.o_proj": ("attention.o",),
    "self_attn.q_norm": ("attention.q_norm",),
    "self_attn.k_norm": ("attention.k_norm",),
}
_LATENT_ATTENTION = {
    "self_attn.q_proj": ("attention.q",),
    "self_attn.q_a_proj": ("attention.q_down",),
    "self_attn.q_a_layernorm": ("attention.q_norm",),
    "self_attn.q_b_proj": ("attention.q_up",),
    "self_attn.kv_a_proj_with_mqa": ("attention.kv_down",),
    "self_attn.kv_a_layernorm": ("attention.kv_norm",),
    "self_attn.kv_b_proj": ("attention.k_up", "attention.v_up"),
    "self_attn.o_proj": ("attention.o",),
}
_MAMBA: dict[str, tuple[str, ...]] = {
    "in_proj": ("mixer.proj",),
    "conv1d": ("mixer.conv",),
    "x_proj": ("mixer.select",),
    "dt_proj": ("mixer.step_up",),
    "dt_layernorm": ("mixer.step_norm",),
    "b_layernorm": ("mixer.b_norm",),
    "c_layernorm": ("mixer.c_norm",),
    "A_log": ("mixer.a_log",),
    "D": ("mixer.skip",),
    "out_proj": ("mixer.out",),
}
_MAMBA2: dict[str, tuple[str, ...]] = {
    "in_proj": ("mixer.proj",),
    "conv1d": ("mixer.conv",),
    "dt_bias": ("mixer.dt_bias",),
    "A_log": ("mixer.a_log",),
    "D": ("mixer.skip",),
    "norm": ("mixer.norm",),
    "out_proj": ("mixer.out",),
}
_GATED_DELTA: dict[str, tuple[str, ...]] = {
    "in_proj_qkv": ("mixer.qkv",),
    "in_proj_z": ("mixer.gate",),
    "in_proj_b": ("mixer.beta",),
    "in_proj_a": ("mixer.decay",),
    "conv1d": ("mixer.conv",),
    "dt_bias": ("mixer.dt_bias",),
    "A_log": ("mixer.a_log",),
    "norm": ("mixer.norm",),
    "out_proj": ("mixer.out",),
}
_GATED_ATTENTION = {"self_attn.q_proj": ("attention.q", "attention.gate")}
_MLP = {"mlp.gate_proj": ("mlp.gate",), "mlp.up_proj": ("mlp.up",), "mlp.down_proj": ("mlp.down",)}
_NORMS = {"input_layernorm": ("attention_norm",), "post_attention_layernorm": ("mlp_norm",)}
_FOUR_NORMS = {
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("attention_post_norm",),
    "pre_feedforward_layernorm": ("mlp_norm",),
    "post_feedforward_layernorm": ("mlp_post_norm",),
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
    modules = {theirs: (theirs, ours) for theirs, ours in _ends(config).items()}
    for index in range(config.num_layers):
        prefix = f"{'h' if config.is_gpt2 else 'layers'}.{index}."
        for theirs, ours in _layer(config, index, shapes).items():
            modules[prefix + theirs] = (theirs, tuple(f"layers.{index}.{o}" for o in ours))
    orders = {} if config.latent_attention is None else _LATENT_ORDERS
    if config.family == "qwen3_5_text":
        orders = {"self_attn.q_proj": _gated_query_order}
    stored = []
    for name, (theirs, ours) in modules.items():
        for kind in (".weight", ".bias", ""):  # the last: a parameter that is no module's weight
            parts = tuple(f"{o}{kind}" for o in ours if f"{o}{kind}" in shapes)
            if not parts:  # no bias, no norm, or keys that are another layer's
                continue
            rows = tuple(shapes[part][0] for part in parts)
            shape = (sum(rows), *shapes[parts[0]][1:])
            conv1d = config.is_gpt2 and kind == ".weight" and ".c_" in theirs
            shape = shape[::-1] if conv1d else shape
            order = partial(orders[theirs], config) if theirs in orders else None
            stored.append(StoredTensor(f"{name}{kind}", parts, rows, shape, conv1d, order))
    return stored


def _ends(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Before and after the layers."""
    if config.is_gpt2:
        return {"wte": ("embed",), "wpe": ("embed_positions",), "ln_f": ("norm",), "lm_head": ("head",)}
    if config.family in ("mamba", "mamba2"):
        return {"embeddings": ("embed",), "norm_f": ("norm",), "lm_head": ("head",)}
    norm = "final_layernorm" if config.family == "jamba" else "norm"
    return {"embed_tokens": ("embed",), norm: ("norm",), "lm_head": ("head",)}


def _layer(config: ModelConfig, index: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
    """Names within one layer: theirs -> ours."""
    if config.is_gpt2:
        return _GPT2_LAYER
    state = config.mixer_of(index) != ATTENTION
    match config.family:
        case "mamba" | "mamba2":
            mixer = _MAMBA if config.family == "mamba" else _MAMBA2
            return {"norm": ("mixer_norm",), **_under("mixer", mixer)}
        case "jamba":
            norms = {
                "input_layernorm": ("mixer_norm" if state else "attention_norm",),
                "pre_ff_layernorm": ("mlp_norm",),
            }
            feeds = {theirs.replace("mlp.", "feed_forward."): ours for theirs, ours in _MLP.items()}
            return {**norms, **(_under("mamba", _MAMBA) if state else _ATTENTION), **feeds}
        case "qwen3_5_text" if state:
            return {**_NORMS, "input_layernorm": ("mixer_norm",), **_under("linear_attn", _GATED_DELTA), **_MLP}
        case "qwen3_5_text":
            return {**_NORMS, **_ATTENTION, **_GATED_ATTENTION, **_MLP}
    if state:  # in no family of theirs: by our own names
        prefix = f"layers.{index}."
        own = dict.fromkeys(n.removeprefix(prefix) for n in shapes if n.startswith(f"{prefix}mixer"))
        return {**{name: (name,) for name in own}, "post_attention_layernorm": ("mlp_norm",), **_MLP}
    attention = _ATTENTION if config.latent_attention is None else _LATENT_ATTENTION
    return {
        **(_FOUR_NORMS if config.post_norms else _NORMS),
        **attention,
        "self_attn.gate": ("attention.gate",),
        **(expert_modules(config) if config.has_experts(index) else _MLP),
    }


def _under(prefix: str, names: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {f"{prefix}.{theirs}": ours for theirs, ours in names.items()}


def _gated_query_order(config: ModelConfig) -> torch.Tensor:
    """Qwen3.5 keeps a head's query and its gate side by side; we have the queries of all heads first."""
    rows = torch.arange(2 * config.num_heads * config.head_dim).view(config.num_heads, 2, config.head_dim)
    return rows.transpose(0, 1).flatten()


def _neighbours(size: int) -> torch.Tensor:
    """0 2 4 … 1 3 5 …: DeepSeek's rotary embedding turns neighbours, (x[0], x[1]), (x[2], x[3]), …; ours turns
    (x[i], x[i + D/2])."""
    return torch.arange(size).view(-1, 2).T.flatten()


def _query_order(config: ModelConfig) -> torch.Tensor:
    latent = config.latent_shape
    rows = torch.arange(config.num_heads * latent.key_head_dim).view(config.num_heads, -1)
    content, rotary = rows.split((latent.content_head_dim, latent.rotary_head_dim), dim=1)
    return torch.cat((content, rotary[:, _neighbours(latent.rotary_head_dim)]), dim=1).flatten()


def _latent_order(config: ModelConfig) -> torch.Tensor:
    latent = config.latent_shape
    return torch.cat((torch.arange(latent.kv_rank), latent.kv_rank + _neighbours(latent.rotary_head_dim)))


def _up_order(config: ModelConfig) -> torch.Tensor:
    """DeepSeek keeps content key and value of a head side by side; we have the keys of all heads first."""
    sizes = (config.latent_shape.content_head_dim, config.latent_shape.value_head_dim)
    rows = torch.arange(config.num_heads * sum(sizes)).view(config.num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])


_LATENT_ORDERS = {
    "self_attn.q_proj": _query_order,
    "self_attn.q_b_proj": _query_order,
    "self_attn.kv_a_proj_with_mqa": _latent_order,
    "self_attn.kv_b_proj": _up_order,
}


_PREFIXES = {"gpt2": "transformer.", "mamba": "backbone.", "mamba2": "backbone."}


def bare_name(name: str) -> str:
    """A tensor's name without the base model's prefix."""
    return name.removeprefix("model.").removeprefix("transformer.").removeprefix("backbone.")


def full_name(config: ModelConfig, name: str) -> str:
    """A tensor's name as transformers writes it."""
    if name.startswith("lm_head"):
        return name
    return _PREFIXES.get(config.family, "model.") + name


def is_derived(name: str) -> bool:
    """Buffers that older files carry beside the weights: causal masks and rotary frequencies."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))
