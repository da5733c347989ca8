"""The Linear of inference: one small interface, behind it the ways to hold a weight matrix.

    y = linear(x)        x [N, in] -> y [N, out]

A decode step multiplies every weight with one row or a few, so its time is that of reading the weights. How they
lie in memory decides how fast they are read: `Plain` leaves them to torch's `F.linear` and is the oracle of all
others; `Packed` lets oneDNN lay them out once, in blocks that its kernels read straight through; `Looped` is our loop
in C++ for a few rows, and `TritonMatvec` our kernel for them on a CUDA device. Which of the first three is fastest
differs between processors and shapes, so `workbench.models.measured_linear` measures it. Weights in fewer bits are
further classes of this kind (`workbench.quantization.inference`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError, unknown


class Linear(Protocol):
    """x [N, in] -> [N, out], for any N. Holds its weight and bias; a call changes nothing."""

    in_features: int
    out_features: int
    weight_bytes: int  # what one call reads: weights, bias, and whatever else the format keeps
    form: str  # how the weight is held, in a few words

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


Join = Callable[..., Linear]  # of modules: one Linear with the outputs of all
INPUTS = ("exact", "q8")  # what quantized weights are multiplied with: inputs as they are, or rounded to 8 bits


class Plain:
    """The weight as it is, [out, in], through `F.linear`."""

    form = "plain"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self.weight_bytes = _bytes(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Packed:
    """The weight in oneDNN's blocked layout, made once. CPU only; float32, and bfloat16 where the CPU has it.

    The block is chosen for ROWS_HINT rows, because the kernel for that reads the same layout faster for one row
    too. A large matrix is multiplied with at least MIN_ROWS rows: the kernel keeps one accumulator a row, and
    with a single one it waits for its own sums instead of for memory (measured on one processor: a quarter faster
    beyond the cache, nothing gained in it; on another, a third slower). min_rows=1: rows stay as few as they are.
    """

    ROWS_HINT = 8
    MIN_ROWS = 4
    LARGE_BYTES = 4 << 20

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, min_rows: int = MIN_ROWS) -> None:
        reason = why_not_packed(weight.dtype, weight.device)
        if reason:
            raise WorkbenchError(f"this weight cannot be packed: {reason}; use the plain linear")
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight_bytes = _bytes(weight, bias)
        self._is_large = weight.nbytes >= self.LARGE_BYTES
        self._multiply_at_least(min_rows)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), self.ROWS_HINT)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows < self._least:
            x = x.expand(self._least, -1) if rows == 1 else F.pad(x, (0, 0, 0, self._least - rows))
            return self._multiply(x.contiguous(), self._packed, self.bias, "none", [], "")[:rows]
        return self._multiply(x, self._packed, self.bias, "none", [], "")

    @property
    def least_rows(self) -> int:
        """What fewer rows are filled up to."""
        return self._least

    def with_least(self, rows: int) -> Packed:
        """The same packed weight, a large one multiplied with at least so many rows."""
        other = copy.copy(self)
        other._multiply_at_least(rows)
        return other

    def _multiply_at_least(self, rows: int) -> None:
        self._least = rows if self._is_large else 1
        self.form = "packed, rows unpadded" if self._is_large and rows == 1 else "packed"


class Looped:
    """The weight as it is, [out, in]: a few rows through our loop in C++ (`workbench.kernels.cpu.floats`), more through
    `F.linear`. CPU. Numbers of 16 bits that torch has no instructions for go through the loop whatever the rows."""

    form = "C++ loop"
    MAX_ROWS = 96

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        reason = why_not_looped(weight.dtype, weight.device)
        if reason:
            raise WorkbenchError(f"this weight cannot go through the C++ loop: {reason}; use the plain linear")
        from workbench.kernels.cpu.floats import FloatProduct

        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight.detach().contiguous(), bias
        self.weight_bytes = _bytes(weight, bias)
        self._product = FloatProduct(self.weight, bias)
        self._max_rows = self.MAX_ROWS if torch_multiplies(weight.dtype) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        many = self._max_rows is not None and x.shape[0] > self._max_rows
        if many or x.requires_grad or torch._C._len_torch_dispatch_stack():  # who records operations knows that one
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)
        return self._product(x) if x.dtype is torch.float32 else self._product(x.float()).to(x.dtype)


class TritonMatvec:
    """The weight as it is, [out, in]: up to 32 rows through our kernel (`workbench.kernels.matvec`), more through
    `F.linear`. CUDA; on a CPU, by name only, in Triton's interpreter."""

    form = "Triton kernel"
    MAX_ROWS = 32

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        reason = why_not_triton(weight.dtype, weight.device)
        if reason:
            raise WorkbenchError(f"this weight cannot go through a Triton kernel: {reason}; use the plain linear")
        from workbench.kernels.arrivals import counters
        from workbench.kernels.matvec import matvec, norms

        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight.contiguous(), bias
        self.weight_bytes = _bytes(weight, bias)
        self._norms = norms
        self._multiply = functools.partial(matvec, arrivals=counters(weight.device))  # one product at a time

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.MAX_ROWS:
            return F.linear(x, self.weight, self.bias)
        return self._multiply(x, self.weight, self.bias)

    def norms(self, rows: int) -> bool:
        """Whether the norm of so many rows can be part of the product."""
        return rows <= self.MAX_ROWS and self._norms(rows, self.weight.dtype)

    def fused(
        self,
        x: torch.Tensor,
        *,
        activation: str | None = None,
        residual: torch.Tensor | None = None,
        norm: tuple[torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        """The product, and in its launch what stands before and after it: the RMSNorm of x (weight, eps), act(gate) ·
        up [N, out/2], or the addition to a residual [N, out], in place. x has at most MAX_ROWS rows."""
        besides: dict[str, Any] = {"activation": activation, "residual": residual, "norm": norm}
        return self._multiply(x, self.weight, self.bias, **besides)


class Matvec:
    """A few rows, each written as a sum of products. For torch.compile, which makes of it one loop over the weight, in
    which every row adds to a sum of its own: the weight is read once for all of them. Run eagerly it would write the
    whole product matrix of every row."""

    form = "a sum of products, compiled"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self.weight_bytes = _bytes(weight, bias)
        self._wide = torch.promote_types(weight.dtype, torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if len(x) == 1 else in_memory(x.to(self._wide))  # else converted again for every row of the weight
        y = torch.stack([(self.weight * row).sum(-1, dtype=self._wide) for row in wide.unbind(0)]).to(x.dtype)
        return y if self.bias is None else y + self.bias


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """x itself. A view with strides of its own needs a tensor in memory, so the compiler writes x there once instead of
    computing it again for every row of the weights."""
    return x.as_strided(x.shape, x.stride())


class SideBySide:
    """Several Linears over the same x with concatenated outputs, where their weights cannot be joined into one
    matrix."""

    def __init__(self, linears: list[Linear]) -> None:
        self.linears = linears
        self.in_features, self.out_features = linears[0].in_features, sum(one.out_features for one in linears)
        self.weight_bytes = sum(one.weight_bytes for one in linears)
        self.form = " | ".join(dict.fromkeys(one.form for one in linears))
        self.reason = "; ".join(dict.fromkeys(filter(None, map(reason_of, linears))))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([one(x) for one in self.linears], dim=-1)


def weights_as_they_lie(linear: Linear) -> list[torch.Tensor]:
    """The tensors that its product reads; [] where they lie in a form of another library, which says no address."""
    if isinstance(linear, SideBySide):
        return [tensor for one in linear.linears for tensor in weights_as_they_lie(one)]
    return list(getattr(linear, "tensors", [one for one in (getattr(linear, "weight", None),) if one is not None]))


def reason_of(linear: Linear) -> str:
    """Why a quantized linear has the form that it has; "" where that needs no words."""
    return str(getattr(linear, "reason", ""))


LINEARS: dict[str, Callable[..., Linear]] = {"plain": Plain, "packed": Packed, "looped": Looped, "triton": TritonMatvec}


def linear_class(name: str, dtype: torch.dtype, device: torch.device | str) -> Callable[..., Linear]:
    """The class of that name; "auto" is the rule, `chosen_linear`, without measuring (`models.measured_linear`)."""
    if name == "auto":
        return chosen_linear(dtype, device)[0]
    if not isinstance(name, str) or name not in LINEARS:
        raise unknown("linear", name, ["auto", *LINEARS])
    return LINEARS[name]


def chosen_linear(dtype: torch.dtype, device: torch.device | str) -> tuple[Callable[..., Linear], str]:
    """The class that "auto" stands for by rule, and why: packed on a CPU that supports it, our kernel on such a GPU,
    else plain. `prepare` measures where packing is possible (`models.measured_linear`); draft heads, the ranks of a
    divided model, which all have to choose alike, and ceilings go by the rule."""
    if torch.device(device).type == "cuda":
        reason = why_not_triton(dtype, device)
        if reason:
            return Plain, f"plain: {reason}"
        return (
            TritonMatvec,
            "triton: up to 32 rows the time is that of reading the weights, which the kernel does once",
        )
    reason = why_not_packed(dtype, device)
    return (
        (Plain, f"plain: {reason}")
        if reason
        else (Packed, "packed, by rule: most processors read it faster; not measured here")
    )


def why_not_triton(dtype: torch.dtype, device: torch.device | str) -> str:
    """Why weights of this dtype on this device do not go through our kernel; "" where they do."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernel is for float32, float16 and bfloat16, the weight is {str(dtype).removeprefix('torch.')}"
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        return "this machine has no CUDA device"
    try:
        from workbench.kernels import launch
    except ImportError as error:
        return f"Triton is not installed here ({error})"
    return launch.why_not(device)


def why_not_looped(dtype: torch.dtype, device: torch.device | str) -> str:
    """Why weights of this dtype on this device do not go through our loop; "" where they do. Compiles it, once a
    machine."""
    if torch.device(device).type != "cpu":
        return f"the loop is for CPUs, the weight is on {device}"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the loop is for float32, float16 and bfloat16, the weight is {str(dtype).removeprefix('torch.')}"
    from workbench.kernels.cpu import floats

    return floats.why_not_here()


def torch_multiplies(dtype: torch.dtype) -> bool:
    """Whether torch has instructions of this processor for products of such numbers."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    known = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(known[dtype]())


def why_not_packed(dtype: torch.dtype, device: torch.device | str) -> str:
    """Why weights of this dtype on this device cannot be packed; "" where they can."""
    if torch.device(device).type != "cpu":
        return f"packing is for CPUs, the weight is on {device}"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch comes without oneDNN"
    if dtype == torch.float32:
        return ""
    if dtype == torch.bfloat16:
        has = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return "" if has else "this processor has no instructions for bfloat16"
    return f"packing is for float32 and bfloat16, the weight is {str(dtype).removeprefix('torch.')}"


def _bytes(weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)
