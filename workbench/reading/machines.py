"""Claims about where the time goes, and about kernels (labs 02 and 10)."""

from __future__ import annotations

import functools

from workbench.instruments.costs import prefill_costs
from workbench.instruments.device import PUBLISHED
from workbench.models.shapes import public_shape
from workbench.reading.claim import Claim

A_ROOFLINE = "often stated of the card, from its data sheet"
OF_ATTENTION = "often stated of attention"
TOY = "a worked example, often repeated"


def ridge(card: str) -> float:
    """FLOPs that the card does while one byte arrives, in 16 bits."""
    return PUBLISHED[card].flop_per_s["bfloat16"] / PUBLISHED[card].read_bytes_per_s


def attention_intensity(keys: int, queries: int) -> float:
    """FLOPs per byte of attention in 16 bits: 4·T·S·D FLOPs over queries, keys, values and results."""
    return 4 * queries * keys / (2 * (2 * queries + 2 * keys))


def feed_forward_weights(name: str) -> float:
    """Weights of the three matrices of a gated feed-forward over those of two matrices of the same width."""
    shape = public_shape(name)
    flops = prefill_costs(shape, batch=1, prompt=1, weight_bytes_per_element=2).flops_by_part["mlp"]
    return flops / (shape.num_layers * 2 * 2 * shape.hidden_size * shape.intermediate_size)


def flops_by_bytes() -> float:
    """FLOPs of a prompt of 1,000 tokens, counted operation by operation, over 2 · tokens · weight bytes."""
    shape = public_shape("llama-2-7b")
    counted = prefill_costs(shape, batch=1, prompt=1000, weight_bytes_per_element=2).flops
    return counted / (1000 * 2 * shape.num_parameters())


def _reached(name: str, says: str, source: str, published: str, reached: float, peak: float) -> Claim:
    return Claim(name, 10, says, source, published, "%", "reached / data sheet", lambda: 100 * reached / peak)


CLAIMS = (
    *(
        Claim(
            f"ridge-{card}",
            2,
            f"The ridge of an {name} is {said} FLOPs per byte",
            A_ROOFLINE,
            said,
            "FLOPs/byte",
            "FLOP/s in 16 bits / bytes per second",
            functools.partial(ridge, card),
        )
        for card, name, said in (("a100-80gb", "A100", "154"), ("h100-sxm", "H100", "295"), ("h200", "H200", "206"))
    ),
    Claim(
        "prefill-intensity",
        2,
        "In prefill attention does S/2 FLOPs per byte: 512 for 1,024 tokens",
        OF_ATTENTION,
        "512",
        "FLOPs/byte",
        "S·T / (S + T) with T = S",
        lambda: attention_intensity(1024, 1024),
    ),
    Claim(
        "decode-intensity",
        2,
        "In decode attention does less than one FLOP per byte, whatever the batch",
        OF_ATTENTION,
        "≤ 1",
        "FLOPs/byte",
        "S / (S + 1)",
        lambda: {f"{S:,} keys": attention_intensity(S, 1) for S in (1, 1000, 100_000)},
    ),
    Claim(
        "swiglu",
        2,
        "A gated feed-forward has half again as many parameters as one of two matrices",
        "Shazeer, arXiv 2002.05202, and every model that has one",
        "1.5",
        "times",
        "three matrices of d × F over two, counted from the operations of Llama 3 8B",
        functools.partial(feed_forward_weights, "llama-3-8b"),
    ),
    Claim(
        "one-by-one",
        2,
        "Weights are read in 10 ms: one by one users get 100 tokens a second",
        TOY,
        "100",
        "tokens/s",
        "1 / 10 ms",
        lambda: 1 / 0.010,
    ),
    Claim(
        "ten-together",
        2,
        "Ten users in one step of 12 ms: 833 tokens a second",
        TOY,
        "833",
        "tokens/s",
        "10 / 12 ms",
        lambda: 10 / 0.012,
    ),
    Claim(
        "flops-by-bytes",
        2,
        "A pass takes 2 · tokens · weight bytes FLOPs",
        "a listing that is often copied",
        "2",
        "FLOPs per token and weight byte",
        "counted operation by operation: 2 per token and *parameter*, which in 16 bits has two bytes",
        flops_by_bytes,
    ),
    _reached(
        "flash-attention-3",
        "740 TFLOP/s are 75 % of an H100's peak",
        "FlashAttention-3, arXiv 2407.08608",
        "75",
        740e12,
        PUBLISHED["h100-sxm"].flop_per_s["bfloat16"],
    ),
    _reached(
        "flashmla-bytes", "3,000 GB/s are 90 % of an H800's bandwidth", "FlashMLA, its README", "90", 3.0e12, 3.35e12
    ),
    _reached(
        "flashmla-flops",
        "660 TFLOP/s are 67 % of an H800's peak",
        "FlashMLA, its README",
        "67",
        660e12,
        PUBLISHED["h100-sxm"].flop_per_s["bfloat16"],
    ),
    Claim(
        "amdahl",
        10,
        "Attention is a tenth of the step: a kernel twice as fast gains 5 %",
        "Amdahl's law",
        "5",
        "%",
        "1 / (0.9 + 0.1/2) − 1",
        lambda: 100 * (1 / (0.9 + 0.1 / 2) - 1),
        about=0.06,
    ),
)
