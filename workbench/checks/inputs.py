"""Inputs of cases that probes and judges make alike, each in its own process: tensors and small random models."""

from __future__ import annotations

import random

import torch

from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder


def random_model(config: dict, seed: int) -> Decoder:
    """A small decoder with random weights, the same for the same seed in every process."""
    model = Decoder(ModelConfig.from_dict(config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + is_norm)
    return model.eval().requires_grad_(False)


def drawn(seed: int, name: str, *sizes: int) -> torch.Tensor:
    """A tensor of normal draws, float32, the same for the same seed, name and sizes in every process."""
    generator = torch.Generator().manual_seed(random.Random(f"{seed}/{name}").randrange(2**31))
    return torch.randn(sizes, generator=generator)
