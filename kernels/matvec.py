"""A few rows times a weight matrix: y [N, out] = x [N, in] · Wᵀ + bias, 1 to 32 rows, weights in 16 or 32 bits.

    bytes   out · in · b for the weight (b bytes a number), N · in · b for x, N · out · b for y
    FLOPs   2 · N · out · in

So N FLOPs per byte in 16 bits, where an H200 has about 200 to spend: up to 32 rows the time is that of reading the
weight once, and a kernel is as good as its share of the memory's bandwidth. By Little's law 4.8 TB/s times some 0.7 µs
of latency are 3.4 MB under way at any moment, 25 KB a multiprocessor: many programs, each with several loads of 16
bytes a thread before the first is used.

  version  what a program does                                                    what it changes
  1        BLOCK_OUT outputs of one row; a tile at a time, multiplied and summed  the plain loop; N rows read W N times
  2        the same for up to 4 rows; sums stay with the thread that made them,   W is read once for 4 rows, and threads
           and are added up once, at the end                                      wait for each other once, not per tile
  3        3 rows and more are a product of matrices on tensor cores, the rows    W is read once for 32 rows; small
           padded to 16; `in` is divided among `splits` programs where `out`      matrices fill the device too
           alone gives too few; the last of them adds up in order

activation=: the weight is a gate's rows and as many of up's, and y [N, out/2] = act(gate) · up, made where the sums
are. A program takes a row of gate and the same row of up beside each other, so nothing is rearranged in memory; gate
and up never get there (6 · N · out/2 · b bytes and a launch less), and are rounded once instead of twice.

residual=: the product is added to a row that is there, in place, by the program that has the sums, so the layer's
addition needs no launch and the sum of a product is rounded once, with what it is added to.

norm=: x is RMSNormed on the way, W · (x · w / rms) = (W · (x · w)) / rms: the squares are summed over the same blocks
of x that are multiplied, and the sums scaled at the end. x and w lie in the cache, so nothing is read twice from
memory, nothing is written, and the norm needs no launch. On tensor cores x · w is rounded to 16 bits unscaled, which
for float16 may be too large: there the norm stays apart.

Split-K is deterministic: partial sums are written and added in a fixed order, by the program that comes last
(arrivals=, see `arrivals`), or by a launch of its own. It is used only where the programs would leave multiprocessors
idle.

Weights are float32, float16 or bfloat16, x of the same type; sums are float32 throughout. In float32 tensor cores are
not used (`input_precision="ieee"`), and 4 rows go through version 2. Reference: Williams, Waterman and Patterson,
"Roofline", CACM 52(4) 2009; split-K, Osama et al., "Stream-K", arXiv 2301.03598 §2. No time has been measured on a GPU
yet; block sizes are reasoned, not tuned.

Tiles of the weight [out, in]:

                 in:  BLOCK_IN | BLOCK_IN | BLOCK_IN | BLOCK_IN
    out: BLOCK_OUT  |    x          x     |    x          x     |  version 1: program (o, n), row n of x, the whole line
         BLOCK_OUT  |    x          x     |    x          x     |  version 2: program (o, n), up to 4 rows of x
         BLOCK_OUT  |    x          x     |    x          x     |  version 3: program (o, 0, split), all rows of x
                    |       split 0       |       split 1       |
    each reads its tiles of the weight once, with the same columns of x, and writes y [rows, BLOCK_OUT]; of a split:
    its part of it; parts are added in the order of splits
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from workbench.errors import is_whole
from workbench.kernels import alone, launch, swiglu, tuning
from workbench.kernels.arrivals import check_arrivals, counters, enough, is_last
from workbench.kernels.launch import wait_for_inputs
from workbench.kernels.norm import rms_norm_reference
from workbench.kernels.swiglu import activated
from workbench.kernels.tuning import Config

VERSIONS: dict[int, str] = {
    1: "one row a program, a sum each tile",
    2: "four rows a program, one sum at the end",
    3: "tensor cores from 3 rows on, and `in` divided among programs",
}
MAX_ROWS = 32
FEW_ROWS = 4  # that one program multiplies and adds without tensor cores, at most
MIN_ON_TENSOR_CORES = 3  # rows of 16 bits; below, multiplying and adding takes fewer instructions than it may
MAX_SPLITS = 64
PROGRAMS_A_MULTIPROCESSOR = 4  # below that, `in` is divided


@triton.jit(do_not_specialize=["N"])
def matvec_one_row(
    x,
    weight,
    bias,
    y,
    N,
    OUT,
    IN,
    stride_x,
    stride_w,
    HAS_BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Version 1: program (o, n) makes BLOCK_OUT outputs of row n."""
    rows, n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(1).to(tl.int64)
    total = tl.zeros([BLOCK_OUT], tl.float32)
    for start in range(0, IN, BLOCK_IN):
        k = start + tl.arange(0, BLOCK_IN)
        at = rows.to(tl.int64)[:, None] * stride_w + k[None, :]
        tile = tl.load(weight + at, mask=(rows < OUT)[:, None] & (k < IN)[None, :], other=0.0)
        values = tl.load(x + n * stride_x + k, mask=k < IN, other=0.0)
        total += tl.sum(tile.to(tl.float32) * values.to(tl.float32)[None, :], 1)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    tl.store(y + n * OUT + rows, total.to(y.dtype.element_ty), mask=rows < OUT)


