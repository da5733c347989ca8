"""RMSNorm, with the residual added on the way: h = x + r,  y = h / √(mean(h²) + eps) · weight.

Cannot do without, for N rows of d values of b bytes: x read and y written, 2·N·d·b, and the weight once, d·b_w; with a
residual that is read and the sum that is written 2·N·d·b more. 4 FLOPs a value (square, addition, two products), one
more with a residual: far below what a GPU computes while it moves the bytes. Made of torch's own operations the same
takes six launches and moves every row several times.

References: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467; the fused addition as in
Megatron-LM and vLLM (`fused_add_rms_norm`).

    1   two passes: the sum of squares, then the values. x is read twice. A residual is added in a launch of its own.
    2   one pass: the row stays in registers. A residual is added in a launch of its own.
    3   the residual is added on the way: one launch, x and r read once, the sum and y written once.

A row of more than LONGEST values does not fit: version 2 and 3 do it as version 1 does.

Supports float32, float16 and bfloat16 for x, residual, weight and the output, each with a type of its own; computed in
float32 and rounded once. The sum is rounded to the residual's type before it is normed, so that the result is that of
an addition and a norm, bit for bit in what is added. Rows with any stride, their values side by side. Gemma's norm,
whose weights lie around zero, is this one with weight + 1.

Tiles (x, residual, y and the sum lie alike; every program reads all of the weight):

    version 1   row r: | BLOCK | BLOCK | ... |  program r, once for the squares and once for the values
    version 2   rows   | ROWS x d, in registers, read and written once |  program i: rows i*ROWS to i*ROWS + ROWS - 1
    version 3   the same; reads x and residual, writes the sum and y
    the addition of versions 1 and 2, a launch of its own: row r, columns of a TILE  ->  program (r, tile)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workbench.kernels import alone, tuning
from workbench.kernels.launch import (
    Unsupported,
    Work,
    cdiv,
    check_shape,
    check_tensors,
    check_version,
    launch,
    next_power_of_2,
    wait_for_inputs,
)

VERSIONS = {1: "two passes", 2: "one pass, the row in registers", 3: "and the residual added on the way"}
LONGEST = 16_384  # values of a row that stay in registers
TILE = 2048  # values that a program holds at least: short rows are done together


@triton.jit
def _norm_two_passes(x, weight, y, d, x_stride, y_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x, y = x + row * x_stride, y + row * y_stride
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, d, BLOCK):
        at = start + lanes
        values = tl.load(x + at, mask=at < d, other=0.0).to(tl.float32)
        squares += values * values
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / d + eps)
    for start in range(0, d, BLOCK):
        at = start + lanes
        values = tl.load(x + at, mask=at < d, other=0.0).to(tl.float32)
        weights = tl.load(weight + at, mask=at < d, other=0.0).to(tl.float32)
        tl.store(y + at, (values * scale * weights).to(y.dtype.element_ty), mask=at < d)


@triton.jit
def _norm_one_pass(
    x,
    residual,
    weight,
    y,
    total,
    rows,
    d,
    x_stride,
    residual_stride,
    y_stride,
    total_stride,
    eps,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < d)
    wait_for_inputs(PDL)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * total_stride + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / d + eps)
    weights = tl.load(weight + column, mask=column < d, other=0.0).to(tl.float32)
    normed = values * scale[:, None] * weights
    tl.store(y + row * y_stride + column, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add(x, residual, total, d, x_stride, residual_stride, total_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + at, mask=at < d, other=0.0).to(tl.float32)
    values += tl.load(residual + row * residual_stride + at, mask=at < d, other=0.0).to(tl.float32)
    tl.store(total + row * total_stride + at, values.to(total.dtype.element_ty), mask=at < d)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    version: int = 3,
    *,
    dtype: torch.dtype | None = None,
    in_place: bool = False,
    config: tuning.Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y [N, d] of x [N, d] and weight [d]; with a residual [N, d] the pair (y, x + residual).

    out: where y goes, of any float type; else a new tensor of `dtype`, which is x's unless given. The sum has the
    residual's type; in_place writes it over the residual, as a residual stream wants it. Raises Unsupported for a
    version, shape, dtype, device or layout that there is not, and changes nothing then.
    """
    check_version("rms_norm", version, VERSIONS)
    check_shape("rms_norm", "x", x, (None, None))
    rows, d = x.shape
    check_shape("rms_norm", "weight", weight, (d,))
    if residual is not None:
        check_shape("rms_norm", "residual", residual, (rows, d))
    if in_place and residual is None:
        raise Unsupported("rms_norm: in_place writes x + residual over the residual; give one")
    if out is None:
        out = torch.empty((rows, d), dtype=dtype or x.dtype, device=x.device)
    check_shape("rms_norm", "out", out, (rows, d))
    check_tensors("rms_norm", contiguous=False, x=x, weight=weight, residual=residual, out=out)
    total = None
    if residual is not None:
        total = residual if in_place else torch.empty((rows, d), dtype=residual.dtype, device=x.device)
    if d == 0:
        return out if total is None else (out, total)
    if residual is not None and total is not None and (version < 3 or d > LONGEST):
        of_add = x.stride(0), residual.stride(0), total.stride(0)
        launch(_add, (rows, cdiv(d, TILE)), x, residual, total, d, *of_add, BLOCK=TILE)
        x, residual = total, None
    if version == 1 or d > LONGEST:
        block = min(next_power_of_2(d), 4096)
        launch(_norm_two_passes, (rows,), x, weight, out, d, x.stride(0), out.stride(0), eps, BLOCK=block, num_warps=8)
    else:
        config = config or _config(x)
        adds = residual is not None
        other, summed = (
            (x, x) if residual is None or total is None else (residual, total)
        )  # not looked at where nothing is added
        strides = x.stride(0), other.stride(0), out.stride(0), summed.stride(0)
        launch(
            _norm_one_pass,
            (cdiv(rows, config["ROWS"]),),
            x,
            other,
            weight,
            out,
            summed,
            rows,
            d,
            *strides,
            eps,
            ADDS=adds,
            BLOCK=next_power_of_2(d),
            **config.options,
        )
    return out if total is None else (out, total)


