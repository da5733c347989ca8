"""The recurrence h_t = a_t ∘ h_{t−1} + b_t in three orders, of the same result.

    sequential   T steps, 2 operations a value: the definition
    blelloch     2·log₂ T steps of ever fewer pairs, about twice the operations: what a parallel machine can do
    chunked      the chunks side by side, each sequentially; then from chunk to chunk: L + T/L steps

Two steps in a row, (a, b) then (a', b'), are one step (a'·a, a'·b + b'): that is associative, so any tree of them gives
the same (Blelloch, "Prefix Sums and Their Applications", 1990; Mamba, arXiv 2312.00752, §3.3.2).
"""

from __future__ import annotations

import torch


def sequential(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """a, b [B, T, …], h [B, …] before the first -> [B, T, …]."""
    states = []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, dim=1)


def blelloch(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The same by a tree: neighbours are joined to pairs, the pairs scanned, and what lies between filled in."""
    b = torch.cat((b[:, :1] + a[:, :1] * h[:, None], b[:, 1:]), dim=1)
    return _from_nothing(a, b)


def _from_nothing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    length = b.shape[1]
    if length == 1:
        return b
    even = length // 2 * 2
    a_first, a_second = a[:, 0:even:2], a[:, 1:even:2]
    b_first, b_second = b[:, 0:even:2], b[:, 1:even:2]
    after_pairs = _from_nothing(a_second * a_first, a_second * b_first + b_second)  # h after tokens 1, 3, 5, …
    before = after_pairs[:, : (length - 1) // 2]
    between = a[:, 2::2] * before + b[:, 2::2]  # h after tokens 2, 4, …
    joined = torch.empty_like(b)
    joined[:, 0], joined[:, 1::2], joined[:, 2::2] = b[:, 0], after_pairs, between
    return joined


def chunked(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """The same in chunks of so many tokens; what is left over at the end comes one after the other."""
    whole = b.shape[1] // chunk_size * chunk_size
    outputs = []
    if whole:
        a_parts, b_parts = (x[:, :whole].unflatten(1, (-1, chunk_size)) for x in (a, b))  # [B, C, L, …]
        within, decay = [b_parts[:, :, 0]], [a_parts[:, :, 0]]
        for t in range(1, chunk_size):
            within.append(a_parts[:, :, t] * within[-1] + b_parts[:, :, t])
            decay.append(decay[-1] * a_parts[:, :, t])
        starts = []
        for c in range(b_parts.shape[1]):
            starts.append(h)
            h = decay[-1][:, c] * h + within[-1][:, c]
        start = torch.stack(starts, dim=1)
        outputs.append(torch.stack([w + d * start for w, d in zip(within, decay)], dim=2).flatten(1, 2))
    if whole < b.shape[1]:
        outputs.append(sequential(a[:, whole:], b[:, whole:], h))
    return torch.cat(outputs, dim=1)
