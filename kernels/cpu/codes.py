"""Products of a few rows with weights in 8 or 4 bits on a CPU, each code read once (`codes.cpp`).

    y = x · Ŵᵀ,   Ŵ = scale · (code − centre + shift) + zero

    precision   inputs                      a code
    exact       float32, as they are        becomes a float32 in a register; only the order of additions differs (a
                                            nibble's centre is taken off afterwards: Σ code·x − centre · Σ x)
    q8          8 bits, a scale a block     stays a whole number, and so does its product with an input's code

q8 is how llama.cpp multiplies its formats q8_0 and q4_0. An input of a block lies at most max|x| / 254 from its rounded
one, so an output lies at most Σ over blocks of (max|x| / 254) · Σ|ŵ| from the exact one, and what float32 adds.

A row with NaN or an infinity has no finite result.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from pathlib import Path

import torch
import torch.nn.functional as F

from workbench.errors import WorkbenchError
from workbench.native.build import functions, why_no_library

SOURCE = Path(__file__).with_name("codes.cpp")
CHUNK = 32  # codes that are multiplied at once
ABREAST = 8  # outputs that lie side by side where inputs are rounded
LARGEST_BLOCK = 256  # inputs that are rounded with one scale, at most
PRECISIONS = ("exact", "q8")
KINDS = ("signed", "unsigned", "nibbles")  # bytes of −128 … 127, of 0 … 255, two codes of 4 bits a byte
SMALL = 1 << 16  # weights, up to which one thread is as fast as several
Pointer, Whole = ctypes.c_void_p, ctypes.c_int64


class WeightArguments(ctypes.Structure):
    """`struct Weight` of codes.cpp."""

    _fields_ = [
        *((name, Pointer) for name in ("codes", "scale", "zero")),
        *((name, Whole) for name in ("out", "in", "group", "block", "kind", "halves", "centre")),
        ("shift", ctypes.c_float),
    ]


def block_of(group: int, *, nibbles: bool) -> int:
    """Inputs that are rounded with one scale: the group, or where it has more than 256 as many as divide it. Rows of
    bytes may have any length: where no multiple of 32 divides them, blocks of 256 and a shorter one."""
    if group <= LARGEST_BLOCK:
        return group
    sizes = range(LARGEST_BLOCK, 0, -CHUNK)
    largest = next((size for size in sizes if group % size == 0), None)
    assert largest is not None or not nibbles, "groups of nibbles are whole chunks"
    return largest or LARGEST_BLOCK


@functools.cache
def why_not_here() -> str:
    """Why there is no such kernel on this machine; "" where there is."""
    return why_no_library(SOURCE)


def opened(made: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions."""
    made.multiply_codes.restype = None
    made.multiply_codes.argtypes = [Pointer, Pointer, Whole, Whole, Whole, Whole, Pointer]
    made.instructions.restype = ctypes.c_char_p
    return made


_functions = functools.partial(functions, SOURCE, opened)


def instructions() -> str:
    """What whole numbers are multiplied with on this processor: "AVX2", "AVX512-VNNI", …"""
    return _functions().instructions().decode()


