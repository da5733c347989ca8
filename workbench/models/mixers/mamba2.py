"""Mamba-2: one decay a head, so that the scan is a few matrix products (state-space duality, SSD).

Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060). Of each head, with Δ = softplus(dt + dt_bias), A = −exp(A_log):

    S_t = exp(Δ_t A) S_{t−1} + Δ_t B_t x_tᵀ        [N, D]
    y_t = C_tᵀ S_t + skip · x_t

which is linear attention with q = C, k = Δ B, v = x and a decay a_t = exp(Δ_t A). Three equal forms, of any q, k, v, a:

    recurrent   the lines above, O(T·N·D), T steps one after the other
    quadratic   y = (L ∘ q kᵀ) v with L[t, s] = a_{s+1} ··· a_t: attention's own order, O(T²) (equation 16)
    chunked     quadratic within chunks, all at once; recurrent from chunk to chunk (section 6, listing 1)

Around it: one projection for the gate z, x, B, C and dt; a short convolution with silu over x, B and C; a norm over
each group's channels of y · silu(z); a projection back. Heads of a group share B and C. Sizes: E, N, H, G, W,
chunk_size; D = E / H.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from workbench.models.config import ModelConfig
from workbench.models.mixers.contract import SequenceMixer, State, in_full_precision, wide
from workbench.models.mixers.short_conv import ShortConv, conv_initial_value

Scanned = tuple[torch.Tensor, torch.Tensor]  # y [B, T, H, D] and the state after it [B, H, N, D]


def recurrent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_a: torch.Tensor, s: torch.Tensor) -> Scanned:
    """q, k [B, T, H, N], v [B, T, H, D], log_a [B, T, H] ≤ 0, s [B, H, N, D]; one token after the other."""
    outputs = []
    for t in range(q.shape[1]):
        s = s * log_a[:, t].exp()[:, :, None, None] + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhn,bhnd->bhd", q[:, t], s))
    return torch.stack(outputs, dim=1), s


def quadratic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_a: torch.Tensor, s: torch.Tensor) -> Scanned:
    """The same from all pairs of tokens at once."""
    since = log_a.cumsum(1)  # log of the decay from the start to each token
    y, added = _within(q, k, v, since)
    y = y + torch.einsum("bthn,bhnd,bth->bthd", q, s, since.exp())
    return y, s * since[:, -1].exp()[:, :, None, None] + added


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_a: torch.Tensor, s: torch.Tensor, chunk_size: int
) -> Scanned:
    """All pairs within chunks of `chunk_size` tokens, and a state from chunk to chunk; what is left over comes last."""
    whole = q.shape[1] // chunk_size * chunk_size
    outputs = []
    if whole:
        parts = [x[:, :whole].unflatten(1, (-1, chunk_size)).flatten(0, 1) for x in (q, k, v, log_a)]
        since = parts[3].cumsum(1)
        within = _within(parts[0], parts[1], parts[2], since)
        y, added = (x.unflatten(0, (len(q), -1)) for x in within)  # [B, chunks, …]
        decay = since[:, -1].exp().unflatten(0, (len(q), -1))[..., None, None]
        before = []
        for c in range(added.shape[1]):
            before.append(s)
            s = s * decay[:, c] + added[:, c]
        start = torch.stack(before, dim=1).flatten(0, 1)
        y = y.flatten(0, 1) + torch.einsum("bthn,bhnd->bthd", parts[0] * since.exp()[..., None], start)
        outputs.append(y.unflatten(0, (len(q), -1)).flatten(1, 2))
    if whole < q.shape[1]:
        y, s = quadratic(q[:, whole:], k[:, whole:], v[:, whole:], log_a[:, whole:], s)
        outputs.append(y)
    return torch.cat(outputs, dim=1), s


def _within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, since: torch.Tensor) -> Scanned:
    """What tokens give each other, and what they add to the state at their end."""
    between = pairwise_decay(since)
    scores = torch.einsum("bthn,bshn->bhts", q, k) * between
    y = torch.einsum("bhts,bshd->bthd", scores, v)
    to_end = (since[:, -1:] - since).exp()
    return y, torch.einsum("bthn,bthd->bhnd", k * to_end[..., None], v)


def pairwise_decay(since: torch.Tensor) -> torch.Tensor:
    """L [B, H, T, T] of cumulated logarithms [B, T, H]: from s to t where s ≤ t, else 0."""
    since = since.transpose(1, 2)
    between = since[..., :, None] - since[..., None, :]
    past = torch.ones(between.shape[-2:], dtype=torch.bool, device=since.device).tril()
    return between.masked_fill(~past, -torch.inf).exp()


class GroupedGatedNorm(nn.Module):
    """rms norm of y · silu(z) over the channels of each group."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps = groups, eps

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        gated = (y * F.silu(wide(z))).unflatten(-1, (self.groups, -1))
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return wide(self.weight) * normed.flatten(-2)


