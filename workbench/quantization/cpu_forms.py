"""Quantized weights as the C++ loops multiply them (`kernels/cpu/codes.cpp`): `inference` asks here for CPUs.

    form        codes                    lie as
    CodeKernel  integers of 5 to 8 bits  bytes, in groups of 32·n inputs or whole rows
                integers of 2 to 4 bits  two a byte, in groups of 32·n

Codes of 8 and 4 bits are read where the stored weight has them; others are written out once, in 8 or 4 bits. A few rows
are one pass over the codes; more go the way that they went before, since there the arithmetic counts.

`inputs` says how the rows themselves are multiplied: "exact", as they are, or "q8", rounded to 8 bits (see
`workbench.kernels.cpu.codes`). Nothing of this module compiles a loop until a form is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from workbench.models.linear import torch_multiplies
from workbench.quantization.formats import IntegerFormat, pack, unpack
from workbench.quantization.stored import Grouped, StoredWeight

if TYPE_CHECKING:
    from workbench.kernels.cpu.codes import CodeProduct

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of activations; the loops compute in float32
# More rows are faster with the weight as numbers (measured with AVX2, without instructions for bfloat16).
MAX_ROWS, MAX_ROWS_16_BITS = 64, 48
MAX_ROWS_OF_Q8 = 256


class CodeKernel:
    """A few rows through the loops, more through `others`: another form of the same weight, whose inputs are as they
    are."""

    def __init__(self, stored: Grouped, others: Callable[[torch.Tensor], torch.Tensor], inputs: str = "exact") -> None:
        from workbench.kernels.cpu.codes import instructions

        self.stored, self.others, self.inputs = stored, others, inputs
        self._product = code_product(stored, inputs)
        self.form = f"C++ kernel for {8 if stored.format.bits > 4 else 4} bits"
        if inputs == "q8":
            self.form += ", inputs rounded to 8"
        self.instructions = instructions()
        self.weight_bytes = self._product.nbytes

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the loops read of it."""
        return self._product.tensors

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > max_rows(x.dtype, self.inputs):
            return self.others(x)
        if x.dtype == torch.float32:
            return self._product(x)
        return self._product(x.float()).to(x.dtype)


def max_rows(dtype: torch.dtype, inputs: str = "exact") -> float:
    """Rows of this type up to which the loops are the faster way; of numbers of 16 bits that the processor does not
    multiply any number."""
    if not torch_multiplies(dtype):
        return math.inf
    if inputs == "q8":
        return MAX_ROWS_OF_Q8
    return MAX_ROWS if dtype == torch.float32 else MAX_ROWS_16_BITS


def code_product(stored: Grouped, inputs: str = "exact") -> CodeProduct:
    """The weight as the loops read it. `why_not_compiled` was asked."""
    from workbench.kernels.cpu.codes import CodeProduct

    format = stored.format
    assert isinstance(format, IntegerFormat), "why_not_compiled was asked"
    codes, kind, centre, shift = _arranged(stored, format)
    scale, zero = _scales(stored)
    return CodeProduct(
        codes,
        scale,
        zero,
        kind=kind,
        inputs=stored.in_features,
        group=stored.group,
        centre=centre,
        shift=shift,
        precision=inputs,
    )


def _arranged(stored: Grouped, format: IntegerFormat) -> tuple[torch.Tensor, str, int, float]:
    """(codes as the loops read them, their kind, what they are taken less, what is added again)."""
    from workbench.kernels.cpu.codes import block_of

    centre = -format.lowest if format.symmetric else 2 ** (format.bits - 1)
    shift = 0.0 if format.symmetric else float(centre)
    if format.bits == 8:
        return stored.codes.contiguous(), "signed" if format.symmetric else "unsigned", 0, shift
    if format.bits > 4:
        codes = unpack(stored.codes, -1, format.bits).to(torch.int16) - centre
        return codes.to(torch.int8), "signed", 0, shift
    block = block_of(stored.group, nibbles=True)
    if format.bits == 4 and block == stored.group:
        return stored.codes.contiguous(), "nibbles", centre, shift
    codes = unpack(stored.codes, -1, format.bits).reshape(stored.out_features, -1, block)
    return pack(codes, -1, 4).contiguous(), "nibbles", centre, shift


def _scales(stored: Grouped) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero [out, in/group] in one type that the loops read: float16, else float32."""
    both = [one[..., 0] for one in (stored.scale, stored.zero) if one is not None]
    held = torch.float16 if all(one.dtype == torch.float16 for one in both) else torch.float32
    scale, *zero = (one.to(held).contiguous() for one in both)
    return scale, zero[0] if zero else None


def why_not_compiled(stored: StoredWeight, dtype: torch.dtype) -> str:
    """Why this weight does not go through the loops, for activations of this type; "" where it does."""
    format = getattr(stored, "format", None)
    if not isinstance(stored, Grouped) or not isinstance(format, IntegerFormat):
        return "the C++ kernels are for integer codes in groups"
    if stored.group % 32 and (format.bits <= 4 or stored.group != stored.in_features):
        rows = "" if format.bits <= 4 else ", or whole rows"
        return f"the C++ kernels take groups of a multiple of 32 inputs{rows}; these have {stored.group}"
    if dtype not in TYPES:
        return f"the C++ kernels take activations in float32 and 16 bits, not {str(dtype).removeprefix('torch.')}"
    if stored.codes.device.type != "cpu":
        return f"the C++ kernels are for CPUs, the weight is on {stored.codes.device}"
    from workbench.kernels.cpu import codes

    return codes.why_not_here()
