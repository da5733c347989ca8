"""Claims about quantization (lab 05)."""

from __future__ import annotations

import functools

import torch

from workbench.instruments.costs import weights_read
from workbench.models.shapes import public_shape
from workbench.quantization.kquant_bytes import LAYOUTS, SUPER_BLOCK
from workbench.quantization.toy import Toy
from workbench.reading.claim import Claim

LLAMA_CPP = "llama.cpp, descriptions of its k-quants"
EXAMPLE = "a worked example of outliers, often repeated"
PERPLEXITIES = {"fp16": 5.47, "RTN": 5.73, "GPTQ": 5.69, "AWQ": 5.60}  # Llama 2 7B, 4 bits in groups of 128
FP16, FP8 = torch.float16, torch.float8_e4m3fn


def bits_with_scale(bits: float, block: int, scale_bits: float) -> float:
    """Bits per weight where `block` weights share a scale."""
    return bits + scale_bits / block


def int4_gain(name: str) -> float:
    """Weight bytes of a step in 16 bits over those in 4 bits, groups of 128 with scale and zero, the head in 16."""
    shape = public_shape(name)
    read, head = weights_read(shape, rows=1, logit_rows=1), shape.vocab_size * shape.hidden_size
    return 2 * read / ((read - head) * bits_with_scale(4, 128, 32) / 8 + 2 * head)


def share_of_excess(method: str) -> float:
    """What a method leaves of RTN's excess over fp16, by the published perplexities."""
    return (PERPLEXITIES[method] - PERPLEXITIES["fp16"]) / (PERPLEXITIES["RTN"] - PERPLEXITIES["fp16"])


def k_quant_bits(bits: int) -> float:
    """Bits per weight of a super-block as llama.cpp stores it."""
    return 8 * LAYOUTS[bits].nbytes / SUPER_BLOCK


def toy(way: str) -> float:
    """Inputs (100, 1), weights (0.03, 0.03), a grid of tenths: the output."""
    made = Toy(inputs=(100.0, 1.0), weights=(0.03, 0.03), step=0.1)
    return round(
        {"exact": made.exact, "RTN": made.rounded, "mixed": made.mixed, "AWQ": lambda: made.scaled(4)}[way](), 9
    )


def _toy(way: str, published: str, says: str) -> Claim:
    return Claim(
        f"toy-{way}", 5, says, EXAMPLE, published, "output", "x·w on a grid of 0.1", functools.partial(toy, way)
    )


def _k_quant(bits: int, published: str) -> Claim:
    return Claim(
        f"q{bits}_k",
        5,
        f"Q{bits}_K has {published} bits per weight",
        LLAMA_CPP,
        published,
        "bits",
        "bytes of a super-block of 256 weights",
        functools.partial(k_quant_bits, bits),
    )


CLAIMS = (
    Claim(
        "scales-3-percent",
        5,
        "At 4 bits scales in groups of 128 add 3 %",
        "often repeated",
        "3",
        "%",
        "16 bits / 128 weights over 4 bits",
        lambda: 100 * (bits_with_scale(4, 128, 16) / 4 - 1),
    ),
    Claim(
        "int4-gain",
        5,
        "Int4 reads 3.15 times fewer bytes at best, not 4, where the head stays in 16 bits",
        "often repeated of Llama 3 8B",
        "3.15",
        "times",
        "weights of a step, groups of 128 with scale and zero",
        lambda: {name: int4_gain(name) for name in ("llama-3-8b", "llama-3.2-1b", "llama-2-70b")},
    ),
    _toy("exact", "3.03", "Inputs (100, 1), weights (0.03, 0.03), a grid of tenths: the exact output is 3.03"),
    _toy("RTN", "0", "The same with weights rounded to nearest: 0"),
    _toy("mixed", "3.0", "The same with the first weight in full precision (LLM.int8): 3.0"),
    _toy("AWQ", "2.5", "The same with the first weight scaled by 4 (AWQ): 2.5"),
    Claim(
        "gptq-share",
        5,
        "At 4 bits in groups of 128 GPTQ leaves 0.85 of what rounding to nearest costs",
        "perplexities of Llama 2 7B in AWQ's table 4, arXiv 2306.00978",
        "0.85",
        "of RTN's excess",
        "(5.69 − 5.47) / (5.73 − 5.47)",
        functools.partial(share_of_excess, "GPTQ"),
    ),
    Claim(
        "awq-share",
        5,
        "At 4 bits in groups of 128 AWQ leaves 0.50 of what rounding to nearest costs",
        "perplexities of Llama 2 7B in AWQ's table 4, arXiv 2306.00978",
        "0.50",
        "of RTN's excess",
        "(5.60 − 5.47) / (5.73 − 5.47)",
        functools.partial(share_of_excess, "AWQ"),
    ),
    Claim(
        "double-quantization",
        5,
        "Double quantization saves 0.37 bits per parameter",
        "QLoRA, arXiv 2305.14314",
        "0.37",
        "bits",
        "32/64 − (8/64 + 32/(64·256))",
        lambda: bits_with_scale(0, 64, 32) - bits_with_scale(0, 64, bits_with_scale(8, 256, 32)),
    ),
    _k_quant(2, "2.5625"),
    _k_quant(3, "3.4375"),
    _k_quant(4, "4.5"),
    _k_quant(5, "5.5"),
    _k_quant(6, "6.5625"),
    Claim(
        "mxfp4",
        5,
        "MXFP4 has 4.25 bits per weight",
        "OCP Microscaling Formats 1.0",
        "4.25",
        "bits",
        "4 + 8/32",
        lambda: bits_with_scale(4, 32, 8),
    ),
    Claim(
        "e4m3",
        5,
        "The largest number of fp8 e4m3 is 448",
        "Micikevicius et al., arXiv 2209.05433",
        "448",
        "",
        "the type's largest finite number",
        lambda: torch.finfo(FP8).max,
    ),
    Claim(
        "fp16",
        5,
        "The largest number of float16 is 65,504",
        "IEEE 754",
        "65,504",
        "",
        "the type's largest finite number",
        lambda: torch.finfo(FP16).max,
    ),
)