@triton.jit
def values_of(x, n, N, k, stride_x, IN, EVEN: tl.constexpr):
    """x[n, k] in float32; a row beyond the last is read as the last, and never stored."""
    at = x + tl.minimum(n, N - 1).to(tl.int64) * stride_x + k
    values = tl.load(at) if EVEN else tl.load(at, mask=k < IN, other=0.0)
    return values.to(tl.float32)


@triton.jit
def row_of(x, n, N, k, stride_x, IN, EVEN: tl.constexpr):
    """The same as [1, len(k)]."""
    return values_of(x, n, N, k, stride_x, IN, EVEN)[None, :]


@triton.jit
def scaled(total, squares, IN, eps, NORMS: tl.constexpr):
    """total [BLOCK_OUT] of a row by 1 / rms."""
    if NORMS:
        total *= 1.0 / tl.sqrt(tl.sum(squares, 0) / IN + eps)
    return total


@triton.jit
def store_part(parts, squares_of, total, squares, n, N, rows, OUT, NORMS: tl.constexpr):
    """total [BLOCK_OUT] of row n and the sum of its squares, this program's part of both, to parts [splits, N, OUT] and
    squares_of [splits, programs, N]."""
    store_outputs(parts, parts, total, n, N, rows, OUT, False)
    if NORMS:
        at = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.store(squares_of + at * N + n, tl.sum(squares, 0), mask=n < N)


@triton.jit
def all_parts(parts, squares_of, n, N, rows, OUT, IN, eps, NORMS: tl.constexpr):
    """The sum of what all splits stored of row n, [BLOCK_OUT], in the order of the splits, scaled by 1 / rms."""
    total = tl.zeros(rows.shape, tl.float32)
    square = tl.zeros([1], tl.float32)
    there = (rows < OUT) & (n < N)
    for split in range(0, tl.num_programs(2)):
        at = (split * N + n).to(tl.int64) * OUT + rows
        total += tl.load(parts + at, mask=there, other=0.0, cache_modifier=".cg")
        if NORMS:
            row = n + tl.arange(0, 1)
            of_program = (split * tl.num_programs(0) + tl.program_id(0)) * N
            square += tl.load(squares_of + of_program + row, mask=row < N, other=0.0, cache_modifier=".cg")
    if NORMS:
        total *= 1.0 / tl.sqrt(square / IN + eps)
    return total


@triton.jit
def store_outputs(
    y, bias, total, n, N, rows, OUT, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr = False, PART: tl.constexpr = True
):
    """total [BLOCK_OUT] of row n to y [splits, N, OUT], in the part of this program's split; without PART to y
    [N, OUT]. ADDS: to what is there."""
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    split = tl.program_id(2).to(tl.int64) if PART else tl.zeros([], tl.int64)
    at = (split * N + n) * OUT + rows
    stored = (rows < OUT) & (n < N)
    if ADDS:
        total += tl.load(y + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=stored)


