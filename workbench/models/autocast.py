"""The precision of matrix products in training: bfloat16 where the processor multiplies it, else float32."""

from __future__ import annotations

import torch


def product_dtype(device_type: str) -> torch.dtype:
    """bfloat16 on a GPU and on a CPU with AVX512-BF16 or AMX. Other CPUs emulate it, at a fiftieth of the speed of
    float32 and below (AVX2, measured), so there it is float32."""
    if device_type != "cpu":
        return torch.bfloat16
    has = torch.cpu.get_capabilities()
    return torch.bfloat16 if has.get("avx512_bf16") or has.get("amx_bf16") or has.get("bf16") else torch.float32


def training_products(device_type: str, *, enabled: bool = True) -> torch.autocast:
    """Within it the products of float32 weights are computed in `product_dtype`; not where `enabled` is False."""
    narrow = product_dtype(device_type) is torch.bfloat16
    return torch.autocast(device_type, torch.bfloat16, enabled=enabled and narrow)


def precision_words(device_type: str) -> str:
    """For a model's card."""
    name = str(product_dtype(device_type)).removeprefix("torch.")
    return f"float32 weights, {name} matrix products; shipped in bfloat16"
