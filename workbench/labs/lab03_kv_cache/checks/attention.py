"""Lab 03: attention as it is defined, which the judges of caches compare with."""

from __future__ import annotations

import torch


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(q·kᵀ·scale)·v in float64, causal, the n queries at the last of the S positions; [n, H_q, D_v]."""
    q, k, v = q.double(), k.double(), v.double()
    (n, heads, _), (tokens, kv_heads, _) = q.shape, k.shape
    which = torch.arange(heads) // (heads // kv_heads)
    later = torch.ones(n, tokens, dtype=torch.bool).triu(tokens - n + 1)
    scores = torch.einsum("nhd,shd->hns", q, k[:, which]) * scale
    return torch.einsum("hns,shd->nhd", scores.masked_fill(later, -torch.inf).softmax(dim=-1), v[:, which])