@triton.jit
def weight_rows(OUT, BLOCK_OUT: tl.constexpr, ACTIVATION: tl.constexpr):
    """Which rows of the weight this program multiplies; with a gate those of gate and up by turns, and beyond the last
    pair OUT and more."""
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if ACTIVATION != "":
        size = OUT // 2
        rows = tl.where(rows < OUT, rows // 2 + rows % 2 * size, OUT)
    return rows


@triton.jit
def biased(bias, total, rows, OUT, HAS_BIAS: tl.constexpr):
    """total [BLOCK_OUT, n] and the bias of its rows."""
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < OUT, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def store_gated(y, total, n, N, OUT, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, ACTIVATION: tl.constexpr):
    """total [BLOCK_OUT, ROWS], gate and up by turns, as act(gate) · up to y [N, OUT / 2]."""
    pairs = tl.permute(tl.reshape(total, (BLOCK_OUT // 2, 2, ROWS)), (0, 2, 1))
    gate, up = tl.split(pairs)  # [BLOCK_OUT / 2, ROWS]
    size = OUT // 2
    at = tl.program_id(0) * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
    value = activated(gate, ACTIVATION == "gelu_tanh") * up
    place = n.to(tl.int64)[None, :] * size + at[:, None]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=(at < size)[:, None] & (n < N)[None, :])


@triton.jit
def end_row(
    y,
    bias,
    total,
    n,
    N,
    rows,
    OUT,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """total [BLOCK_OUT] of row n to y, gated, added or as it is."""
    if ACTIVATION == "":
        store_outputs(y, bias, total, n, N, rows, OUT, HAS_BIAS, ADDS, False)
    else:
        total = biased(bias, total[:, None], rows, OUT, HAS_BIAS)
        store_gated(y, total, n + tl.arange(0, 1), N, OUT, 1, BLOCK_OUT, ACTIVATION)


@triton.jit(do_not_specialize=["N"])
def matvec_few_rows(
    x,
    weight,
    bias,
    y,
    N,
    OUT,
    IN,
    stride_x,
    stride_w,
    blocks_a_split,
    norm_weight,
    eps,
    parts,
    squares_of,
    arrivals,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    WHOLE: tl.constexpr,
    MERGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Program (o, c, s): BLOCK_OUT outputs of rows ROWS·c … for the s-th part of `in`.

    Outputs beyond the last are computed as the last again, which needs no mask at the loads, and not stored.
    EVEN: BLOCK_IN divides `in`. Four names and not an array, so that each stays in registers.
    """
    rows, n = weight_rows(OUT, BLOCK_OUT, ACTIVATION), tl.program_id(1) * ROWS
    tile_of = weight + tl.minimum(rows, OUT - 1).to(tl.int64)[:, None] * stride_w
    first = tl.program_id(2) * blocks_a_split
    wait_for_inputs(PDL)
    sums0 = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    sums1, sums2, sums3 = sums0, sums0, sums0
    squares0 = tl.zeros([BLOCK_IN], tl.float32)  # one axis: in the threads that load x
    squares1, squares2, squares3 = squares0, squares0, squares0
    last = tl.minimum(first + blocks_a_split, tl.cdiv(IN, BLOCK_IN))
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_IN + tl.arange(0, BLOCK_IN)
        if EVEN:
            tile = tl.load(tile_of + k[None, :])
        else:
            tile = tl.load(tile_of + k[None, :], mask=(k < IN)[None, :], other=0.0)
        tile = tile.to(tl.float32)
        if NORMS:
            of_norm = values_of(norm_weight, 0, 1, k, 0, IN, EVEN)
        row = values_of(x, n, N, k, stride_x, IN, EVEN)
        if NORMS:
            squares0 += row * row
            row *= of_norm
        sums0 += tile * row[None, :]
        if ROWS > 1:
            row = values_of(x, n + 1, N, k, stride_x, IN, EVEN)
            if NORMS:
                squares1 += row * row
                row *= of_norm
            sums1 += tile * row[None, :]
        if ROWS > 2:
            row = values_of(x, n + 2, N, k, stride_x, IN, EVEN)
            if NORMS:
                squares2 += row * row
                row *= of_norm
            sums2 += tile * row[None, :]
        if ROWS > 3:
            row = values_of(x, n + 3, N, k, stride_x, IN, EVEN)
            if NORMS:
                squares3 += row * row
                row *= of_norm
            sums3 += tile * row[None, :]
    if WHOLE:
        total0 = scaled(tl.sum(sums0, 1), squares0, IN, eps, NORMS)
        end_row(y, bias, total0, n, N, rows, OUT, HAS_BIAS, ADDS, BLOCK_OUT, ACTIVATION)
        if ROWS > 1:
            total1 = scaled(tl.sum(sums1, 1), squares1, IN, eps, NORMS)
            end_row(y, bias, total1, n + 1, N, rows, OUT, HAS_BIAS, ADDS, BLOCK_OUT, ACTIVATION)
        if ROWS > 2:
            total2 = scaled(tl.sum(sums2, 1), squares2, IN, eps, NORMS)
            end_row(y, bias, total2, n + 2, N, rows, OUT, HAS_BIAS, ADDS, BLOCK_OUT, ACTIVATION)
        if ROWS > 3:
            total3 = scaled(tl.sum(sums3, 1), squares3, IN, eps, NORMS)
            end_row(y, bias, total3, n + 3, N, rows, OUT, HAS_BIAS, ADDS, BLOCK_OUT, ACTIVATION)
    else:
        store_part(parts, squares_of, tl.sum(sums0, 1), squares0, n, N, rows, OUT, NORMS)
        if ROWS > 1:
            store_part(parts, squares_of, tl.sum(sums1, 1), squares1, n + 1, N, rows, OUT, NORMS)
        if ROWS > 2:
            store_part(parts, squares_of, tl.sum(sums2, 1), squares2, n + 2, N, rows, OUT, NORMS)
        if ROWS > 3:
            store_part(parts, squares_of, tl.sum(sums3, 1), squares3, n + 3, N, rows, OUT, NORMS)
        if MERGES:  # noqa: SIM102 - both sides of an `and` would be compiled
            if is_last(arrivals, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.num_programs(2)):
                for row in tl.static_range(ROWS):
                    total = all_parts(parts, squares_of, n + row, N, rows, OUT, IN, eps, NORMS)
                    end_row(y, bias, total, n + row, N, rows, OUT, HAS_BIAS, ADDS, BLOCK_OUT, ACTIVATION)


@triton.jit(do_not_specialize=["N"])
def matvec_many_rows(
    x,
    weight,
    bias,
    y,
    N,
    OUT,
    IN,
    stride_x,
    stride_w,
    blocks_a_split,
    norm_weight,
    eps,
    parts,
    squares_of,
    arrivals,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    WHOLE: tl.constexpr,
    MERGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """The same with all rows, padded to ROWS (16 or 32): [BLOCK_OUT, BLOCK_IN] · [BLOCK_IN, ROWS] on tensor cores."""
    rows, n = weight_rows(OUT, BLOCK_OUT, ACTIVATION), tl.arange(0, ROWS)
    tile_of = weight + tl.minimum(rows, OUT - 1).to(tl.int64)[:, None] * stride_w
    first = tl.program_id(2) * blocks_a_split
    wait_for_inputs(PDL)
    x_of = x + n.to(tl.int64)[:, None] * stride_x
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_IN], tl.float32)
    last = tl.minimum(first + blocks_a_split, tl.cdiv(IN, BLOCK_IN))
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_IN + tl.arange(0, BLOCK_IN)
        if EVEN:
            tile = tl.load(tile_of + k[None, :])
            values = tl.load(x_of + k[None, :], mask=(n < N)[:, None], other=0.0)
        else:
            tile = tl.load(tile_of + k[None, :], mask=(k < IN)[None, :], other=0.0)
            values = tl.load(x_of + k[None, :], mask=(n < N)[:, None] & (k < IN)[None, :], other=0.0)
        if NORMS:
            wide = values.to(tl.float32)
            squares += wide * wide
            of_norm = tl.load(norm_weight + k, mask=k < IN, other=0.0).to(tl.float32)
            values = (wide * of_norm[None, :]).to(tile.dtype)
        total = tl.dot(tile, tl.trans(values), total, input_precision="ieee")
    if WHOLE:
        if NORMS:
            total *= (1.0 / tl.sqrt(tl.sum(squares, 1) / IN + eps))[None, :]
        end_rows(y, bias, total, n, N, rows, OUT, HAS_BIAS, ADDS, ROWS, BLOCK_OUT, ACTIVATION)
    else:
        store_product(parts, total, n, N, rows, OUT)
        if NORMS:
            own = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
            tl.store(squares_of + own * N + n, tl.sum(squares, 1), mask=n < N)
        if MERGES:  # noqa: SIM102 - both sides of an `and` would be compiled
            if is_last(arrivals, tl.program_id(0), tl.num_programs(2)):
                total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
                square = tl.zeros([ROWS], tl.float32)
                there = (rows < OUT)[:, None] & (n < N)[None, :]
                for split in range(0, tl.num_programs(2)):
                    at = (split * N + n).to(tl.int64)[None, :] * OUT + rows[:, None]
                    total += tl.load(parts + at, mask=there, other=0.0, cache_modifier=".cg")
                    if NORMS:
                        of_program = (split * tl.num_programs(0) + tl.program_id(0)) * N
                        square += tl.load(squares_of + of_program + n, mask=n < N, other=0.0, cache_modifier=".cg")
                if NORMS:
                    total *= (1.0 / tl.sqrt(square / IN + eps))[None, :]
                end_rows(y, bias, total, n, N, rows, OUT, HAS_BIAS, ADDS, ROWS, BLOCK_OUT, ACTIVATION)


@triton.jit
def end_rows(
    y,
    bias,
    total,
    n,
    N,
    rows,
    OUT,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """total [BLOCK_OUT, ROWS] to y, gated, added or as it is."""
    total = biased(bias, total, rows, OUT, HAS_BIAS)
    if ACTIVATION == "":
        store_product(y, total, n, N, rows, OUT, ADDS, False)
    else:
        store_gated(y, total, n, N, OUT, ROWS, BLOCK_OUT, ACTIVATION)


@triton.jit
def store_product(y, total, n, N, rows, OUT, ADDS: tl.constexpr = False, PART: tl.constexpr = True):
    """total [BLOCK_OUT, ROWS] to y [splits, N, OUT], in the part of this program's split; without PART to y [N, OUT].
    ADDS: to what is there."""
    split = tl.program_id(2).to(tl.int64) if PART else tl.zeros([], tl.int64)
    at = (split * N + n)[None, :] * OUT + rows[:, None]
    stored = (rows < OUT)[:, None] & (n < N)[None, :]
    if ADDS:
        total += tl.load(y + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=stored)


@triton.jit
def scale_of(squares_of, n, N, SPLITS, PROGRAMS, IN, eps):
    """1 / rms of rows n, from squares_of [splits, programs, N], the same of every program; of a row beyond the last
    that of nothing."""
    square = tl.zeros(n.shape, tl.float32)
    for split in range(0, SPLITS):
        square += tl.load(squares_of + split * PROGRAMS * N + n, mask=n < N, other=0.0)
    return 1.0 / tl.sqrt(square / IN + eps)


@triton.jit(do_not_specialize=["SPLITS"])
def sum_of_splits(
    parts,
    bias,
    y,
    SIZE,
    OUT,
    SPLITS,
    squares_of,
    PROGRAMS,
    IN,
    eps,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """parts [splits, N · out] float32, added in the order of the splits. ADDS: and to what is in y. NORMS: the sum by
    1 / rms of its row, from squares_of [splits, programs, N]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    wait_for_inputs(PDL)
    for split in range(0, SPLITS):
        total += tl.load(parts + split * SIZE + at, mask=at < SIZE, other=0.0)
    if NORMS:
        total *= scale_of(squares_of, at // OUT, SIZE // OUT, SPLITS, PROGRAMS, IN, eps)
    if HAS_BIAS:
        total += tl.load(bias + at % OUT, mask=at < SIZE, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(y + at, mask=at < SIZE, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < SIZE)


@triton.jit(do_not_specialize=["SPLITS"])
def gated_sum_of_splits(
    parts,
    bias,
    y,
    SIZE,
    OUT,
    SPLITS,
    squares_of,
    PROGRAMS,
    IN,
    eps,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """act(gate) · up of parts [splits, N · out] float32, added in the order of the splits."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    half, there = OUT // 2, at < SIZE // 2
    first = at // half * OUT + at % half  # of the gate; up is half a row further
    gate, up = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    wait_for_inputs(PDL)
    for split in range(0, SPLITS):
        gate += tl.load(parts + split * SIZE + first, mask=there, other=0.0)
        up += tl.load(parts + split * SIZE + first + half, mask=there, other=0.0)
    if NORMS:
        scale = scale_of(squares_of, at // half, SIZE // OUT, SPLITS, PROGRAMS, IN, eps)
        gate, up = gate * scale, up * scale
    if HAS_BIAS:
        gate += tl.load(bias + at % half, mask=there, other=0.0).to(tl.float32)
        up += tl.load(bias + at % half + half, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, (activated(gate, ACTIVATION == "gelu_tanh") * up).to(y.dtype.element_ty), mask=there)


# -- how a product is cut --------------------------------------------------------------------------------------------


def on_tensor_cores(rows: int, dtype: torch.dtype, version: int) -> bool:
    return version >= 3 and rows >= (FEW_ROWS + 1 if dtype == torch.float32 else MIN_ON_TENSOR_CORES)


def padded_rows(rows: int, dtype: torch.dtype, version: int = 3) -> int:
    """What a kernel is compiled for: 1, 2 or 4 rows, and with tensor cores 16 or 32."""
    if on_tensor_cores(rows, dtype, version):
        return 16 if rows <= 16 else 32
    return 1 if version == 1 else min(FEW_ROWS, launch.next_power_of_2(max(rows, 1)))


def splits_for(programs: int, blocks: int, device: torch.device | str, least: int = 2) -> int:
    """Into how many parts `in` is divided: 1 if the programs are enough for this device, else doubled until they are,
    while a part has `least` blocks or more."""
    wanted, splits = PROGRAMS_A_MULTIPROCESSOR * multiprocessors(torch.device(device)), 1
    while programs * splits < wanted and 2 * splits <= MAX_SPLITS and blocks // (2 * splits) >= least:
        splits *= 2
    return splits


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of this device; the interpreter is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def check_rows(operation: str, x: torch.Tensor) -> int:
    launch.check_shape(operation, "x", x, (None, None))
    if x.shape[0] > MAX_ROWS:
        raise launch.Unsupported(
            f"{operation}: x has 0 to {MAX_ROWS} rows, got {x.shape[0]}; more rows are a matter of arithmetic: F.linear"
        )
    return x.shape[0]


def check_splits(operation: str, splits: int | None, version: int) -> None:
    if splits is None:
        return
    if not is_whole(splits) or not 1 <= splits <= MAX_SPLITS:
        raise launch.Unsupported(f"{operation}: splits is None or 1 to {MAX_SPLITS}, got {splits!r}")
    if splits > 1 and version < 3:
        raise launch.Unsupported(f"{operation}: version {version} does not divide `in`; take version 3 or splits=1")


def add_parts(
    parts: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = None,
    *,
    adds: bool = False,
    norm: tuple[torch.Tensor, int, int, float] | None = None,
) -> None:
    """y [N, out] = the sum of parts [splits, N, out], and the bias; with an activation y [N, out/2] is gated. adds: to
    what is in y. norm: squares [splits, programs, N] of x, programs, its width and eps, for their scale."""
    block, more = 256, {"ADDS": adds} if activation is None else {"ACTIVATION": activation}
    launch.launch(
        sum_of_splits if activation is None else gated_sum_of_splits,
        (launch.cdiv(y.numel(), block),),
        parts,
        y if bias is None else bias,
        y,
        parts[0].numel(),
        parts.shape[2],
        parts.shape[0],
        *((parts, 0, 0, 0.0) if norm is None else norm),
        HAS_BIAS=bias is not None,
        NORMS=norm is not None,
        **more,
        BLOCK=block,
        num_warps=2,
    )


# -- the operation ---------------------------------------------------------------------------------------------------


def matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    splits: int | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    arrivals: torch.Tensor | None = None,
    version: int = 3,
    config: Config | None = None,
) -> torch.Tensor:
    """x [N ≤ 32, in] · weight [out, in]ᵀ + bias [out] -> [N, out] in x's type.

    activation: "silu" or "gelu_tanh" of a gate in the first half of the weight's rows, times the second half:
    [N, out/2]; from version 2 on. residual: [N, out] of any float type, to which the product is added in place, and
    which is returned; from version 2 on. norm: weight [in] and eps of an RMSNorm of x, where `norms` says that it can
    be part of the product; x may then be of any float type, and the result is of the weight's. arrivals: int32 zeros
    (`kernels.arrivals`), which are zeros again afterwards: with them the last program adds the parts up where `in` is
    divided, and there is one launch; without, or with too few, a launch of its own adds.

    Rows of x and of the weight may lie apart; within a row numbers are neighbours. splits: into how many parts `in` is
    divided; None: what the device needs. config: blocks to use instead of the chosen ones, for tuning.
    Raises Unsupported for more rows, other types, and shapes that do not fit.
    """
    name = "matvec"
    launch.check_version(name, version, VERSIONS)
    rows = check_rows(name, x)
    launch.check_shape(name, "weight", weight, (None, x.shape[1]))
    out_features, in_features = weight.shape
    if bias is not None:
        launch.check_shape(name, "bias", bias, (out_features,))
    tensor_cores = on_tensor_cores(rows, weight.dtype, version)
    launch.check_tensors(name, multiplies=tensor_cores, contiguous=False, x=x, weight=weight, bias=bias)
    kinds = {one.dtype for one in ((x if norm is None else None), weight, bias) if one is not None}
    if len(kinds) > 1:
        raise launch.Unsupported(f"{name}: x, weight and bias must have one type, got {x.dtype} and {weight.dtype}")
    check_norm(name, x, weight.dtype, norm, version)
    check_splits(name, splits, version)
    check_activation(name, activation, out_features, version)
    check_residual(name, x, residual, out_features, activation, version)
    check_arrivals(name, arrivals, x.device)
    adds = residual is not None
    y = residual
    if y is None:
        y = weight.new_empty(rows, out_features if activation is None else out_features // 2)
    if not y.numel():
        return y
    config = config or chosen(rows, out_features, in_features, weight.dtype, x.device, version)
    block_out, block_in = config["BLOCK_OUT"], config["BLOCK_IN"]
    programs = launch.cdiv(out_features, block_out)
    strides = (x.stride(0), weight.stride(0))
    given = y if bias is None else bias  # a pointer that nothing is read from
    if version == 1:
        launch.launch(
            matvec_one_row,
            (programs, rows),
            x,
            weight,
            given,
            y,
            rows,
            out_features,
            in_features,
            *strides,
            HAS_BIAS=bias is not None,
            BLOCK_OUT=block_out,
            BLOCK_IN=block_in,
            num_warps=config.num_warps,
        )
        return y
    padded = padded_rows(rows, weight.dtype, version)
    chunks = 1 if tensor_cores else launch.cdiv(rows, padded)
    blocks = launch.cdiv(in_features, block_in)
    splits = _splits(splits, version, programs * chunks, blocks, x.device)
    whole = splits == 1
    merges = not whole and enough(arrivals, programs * chunks)
    parts, squares = y, y
    if not whole:
        parts = x.new_empty(splits, rows, out_features, dtype=torch.float32)
        squares = x.new_empty(splits, programs, rows, dtype=torch.float32) if norm is not None else parts
    norm_weight, eps = norm or (weight, 0.0)
    launch.launch(
        matvec_many_rows if tensor_cores else matvec_few_rows,
        (programs, chunks, splits),
        x,
        weight,
        given,
        y,
        rows,
        out_features,
        in_features,
        *strides,
        launch.cdiv(blocks, splits),
        norm_weight,
        eps,
        parts,
        squares,
        arrivals if merges else y,
        HAS_BIAS=bias is not None and (whole or merges),
        ADDS=adds and (whole or merges),
        NORMS=norm is not None,
        WHOLE=whole,
        MERGES=merges,
        ACTIVATION=(activation or "") if whole or merges else "",  # a part of a sum cannot be gated
        EVEN=in_features % block_in == 0,
        ROWS=padded,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    if not whole and not merges:
        of_sums = None if norm is None else (squares, programs, in_features, eps)
        add_parts(parts, y, bias, activation, adds=adds, norm=of_sums)
    return y


def _splits(splits: int | None, version: int, programs: int, blocks: int, device: torch.device) -> int:
    if version < 3:
        return 1
    return splits_for(programs, blocks, device) if splits is None else splits


def check_activation(operation: str, activation: str | None, out_features: int, version: int) -> None:
    if activation is None:
        return
    if activation not in swiglu.ACTIVATIONS:
        known = ", ".join(swiglu.ACTIVATIONS)
        raise launch.Unsupported(f"{operation}: activation is None or one of {known}; got {activation!r}")
    if out_features % 2:
        raise launch.Unsupported(
            f"{operation}: with an activation the weight is a gate's rows and as many of up's, an even number; got"
            f" {out_features}"
        )
    if version < 2:
        raise launch.Unsupported(f"{operation}: version {version} has no activation; take version 2 or 3")


def check_residual(
    operation: str,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out_features: int,
    activation: str | None,
    version: int,
) -> None:
    if residual is None:
        return
    launch.check_shape(operation, "residual", residual, (x.shape[0], out_features))
    launch.check_tensors(operation, residual=residual)
    if residual.device != x.device:
        raise launch.Unsupported(f"{operation}: the residual is on {residual.device} and x on {x.device}")
    if activation is not None:
        raise launch.Unsupported(f"{operation}: a product is gated or added to a residual; give one of the two")
    if version < 2:
        raise launch.Unsupported(f"{operation}: version {version} adds to no residual; take version 2 or 3")


def norms(rows: int, dtype: torch.dtype, version: int = 3) -> bool:
    """Whether a norm of so many rows can be part of the product. Tensor cores take x · norm weight before it is
    scaled, which may be beyond float16."""
    return version >= 2 and not (dtype == torch.float16 and on_tensor_cores(rows, dtype, version))


def check_norm(
    operation: str, x: torch.Tensor, dtype: torch.dtype, norm: tuple[torch.Tensor, float] | None, version: int
) -> None:
    """dtype: of the weight."""
    if norm is None:
        return
    weight, _ = norm
    launch.check_shape(operation, "norm weight", weight, (x.shape[1],))
    launch.check_tensors(operation, norm_weight=weight)
    if weight.device != x.device:
        raise launch.Unsupported(f"{operation}: the norm's weight is on {weight.device} and x on {x.device}")
    if not norms(len(x), dtype, version):
        raise launch.Unsupported(
            f"{operation}: version {version} does not norm {len(x)} rows for weights in"
            f" {str(dtype).removeprefix('torch.')}; use workbench.kernels.norm first"
        )


def matvec_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """x·Wᵀ + bias, gated where there is an activation; in float32, or in float64 where x is float64. With a residual
    the sum, in the residual's type; the residual stays as it was."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if norm is not None:
        normed = rms_norm_reference(x, *norm, dtype=wide)
        assert isinstance(normed, torch.Tensor), "without a residual it is one tensor"
        x = normed
    y = x.to(wide) @ weight.to(wide).T
    y = y if bias is None else y + bias.to(wide)
    if residual is not None:
        return (residual.to(wide) + y).to(residual.dtype)
    return (y if activation is None else swiglu.swiglu_reference(y, activation=activation)).to(weight.dtype)


def matvec_work(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    splits: int | None = None,
    *,
    version: int = 3,
    merges: bool = False,
) -> launch.Work:
    """Weight, x and bias read once, y written once. launches: of this version with these splits, on x's device; merges:
    with arrivals, so that no launch adds the parts up."""
    (rows, in_features), out_features = x.shape, weight.shape[0]
    read = sum(one.numel() * one.element_size() for one in (x, weight, bias) if one is not None)
    flops = 2 * rows * out_features * in_features + (0 if bias is None else rows * out_features)
    config = chosen(rows, out_features, in_features, x.dtype, x.device, version)
    count = launches_of(rows, out_features, in_features, config, splits, x.dtype, x.device, version)
    count = min(count, 1) if merges else count
    return launch.Work(read, rows * out_features * x.element_size(), flops, count)


def launches_of(
    rows: int, out_features: int, in_features: int, config: Config, splits: int | None, dtype, device, version: int
) -> int:
    """1, and one more where `in` is divided; 0 where there is nothing to do."""
    if rows == 0 or out_features == 0:
        return 0
    many = on_tensor_cores(rows, dtype, version)
    programs = launch.cdiv(out_features, config["BLOCK_OUT"])
    programs *= 1 if many else launch.cdiv(rows, padded_rows(rows, dtype, version))
    blocks = launch.cdiv(in_features, config["BLOCK_IN"])
    return 1 + (_splits(splits, version, programs, blocks, device) > 1)


# -- block sizes -----------------------------------------------------------------------------------------------------


def candidates(rows: int, in_features: int, dtype: torch.dtype, version: int = 3) -> list[Config]:
    """Configs worth timing, the default first.

    Few rows: a tile of BLOCK_OUT rows of weights in which a thread has several loads of 16 bytes. With tensor cores a
    tile is at least 16 in every direction, and STAGES of them are under way to shared memory.
    """
    numbers = 16 // dtype.itemsize  # in a load of 16 bytes
    if on_tensor_cores(rows, dtype, version):
        sizes = [(64, 16, 4, 4), (64, 8, 4, 5), (64, 32, 4, 3), (128, 16, 4, 3), (128, 8, 8, 4), (32, 32, 4, 4)]
        return [Config.of(warps, stages, BLOCK_OUT=out, BLOCK_IN=numbers * wide) for out, wide, warps, stages in sizes]
    most = max(32, launch.next_power_of_2(in_features))
    sizes = [
        (4, 128, 4, 1),
        (8, 64, 4, 1),
        (8, 128, 4, 1),
        (2, 128, 4, 1),
        (4, 256, 8, 1),
        (4, 128, 4, 3),
        (16, 32, 4, 1),
    ]
    if version == 1:
        sizes = [(4, 128, 4, 1), (16, 32, 4, 1)]
    found = [
        Config.of(warps, stages, BLOCK_OUT=out, BLOCK_IN=min(numbers * wide, most))
        for out, wide, warps, stages in sizes
    ]
    return list(dict.fromkeys(found))


def key_of(rows: int, out_features: int, in_features: int, dtype: torch.dtype, version: int) -> tuple:
    """What the best blocks depend on."""
    return (padded_rows(rows, dtype, version), out_features, in_features, str(dtype).removeprefix("torch."), version)


def chosen(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device, version: int = 3
) -> Config:
    default = candidates(rows, in_features, dtype, version)[0]
    return tuning.choose("matvec", key_of(rows, out_features, in_features, dtype, version), default, device)


def tune_matvec(
    x: torch.Tensor, weight: torch.Tensor, *, version: int = 3, budget_s: float = 5.0, repeats: int = 5
) -> Config:
    """Time the candidates for tensors like these, as the engine calls them, and keep the fastest in this device's
    table."""
    key, arrivals = key_of(x.shape[0], weight.shape[0], weight.shape[1], x.dtype, version), counters(x.device)
    return tuning.tune(
        "matvec",
        key,
        candidates(x.shape[0], x.shape[1], x.dtype, version),
        lambda config: matvec(x, weight, version=version, config=config, arrivals=arrivals),
        x.device,
        budget_s=budget_s,
        repeats=repeats,
    )


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.matvec` checks, and on a GPU times."""
    rows, out, inside = make.size(3, 1), make.size(96, 65536), make.size(128, 4096)
    x = make.normal(rows, inside)
    weight = make.normal(out, inside, scale=inside**-0.5)
    return [
        alone.Example(
            f"matvec, {rows} x [{out:,}, {inside:,}]",
            VERSIONS,
            lambda v: matvec(x, weight, version=v),
            lambda: matvec_reference(x.double(), weight.double()),
            matvec_work(x, weight),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