class Mamba2(SequenceMixer):
    """Mamba-2's mixer, with transformers' order of channels."""

    kind = "mamba2"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        s, d = self.shape, config.hidden_size
        self.conv_channels = s.inner_size + 2 * s.num_groups * s.state_size
        self.proj = nn.Linear(d, s.inner_size + self.conv_channels + s.num_heads, bias=s.bias)
        self.conv = ShortConv(self.conv_channels, s.conv_width, bias=s.conv_bias)
        self.dt_bias = nn.Parameter(torch.ones(s.num_heads))
        self.a_log = nn.Parameter(torch.arange(1, s.num_heads + 1).float().log())
        self.skip = nn.Parameter(torch.ones(s.num_heads))
        self.norm = GroupedGatedNorm(s.inner_size, s.num_groups, config.norm_eps)
        self.out = nn.Linear(s.inner_size, d, bias=s.bias)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        if name == "a_log":  # decays of 1 to 16 a unit of time
            return (1 + 15 * torch.rand(shape, generator=generator, device=generator.device)).log()
        if name == "dt_bias":
            return step_bias(shape, generator)
        return conv_initial_value(name, shape, generator)

    def mix(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        s = self.shape
        z, channels, dt = self.proj(x).split((s.inner_size, self.conv_channels, s.num_heads), dim=-1)
        with in_full_precision(x):
            convolved, conv = self.conv(channels, states["conv"])
            keys = s.num_groups * s.state_size
            v, b, c = F.silu(convolved).split((s.inner_size, keys, keys), dim=-1)
            v = v.unflatten(-1, (s.num_heads, s.head_dim))
            b, c = (
                t.unflatten(-1, (s.num_groups, s.state_size)).repeat_interleave(s.num_heads // s.num_groups, dim=2)
                for t in (b, c)
            )
            step = F.softplus(wide(dt) + wide(self.dt_bias))  # [B, T, H]
            log_a = -step * wide(self.a_log).exp()
            k = b * step[..., None]
            if x.shape[1] == 1:
                y, ssm = recurrent(c, k, v, log_a, states["ssm"])
            else:
                y, ssm = chunked(c, k, v, log_a, states["ssm"], s.chunk_size)
            y = y + wide(self.skip)[:, None] * v
            y = self.norm(y.flatten(-2), z)
        return self.out(y.to(x.dtype)), {"conv": conv, "ssm": ssm}


def step_bias(
    shape: torch.Size, generator: torch.Generator, min_step: float = 1e-3, max_step: float = 0.1
) -> torch.Tensor:
    """Biases whose softplus lies between `min_step` and `max_step`, evenly on a logarithmic scale (Mamba, §3.6)."""
    share = torch.rand(shape, generator=generator, device=generator.device)
    step = (share * (math.log(max_step) - math.log(min_step)) + math.log(min_step)).exp()
    return step + torch.log(-torch.expm1(-step))
