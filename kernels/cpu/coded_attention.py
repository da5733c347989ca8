"""Attention over keys and values in codes on a CPU, each code read once and never written as a float
(`coded_attention.cpp`).

    k' = scale · code + zero, a scale (and zero) of each channel over a group of tokens
    v' = scale · code + zero, of each token; fp8 (e4m3) has no zeros

The loop takes a layer of any number of sequences, each with one or a few new tokens, and all heads at once. Query heads
that share a key-value head share what is read. What it computes is softmax(q · k'ᵀ · scale) · v' with sums in float32;
only the order of additions differs from attention over the numbers.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from workbench.native.build import functions, why_no_library

SOURCE = Path(__file__).with_name("coded_attention.cpp")
FORMATS = ("int8", "fp8", "int4")  # 0 … 255 and e4m3 a byte each; 0 … 15, a token of either half of a group a byte
SMALL = 1 << 16  # numbers of the cache, up to which one thread is as fast as several
RECENT = -1  # place of a run in the recent part
Pointer, Whole = ctypes.c_void_p, ctypes.c_int64


class Side(ctypes.Structure):
    """`struct Side`: the keys, or the values, of one layer."""

    _fields_ = [*((name, Pointer) for name in ("codes", "scale", "zero", "recent")), ("size", Whole)]


class Layer(ctypes.Structure):
    """`struct Layer`."""

    _fields_ = [
        *((name, Side) for name in ("keys", "values")),
        *(
            (name, Whole)
            for name in ("heads", "shared", "group", "places", "recent_places", "format", "window", "sinks")
        ),
        ("scale", ctypes.c_float),
    ]


class Run(ctypes.Structure):
    """`tokens` tokens side by side, the first of them at `position` in its sequence: of the groups from `place` on,
    after `skip` tokens (fewer than a group has); or of the recent part, with RECENT as the place."""

    _fields_ = [(name, Whole) for name in ("place", "skip", "tokens", "position")]


class Sequence(ctypes.Structure):
    """New tokens of one sequence, `past` others before them: rows of the batch, and the runs that they see. keep_at:
    the place in the recent part from which on the new ones are stored, −1 where they are not."""

    _fields_ = [(name, Whole) for name in ("slot", "past", "first_row", "rows", "first_run", "runs", "keep_at")]


class Rows(ctypes.Structure):
    """`struct Rows`: new keys or values, strides in floats."""

    _fields_ = [("start", Pointer), ("row", Whole), ("head", Whole)]

    @classmethod
    def of(cls, x: torch.Tensor) -> Rows:
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


@functools.cache
def why_not_here() -> str:
    """Why there is no such loop on this machine; "" where there is."""
    return why_no_library(SOURCE)


def opened(made: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions."""
    made.attend_codes.restype = Whole
    made.attend_codes.argtypes = [Pointer, Pointer, Whole, Pointer, Pointer, Whole, Pointer, Pointer, Whole, Pointer]
    return made


_functions = functools.partial(functions, SOURCE, opened)


class Kept:
    """One layer's part of a cache, as the loop reads it. All tensors stay where they are.

    codes: of keys [slots, H_kv, places, rows, D] and values […, D_v], rows the group, or half of it for int4; scales,
    zeros (none for fp8): float16, of keys [slots, H_kv, places, 1, D], of values [slots, H_kv, places, group, 1];
    recent: float32, [slots, H_kv, recent, D] and D_v. heads: query heads. scale: of attention. window None: none.
    """

    def __init__(
        self,
        codes: list[torch.Tensor],
        scales: list[torch.Tensor],
        zeros: list[torch.Tensor],
        recent: list[torch.Tensor],
        *,
        format: str,
        heads: int,
        scale: float,
        window: int | None,
        sinks: int,
    ) -> None:
        assert all(one.is_contiguous() for one in (*codes, *scales, *zeros, *recent))
        assert all(one.dtype == torch.float16 for one in (*scales, *zeros))
        assert all(one.dtype == torch.float32 for one in recent)
        kv_heads, places, group = scales[1].shape[1:4]
        sides = [
            Side(*(part[i].data_ptr() if part else None for part in (codes, scales, zeros, recent)), codes[i].shape[-1])
            for i in range(2)
        ]
        self._tensors = (codes, scales, zeros, recent)  # kept alive
        shape = (kv_heads, heads // kv_heads, group, places, recent[0].shape[2])
        self.layer = Layer(*sides, *shape, FORMATS.index(format), window or 0, sinks, scale)
        self._address = ctypes.addressof(self.layer)
        self._attend = _functions().attend_codes

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sequences: ctypes.Array[Sequence],
        runs: ctypes.Array[Run],
        out: torch.Tensor,
        *,
        numbers: int,
    ) -> int:
        """The rows of these sequences of q [N, H_q, D] -> those of out [N, H_q, D_v], which is contiguous; all float32.

        k, v [N, H_kv, D], D_v: of the new tokens. numbers: kept ones that are read, about. Returns the bytes of the
        cache that were read: codes, scales and zeros, and the recent part.
        """
        assert out.is_contiguous() and out.dtype == torch.float32
        q = q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
        k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (k, v))
        threads = 1 if numbers <= SMALL else torch.get_num_threads()
        given = (self._address, sequences, len(sequences), runs, q.data_ptr(), q.stride(0))
        new = (ctypes.byref(Rows.of(k)), ctypes.byref(Rows.of(v)))
        return self._attend(*given, *new, threads, out.data_ptr())
