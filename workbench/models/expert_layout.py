"""Experts in Hugging Face's layout: keys of config.json and names of tensors, of Mixtral, Qwen3-MoE, DeepSeek-V2 and"
" V3.

On disk every expert has tensors of its own, as in the published checkpoints; transformers joins them when it loads.

    family       router                                  expert e                               shared experts
    mixtral      block_sparse_moe.gate                   block_sparse_moe.experts.e.w1, w3, w2  none
    qwen3_moe    mlp.gate                                mlp.experts.e.gate_proj, up_, down_    none
    deepseek_v2  mlp.gate                                the same                               mlp.shared_experts.…
    deepseek_v3  mlp.gate, mlp.gate.e_score_correction_bias  the same                           the same
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from workbench.errors import is_whole
from workbench.models.config import ExpertsShape, ModelConfig
from workbench.models.layout_values import need, only

EXPERT_ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
DENSE_LAYERS = {"deepseek_v2": 0, "deepseek_v3": 3}  # what transformers takes for first_k_dense_replace
_V2 = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0}
_V3 = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"


def published_code(family: str, auto_map: object) -> bool:
    """Whether auto_map names DeepSeek's own files and nothing else. Its published checkpoints bring their code, which
    computes what is computed here; it is neither read nor run, so changes of it under the same name are not seen."""
    own = ("configuration_deepseek.", "modeling_deepseek.")
    return (
        family in DENSE_LAYERS
        and isinstance(auto_map, dict)
        and all(isinstance(name, str) and name.startswith(own) for name in auto_map.values())
    )


def is_predicting(config: ModelConfig, name: str, extra_layers: object) -> bool:
    """Whether a tensor belongs to one of the `num_nextn_predict_layers` of a DeepSeek-V3, which lie behind its last
    layer. They predict the token after the next in training (arXiv 2412.19437 §2.2); nothing here reads them."""
    if config.family != "deepseek_v3" or not is_whole(extra_layers):
        return False
    first, _, rest = name.removeprefix("layers.").partition(".")
    layer = int(first) if name.startswith("layers.") and first.isdecimal() and rest else -1
    return config.num_layers <= layer < config.num_layers + extra_layers


def joined_experts(stored: Iterable[str]) -> str | None:
    """A tensor that holds all experts of a layer, as transformers has them in memory, if there is one."""
    return next((name for name in stored if not (name.partition(".experts.")[2] or "0")[0].isdecimal()), None)


def experts_from_hf(family: str, values: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """`experts`, and of a family without dense layers `intermediate_size`; {} where no layer has experts.

    Raises WorkbenchError for what is not computed here: layers with experts here and there.
    """
    match family:
        case "mixtral":
            given = {"num_local_experts": 8, "num_experts_per_tok": 2, **values}
            shape = ExpertsShape(
                need(given, "num_local_experts"),
                need(given, "num_experts_per_tok"),
                0,
                need(values, "intermediate_size"),
                0,
            )
            return {"experts": shape}
        case "qwen3_moe":
            only(values, "decoder_sparse_step", (1,), "experts in some layers only", default=1)
            only(values, "mlp_only_layers", ([], None), "experts in some layers only")
            given = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, **values}
            given["num_experts"] = given.get("num_experts", given.get("num_local_experts", 128))  # published; saved now
            shape = ExpertsShape(
                need(given, "num_experts"),
                need(given, "num_experts_per_tok"),
                0,
                need(given, "moe_intermediate_size"),
                0,
                normalize=bool(values.get("norm_topk_prob", False)),
            )
            return {"experts": shape}
        case "deepseek_v2" | "deepseek_v3":
            dense = need({"first_k_dense_replace": DENSE_LAYERS[family], **values}, "first_k_dense_replace")
            return (
                {} if isinstance(dense, int) and dense >= num_layers else {"experts": _deepseek(family, values, dense)}
            )
    return {}


def _deepseek(family: str, values: dict[str, Any], dense: Any) -> ExpertsShape:
    is_v3 = family == "deepseek_v3"
    given = {**(_V3 if is_v3 else _V2), **values}
    only(values, "moe_layer_freq", (1,), "experts in some layers only", default=1)
    groups: dict[str, Any] = {}
    if is_v3:
        only(values, "scoring_func", ("sigmoid",), "other scores of experts", default="sigmoid")
        only(values, "topk_method", ("noaux_tc",), "another choice of experts", default="noaux_tc")
        groups = {"num_groups": need(given, "n_group"), "groups_per_token": need(given, "topk_group")}
    else:
        only(values, "scoring_func", ("softmax",), "other scores of experts", default="softmax")
        # DeepSeek's code then normalizes and does not scale; transformers' scales and does not normalize
        only(values, "norm_topk_prob", (False, None), "weights of experts that sum to 1", default=False)
        only(values, "topk_method", (GREEDY, IN_GROUPS), "another choice of experts", default=GREEDY)
        if values.get("topk_method") == IN_GROUPS:
            groups = {"num_groups": need(given, "n_group"), "groups_per_token": need(given, "topk_group")}
    return ExpertsShape(
        need(given, "n_routed_experts"),
        need(given, "num_experts_per_tok"),
        need(given, "n_shared_experts"),
        need(given, "moe_intermediate_size"),
        dense,
        router_bias=is_v3,
        scoring="sigmoid" if is_v3 else "softmax",
        normalize=is_v3 and bool(values.get("norm_topk_prob", True)),
        scaling=float(need(given, "routed_scaling_factor")),
        **groups,
    )


def experts_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json about experts; of a DeepSeek without them, that every layer is dense."""
    if config.experts is None:
        return {"first_k_dense_replace": config.num_layers} if config.family in DENSE_LAYERS else {}
    e = config.experts
    match config.family:
        case "mixtral":
            return {"num_local_experts": e.num_experts, "num_experts_per_tok": e.experts_per_token}
        case "qwen3_moe":
            return {
                "num_experts": e.num_experts,
                "num_experts_per_tok": e.experts_per_token,
                "moe_intermediate_size": e.intermediate_size,
                "norm_topk_prob": e.normalize,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        case "deepseek_v2" | "deepseek_v3":
            values: dict[str, Any] = {
                "first_k_dense_replace": e.dense_layers,
                "n_routed_experts": e.num_experts,
                "num_experts_per_tok": e.experts_per_token,
                "n_shared_experts": e.shared_experts,
                "moe_intermediate_size": e.intermediate_size,
                "routed_scaling_factor": e.scaling,
                "norm_topk_prob": e.normalize,
                "scoring_func": e.scoring,
                "n_group": e.num_groups,
                "topk_group": e.groups_per_token,
            }
            in_groups = e.groups_per_token < e.num_groups
            method = (IN_GROUPS if in_groups else GREEDY) if config.family == "deepseek_v2" else "noaux_tc"
            return values | {"topk_method": method}
    return {}


def expert_modules(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Names of the feed-forward of a layer with experts: theirs -> ours."""
    e = config.experts_shape
    parts = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    mixtral = config.family == "mixtral"
    prefix = "block_sparse_moe" if mixtral else "mlp"
    of_expert = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else parts
    names: dict[str, tuple[str, ...]] = {f"{prefix}.gate": ("mlp.router",)}
    if e.router_bias:
        names[f"{prefix}.gate.e_score_correction_bias"] = ("mlp.router.selection_bias",)
    for expert in range(e.num_experts):
        for ours, theirs in of_expert.items():
            names[f"{prefix}.experts.{expert}.{theirs}"] = (f"mlp.experts.{expert}.{ours}",)
    if e.shared_experts:
        names |= {f"{prefix}.shared_experts.{theirs}": (f"mlp.shared.{ours}",) for ours, theirs in parts.items()}
    return names
