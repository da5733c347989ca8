"""Hyena: long convolutions with implicit filters, and gates between them. It has no state of constant size.

Poli et al., "Hyena Hierarchy" (arXiv 2302.10866), definition 3.1. From a projection and a short convolution come v and
`order` gates x¹, x², …; with filters h¹, h², … as long as the context:

    z¹ = v,   zⁿ⁺¹_t = xⁿ_t · (hⁿ ∗ zⁿ + skipⁿ · zⁿ)_t,   y = out(z^{order+1})

A filter is a function of the distance: a small network with sines of (l, cos, sin), times a decaying window (§3.3), so
that its parameters do not grow with its length. Two equal forms of a convolution, s4.py's: by FFT, O(T log T), and by
the definition, O(T²).

A filter that is no sum of a few powers has no recurrence: a step needs every zⁿ so far, `context_length` rows of E
values, as many as a cache of keys and values, and its dot products with the filter (§2.1 says so of itself). So this
state is there, has a fixed size, and is no saving. Sizes: E, W, `order`, R (width of the filter's network).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from workbench.models.config import ModelConfig
from workbench.models.mixers.contract import SequenceMixer, State, in_full_precision, wide
from workbench.models.mixers.s4 import causal_convolution
from workbench.models.mixers.short_conv import ShortConv, conv_initial_value

DISTANCE_INPUTS = 5  # of a distance: itself, and cosine and sine of one and of two turns over the context
SINE_FREQUENCY = 8.0  # of the filter network's activation


class ImplicitFilter(nn.Module):
    """h [order, E, S] of the distances 0 … S − 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.state_shape is not None, "a Hyena mixer has a state shape"
        s = config.state_shape
        self.order, self.inner, self.length = s.order, s.inner_size, config.context_length
        self.first, self.second = nn.Linear(DISTANCE_INPUTS, s.rank), nn.Linear(s.rank, s.rank)
        self.last = nn.Linear(s.rank, s.order * s.inner_size, bias=False)

    def forward(self) -> torch.Tensor:
        weight = wide(self.last.weight)
        share = torch.arange(self.length, dtype=weight.dtype, device=weight.device) / self.length
        turns = 2 * math.pi * share[:, None] * torch.arange(1, 3, dtype=weight.dtype, device=weight.device)
        hidden = torch.cat((share[:, None], turns.cos(), turns.sin()), dim=1)
        for layer in (self.first, self.second):
            hidden = torch.sin(SINE_FREQUENCY * (hidden @ wide(layer.weight).T + wide(layer.bias)))
        filters = (hidden @ weight.T).T.unflatten(0, (self.order, self.inner))
        # channels forget at rates from 1 to 20 over the context
        rates = torch.linspace(1, 20, self.inner, dtype=weight.dtype, device=weight.device)
        return filters * (-rates[:, None] * share).exp()


class Hyena(SequenceMixer):
    """The Hyena operator; see the module about its state."""

    kind = "hyena"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        s, d = self.shape, config.hidden_size
        channels = (s.order + 1) * s.inner_size
        self.proj = nn.Linear(d, channels, bias=s.bias)
        self.conv = ShortConv(channels, s.conv_width, bias=s.conv_bias)
        self.filter = ImplicitFilter(config)
        self.skip = nn.Parameter(torch.ones(s.order * s.inner_size))
        self.out = nn.Linear(s.inner_size, d, bias=s.bias)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        if name.startswith("filter.") and name.endswith("weight"):  # as torch starts a Linear: within ±1/√inputs
            return (2 * torch.rand(shape, generator=generator, device=generator.device) - 1) / math.sqrt(shape[1])
        return conv_initial_value(name, shape, generator)

    def mix(self, x: torch.Tensor, states: State) -> tuple[torch.Tensor, State]:
        projected = self.proj(x)
        with in_full_precision(x):
            convolved, conv = self.conv(projected, states["conv"])
            z, *gates = convolved.chunk(self.shape.order + 1, dim=-1)
            filters, skips = self.filter(), wide(self.skip).unflatten(0, (self.shape.order, -1))
            inputs = []
            for n, gate in enumerate(gates):
                kept, z = self._convolved(z, states["inputs"][:, n], filters[n], skips[n])
                z = gate * z
                inputs.append(kept)
        return self.out(z.to(x.dtype)), {"conv": conv, "inputs": torch.stack(inputs, dim=1)}

    def _convolved(
        self, z: torch.Tensor, before: torch.Tensor, kernel: torch.Tensor, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last S inputs after z, and kernel ∗ z + skip · z where `before` [B, S, E] are the S inputs before it."""
        length, context = z.shape[1], self.config.context_length
        inputs = torch.cat((before, z), dim=1)
        kept = inputs[:, length:]
        if length == 1:
            y = torch.einsum("bse,es->be", kept, kernel.flip(1))[:, None]
        else:
            padded = torch.nn.functional.pad(kernel, (0, length))
            y = causal_convolution(inputs, padded)[:, context:]
        return kept, y + skip * z

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Without the empty past, which `mix` would convolve too."""
        length = x.shape[1]
        projected = self.proj(x)
        with in_full_precision(x):
            convolved, _ = self.conv(projected, self.initial_state(x, len(x))["conv"])
            z, *gates = convolved.chunk(self.shape.order + 1, dim=-1)
            skips = wide(self.skip).unflatten(0, (self.shape.order, -1))
            for gate, kernel, skip in zip(gates, self.filter()[..., :length], skips):
                z = gate * (causal_convolution(z, kernel) + skip * z)
        return self.out(z.to(x.dtype))