def _config(x: torch.Tensor) -> tuning.Config:
    """A few rows are a few programs, so each gets the warps to have its row on the way at once."""
    block = next_power_of_2(x.shape[1])
    default = tuning.Config.of(ROWS=max(1, TILE // block), num_warps=4 if block <= 2048 else 8)
    return tuning.choose("rms_norm", (block, x.element_size()), default, x.device)


# -- the oracle, the work, the tuning ------------------------------------------------------------------------------


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """In at least float32, rounded once; float64 in, float64 out."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = None if residual is None else (x.to(wide) + residual.to(wide)).to(residual.dtype)
    values = (x if total is None else total).to(wide)
    y = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    y = y.to(dtype or x.dtype)
    return y if total is None else (y, total)


def rms_norm_work(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    version: int = 3,
    *,
    dtype: torch.dtype | None = None,
) -> Work:
    size = (dtype or x.dtype).itemsize
    added = 0 if residual is None else residual.nbytes
    apart = residual is not None and (version < 3 or x.shape[-1] > LONGEST)
    flops = x.numel() * (4 if residual is None else 5)
    launches = (1 + apart) if x.numel() else 0
    return Work(x.nbytes + weight.nbytes + added, x.numel() * size + added, flops, launches)


def candidates(d: int) -> list[tuning.Config]:
    block = next_power_of_2(d)
    return [
        tuning.Config.of(ROWS=rows, num_warps=warps)
        for rows in (1, 2, 4, 8, 16)
        if rows * block <= LONGEST
        for warps in (1, 2, 4, 8, 16)
        if rows * block >= 32 * warps
    ] or [tuning.Config.of(ROWS=1, num_warps=1)]


def tune_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, **limits) -> tuning.Config:
    """The fastest of the candidates for rows as long as x's, with a residual; kept in the device's table."""
    residual, out = torch.randn_like(x), torch.empty_like(x)
    key = (next_power_of_2(x.shape[1]), x.element_size())
    return tuning.tune(
        "rms_norm",
        key,
        candidates(x.shape[1]),
        lambda config: rms_norm(x, weight, eps, residual, out, config=config),
        x.device,
        **limits,
    )


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.norm` checks, and on a GPU times."""
    x, residual = (make.normal(make.size(6, 32_768), make.size(200, 4096)) for _ in range(2))
    weight = make.normal(x.shape[1])

    def normed(version: int) -> torch.Tensor:
        y, _ = rms_norm(x, weight, 1e-5, residual, version=version)
        return y

    def truth() -> torch.Tensor:
        y, _ = rms_norm_reference(x.double(), weight.double(), 1e-5, residual.double())
        return y

    words = f"rms_norm of {len(x):,} rows of {x.shape[1]:,} and a residual"
    return [alone.Example(words, VERSIONS, normed, truth, rms_norm_work(x, weight, residual))]


if __name__ == "__main__":
    alone.main(examples)