class CodeProduct:
    """x [N, in] float32 -> x·Ŵᵀ [N, out] float32.

    codes: contiguous, [out, in] bytes, or nibbles [out, in/block, block/2], the first half of a block in the lower
    bits. scale, zero [out, in/group], float16 or float32 both. centre: of nibbles; bytes of 0 … 255 are taken less 128.
    shift: see the module. The tensors are read where they are with "exact"; for "q8" they are written once more, in the
    order in which that reads them.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        *,
        kind: str,
        inputs: int,
        group: int,
        centre: int = 0,
        shift: float = 0.0,
        precision: str = "exact",
    ) -> None:
        assert precision in PRECISIONS and kind in KINDS
        assert codes.is_contiguous() and scale.is_contiguous() and (zero is None or zero.is_contiguous())
        assert scale.dtype in (torch.float16, torch.float32) and (zero is None or zero.dtype == scale.dtype)
        assert group == inputs or group % CHUNK == 0
        self.out_features, self.in_features = len(codes), inputs
        self.block, self.q8 = block_of(group, nibbles=kind == "nibbles"), precision == "q8"
        if self.q8:
            codes, kind = abreast(codes, kind, inputs)
            scale, zero = in_eights(scale), None if zero is None else in_eights(zero)
        self.codes, self.scale, self.zero = codes, scale, zero  # kept alive
        self.arguments = WeightArguments(
            codes.data_ptr(),
            scale.data_ptr(),
            None if zero is None else zero.data_ptr(),
            self.out_features,
            inputs,
            group,
            self.block,
            KINDS.index(kind),
            scale.dtype == torch.float16,
            centre,
            shift,
        )
        self._address = ctypes.addressof(self.arguments)
        self._multiply = _functions().multiply_codes
        self._is_small = self.out_features * inputs <= SMALL

    @property
    def nbytes(self) -> int:
        """What one call reads, x not counted."""
        return sum(one.nbytes for one in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [one for one in (self.codes, self.scale, self.zero) if one is not None]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack():  # who records operations sees this one, too
            KNOWN[id(self)] = self
            return code_product(x, id(self))
        return self.multiply(x)

    def multiply(self, x: torch.Tensor, threads: int | None = None) -> torch.Tensor:
        """The product itself. threads: default torch's, one for a small weight."""
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype != torch.float32 or x.device.type != "cpu":
            raise WorkbenchError(  # the loop is handed where x lies, and would read beyond it
                f"a product of codes takes x [N, {self.in_features}] in float32 on the CPU, got {list(x.shape)} in"
                f" {str(x.dtype).removeprefix('torch.')} on {x.device}"
            )
        rows = x.shape[0]
        if x.stride(1) != 1:
            x = x.contiguous()
        y = x.new_empty((rows, self.out_features))
        threads = threads or (1 if self._is_small else torch.get_num_threads())
        self._multiply(self._address, x.data_ptr(), rows, x.stride(0), self.q8, threads, y.data_ptr())
        return y


def abreast(codes: torch.Tensor, kind: str, inputs: int) -> tuple[torch.Tensor, str]:
    """(codes as products_q8.h reads them, eight outputs side by side; their kind). codes: as `CodeProduct` takes them.

    [out/8, in/32, vector, output, input of the vector]: 8 vectors of 4 inputs of each output, signed; or 4 of nibbles,
    the first 16 inputs of a chunk in the lower bits.
    """
    if kind == "nibbles":
        codes = torch.cat((codes & 15, codes >> 4), -1)
    elif kind == "unsigned":
        codes, kind = codes ^ 128, "signed"
    whole = codes.reshape(len(codes), inputs).view(torch.uint8)
    whole = F.pad(whole, (0, -inputs % CHUNK, 0, -len(whole) % ABREAST))
    vectors = whole.view(-1, ABREAST, whole.shape[1] // CHUNK, CHUNK // 4, 4).permute(0, 2, 3, 1, 4)
    if kind == "nibbles":
        lower, upper = vectors.chunk(2, 2)
        vectors = lower | upper << 4
    return vectors.contiguous(), kind


def in_eights(tensor: torch.Tensor) -> torch.Tensor:
    """[out, groups] -> [out/8, groups, 8], outputs that are missing 0."""
    return F.pad(tensor, (0, 0, 0, -len(tensor) % ABREAST)).unflatten(0, (-1, ABREAST)).transpose(1, 2).contiguous()


KNOWN: weakref.WeakValueDictionary[int, CodeProduct] = weakref.WeakValueDictionary()  # by id, for `code_product`


@torch.library.custom_op("workbench::code_product", mutates_args=())
def code_product(x: torch.Tensor, product: int) -> torch.Tensor:
    """The product of that id, as an operation of torch: slower to start, but seen by who records operations."""
    return KNOWN[product].multiply(x)
