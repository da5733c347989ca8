"""Products of a few rows with weights that are numbers on a CPU, each read once (`floats.cpp`).

    y = x · Wᵀ + b        x, y and the sums float32; W float32, bfloat16 or float16

Only the order of additions differs from `F.linear`. It takes any number of rows, and is made for few: up to six are
multiplied with a weight while it is in a register.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from workbench.errors import WorkbenchError
from workbench.native.build import functions, why_no_library

SOURCE = Path(__file__).with_name("floats.cpp")
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of weights, as the loop counts them
SMALL = 1 << 16  # weights, up to which one thread is as fast as several
Pointer, Whole = ctypes.c_void_p, ctypes.c_int64


@functools.cache
def why_not_here() -> str:
    """Why there is no such loop on this machine; "" where there is. Compiles it, once a machine."""
    return why_no_library(SOURCE)


def opened(made: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions."""
    made.multiply_floats.restype = None
    made.multiply_floats.argtypes = [Whole, Pointer, Pointer, Whole, Whole, Pointer, Whole, Whole, Whole, Pointer]
    return made


_functions = functools.partial(functions, SOURCE, opened)


class FloatProduct:
    """x [N, in] float32 -> x·Wᵀ + b [N, out] float32. weight [out, in] of one of TYPES, read where it is; bias [out] or
    None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        assert weight.dtype in TYPES and weight.device.type == "cpu" and weight.dim() == 2
        self.weight, self.bias = weight.contiguous(), None if bias is None else bias.float().contiguous()
        self.out_features, self.in_features = weight.shape
        address = None if self.bias is None else self.bias.data_ptr()
        self._given = (TYPES.index(weight.dtype), self.weight.data_ptr(), address, *self.weight.shape)
        self._multiply = _functions().multiply_floats
        self._is_small = weight.numel() <= SMALL

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype is not torch.float32 or not x.is_cpu:
            raise WorkbenchError(  # the loop is handed where x lies, and would read beyond it
                f"this product takes x [N, {self.in_features}] in float32 on the CPU, got {list(x.shape)} in"
                f" {str(x.dtype).removeprefix('torch.')} on {x.device}"
            )
        rows, (stride, within) = x.shape[0], x.stride()  # len(x) is a function of Python, and takes longer
        if within != 1:
            x, stride = x.contiguous(), self.in_features
        y = torch.empty(rows, self.out_features)
        threads = 1 if self._is_small else torch.get_num_threads()
        self._multiply(*self._given, x.data_ptr(), rows, stride, threads, y.data_ptr())
        return y
