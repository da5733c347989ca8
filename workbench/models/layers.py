"""The parts of a decoder layer that see one row at a time: norms, rotary embedding, feed-forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workbench.models.config import LinearScaling, ModelConfig, RotaryScaling, YarnScaling


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32 (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class ZeroCenteredRMSNorm(nn.Module):
    """x / rms(x) · (1 + weight), all in float32 and rounded once: Gemma's norm, whose weights lie around zero."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): three matrices (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        """width: F, where it is not the config's own."""
        super().__init__()
        d, wide, bias = config.hidden_size, width or config.intermediate_size, config.mlp_bias
        self.gate = nn.Linear(d, wide, bias=bias)
        self.up = nn.Linear(d, wide, bias=bias)
        self.down = nn.Linear(wide, d, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) · up(x)), with the tanh form of GELU: Gemma's feed-forward (arXiv 2002.05202)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class GELUMLP(nn.Module):
    """GPT-2's feed-forward: down(gelu(up(x))), with the tanh form of GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up = nn.Linear(d, wide, bias=bias)
        self.down = nn.Linear(wide, d, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def rotary_frequencies(config: ModelConfig, *, local: bool = False) -> torch.Tensor:
    """[D/2] float32 radians a position for each pair of a head's values (Su et al., arXiv 2104.09864).

    local: those of the windowed layers of a shape with `local_rope_theta`, which are never scaled.
    """
    pairs = torch.arange(0, config.rotary_head_dim, 2, dtype=torch.int64).float()
    if local:
        assert config.local_rope_theta is not None, "a shape whose windowed layers turn as the others"
        return 1.0 / (config.local_rope_theta ** (pairs / config.rotary_head_dim))
    frequency = 1.0 / (config.rope_theta ** (pairs / config.rotary_head_dim))
    match config.rope_scaling:
        case RotaryScaling() as scaling:
            return _llama3_frequencies(frequency, scaling)
        case LinearScaling() as scaling:
            return frequency / scaling.factor
        case YarnScaling() as scaling:
            return _yarn_frequencies(frequency, scaling, config.rope_theta)
    return frequency


def _llama3_frequencies(frequency: torch.Tensor, scaling: RotaryScaling) -> torch.Tensor:
    """Waves longer than the original context turn `factor` times slower, short ones stay, those between blend."""
    wavelength = 2 * math.pi / frequency
    low_wavelength = scaling.original_context_length / scaling.low_frequency_factor
    high_wavelength = scaling.original_context_length / scaling.high_frequency_factor
    blend = (scaling.original_context_length / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    slowed = frequency / scaling.factor
    blended = (1 - blend) * slowed + blend * frequency
    between = (wavelength <= low_wavelength) & (wavelength >= high_wavelength)
    return torch.where(between, blended, torch.where(wavelength > low_wavelength, slowed, frequency))


def _yarn_frequencies(frequency: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """YaRN's "NTK-by-parts" (arXiv 2309.00071 §3.2), its ramp over whole pairs as DeepSeek and transformers have it."""
    dim = 2 * len(frequency)

    def pair_of(turns: float) -> float:
        """The pair, a fraction, that turns so often over the original context."""
        return dim * math.log(scaling.original_context_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_of(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_of(scaling.beta_slow)), dim - 1)
    pair = torch.arange(len(frequency), dtype=torch.float32)
    slow = ((pair - first) / (last - first or 0.001)).clamp(0, 1)
    return frequency / scaling.factor * slow + frequency * (1 - slow)


class Rotary(nn.Module):
    """Cosines and sines of the positions in a batch, computed once a step and shared by all layers.

    The frequencies follow the model from device to device and stay float32 whatever its dtype: in bfloat16
    they are off by up to 0.2 %, which at position 1,000 is whole turns of the fast pairs.
    """

    def __init__(self, config: ModelConfig, *, local: bool = False) -> None:
        super().__init__()
        self.config, self.local = config, local
        self.register_buffer("frequencies", None, persistent=False)
        self.put_on(torch.get_default_device())

    def put_on(self, device: torch.device) -> None:
        """Compute the frequencies anew, on `device`. On the meta device they only get their shape: to compute nothing
        there torch would first import its compiler, for a second and more."""
        if device.type == "meta":
            self.frequencies = torch.empty((self.config.rotary_head_dim + 1) // 2, device=device)
        else:
            self.frequencies = rotary_frequencies(self.config, local=self.local).to(device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # every .to(...) comes through here
        self.put_on(self.frequencies.device)
        return self

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [N] -> cos, sin, each [N, 1, D/2] in `dtype`."""
        angle = positions[:, None].float() * self.frequencies[None, :]
        angle = angle[:, None, :]
        cos, sin = angle.cos(), angle.sin()
        amplitude = self.config.rotary_amplitude
        if amplitude != 1 and not self.local:
            cos, sin = cos * amplitude, sin * amplitude
        return cos.to(dtype), sin.to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its angle; Hugging Face's pairing of the two halves.

    x [N, H, D], cos and sin [N, 1, D/2] -> [N, H, D].
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
