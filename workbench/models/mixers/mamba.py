"""Mamba: a linear system whose step, input and output depend on the token, so that it can choose what to keep.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752), algorithm 2. Of each
of E channels u, with A = −exp(A_log) [E, N] and, read from the token, B, C [N] and Δ = softplus(R -> E) [E]:

    h_t = exp(Δ_t A) ∘ h_{t−1} + Δ_t u_t B_t        [E, N]
    y_t = h_t C_t + skip ∘ u_t

As B̄ changes from token to token there is no convolution any more; what is left is the scan, in the three orders of
scan.py. `selective` gives what it scans. Around it: a projection to u and a gate z, a short convolution with silu over
u, y · silu(z), a projection back. Jamba (arXiv 2403.19887) norms Δ's R values, B and C (`inner_norms`). Sizes: E, N,
R, W, chunk_size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from workbench.models.config import ModelConfig
from workbench.models.layers import RMSNorm
from workbench.models.mixers import scan
from workbench.models.mixers.contract import SequenceMixer, State, in_full_precision, wide
from workbench.models.mixers.mamba2 import step_bias
from workbench.models.mixers.short_conv import ShortConv, conv_initial_value


def selective(
    u: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """u, step [B, T, E], a [E, N] < 0, b [B, T, N] -> decays and inputs of the scan, both [B, T, E, N]."""
    return (step[..., None] * a).exp(), (step * u)[..., None] * b[:, :, None]


class Mamba(SequenceMixer):
    """Mamba's mixer; of `inner_norms` Jamba's."""

    kind = "mamba"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        s, d = self.shape, config.hidden_size
        self.proj = nn.Linear(d, 2 * s.inner_size, bias=s.bias)
        self.conv = ShortConv(s.inner_size, s.conv_width, bias=s.conv_bias)
        self.select = nn.Linear(s.inner_size, s.rank + 2 * s.state_size, bias=False)
        self.step_up = nn.Linear(s.rank, s.inner_size)
        if s.inner_norms:
            self.step_norm = RMSNorm(s.rank, config.norm_eps)
            self.b_norm, self.c_norm = (RMSNorm(s.state_size, config.norm_eps) for _ in range(2))
        self.a_log = nn.Parameter(torch.arange(1, s.state_size + 1).float().log().repeat(s.inner_size, 1))
        self.skip = nn.Parameter(torch.ones(s.inner_size))
        self.out = nn.Linear(s.inner_size, d, bias=s.bias)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        if name == "a_log":  # S4D-Real: decays of 1 … N in every channel
            return torch.arange(1, shape[1] + 1, device=generator.device).float().log().repeat(shape[0], 1)
        if name == "step_up.bias":
            return step_bias(shape, generator)
        return conv_initial_value(name, shape, generator)

    def mix(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        s = self.shape
        u, z = self.proj(x).chunk(2, dim=-1)
        with in_full_precision(x):
            convolved, conv = self.conv(u, states["conv"])
            u = F.silu(convolved)
        step, b, c = self.select(u.to(x.dtype)).split((s.rank, s.state_size, s.state_size), dim=-1)
        if s.inner_norms:
            step, b, c = self.step_norm(step), self.b_norm(b), self.c_norm(c)
        step = self.step_up(step)
        with in_full_precision(x):
            step, b, c = F.softplus(wide(step)), wide(b), wide(c)
            decays, inputs = selective(u, step, -wide(self.a_log).exp(), b)
            if x.shape[1] == 1:
                h = scan.sequential(decays, inputs, states["ssm"])
            else:
                h = scan.chunked(decays, inputs, states["ssm"], s.chunk_size)
            y = torch.einsum("bten,btn->bte", h, c) + wide(self.skip) * u
            y = y * F.silu(wide(z))
        return self.out(y.to(x.dtype)), {"conv": conv, "ssm": h[:, -1]}
