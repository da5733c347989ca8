"""RWKV-7: the delta rule with a decay for every key channel, and a rate of replacing for every one too.

Peng et al., "RWKV-7 Goose" (arXiv 2503.14456), section 4. Of each head, the state transposed (keys × values), with a
decay w_t, a removal key κ̂_t of length 1, a rate a_t in (0, 1) and a written key k̃_t (equations 16 to 18 there):

    S_t = diag(w_t) S_{t−1} − (a_t ∘ κ̂_t) (S_{t−1}ᵀ κ̂_t)ᵀ + k̃_t v_tᵀ        [D, D]
    y_t = S_tᵀ r_t

Two equal forms: `recurrent` as above, and `chunked`, where what is removed, u_t = −S_{t−1}ᵀ κ̂_t, is solved for at once
for all tokens of a chunk, as in gated_delta.py. A decay is at least exp(−exp(−1/2)) = 0.545, so that over a chunk of 64
tokens its inverse stays below 10¹⁷, and products of decays may be taken apart into factors.

Every projection reads a mixture of the token and the one before it (token shift): the state holds that token's row.
Left out of the paper's layer: the values of the first layer that later ones mix in; and the feed-forward beside it is
this package's SwiGLU, without token shift. Sizes: E, H, R (of the four small maps: decay, rate and gate), chunk_size;
D = E / H for keys and values.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from workbench.models.config import ModelConfig
from workbench.models.mixers.contract import SequenceMixer, State, in_full_precision, wide
from workbench.models.mixers.mamba2 import Scanned

LARGEST_DECAY = math.exp(-0.5)  # of −log w, so that no channel forgets all in a few tokens
NORM_EPS = 64e-5  # of the norm of each head, as in RWKV's own code


def recurrent(
    r: torch.Tensor,
    log_w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    removed: torch.Tensor,
    rate: torch.Tensor,
    s: torch.Tensor,
) -> Scanned:
    """All [B, T, H, D], log_w ≤ 0, `removed` is κ̂, s [B, H, D, D]; one token after the other."""
    outputs = []
    for t in range(r.shape[1]):
        u = -torch.einsum("bhn,bhnd->bhd", removed[:, t], s)
        s = s * log_w[:, t].exp()[..., None] + (rate[:, t] * removed[:, t])[..., None] * u[:, :, None]
        s = s + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhn,bhnd->bhd", r[:, t], s))
    return torch.stack(outputs, dim=1), s


def chunked(
    r: torch.Tensor,
    log_w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    removed: torch.Tensor,
    rate: torch.Tensor,
    s: torch.Tensor,
    chunk_size: int,
) -> Scanned:
    """The same in chunks; with W_t the decay from the start of the chunk, p = a ∘ κ̂ and n = −κ̂:

    u_t = n_tᵀ W_{t−1} S + Σ_{s<t} n_tᵀ (W_{t−1}/W_s) (p_s u_sᵀ + k_s v_sᵀ)
    y_t = r_tᵀ W_t S + Σ_{s≤t} r_tᵀ (W_t/W_s) (p_s u_sᵀ + k_s v_sᵀ)
    """
    length = r.shape[1]
    short = -length % chunk_size
    parts = (r, log_w, k, v, removed, rate * removed)
    parts = tuple(F.pad(x, (0, 0, 0, 0, 0, short)).transpose(1, 2).unflatten(2, (-1, chunk_size)) for x in parts)
    r, log_w, k, v, removed, p = parts  # [B, H, C, L, D]
    since = log_w.cumsum(3)
    n = -removed * (since - log_w).exp()  # up to the token before
    r = r * since.exp()
    k_back, p_back = k * (-since).exp(), p * (-since).exp()
    system = (n @ p_back.mT).tril(-1)
    right = torch.cat(((n @ k_back.mT).tril(-1) @ v, n), dim=-1)
    solved = torch.linalg.solve_triangular(-system, right, upper=False, unitriangular=True)
    written, reads = solved.split((v.shape[-1], n.shape[-1]), dim=-1)
    seen_p, seen_v = (r @ p_back.mT).tril(), (r @ k_back.mT).tril() @ v
    to_end = (since[..., -1:, :] - since).exp()
    k_end, p_end, decay = k * to_end, p * to_end, since[..., -1, :].exp()[..., None]
    outputs = []
    for c in range(r.shape[2]):
        u = written[:, :, c] + reads[:, :, c] @ s
        outputs.append(r[:, :, c] @ s + seen_p[:, :, c] @ u + seen_v[:, :, c])
        s = s * decay[:, :, c] + p_end[:, :, c].mT @ u + k_end[:, :, c].mT @ v[:, :, c]
    return torch.cat(outputs, dim=2).transpose(1, 2)[:, :length], s


class RWKV7(SequenceMixer):
    """RWKV-7's time mixing."""

    kind = "rwkv7"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        s, d = self.shape, config.hidden_size
        inner = s.inner_size
        self.shift = nn.Parameter(torch.full((6, d), 0.5))  # share of the token before: r, w, k, v, a, g
        self.r, self.k, self.v = (nn.Linear(d, inner, bias=False) for _ in range(3))
        self.decay_down, self.decay_up = nn.Linear(d, s.rank, bias=False), nn.Linear(s.rank, inner)
        self.rate_down, self.rate_up = nn.Linear(d, s.rank, bias=False), nn.Linear(s.rank, inner)
        self.gate_down, self.gate_up = nn.Linear(d, s.rank, bias=False), nn.Linear(s.rank, inner, bias=False)
        self.removal = nn.Parameter(torch.ones(inner))  # k to κ
        self.replacement = nn.Parameter(torch.ones(inner))  # how far the rate scales the written key
        self.bonus = nn.Parameter(torch.zeros(inner))  # of the token itself
        self.norm = nn.GroupNorm(s.num_heads, inner, eps=NORM_EPS)
        self.out = nn.Linear(inner, d, bias=False)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        device = generator.device
        if name == "shift":  # later channels look back less
            share = torch.linspace(0, 1, shape[1], device=device)
            powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2], device=device)
            return 1 - share[None, :] ** powers[:, None]
        if name == "decay_up.bias":  # from slow channels to fast ones
            return -6 + 5 * torch.linspace(0, 1, shape[0], device=device) ** 0.85
        return None

    def mix(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        s, wider = self.shape, wide(x)
        before = torch.cat((states["shift"][:, None], wider[:, :-1]), dim=1)
        mixed = (x + (before - wider).to(x.dtype) * share.to(x.dtype) for share in self.shift)
        x_r, x_w, x_k, x_v, x_a, x_g = mixed
        r, k, v = self.r(x_r), self.k(x_k), self.v(x_v)
        decay = self.decay_up(torch.tanh(self.decay_down(x_w)))
        rate = self.rate_up(self.rate_down(x_a))
        gate = self.gate_up(torch.sigmoid(self.gate_down(x_g)))
        with in_full_precision(x):
            r, k, v, decay, rate = (wide(t) for t in (r, k, v, decay, rate))
            rate = torch.sigmoid(rate)
            log_w = -LARGEST_DECAY * torch.sigmoid(decay)
            removed = k * wide(self.removal)
            k = k * (1 + (rate - 1) * wide(self.replacement))
            size = s.num_heads, s.head_dim
            values = v.unflatten(-1, size)
            y, wkv = self._scanned(
                r.unflatten(-1, size),
                log_w.unflatten(-1, size),
                k.unflatten(-1, size),
                values,
                removed.unflatten(-1, size),
                rate.unflatten(-1, size),
                states["wkv"],
            )
            weight, bias = wide(self.norm.weight), wide(self.norm.bias)
            y = F.group_norm(y.flatten(0, 1).flatten(1), s.num_heads, weight, bias, NORM_EPS).unflatten(0, x.shape[:2])
            own = (r * k * wide(self.bonus)).unflatten(-1, (s.num_heads, s.head_dim)).sum(-1, keepdim=True)
            y = (y + (own * values).flatten(-2)) * wide(gate)
        return self.out(y.to(x.dtype)), {"shift": wider[:, -1], "wkv": wkv}

    def _scanned(
        self,
        r: torch.Tensor,
        log_w: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        removed: torch.Tensor,
        rate: torch.Tensor,
        s: torch.Tensor,
    ) -> Scanned:
        removed = F.normalize(removed, dim=-1)
        if r.shape[1] == 1:
            return recurrent(r, log_w, k, v, removed, rate, s)
        return chunked(r, log_w, k, v, removed, rate, s, self.shape.chunk_size)
