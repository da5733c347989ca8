"""Softmax over rows, the first kernel to write: yᵢ = exp(xᵢ − m) / Σ exp(xⱼ − m) with m = max x.

Cannot do without: each of rows·n values read once and written once, 2·rows·n·b bytes; 5 FLOPs a value (maximum,
difference, exponential, addition, product). 5 FLOPs over 2·b bytes is far below what a GPU computes while it moves
them, so the time is that of memory and a version is as good as the number of times it goes through the row:

    1   three passes: the maximum, the sum, the values. Reads x three times, as the definition is written: 4·n·b bytes.
    2   two passes: maximum and sum at once ("online"): when a larger maximum m' comes, the sum so far is multiplied
        with exp(m − m'). Reads x twice: 3·n·b bytes. The same rescaling makes FlashAttention possible.
    3   one pass: the row stays in registers, 2·n·b bytes; several short rows share a program. A row of more than
        LONGEST values does not fit and is done as in version 2.

References: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867; Triton's tutorial 02.

Supports float32, float16 and bfloat16, computed in float32 and rounded once; rows with any stride, their values side by
side. −inf is a value that has no share; a row of nothing else has no softmax and gives NaN, as does a row with a NaN
or a +inf in it, all as in torch.softmax.

Tiles, for 4 rows of x (and of out, which lies alike):

    versions 1, 2   row r is program r's, BLOCK values at a time        version 3   a program has ROWS whole rows
                    +-------+-------+-------+                                       +-----------------------+
    row 0           | step 0| step 1| step 2|  program 0                            | ROWS x next power of 2|  program 0
    row 1           | step 0| step 1| step 2|  program 1                            | of n, read once       |
                    +-------+-------+-------+                                       +-----------------------+
    row 2, 3        likewise: read 3 or 2 times, written once                       | likewise              |  program 1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workbench.kernels import alone, tuning
from workbench.kernels.launch import Work, cdiv, check_shape, check_tensors, check_version, launch, next_power_of_2

VERSIONS = {1: "three passes", 2: "online: two passes", 3: "one pass, the row in registers"}
LONGEST = 16_384  # values of a row that version 3 holds: 64 KiB in float32, a quarter of an SM's registers
TILE = 2048  # values that a program of version 3 holds at least: short rows are done together


@triton.jit
def _softmax_three_passes(x, out, n, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x, out = x + row * x_stride, out + row * out_stride
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        top = tl.maximum(top, tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32))
    m = tl.max(top, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        values = tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32)
        total += tl.where(at < n, tl.exp(values - m), 0.0)
    scale = 1.0 / tl.sum(total, axis=0)
    for start in range(0, n, BLOCK):
        at = start + lanes
        values = tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32)
        tl.store(out + at, (tl.exp(values - m) * scale).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _softmax_online(x, out, n, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x, out = x + row * x_stride, out + row * out_stride
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)  # each lane has a maximum and a sum of its own
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        values = tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, values)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but −inf so far: −inf − −inf is NaN
        total = total * tl.exp(top - base) + tl.exp(values - base)
        top = higher
    m = tl.max(top, axis=0)
    base = tl.where(m == float("-inf"), 0.0, m)
    scale = 1.0 / tl.sum(total * tl.exp(top - base), axis=0)
    for start in range(0, n, BLOCK):
        at = start + lanes
        values = tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32)
        tl.store(out + at, (tl.exp(values - base) * scale).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _softmax_one_pass(x, out, rows, n, x_stride, out_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < n)
    values = tl.load(x + row * x_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.where(row < rows, values, 0.0)
    m = tl.max(values, axis=1)
    m = tl.where(m == float("-inf"), 0.0, m)
    shares = tl.exp(values - m[:, None])
    shares = shares * (1.0 / tl.sum(shares, axis=1))[:, None]
    tl.store(out + row * out_stride + column, shares.to(out.dtype.element_ty), mask=inside)


def softmax(x: torch.Tensor, version: int = 3, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax of each row of x [rows, n], in x's dtype: a new tensor, or `out`, which may be x itself.

    Raises Unsupported for a version, dtype, device or layout that there is not.
    """
    check_version("softmax", version, VERSIONS)
    check_shape("softmax", "x", x, (None, None))
    check_tensors("softmax", contiguous=False, x=x, out=out)
    rows, n = x.shape
    if out is None:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    check_shape("softmax", "out", out, (rows, n))
    if n == 0:
        return out
    if version == 3 and n <= LONGEST:
        block = next_power_of_2(n)
        together = max(1, TILE // block)
        default = tuning.Config.of(ROWS=together, num_warps=4 if block <= 4096 else 8)
        config = tuning.choose("softmax", (block, x.element_size()), default, x.device)
        grid = (cdiv(rows, config["ROWS"]),)
        launch(_softmax_one_pass, grid, x, out, rows, n, x.stride(0), out.stride(0), BLOCK=block, **config.options)
        return out
    kernel = _softmax_three_passes if version == 1 else _softmax_online
    block = min(next_power_of_2(n), 4096)
    launch(kernel, (rows,), x, out, n, x.stride(0), out.stride(0), BLOCK=block, num_warps=8)
    return out


# -- the oracle, the work, the tuning ------------------------------------------------------------------------------


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """In at least float32, rounded once; float64 in, float64 out."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    shares = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    return (shares / shares.sum(dim=-1, keepdim=True)).to(x.dtype)


def softmax_work(x: torch.Tensor) -> Work:
    return Work(x.nbytes, x.nbytes, 5 * x.numel(), 1 if x.numel() else 0)


def softmax_bytes(x: torch.Tensor, version: int) -> int:
    """Bytes that the version asks for: what it reads more than once may come from a cache."""
    check_version("softmax", version, VERSIONS)
    passes = 2 if version == 3 and x.shape[1] > LONGEST else 4 - version
    return (passes + 1) * x.nbytes


def candidates(n: int) -> list[tuning.Config]:
    """Rows in a program and warps, for rows that fit."""
    block = next_power_of_2(n)
    return [
        tuning.Config.of(ROWS=rows, num_warps=warps)
        for rows in (1, 2, 4, 8, 16, 32)
        if rows * block <= LONGEST
        for warps in (1, 2, 4, 8, 16)
        if rows * block >= 32 * warps
    ] or [tuning.Config.of(ROWS=1, num_warps=1)]


def tune_softmax(x: torch.Tensor, **limits) -> tuning.Config:
    """The fastest of the candidates for rows as long as x's, kept in the device's table."""
    n = x.shape[1]
    block, out = next_power_of_2(n), torch.empty_like(x)

    def run(config: tuning.Config) -> None:
        grid = (cdiv(len(x), config["ROWS"]),)
        launch(_softmax_one_pass, grid, x, out, len(x), n, x.stride(0), out.stride(0), BLOCK=block, **config.options)

    return tuning.tune("softmax", (block, x.element_size()), candidates(n), run, x.device, **limits)


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.softmax` checks, and on a GPU times."""
    x = make.normal(make.size(5, 16_384), make.size(300, 16_384))
    words = f"softmax of {len(x):,} rows of {x.shape[1]:,}"
    return [
        alone.Example(words, VERSIONS, lambda v: softmax(x, v), lambda: softmax_reference(x.double()), softmax_work(x))
    ]


if __name__ == "__main__":
    alone.main(examples)
