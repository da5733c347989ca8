"""Which attention a paged cache has: over gathered keys, or where they lie, by a C++ loop or by Triton kernels.

"eager", "sdpa"   gathered, then torch                            everywhere: the oracle, and the plain way
"blocks"          the loop of `workbench.kv.paged_blocks`         a CPU with a C++ compiler
"triton"          the kernels of `workbench.kv.paged_triton`      a CUDA device, or Triton's interpreter
"auto"            the last of these that runs here, and else "sdpa"; why not another, in words
"""

from __future__ import annotations

import torch

from workbench.errors import WorkbenchError, unknown
from workbench.kv import paged_triton
from workbench.kv.paged_blocks import BlockLoop, why_not_blocks
from workbench.kv.paged_store import KeysAndValues, Latents, Store
from workbench.models.attention import ATTENTION
from workbench.models.config import ModelConfig

CHOICES = (*ATTENTION, "blocks", "triton", "auto")


def choose_attention(
    name: str,
    config: ModelConfig,
    store_kind: type[Store],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    format: str | None,
) -> tuple[str, str]:
    """(one of CHOICES but "auto", why). dtype: as stored. Raises WorkbenchError for what cannot be here."""
    if name not in CHOICES:
        raise unknown("attention", name, CHOICES)
    if name in ATTENTION:
        return name, "as asked"
    device = torch.device(device)
    chosen = name if name != "auto" else "triton" if device.type == "cuda" else "blocks"
    if chosen == "triton":
        reason = paged_triton.why_not(
            config, store_kind, block_size=block_size, dtype=dtype, device=device, format=format
        )
    else:
        reason = why_not_blocks(config, store_kind, dtype=dtype, device=device, format=format)
    if reason and name == "auto":
        return "sdpa", reason
    if reason:
        raise WorkbenchError(
            f"kv 'paged' cannot attend with attention={name!r} here: {reason}. Take attention='sdpa', or 'auto' for"
            " what runs here"
        )
    if chosen == "blocks":
        return chosen, "as asked" if name == chosen else "a CPU, where the loop over blocks gathers nothing"
    reason = "as asked" if name == "triton" else "a CUDA device that runs the kernels"
    if store_kind is not KeysAndValues:
        kept = "latents" if store_kind is Latents else format
        reason += f"; single tokens through the kernel for {kept}, several new tokens of a text are gathered"
    return chosen, reason


def attends_in_place(
    name: str, config: ModelConfig, *, block_size: int, format: str | None, device: torch.device | str
) -> paged_triton.Kernels | BlockLoop | None:
    """What attends where keys and values lie; None where they are gathered. name: as `choose_attention` gave it."""
    if name == "triton":
        return paged_triton.Kernels(config, block_size, format, device)
    return BlockLoop(config, block_size) if name == "blocks" else None
