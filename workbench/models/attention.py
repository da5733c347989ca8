"""Causal attention over a flat batch: the definition (eager) and the fast twin (SDPA).

Both take, for every sequence, its new queries and all its keys and values so far. Query i of a sequence
that already had `past` tokens stands at position past + i and sees the keys at positions up to its own.

Where the new tokens are a tree (`Batch.parents`), query i sees the `past` keys, the ancestors of its own token, and it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from workbench.errors import unknown
from workbench.models.batch import depths


def causal_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device | str, sinks: int = 0
) -> torch.Tensor:
    """[num_queries, num_keys] bool, True where a query may look. The queries are the last of the keys.

    With a window W a query sees itself and the W − 1 tokens before it, and the first `sinks` tokens of the text
    (attention sinks, Xiao et al., arXiv 2309.17453).
    """
    query_at = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key_at = torch.arange(num_keys, device=device)[None, :]
    allowed = key_at <= query_at
    if window is not None:
        allowed &= (key_at > query_at - window) | (key_at < sinks)
    return allowed


def tree_mask(
    parents: Sequence[int], num_keys: int, window: int | None, device: torch.device | str, sinks: int = 0
) -> torch.Tensor:
    """[n, num_keys] bool, True where a token of a tree may look. The n tokens are the last of the keys.

    A token sees all keys before the tree, its ancestors and itself. A window counts positions, and so along the branch:
    the key of a token of the tree stands at num_keys − n + its depth (SpecInfer, arXiv 2305.09781 §4).
    """
    count = len(parents)
    past = num_keys - count
    allowed = np.zeros((count, num_keys), dtype=bool)
    allowed[:, :past] = True
    for token, parent in enumerate(parents):
        if parent >= 0:
            allowed[token] = allowed[parent]
        allowed[token, past + token] = True
    if window is not None:
        key_at = np.concatenate((np.arange(past), past + np.array(depths(parents))))
        allowed &= (key_at > key_at[past:, None] - window) | (key_at < sinks)
    return torch.from_numpy(allowed).to(device)


def eager_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    parents: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attention as it is defined, softmax(q·kᵀ·scale)·v, in float32. The oracle of every other attention.

    q [n, H_q, D], k [S, H_kv, D], v [S, H_kv, D_v] with n ≤ S -> [n, H_q, D_v]. parents: of n tokens that are a tree.
    """
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)  # [S, H_q, D]: one copy a query head
    v = v.repeat_interleave(group, dim=1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("nhd,shd->hns", q.to(wide), k.to(wide)) * scale
    if parents is None:
        mask = causal_mask(q.shape[0], k.shape[0], window, q.device, sinks)
    else:
        mask = tree_mask(parents, k.shape[0], window, q.device, sinks)
    scores = scores.masked_fill(~mask, -math.inf)
    return torch.einsum("hns,shd->nhd", scores.softmax(dim=-1), v.to(wide)).to(q.dtype)


def needs_mask(num_queries: int, num_keys: int, window: int | None) -> bool:
    """Whether the fused kernel needs an explicit mask: not for a single query, nor for a whole prompt."""
    return not ((window is None or window >= num_keys) and num_queries in (1, num_keys))


def fused_mask(
    num_queries: int,
    num_keys: int,
    window: int | None,
    device: torch.device | str,
    sinks: int = 0,
    parents: Sequence[int] | None = None,
) -> torch.Tensor | None:
    """The mask that the fused kernel needs, [num_queries, num_keys] bool; None where it needs none."""
    if parents is not None:
        return tree_mask(parents, num_keys, window, device, sinks)
    return (
        causal_mask(num_queries, num_keys, window, device, sinks) if needs_mask(num_queries, num_keys, window) else None
    )


def added_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of `fused_mask` as what is added to scores of this type, 0 or −∞: torch's kernel for CPUs makes it of one
    of bools in every call, so where layers share a mask it is better made once."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def sdpa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    parents: Sequence[int] | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same through torch's fused kernel, which never writes the n × S scores to memory.

    mask: what `fused_mask` or `added_mask` gives, if it is at hand already (it is the same for all layers).
    """
    queries, keys = q.shape[0], k.shape[0]
    if mask is None:
        mask = fused_mask(queries, keys, window, q.device, sinks, parents)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # [1, H, tokens, D]
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and queries > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


AttentionFunction = Callable[..., torch.Tensor]
ATTENTION: dict[str, AttentionFunction] = {"eager": eager_attention, "sdpa": sdpa_attention}


def attention_function(name: str) -> AttentionFunction:
    if name not in ATTENTION:
        raise unknown("attention", name, ATTENTION)
    return ATTENTION[name]
