"""Claims about batches, servers, and models in host memory (labs 08 and 11)."""

from __future__ import annotations

import math
from dataclasses import replace

from workbench.instruments.costs import kv_bytes
from workbench.models.config import ModelConfig
from workbench.models.shapes import public_shape
from workbench.offload.cost_model import OPT
from workbench.reading.claim import Claim
from workbench.serving.bounds import static_batches
from workbench.serving.load import workload

FLEXGEN = "FlexGen, arXiv 2303.06865"
DISTSERVE = "DistServe, arXiv 2401.09670"
GiB = 2**30


def padding(lengths: str, group: int) -> float:
    """Percent of the rows after the prompts that are padding, in groups of that size in order of arrival."""
    drawn = workload(lengths).draw(1024, seed=0)
    return 100 * static_batches(drawn, group, order="arrival").decode_padding_share


def runs_without_a_violation(percentile: float, confidence: float) -> int:
    """Queries that must all be in time before so many percent are known to be, at that confidence."""
    return math.ceil(math.log(1 - confidence) / math.log(percentile))


def opt_66b() -> ModelConfig:
    """As far as its cache goes: 64 layers of width 9,216."""
    return replace(
        public_shape("llama-2-13b"), num_layers=64, hidden_size=9216, num_heads=72, num_kv_heads=72, head_dim=128
    )


def _in_two_units(size: float, digits: int = 9) -> dict[str, float]:
    return {"in units of 1,000": size / 10**digits, "of 1,024": size / 2 ** (digits * 10 // 3)}


def opt_175b_weights() -> float:
    """Bytes in 16 bits: layers, embedding of 50,272 tokens, 2,050 positions."""
    shape = OPT["opt-175b"]
    return shape.layers * shape.layer_bytes + 2 * shape.hidden_size * (50_272 + 2_050)


def opt_175b_cache(batch: int = 512, tokens: int = 512 + 32) -> float:
    """Bytes of keys and values in 16 bits."""
    shape = OPT["opt-175b"]
    return 4.0 * batch * shape.layers * shape.hidden_size * tokens


CLAIMS = (
    Claim(
        "padding",
        8,
        "Static batches waste 30 to 70 % of their rows",
        "often repeated",
        "30 to 70",
        "%",
        "rows after the prompts, of the lengths of two public traces (Azure 2023) and two of ours, in groups",
        lambda: {
            f"{name}, groups of {group}": padding(name, group)
            for name in ("uniform", "conversation", "code")
            for group in (4, 16, 64)
        },
    ),
    Claim(
        "mlperf-459",
        11,
        "459 queries without a violation show that 99 % are in time, at 99 % confidence",
        "MLPerf, its early stopping",
        "459",
        "queries",
        "ln 0.01 / ln 0.99, rounded up",
        lambda: runs_without_a_violation(0.99, 0.99),
    ),
    Claim(
        "opt-66b-transfer",
        11,
        "The cache of 512 tokens of OPT-66B takes 1.13 GB",
        DISTSERVE,
        "1.13",
        "GB",
        "2·L·d·S·2 bytes",
        lambda: _in_two_units(kv_bytes(opt_66b(), 512)),
    ),
    Claim(
        "opt-66b-link",
        11,
        "10 requests of 512 tokens per second need a link of 90 Gb/s with OPT-66B",
        DISTSERVE,
        "90",
        "Gb/s",
        "10 · 8 · the same",
        lambda: {k: 80 * v for k, v in _in_two_units(kv_bytes(opt_66b(), 512)).items()},
    ),
    Claim(
        "opt-175b-weights",
        11,
        "The weights of OPT-175B take 325 GB in 16 bits",
        FLEXGEN,
        "325",
        "GB",
        "counted by matrix, with embeddings",
        lambda: _in_two_units(opt_175b_weights()),
    ),
    Claim(
        "opt-175b-cache",
        11,
        "The cache of 512 sequences of 512 + 32 tokens of OPT-175B takes 1.2 TB",
        FLEXGEN,
        "1.2",
        "TB",
        "4·L·d·B·S bytes",
        lambda: {"in TB of 10¹²": opt_175b_cache() / 1e12, "in TiB": opt_175b_cache() / 2**40},
    ),
    Claim(
        "opt-175b-ratio",
        11,
        "The cache of 512 sequences of 512 + 32 tokens of OPT-175B is 3.8 times its weights",
        FLEXGEN,
        "3.8",
        "times",
        "cache / weights",
        lambda: opt_175b_cache() / opt_175b_weights(),
    ),
)
