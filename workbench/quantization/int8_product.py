"""Both sides in int8: the product of a layer in whole numbers.

    y = (scale_x · q_x) · (scale_w · q_w)ᵀ  =  (scale_x ⊗ scale_w) · (q_x · q_wᵀ)

q are codes from −127 to 127. scale_w is one an output, fixed; scale_x is one a token, taken when the token comes, so no
calibration is needed. Sums stay exact: at most 127² · in in an int32. What this gains is arithmetic (8-bit products) on
top of bytes; what it costs is that the inputs are rounded too, to the 255 steps that the largest of a token sets. One
channel far larger than the others takes them all: see `outliers`, and the remedies in `llm_int8` and `smoothquant`.
"""

from __future__ import annotations

import functools
import platform

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, check_settings
from workbench.quantization.calibration import Inputs
from workbench.quantization.formats import IntegerFormat, quantize_tensor
from workbench.quantization.methods import Method, method
from workbench.quantization.stored import StoredWeight, check_finite, expect, register, take

INT8 = IntegerFormat(8, symmetric=True)
WIDEST = (2**31 - 1) // INT8.highest**2  # inputs whose products surely fit an int32: 133,143
EXACT_IN_FLOAT32 = 2**24 // INT8.highest**2  # … and the 24 bits of a float32: 1,040


@register
class Int8Product(StoredWeight):
    """codes [out, in] int8 and a scale for each output [out, 1] float16; `multiply` rounds its inputs too.

    `dequantize` gives the weight; `multiply` is not the exact product with it, because it rounds x as well.
    """

    kind = "int8_product"

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(*codes.shape)
        if self.in_features > WIDEST:
            raise WorkbenchError(
                f"an int8 product of more than {WIDEST:,} inputs may not fit 32 bits, got {self.in_features:,}"
            )
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> Int8Product:
        """weight [out, in] rounded to the nearest. Raises WorkbenchError for one that is not finite."""
        return cls(*rounded_weight(weight))

    def dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        return self.codes[start:end].float() * self.scale[start:end].float()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return int8_product(x.float(), self.codes, self.scale).to(x.dtype)

    def settings(self) -> dict[str, int | str | bool | None]:
        return {}

    @classmethod
    def from_parts(cls, tensors: dict[str, torch.Tensor], settings: dict) -> Int8Product:
        check_settings(f"an {cls.kind} weight", settings, ())
        return cls(*taken_codes(take(tensors, cls.kind, ("codes", "scale"))))


def rounded_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [out, in] -> (codes [out, in] int8, scale [out, 1] float16)."""
    check_finite(weight)
    q = quantize_tensor(weight.detach().float(), INT8, over=1)
    check_finite(q.scale, "the scale of an output (its weights are beyond what float16 can scale), which")
    return q.codes, q.scale


def taken_codes(codes_and_scale: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale, checked for type and shape. Raises WorkbenchError."""
    codes, scale = codes_and_scale
    expect(codes, "codes", (None, None), (torch.int8,))
    expect(scale, "scale", (codes.shape[0], 1), (torch.float16,))
    check_finite(scale, "scale of an int8 weight")
    return codes, scale


def rounded_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, in] float32 -> (codes [N, in] int8, scale [N, 1] float32), a scale for each token.

    A token with NaN or an infinity gets a scale that is not finite, so none of its results is finite.
    """
    scale = x.abs().amax(1, keepdim=True) / INT8.highest
    return (x / scale.where(scale > 0, 1)).round().to(torch.int8), scale


def int8_product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [N, in] float32, rounded token by token, times the codes [out, in] with their scale [out, 1] -> [N, out]
    float32."""
    q, token_scale = rounded_tokens(x)
    return integer_product(q, codes).float() * token_scale * scale.float().T


def integer_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [N, in] int8 · b [out, in]ᵀ int8 -> [N, out] int32, every sum exact; codes from −127 to 127.

    torch._int_mm where it is exact and computed by instructions for it. On a GPU it takes at least 17 rows and
    multiples of 8: zeros fill up to there. On a CPU it leaves its result as it found it where a dimension of size 1 has
    a stride it does not expect (pytorch issue 195066), so rows get the usual strides, and a single column goes another
    way.
    """
    if a.is_cuda:
        return _on_gpu(a, b)
    if multiplies_whole_numbers() and int_mm_is_exact() and a.shape[1] > 1:
        return torch._int_mm(a.reshape(-1).view(a.shape), b.reshape(-1).view(b.shape).T)
    return _in_float32(a, b)


@functools.cache
def multiplies_whole_numbers() -> bool:
    """Whether this processor has instructions for products of 8-bit numbers.

    On x86 without VNNI torch._int_mm adds product after product: with AVX2 that takes twice (one row) to 25 times (512
    rows of 320) as long as the same sums in float32.
    """
    return platform.machine().lower() not in ("x86_64", "amd64") or torch.cpu._is_vnni_supported()


@functools.cache
def int_mm_is_exact() -> bool:
    """Whether torch._int_mm is exact on this processor.

    On x86 without VNNI instructions oneDNN, which computes it, adds pairs of products in 16 bits and cuts off what does
    not fit (pytorch issue 136746): 64 products of 127 · 127 come out as 8,160.
    """
    shapes = ((1, 64, 16), (3, 64, 5), (32, 256, 64))
    for rows, wide, out in shapes:
        for sign in (1, -1):
            a = torch.full((rows, wide), sign * INT8.highest, dtype=torch.int8)
            b = torch.full((out, wide), INT8.highest, dtype=torch.int8)
            if bool((torch._int_mm(a, b.T) != sign * INT8.highest**2 * wide).any()):
                return False
    return True


def _in_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whole numbers below 2²⁴ are exact in float32, whatever the order of addition: so many columns at a time."""
    total = torch.zeros(len(a), len(b), dtype=torch.int32, device=a.device)
    for x, w in zip(a.split(EXACT_IN_FLOAT32, 1), b.split(EXACT_IN_FLOAT32, 1)):
        total += F.linear(x.float(), w.float()).to(torch.int32)
    return total


def _on_gpu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows, wide, out = len(a), a.shape[1], len(b)
    a = F.pad(a, (0, -wide % 8, 0, max(0, 17 - rows)))
    b = F.pad(b, (0, -wide % 8, 0, -out % 8))
    return torch._int_mm(a, b.T)[:rows, :out]


@method("int8", "weights and inputs rounded to 8 bits, products in whole numbers; no remedy for outliers")
class Int8(Method):
    """Per-output weight scales, per-token input scales: the baseline that outliers break."""

    def store(self, weight: torch.Tensor, inputs: Inputs | None) -> Int8Product:
        return Int8Product.rounded(weight)
