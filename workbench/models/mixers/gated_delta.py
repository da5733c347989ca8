"""Gated DeltaNet: a matrix of associations in which a key's old value is replaced, and all of which fades.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). Of each head, with a decay α_t in (0, 1] and a
rate of writing β_t in (0, 1), keys and queries of length 1 (equation 10 there, the state transposed):

    S_t = α_t S_{t−1} + k_t (β_t (v_t − (α_t S_{t−1})ᵀ k_t))ᵀ        [N, D]
    y_t = S_tᵀ q_t

Linear attention adds v to whatever stands under k; the delta rule (Schlag et al., arXiv 2102.11174) first reads what
stands there and writes the difference, one step of gradient descent on |Sᵀk − v|². Two equal forms:

    recurrent   the lines above, T steps one after the other
    chunked     the written differences u of a chunk depend on each other through a triangular matrix of kᵀk, and are
                solved for at once (the WY form, section 3.3; Yang et al., arXiv 2406.06484)

Around it: q, k, v by one projection and a short convolution with silu; log α = −exp(a_log) · softplus(a + dt_bias);
β = sigmoid(b); a norm of each head's y, gated by silu(z); a projection back. `num_groups` key heads serve `num_heads`
value heads. Sizes: E, N (of a key), H, G, W, chunk_size; D = E / H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from workbench.models.config import ModelConfig
from workbench.models.mixers.contract import SequenceMixer, State, in_full_precision, wide
from workbench.models.mixers.mamba2 import Scanned, pairwise_decay, step_bias
from workbench.models.mixers.short_conv import ShortConv, conv_initial_value


def recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_a: torch.Tensor, beta: torch.Tensor, s: torch.Tensor
) -> Scanned:
    """q, k [B, T, H, N], v [B, T, H, D], log_a and beta [B, T, H], s [B, H, N, D]; one token after the other."""
    outputs = []
    for t in range(q.shape[1]):
        s = s * log_a[:, t].exp()[:, :, None, None]
        held = torch.einsum("bhn,bhnd->bhd", k[:, t], s)
        written = beta[:, t, :, None] * (v[:, t] - held)
        s = s + k[:, t, :, :, None] * written[:, :, None]
        outputs.append(torch.einsum("bhn,bhnd->bhd", q[:, t], s))
    return torch.stack(outputs, dim=1), s


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_a: torch.Tensor,
    beta: torch.Tensor,
    s: torch.Tensor,
    chunk_size: int,
) -> Scanned:
    """Chunks of `chunk_size` tokens: solved for all at once, then one after the other from the state before."""
    length = q.shape[1]
    short = -length % chunk_size  # filled with tokens that write nothing and let nothing fade
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, short)).transpose(1, 2) for x in (q, k, v))  # [B, H, T, …]
    log_a, beta = (F.pad(x, (0, 0, 0, short)).transpose(1, 2) for x in (log_a, beta))
    q, k, v, log_a, beta = (x.unflatten(2, (-1, chunk_size)) for x in (q, k, v, log_a, beta))  # [B, H, C, L, …]
    since = log_a.cumsum(3)  # log of the decay from the start of the chunk to each token
    between = pairwise_decay(since.flatten(0, 2)[..., None])[:, 0].unflatten(0, since.shape[:3])  # [B, H, C, L, L]
    # u = β(v − what stands under k) of all tokens at once: (I + tril(β kkᵀ ∘ between, −1)) u = β v − β k e^since S
    system = (beta[..., None] * (k @ k.mT) * between).tril(-1)
    right = torch.cat((v, k * since.exp()[..., None]), dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    seen = (q @ k.mT) * between
    q = q * since.exp()[..., None]
    k = k * (since[..., -1:] - since).exp()[..., None]
    decay = since[..., -1].exp()[..., None, None]
    outputs = []
    for c in range(q.shape[2]):
        u = written[:, :, c] - reads[:, :, c] @ s
        outputs.append(q[:, :, c] @ s + seen[:, :, c] @ u)
        s = s * decay[:, :, c] + k[:, :, c].mT @ u
    return torch.cat(outputs, dim=2).transpose(1, 2)[:, :length], s


def unit(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x of length 1 in its last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


class HeadGatedNorm(nn.Module):
    """rms norm of each head's y, times silu(z)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return wide(self.weight) * normed * F.silu(wide(z))


class GatedDelta(SequenceMixer):
    """Gated DeltaNet as Qwen3.5 has it."""

    kind = "gated_delta"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        s, d = self.shape, config.hidden_size
        self.keys = s.num_groups * s.state_size
        channels = 2 * self.keys + s.inner_size
        self.qkv = nn.Linear(d, channels, bias=False)
        self.gate = nn.Linear(d, s.inner_size, bias=False)
        self.beta = nn.Linear(d, s.num_heads, bias=False)
        self.decay = nn.Linear(d, s.num_heads, bias=False)
        self.conv = ShortConv(channels, s.conv_width, bias=s.conv_bias)
        self.dt_bias = nn.Parameter(torch.ones(s.num_heads))
        self.a_log = nn.Parameter(torch.zeros(s.num_heads))
        self.norm = HeadGatedNorm(s.head_dim, config.norm_eps)
        self.out = nn.Linear(s.inner_size, d, bias=False)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        if name == "a_log":
            return (1 + 15 * torch.rand(shape, generator=generator, device=generator.device)).log()
        if name == "dt_bias":
            return step_bias(shape, generator)
        return conv_initial_value(name, shape, generator)

    def mix(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        s = self.shape
        projected, z, b, a = self.qkv(x), self.gate(x), self.beta(x), self.decay(x)
        with in_full_precision(x):
            convolved, conv = self.conv(projected, states["conv"])
            q, k, v = F.silu(convolved).split((self.keys, self.keys, s.inner_size), dim=-1)
            q, k = (
                unit(t.unflatten(-1, (s.num_groups, s.state_size))).repeat_interleave(s.num_heads // s.num_groups, 2)
                for t in (q, k)
            )
            q = q * s.state_size**-0.5
            v = v.unflatten(-1, (s.num_heads, s.head_dim))
            beta = torch.sigmoid(wide(b))
            log_a = -wide(self.a_log).exp() * F.softplus(wide(a) + wide(self.dt_bias))
            if x.shape[1] == 1:
                y, delta = recurrent(q, k, v, log_a, beta, states["delta"])
            else:
                y, delta = chunked(q, k, v, log_a, beta, states["delta"], s.chunk_size)
            y = self.norm(y, z.unflatten(-1, (s.num_heads, s.head_dim)))
        return self.out(y.flatten(-2).to(x.dtype)), {"conv": conv, "delta": delta}
