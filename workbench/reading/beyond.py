"""Claims about models without attention in every layer, and about diffusion (lab 14)."""

from __future__ import annotations

import functools

from workbench.instruments.device import PUBLISHED
from workbench.labs.lab14_beyond_transformers import cache_table
from workbench.labs.lab14_beyond_transformers.few_passes import few_passes, few_passes_by_roofline
from workbench.models.shapes import public_shape
from workbench.reading.claim import Claim

DIFFUSION = "often repeated of text diffusion on an H100"
BITS = 16


def _size(claim: cache_table.Claim) -> dict[str, float]:
    size = cache_table.by_formula(claim.model, BITS).at(claim.context)
    return {
        f"in {claim.unit} of 1,000": claim.in_unit(size, 1000),
        f"in {claim.binary_unit()}": claim.in_unit(size, 1024),
    }


def attention_layers(name: str) -> float:
    """One layer in how many attends."""
    mixers = cache_table.shape_called(name).mixers
    return len(mixers) / sum(mixer == "attention" for mixer in mixers)


def _speedup(batch: int) -> float:
    return few_passes_by_roofline(PUBLISHED["h100-sxm"], batch=batch)


CLAIMS = (
    *(
        Claim(
            f"cache-{claim.model}-{claim.context}",
            14,
            f"{claim.context:,} tokens take {claim.published} on {claim.model}",
            claim.source if claim.source.startswith(("Jamba", "hugging")) else "often repeated",
            claim.number,
            claim.unit,
            "keys and values in 16 bits, states in float32",
            functools.partial(_size, claim),
        )
        for claim in cache_table.CLAIMS
    ),
    Claim(
        "jamba-layers",
        14,
        "Jamba attends in one layer of eight",
        cache_table.JAMBA_PAPER,
        "8",
        "layers",
        "its config.json",
        functools.partial(attention_layers, cache_table.JAMBA),
    ),
    Claim(
        "few-passes-fast",
        14,
        "20 passes over 1,000 tokens are 50 times as fast as 1,000 steps",
        DIFFUSION,
        "50",
        "times",
        "roofline of an H100: a pass over 1,000 rows computes for as long as 3.4 reads take",
        lambda: {f"batch {batch}": _speedup(batch) for batch in (1, 16, 64)},
    ),
    Claim(
        "few-passes-roofline",
        14,
        "20 passes over 1,000 tokens are 14.7 times as fast as 1,000 steps at batch 1",
        DIFFUSION,
        "14.7",
        "times",
        "295 / 20; 14.7 comes of a rounded 3.4",
        functools.partial(_speedup, 1),
    ),
    Claim(
        "few-passes-flops",
        14,
        "20 passes over 1,000 tokens take 20 times the FLOPs of 1,000 steps",
        DIFFUSION,
        "20",
        "times",
        "operations of both, for Llama 3.1 8B",
        lambda: few_passes(public_shape("llama-3.1-8b"), PUBLISHED["h100-sxm"]).flops_ratio,
    ),
)
