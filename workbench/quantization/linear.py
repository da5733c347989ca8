"""QuantizedLinear: stands where an nn.Linear stood, whatever its weight is stored as."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from workbench.quantization.stored import StoredWeight


class QuantizedLinear(nn.Module):
    """y = (x / divisor)·Ŵᵀ + bias; the divisor only where a method scales its inputs and could not fold that away.

    `dequantized_weight` is the matrix of the plain linear that computes the same, and so the oracle.
    """

    def __init__(
        self, stored: StoredWeight, bias: torch.Tensor | None = None, divisor: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.stored = stored
        self.in_features, self.out_features = stored.in_features, stored.out_features
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("divisor", None if divisor is None else divisor.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.divisor is not None:
            x = x / self.divisor.to(x.dtype)
        y = self.stored.multiply(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantized_weight(self) -> torch.Tensor:
        """[out, in] float32."""
        weight = self.stored.dequantize()
        return weight if self.divisor is None else weight / self.divisor.float()

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes + sum(b.nbytes for b in (self.bias, self.divisor) if b is not None)

    @property
    def weight_bytes(self) -> int:
        """What one call reads, as `models.linear.Linear` has it."""
        return self.nbytes

    def for_inference(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The same as a `models.linear.Linear`, in the fastest form this weight has here."""
        return self
