"""The two equal forms of latent attention: expand the cache, or absorb the expansion into the query.

A kv of latent attention holds one row (c, k_r) a token: the latent [kv_rank] and the rotated rotary key [rotary].
Head h has the key (K_h·c, k_r) and the value V_h·c, where K_h [content, kv_rank] and V_h [value, kv_rank]. So

    score    q·k = q_c·(K_h·c) + q_r·k_r  =  (K_hᵀ·q_c)·c + q_r·k_r          "absorbed": the key is (c, k_r) itself,
    result   Σ w·(V_h·c)                  =  V_h·(Σ w·c)                      its value the first kv_rank of it

    form       multiply-adds for n queries over S tokens, a head         reads of the cache
    expanded   S·kv_rank·(content + value) + n·S·(content + rotary + value)   S·(kv_rank + rotary), then S·H·(…) more
    absorbed   n·kv_rank·(content + value) + n·S·(2·kv_rank + rotary)         S·(kv_rank + rotary), once for all heads

The absorbed form is attention with one key-value head. It is cheaper in FLOPs while n is below
kv_rank·(content + value) / (2·kv_rank − content − value), about 171 for DeepSeek's shape: decode, not prefill.
Source: DeepSeek-V2, arXiv 2405.04434 §2.1.2 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.models.config import LatentAttentionShape


@dataclass(frozen=True)
class UpProjections:
    """The maps from latents to the keys and values of every head, and the same maps applied to queries and outputs
    instead."""

    shape: LatentAttentionShape
    k_up: torch.Tensor  # [H·content, kv_rank]
    v_up: torch.Tensor  # [H·value, kv_rank]

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latent [S, 1, kv_rank + rotary] -> k [S, H, content + rotary], v [S, H, value]."""
        shape = self.shape
        c, k_rotary = latent.split((shape.kv_rank, shape.rotary_head_dim), dim=-1)
        c = c.squeeze(1).to(self.k_up.dtype)
        content = torch.nn.functional.linear(c, self.k_up).unflatten(-1, (-1, shape.content_head_dim))
        v = torch.nn.functional.linear(c, self.v_up).unflatten(-1, (-1, shape.value_head_dim))
        k_rotary = k_rotary.to(content.dtype).expand(-1, content.shape[1], -1)
        return torch.cat((content, k_rotary), dim=-1), v

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """q [N, H, content + rotary] -> [N, H, kv_rank + rotary], to be held against the latents themselves."""
        shape = self.shape
        content, q_rotary = q.split((shape.content_head_dim, shape.rotary_head_dim), dim=-1)
        k_up = self.k_up.unflatten(0, (-1, shape.content_head_dim))  # [H, content, kv_rank]
        folded = torch.bmm(content.transpose(0, 1), k_up).transpose(0, 1)
        return torch.cat((folded, q_rotary), dim=-1)

    def restore(self, mixed: torch.Tensor) -> torch.Tensor:
        """What attention over latents gives, [N, H, kv_rank] -> [N, H, value]."""
        v_up = self.v_up.unflatten(0, (-1, self.shape.value_head_dim))  # [H, value, kv_rank]
        return torch.bmm(mixed.transpose(0, 1), v_up.transpose(1, 2)).transpose(0, 1)


def absorbing_pays(shape: LatentAttentionShape, new_tokens: int) -> bool:
    """Whether the absorbed form takes fewer FLOPs for so many new tokens of a sequence with a far longer context."""
    ups = shape.content_head_dim + shape.value_head_dim
    more_a_query = 2 * shape.kv_rank - ups  # multiply-adds for a query and a token, over the expanded form's
    return more_a_query <= 0 or new_tokens * more_a_query < shape.kv_rank * ups
