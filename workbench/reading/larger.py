"""Claims about models made smaller, and models on several devices (labs 12 and 13)."""

from __future__ import annotations

import functools
from dataclasses import replace

from workbench.labs.lab12_pruning_and_distillation.cheaper import (
    BILLION,
    NEMOTRON,
    PUBLISHED_TOKENS,
    TRILLION,
    Family,
    family_ratio,
)
from workbench.models.config import ExpertsShape, ModelConfig
from workbench.models.shapes import public_shape
from workbench.parallel.costs import step_counts
from workbench.parallel.pipeline import bubble
from workbench.parallel.shard import Layout
from workbench.reading.claim import Claim

MINITRON = "Minitron, arXiv 2407.14679"
FORTY = 40 * NEMOTRON["distilled_tokens"]  # tokens from nothing, where the ratio is rounded first


def _family(child: float, tokens: float) -> Family:
    return Family(child=child * BILLION, from_nothing_tokens=tokens, children=2, **NEMOTRON)


def _flops(child: float) -> dict[str, float]:
    return {
        "from 3.8 T tokens": _family(child, PUBLISHED_TOKENS).flops_ratio(),
        "from a rounded 40 times": _family(child, FORTY).flops_ratio(),
    }


def mixtral() -> ModelConfig:
    """mistralai/Mixtral-8x7B-v0.1: Mistral 7B with 8 experts of its feed-forward, 2 for each token."""
    experts = ExpertsShape(8, 2, shared_experts=0, intermediate_size=14_336, dense_layers=0)
    return replace(public_shape("mistral-7b"), sliding_window=None, experts=experts)


def all_reduces_per_layer(ranks: int) -> float:
    """Of a decode step of Llama 3.1 8B under tensor parallelism, the one of the embedding left out."""
    shape = public_shape("llama-3.1-8b")
    counted = step_counts(Layout.checked(shape, ranks, 1), 0, [(1, 1)], element_bytes=2)["all_reduce"].calls
    return counted // shape.num_layers


def _active(config: ModelConfig) -> dict[str, float]:
    active, table = config.num_active_parameters() / 1e9, config.vocab_size * config.hidden_size / 1e9
    return {"with the embedding table": active, "without it, of which a token reads one row": active - table}


def _parameters(name: str, of: str, shape: str | None, said: str, active: str, source: str) -> tuple[Claim, Claim]:
    """Of all and of one token, in billions."""

    def config() -> ModelConfig:
        return mixtral() if shape is None else public_shape(shape)

    how = "counted from config.json"
    return (
        Claim(f"{name}-all", 13, f"{of} has {said} B parameters", source, said, "B", how,
              lambda: config().num_parameters() / 1e9),
        Claim(f"{name}-active", 13, f"A token uses {active} B of the parameters of {of}", source, active, "B", how,
              lambda: _active(config())),
    )  # fmt: skip


CLAIMS = (
    Claim(
        "minitron-tokens",
        12,
        "Pruning and distillation take up to 40 times fewer training tokens",
        MINITRON,
        "40",
        "times",
        "3.8 T / 94 B",
        _family(8, PUBLISHED_TOKENS).token_ratio,
    ),
    Claim(
        "minitron-cheaper",
        12,
        "Pruning and distillation are up to 40 times cheaper",
        "summaries of it, often repeated",
        "40",
        "times",
        "FLOPs: 6·N per token of training, 2·N per token that the teacher reads",
        lambda: {"8B": _family(8, PUBLISHED_TOKENS).flops_ratio(), "4B": _family(4, PUBLISHED_TOKENS).flops_ratio()},
    ),
    Claim(
        "minitron-8b",
        12,
        "In FLOPs, the teacher's included, it is 24.6 times for the 8B",
        "computed from it, often repeated",
        "24.6",
        "times",
        "the same",
        functools.partial(_flops, 8),
    ),
    Claim(
        "minitron-4b",
        12,
        "In FLOPs, the teacher's included, it is 17.8 times for the 4B",
        "computed from it, often repeated",
        "17.8",
        "times",
        "the same",
        functools.partial(_flops, 4),
    ),
    Claim(
        "minitron-family",
        12,
        "Training all of the family costs 1.8 times less",
        MINITRON,
        "1.8",
        "times",
        "15, 8 and 4 B on 8 T tokens each, over the parent and two that were distilled",
        lambda: family_ratio(15 * BILLION, (8 * BILLION, 4 * BILLION), 8 * TRILLION, NEMOTRON["distilled_tokens"]),
    ),
    *_parameters("mixtral", "Mixtral 8x7B", None, "47", "13", "Jiang et al., arXiv 2401.04088"),
    *_parameters("deepseek-v2", "DeepSeek-V2", "deepseek-v2", "236", "21", "arXiv 2405.04434"),
    *_parameters("deepseek-v2-lite", "DeepSeek-V2-Lite", "deepseek-v2-lite", "15.7", "2.4", "arXiv 2405.04434"),
    *_parameters("deepseek-v3", "DeepSeek-V3", "deepseek-v3", "671", "37", "arXiv 2412.19437"),
    Claim(
        "mixtral-8x7",
        13,
        "Eight experts of 7 B are 56 B parameters",
        "its name",
        "56",
        "B",
        "only the feed-forward is there eight times",
        lambda: mixtral().num_parameters() / 1e9,
    ),
    Claim(
        "mixtral-cache",
        13,
        "Experts do not change the cache: it is Mistral 7B's",
        "often repeated",
        "1",
        "times",
        "values per token",
        lambda: mixtral().kv_values_per_token() / public_shape("mistral-7b").kv_values_per_token(),
    ),
    Claim(
        "all-reduces",
        13,
        "Tensor parallelism has one all-reduce per layer",
        "introductions, often repeated",
        "1",
        "per layer",
        "counted: behind attention and behind the feed-forward",
        lambda: {f"{ranks} ranks": all_reduces_per_layer(ranks) for ranks in (2, 8)},
    ),
    Claim(
        "all-reduces-megatron",
        13,
        "Tensor parallelism has two all-reduces per layer in the forward pass",
        "Megatron-LM, arXiv 1909.08053",
        "2",
        "per layer",
        "the same count",
        lambda: all_reduces_per_layer(8),
    ),
    Claim(
        "nvlink-pcie",
        13,
        "NVLink's 900 GB/s are 14 times PCIe's 64",
        "comparisons, often repeated",
        "14",
        "times",
        "one direction of each: 450 against 64",
        lambda: 450 / 64,
    ),
    Claim(
        "pp4-idle",
        13,
        "Four stages are idle for 75 % of the time when one sequence decodes",
        "GPipe's bubble, arXiv 1811.06965, with one group",
        "75",
        "%",
        "(p − 1) / (m + p − 1)",
        lambda: 100 * bubble(4, 1),
    ),
)
