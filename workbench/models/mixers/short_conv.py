"""The short convolution before a scan: each channel sees its last W inputs. Its state is the last W − 1 of them."""

from __future__ import annotations

import math

import torch
from torch import nn

from workbench.models.mixers.contract import wide


class ShortConv(nn.Module):
    """y[t, c] = Σ_w weight[c, w] · x[t − W + 1 + w, c] (+ bias[c]); nothing stands before the first token.

    W products a channel and token. The weight is [C, 1, W], as torch's Conv1d of C groups keeps it.
    """

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-1, 1) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, T, C] and the W − 1 inputs before it [B, W − 1, C] -> y [B, T, C] and the last W − 1 inputs."""
        width = self.weight.shape[2]
        inputs = torch.cat((before, wide(x)), dim=1)
        weight = wide(self.weight)
        y = sum(inputs[:, w : w + x.shape[1]] * weight[:, 0, w] for w in range(width))
        assert isinstance(y, torch.Tensor), "a width of at least 1"
        if self.bias is not None:
            y = y + self.bias
        return y, inputs[:, x.shape[1] :]


def conv_initial_value(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
    """torch's own start for a convolution of W inputs: uniform within ±1/√W."""
    if not name.endswith("conv.weight"):
        return None
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    return (2 * uniform - 1) / math.sqrt(shape[-1])
