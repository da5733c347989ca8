"""QuantizedLinear: stands where an nn.Linear stood, whatever its weight is stored as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.quantization import cpu_forms
from workbench.quantization.inference import InferenceLinear, one_row_product_for, product_for, reason_for, stacked
from workbench.quantization.stored import Grouped, StoredWeight

if TYPE_CHECKING:
    from workbench.kernels.cpu.step import Matrix


class QuantizedLinear(nn.Module):
    """y = (x / divisor)·Ŵᵀ + bias; the divisor only where a method scales its inputs and could not fold that away.

    `dequantized_weight` is the matrix of the plain linear that computes the same, and so the oracle.
    """

    stored: StoredWeight
    bias: torch.Tensor | None
    divisor: torch.Tensor | None

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

    def for_inference(
        self, dtype: torch.dtype = torch.float32, *, one_row: bool = False, inputs: str = "exact"
    ) -> InferenceLinear:
        """The same as a `models.linear.Linear` for activations of `dtype`, in the fastest form this weight has here.

        one_row: for steps of one row in torch.compile. inputs: "exact", or "q8", rounded to 8 bits. Raises
        WorkbenchError where this weight has no form for that.
        """
        product = one_row_product_for(self.stored, dtype) if one_row else product_for(self.stored, dtype, inputs)
        if product is None:
            raise WorkbenchError(
                f"a {self.stored.kind} weight cannot be part of a compiled step: it has no form for that on "
                f"{next(self.stored.buffers()).device.type} in {str(dtype).removeprefix('torch.')}; prepare the model "
                "without compile=True"
            )
        shape = (self.out_features, self.in_features)
        reason = "" if one_row else reason_for(product, self.stored, dtype)
        return InferenceLinear(product, shape, self.bias, self.divisor, dtype, reason)

    def for_loop(self, inputs: str = "exact") -> Matrix:
        """The same for steps that are one function in C++ (`models.native_steps`). inputs: as `for_inference`. Raises
        WorkbenchError where this weight has no form for that."""
        from workbench.kernels.cpu.step import Matrix

        reason = cpu_forms.why_not_compiled(self.stored, torch.float32)
        if reason or not isinstance(self.stored, Grouped):
            raise WorkbenchError(f"a {self.stored.kind} weight has no form for steps as one function in C++: {reason}")
        return Matrix(cpu_forms.code_product(self.stored, inputs), self.bias, self.divisor)

    def joined_with(self, *others: nn.Module) -> QuantizedLinear | None:
        """One linear with the concatenated outputs of all; None where their layouts differ."""
        every: list[Any] = [self, *others]
        if not all(isinstance(one, QuantizedLinear) and _same(one.divisor, self.divisor) for one in every):
            return None
        biased = [one.bias is not None for one in every]
        stored = stacked([one.stored for one in every]) if len(set(biased)) == 1 else None
        if stored is None:
            return None
        bias = torch.cat([one.bias for one in every]) if biased[0] else None
        return QuantizedLinear(stored, bias, self.divisor)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
