"""A few rows times a weight matrix in 8 bits: y [N, out] = x · Ŵᵀ, ŵ = scale · (code + added) + zero, 1 to 32 rows.

    bytes   out · in for the codes, 2 · out · in / group for each of scale and zero; x and y as in 16 bits
    FLOPs   2 · N · out · in, and a conversion for each code

Half the bytes of 16 bits, so twice the weights a second: 4.8 · 10¹² on an H200, which leaves some six instructions
each. Codes are multiplied as they are; scale and zero wait for the sum over their group:

    y = Σ_g  scale_g · Σ_{k in g} code_k·x_k  +  (zero_g + added · scale_g) · Σ_{k in g} x_k

  version  what it does                                                        what it changes
  1        each code is converted, scaled and multiplied                       the formula, as it stands
  2        scale and zero are applied to sums; up to 4 rows at a time          from 4 operations a code to 2; codes are
                                                                               read once for 4 rows
  3        tensor cores, the rows padded to 16; `in` divided among programs    codes are read once for 32 rows
  4        the same with codes interleaved as tensor cores take them           from 8 instructions a code to 4: no code
                                                                               goes through shared memory as a number

A code of 8 bits is exact in float16 and bfloat16, and so are its products with x in float32: nothing is rounded but
sums. In float32 there are no tensor cores, and up to 4 rows go through version 2.

Versions 1 to 3 take codes [out, in] int8 or uint8 as `workbench.quantization` keeps them. Version 4 takes words
[out, 16 · ⌈in/64⌉] int32 (`interleaved`, made once; codes of 0 to 255 go in less 128, which `added` gives back): byte
2·i + h of word 4·l + j (l, j in 0 … 3, i, h in 0, 1) is the code of input 16·j + 8·i + 2·l + h of a unit of 64. It is
the layout of `matvec_int4` with bytes for nibbles; why is said there. Groups of any multiple of 32, or the whole row;
groups below a step (128, in version 4: 64) take several times the products. Scales and zeros in any float type, or both
in one word (`packed`, as a prepared model has them).
Reference: Dettmers et al., arXiv 2208.07339 §2.1 (a scale a row); Xiao et al., arXiv 2211.10438 (weights of 8 bits).
Instructions were counted in the code compiled for compute capability 9.0; no time has been measured on a GPU yet.

Tiles of the weight [out, in] in codes, with scale and zero [out, groups] beside them:

                 in:  BLOCK_IN | BLOCK_IN | BLOCK_IN | BLOCK_IN
    out: BLOCK_OUT  |    x          x     |    x          x     |  version 1: program (o, n), row n of x, the whole line
         BLOCK_OUT  |    x          x     |    x          x     |  version 2: program (o, n), up to 4 rows of x
         BLOCK_OUT  |    x          x     |    x          x     |  version 3 and 4: program (o, 0, split), all rows of x
                    |       split 0       |       split 1       |
    each reads its tiles of the weight once, with the same columns of x, and writes y [rows, BLOCK_OUT]; of a split:
    its part of it; parts are added in the order of splits
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from workbench.kernels import alone, launch, tuning
from workbench.kernels.arrivals import check_arrivals, counters, enough
from workbench.kernels.matvec import add_parts, check_rows, check_splits, row_of, store_outputs
from workbench.kernels.matvec_codes import (
    UNIT,
    check_group,
    check_scales,
    end_few_rows,
    end_product,
    key_of,
    on_tensor_cores,
    order_of_rows,
    padded,
    splits_of,
    step_and_offset,
    sums_of_inputs,
    unpacked,
)
from workbench.kernels.tuning import Config

VERSIONS: dict[int, str] = {
    1: "each code converted, scaled, multiplied",
    2: "scaled after the sums, four rows",
    3: "tensor cores, and `in` divided among programs",
    4: "codes interleaved as tensor cores take them",
}
INTERLEAVED_UNIT = 64  # inputs that are interleaved together, and a step of version 4


def interleaved(codes: torch.Tensor) -> torch.Tensor:
    """codes [out, in] int8 -> words [out, 16 · ⌈in/64⌉] int32. A last unit is filled up with zeros."""
    launch.check_shape("matvec_int8", "codes", codes, (None, None))
    launch.check_tensors("matvec_int8", dtypes=(torch.int8,), contiguous=False, codes=codes)
    whole = F.pad(codes, (0, -codes.shape[1] % INTERLEAVED_UNIT))
    parts = whole.view(len(codes), -1, 4, 2, 4, 2).permute(0, 1, 4, 2, 3, 5)  # [out, units, l, j, i, h]
    return parts.reshape(len(codes), -1).view(torch.int32)


def deinterleaved(words: torch.Tensor, in_features: int) -> torch.Tensor:
    """The inverse: codes [out, in] int8."""
    parts = words.view(torch.int8).view(len(words), -1, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5)
    return parts.reshape(len(words), -1)[:, :in_features]


@triton.jit(do_not_specialize=["N"])
def matvec_int8_one_row(
    x,
    codes,
    scale,
    zero,
    y,
    N,
    OUT,
    IN,
    GROUP,
    GROUPS,
    stride_x,
    stride_row,
    stride_group,
    added,
    HAS_ZERO: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Version 1: program (o, n) makes BLOCK_OUT outputs of row n."""
    rows, n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(1).to(tl.int64)
    safe = tl.minimum(rows, OUT - 1).to(tl.int64)[:, None]
    total = tl.zeros([BLOCK_OUT], tl.float32)
    for start in range(0, IN, UNITS * 128):
        k = start + tl.arange(0, UNITS * 128)
        tile = tl.load(codes + safe * IN + k[None, :], mask=(k < IN)[None, :], other=0).to(tl.float32)
        group = tl.minimum(k // GROUP, GROUPS - 1)[None, :]
        step, offset = step_and_offset(scale, zero, safe, group, stride_row, stride_group, -added, HAS_ZERO)
        value = tl.load(x + n * stride_x + k, mask=k < IN, other=0.0).to(tl.float32)[None, :]
        total += tl.sum((step * tile + offset) * value, 1)
    tl.store(y + n * OUT + rows, total.to(y.dtype.element_ty), mask=rows < OUT)


@triton.jit
def scaled_sums(tile, value, step, offset, BLOCK_OUT: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """scale · Σ code·x + offset · Σ x of each part, [BLOCK_OUT, PARTS]; tile [BLOCK_OUT, PARTS · PART], value [1,
    …]."""
    sums = tl.sum(tl.reshape(tile * value, (BLOCK_OUT, PARTS, PART)), 2)
    return step * sums + offset * tl.sum(tl.reshape(value, (1, PARTS, PART)), 2)


@triton.jit(do_not_specialize=["N"])
def matvec_int8_few_rows(
    x,
    codes,
    scale,
    zero,
    y,
    N,
    OUT,
    IN,
    GROUP,
    GROUPS,
    stride_x,
    stride_row,
    stride_group,
    added,
    blocks_a_split,
    parts,
    arrivals,
    HAS_ZERO: tl.constexpr,
    MERGES: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (o, c, s): BLOCK_OUT outputs of rows ROWS·c … for the s-th part of `in`; a tile is UNITS · 128 inputs, in
    parts of one group each."""
    PARTS: tl.constexpr = UNITS * 128 // PART
    rows, n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(1) * ROWS
    safe = tl.minimum(rows, OUT - 1).to(tl.int64)[:, None]
    total0 = tl.zeros([BLOCK_OUT, PARTS], tl.float32)
    total1, total2, total3 = total0, total0, total0
    first = tl.program_id(2) * blocks_a_split
    last = tl.minimum(first + blocks_a_split, tl.cdiv(IN, UNITS * 128))
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * (UNITS * 128) + tl.arange(0, UNITS * 128)
        if EVEN:
            tile = tl.load(codes + safe * IN + k[None, :])
        else:
            tile = tl.load(codes + safe * IN + k[None, :], mask=(k < IN)[None, :], other=0)
        tile = tile.to(tl.float32)
        group = tl.minimum((block * PARTS + tl.arange(0, PARTS)) * PART // GROUP, GROUPS - 1)[None, :]
        step, offset = step_and_offset(scale, zero, safe, group, stride_row, stride_group, -added, HAS_ZERO)
        value = row_of(x, n, N, k, stride_x, IN, EVEN)
        total0 += scaled_sums(tile, value, step, offset, BLOCK_OUT, PARTS, PART)
        if ROWS > 1:
            value = row_of(x, n + 1, N, k, stride_x, IN, EVEN)
            total1 += scaled_sums(tile, value, step, offset, BLOCK_OUT, PARTS, PART)
        if ROWS > 2:
            value = row_of(x, n + 2, N, k, stride_x, IN, EVEN)
            total2 += scaled_sums(tile, value, step, offset, BLOCK_OUT, PARTS, PART)
        if ROWS > 3:
            value = row_of(x, n + 3, N, k, stride_x, IN, EVEN)
            total3 += scaled_sums(tile, value, step, offset, BLOCK_OUT, PARTS, PART)
    own = parts if MERGES else y
    store_outputs(own, own, tl.sum(total0, 1), n, N, rows, OUT, False)
    if ROWS > 1:
        store_outputs(own, own, tl.sum(total1, 1), n + 1, N, rows, OUT, False)
    if ROWS > 2:
        store_outputs(own, own, tl.sum(total2, 1), n + 2, N, rows, OUT, False)
    if ROWS > 3:
        store_outputs(own, own, tl.sum(total3, 1), n + 3, N, rows, OUT, False)
    end_few_rows(y, parts, arrivals, n, N, rows, OUT, ROWS, MERGES)


@triton.jit(do_not_specialize=["N"])
def matvec_int8_many_rows(
    x,
    codes,
    scale,
    zero,
    y,
    N,
    OUT,
    IN,
    GROUP,
    GROUPS,
    stride_x,
    stride_row,
    stride_group,
    added,
    blocks_a_split,
    parts,
    arrivals,
    HAS_ZERO: tl.constexpr,
    MERGES: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Version 3: all rows, padded to ROWS, on tensor cores; 128 inputs a step, in parts of one group each."""
    rows, n, k = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, ROWS), tl.arange(0, 128)
    safe = tl.minimum(rows, OUT - 1).to(tl.int64)
    x_of = x + n.to(tl.int64)[:, None] * stride_x
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    ones = tl.full([BLOCK_OUT, 128], 1.0, x.dtype.element_ty)
    first = tl.program_id(2) * blocks_a_split
    last = tl.minimum(first + blocks_a_split, tl.cdiv(IN, 128))
    for unit in tl.range(first, last, num_stages=STAGES):
        at = unit * 128 + k
        if EVEN:
            tile = tl.load(codes + safe[:, None] * IN + at[None, :])
            values = tl.load(x_of + at[None, :], mask=(n < N)[:, None], other=0.0)
        else:
            tile = tl.load(codes + safe[:, None] * IN + at[None, :], mask=(at < IN)[None, :], other=0)
            values = tl.load(x_of + at[None, :], mask=(n < N)[:, None] & (at < IN)[None, :], other=0.0)
        numbers = tile.to(values.dtype)
        for part in tl.static_range(128 // PART):
            if PART == 128:
                inside = values
            else:
                inside = tl.where((k // PART == part)[None, :], values, 0.0).to(values.dtype)
            sums = tl.dot(numbers, tl.trans(inside), input_precision="ieee")
            group = tl.minimum((unit * 128 + part * PART) // GROUP, GROUPS - 1)
            step, offset = step_and_offset(scale, zero, safe, group, stride_row, stride_group, -added, HAS_ZERO)
            total += step[:, None] * sums + offset[:, None] * sums_of_inputs(inside, ones)
    end_product(y, parts, arrivals, total, n, N, rows, OUT, MERGES)


@triton.jit(do_not_specialize=["N"])
def matvec_int8_interleaved(
    x,
    words,
    scale,
    zero,
    y,
    N,
    OUT,
    IN,
    GROUP,
    GROUPS,
    stride_x,
    stride_row,
    stride_group,
    added,
    blocks_a_split,
    parts,
    arrivals,
    HAS_ZERO: tl.constexpr,
    MERGES: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Version 4: 64 inputs a step, four codes a word."""
    m, n, k = tl.arange(0, BLOCK_OUT), tl.arange(0, ROWS), tl.arange(0, 64)
    first_row, units = tl.program_id(0) * BLOCK_OUT, tl.cdiv(IN, 64)
    loaded = tl.minimum(first_row + m, OUT - 1).to(tl.int64)
    rows = first_row + order_of_rows(m, WARPS)
    safe = tl.minimum(rows, OUT - 1).to(tl.int64)
    tile_of = words + loaded[:, None] * (units * 16) + tl.arange(0, 16)[None, :]
    x_of = x + n.to(tl.int64)[:, None] * stride_x
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    ones = tl.full([BLOCK_OUT, 64], 1.0, x.dtype.element_ty)
    first = tl.program_id(2) * blocks_a_split
    last = tl.minimum(first + blocks_a_split, units)
    for unit in tl.range(first, last, num_stages=STAGES):
        tile = tl.load(tile_of + unit * 16)
        at = unit * 64 + k
        there = (n < N)[:, None] if EVEN else (n < N)[:, None] & (at < IN)[None, :]
        values = tl.load(x_of + at[None, :], mask=there, other=0.0)
        numbers = numbers_of_bytes(tile, x.dtype.element_ty, BLOCK_OUT, WARPS)
        for part in tl.static_range(64 // PART):
            if PART == 64:
                inside = values
            else:
                inside = tl.where((k // PART == part)[None, :], values, 0.0).to(values.dtype)
            sums = tl.dot(numbers, tl.trans(inside), input_precision="ieee")
            group = tl.minimum((unit * 64 + part * PART) // GROUP, GROUPS - 1)
            step, offset = step_and_offset(scale, zero, safe, group, stride_row, stride_group, -added, HAS_ZERO)
            total += step[:, None] * sums + offset[:, None] * sums_of_inputs(inside, ones)
    end_product(y, parts, arrivals, total, n, N, rows, OUT, MERGES)


@triton.jit
def numbers_of_bytes(tile, dtype: tl.constexpr, BLOCK_OUT: tl.constexpr, WARPS: tl.constexpr):
    """Words [BLOCK_OUT, 16] as numbers [BLOCK_OUT, 64], rows in `order_of_rows`. All that moves is the names."""
    tile = tl.reshape(tile, (BLOCK_OUT // (16 * WARPS), 2, WARPS, 8, 4, 4))  # again, half, warp, row, l, j
    tile = tl.reshape(tl.permute(tile, (0, 2, 1, 3, 5, 4)), (BLOCK_OUT, 4, 4))  # m, j, l
    low = tl.join(byte_of(tile, 0, dtype), byte_of(tile, 1, dtype))
    high = tl.join(byte_of(tile, 2, dtype), byte_of(tile, 3, dtype))
    both = tl.permute(tl.join(low, high), (0, 1, 4, 2, 3))  # m, j, i, l, h
    return tl.reshape(both, (BLOCK_OUT, 64))


@triton.jit
def byte_of(tile, PLACE: tl.constexpr, dtype: tl.constexpr):
    """The signed byte at PLACE of each word."""
    return ((tile << (24 - 8 * PLACE)) >> 24).to(tl.float32).to(dtype)


# -- the operation ---------------------------------------------------------------------------------------------------


def matvec_int8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group: int | None = None,
    added: int = 0,
    splits: int | None = None,
    arrivals: torch.Tensor | None = None,
    version: int | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """x [N ≤ 32, in] · Ŵᵀ -> [N, out] in x's type, with ŵ = scale · (code + added) + zero.

    codes [out, in] int8 or uint8, or for version 4 `interleaved` words [out, 16 · ⌈in/64⌉] int32; version None: the
    latest for them. scale, zero [out, in/group], best laid out group after group
    (`scale.T.contiguous().T`). group: inputs that share a scale, None for the whole row. added: what symmetric codes of
    fewer bits are stored above, negative. scale may be words of `matvec_codes.packed`, which have zero in them. splits,
    arrivals, config: as of `matvec`.
    Raises Unsupported for more rows, other types and groups, and shapes that do not fit.
    """
    name = "matvec_int8"
    version = version_for(codes, version)
    rows, in_features = check_rows(name, x), x.shape[1]
    group = check_group(name, group, in_features)
    width = in_features if version < 4 else 16 * launch.cdiv(in_features, INTERLEAVED_UNIT)
    launch.check_shape(name, "codes", codes, (None, width))
    out_features = len(codes)
    _check(name, x, codes, scale, zero, group, added)
    tensor_cores = version == 4 or on_tensor_cores(rows, x.dtype, version)
    launch.check_tensors(name, multiplies=tensor_cores, contiguous=False, x=x)
    check_splits(name, splits, version)
    check_arrivals(name, arrivals, x.device)
    y = x.new_empty(rows, out_features)
    if not y.numel():
        return y
    config = config or chosen(rows, out_features, in_features, group, x.dtype, x.device, version)
    programs, chunks, blocks = _cut(rows, out_features, in_features, config, x.dtype, version)
    arguments = (
        x,
        codes,
        scale,
        scale if zero is None else zero,
        y,
        rows,
        out_features,
        in_features,
        group,
        scale.shape[1],
        x.stride(0),
        *scale.stride(),
        float(added),
    )
    shared = {
        "HAS_ZERO": zero is not None,
        "BLOCK_OUT": config["BLOCK_OUT"],
        "UNITS": config["UNITS"],
        "num_warps": config.num_warps,
    }
    if version == 1:
        launch.launch(matvec_int8_one_row, (programs, rows), *arguments, **shared)
        return y
    splits = splits_of(splits, version, programs * chunks, blocks, x.device)
    parts = y if splits == 1 else x.new_empty(splits, rows, out_features, dtype=torch.float32)
    merges = splits > 1 and enough(arrivals, programs * chunks)
    to, ends = (y, (parts, arrivals)) if merges else (parts, (parts, parts))
    unit = INTERLEAVED_UNIT if version == 4 else UNIT
    shared |= {
        "MERGES": merges,
        "EVEN": in_features % (unit * config["UNITS"]) == 0,
        "ROWS": padded(rows, x.dtype, version),
        "PART": math.gcd(group, unit) if scale.shape[1] > 1 else unit,
        "STAGES": config.num_stages,
    }
    kernel = matvec_int8_many_rows if tensor_cores else matvec_int8_few_rows
    if version == 4:
        kernel, shared["WARPS"] = matvec_int8_interleaved, config.num_warps
    launch.launch(
        kernel,
        (programs, chunks, splits),
        *arguments[:4],
        to,
        *arguments[5:],
        launch.cdiv(blocks, splits),
        *ends,
        **shared,
    )
    if splits > 1 and not merges:
        add_parts(parts, y, None)
    return y


def version_for(codes: torch.Tensor, version: int | None) -> int:
    """The version, or the latest for these codes. Raises Unsupported for one that does not take them."""
    latest = 4 if codes.dtype == torch.int32 else 3
    version = launch.check_version("matvec_int8", latest if version is None else version, VERSIONS)
    if (version == 4) != (latest == 4):
        raise launch.Unsupported(
            f"matvec_int8: version {version} takes"
            f" {'interleaved words, int32' if version == 4 else 'codes, int8 or uint8'}; got"
            f" {str(codes.dtype).removeprefix('torch.')}"
        )
    return version


def _check(name: str, x, codes, scale: torch.Tensor, zero: torch.Tensor | None, group: int, added: int) -> None:
    launch.check_tensors(name, dtypes=(torch.int8, torch.uint8, torch.int32), codes=codes)
    check_scales(name, x, len(codes), scale, zero, group, added, most=255)


def _cut(
    rows: int, out_features: int, in_features: int, config: Config, dtype: torch.dtype, version: int
) -> tuple[int, int, int]:
    """(blocks of outputs, chunks of rows, steps over `in`)."""
    programs = launch.cdiv(out_features, config["BLOCK_OUT"])
    if version == 4:
        return programs, 1, launch.cdiv(in_features, INTERLEAVED_UNIT)
    chunks = 1 if on_tensor_cores(rows, dtype, version) else launch.cdiv(rows, padded(rows, dtype, version))
    return programs, chunks, launch.cdiv(in_features, UNIT * config["UNITS"])


def matvec_int8_reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group: int | None = None,
    added: int = 0,
) -> torch.Tensor:
    """The numbers written down and multiplied, in float32, or in float64 where x is float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    group = x.shape[1] if group is None else group
    codes = deinterleaved(codes, x.shape[1]) if codes.dtype == torch.int32 else codes
    scale, zero = unpacked(scale, zero)
    numbers = (codes.to(wide).unflatten(1, (-1, group)) + added) * scale.to(wide)[..., None]
    if zero is not None:
        numbers = numbers + zero.to(wide)[..., None]
    return (x.to(wide) @ numbers.flatten(1).T).to(x.dtype)


def matvec_int8_work(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group: int | None = None,
    splits: int | None = None,
    merges: bool = False,
    version: int | None = None,
) -> launch.Work:
    """Codes, scales, zeros and x read once, y written once; 2 FLOPs for each weight and row.
    merges: with arrivals, so that no launch adds the parts up."""
    version = version_for(codes, version)
    (rows, in_features), out_features = x.shape, len(codes)
    read = sum(one.numel() * one.element_size() for one in (x, codes, scale, zero) if one is not None)
    config = chosen(rows, out_features, in_features, group or in_features, x.dtype, x.device, version)
    programs, chunks, blocks = _cut(rows, out_features, in_features, config, x.dtype, version)
    divided = splits_of(splits, version, programs * chunks, blocks, x.device) > 1
    count = 1 + (divided and not merges) if rows and out_features else 0
    return launch.Work(read, rows * out_features * x.element_size(), 2 * rows * out_features * in_features, count)


# -- block sizes -----------------------------------------------------------------------------------------------------


def candidates(rows: int, in_features: int, dtype: torch.dtype, version: int = 3) -> list[Config]:
    """Configs worth timing, the default first. UNITS: steps of 128 inputs in a tile."""
    if version == 4:
        sizes = [(128, 4, 4), (64, 4, 4), (128, 4, 6), (64, 4, 6), (128, 8, 4), (256, 8, 4), (128, 4, 1)]
        return [Config.of(warps, stages, BLOCK_OUT=out, UNITS=1) for out, warps, stages in sizes]
    if on_tensor_cores(rows, dtype, version):
        sizes = [(64, 4, 4), (128, 4, 4), (64, 4, 6), (128, 8, 4), (32, 2, 4), (64, 4, 3)]
        return [Config.of(warps, stages, BLOCK_OUT=out, UNITS=1) for out, warps, stages in sizes]
    max_units = launch.next_power_of_2(launch.cdiv(in_features, UNIT))
    wide = [(16, 4, 4, 1), (8, 4, 4, 1), (32, 2, 4, 1), (8, 8, 4, 1), (16, 4, 4, 3)]
    found = [Config.of(warps, stages, BLOCK_OUT=out, UNITS=min(units, max_units)) for out, units, warps, stages in wide]
    return list(dict.fromkeys(found))


def chosen(
    rows: int,
    out_features: int,
    in_features: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    version: int = 3,
) -> Config:
    key = key_of(rows, out_features, in_features, group, dtype, version)
    return tuning.choose("matvec_int8", key, candidates(rows, in_features, dtype, version)[0], device)


def tune_matvec_int8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group: int | None = None,
    added: int = 0,
    version: int | None = None,
    budget_s: float = 5.0,
    repeats: int = 5,
) -> Config:
    """Time the candidates for tensors like these and keep the fastest in this device's table."""
    version = version_for(codes, version)
    given: dict[str, Any] = {"group": group, "added": added, "version": version, "arrivals": counters(x.device)}
    multiply = functools.partial(matvec_int8, x, codes, scale, zero, **given)
    key = key_of(x.shape[0], len(codes), x.shape[1], group or x.shape[1], x.dtype, version)
    return tuning.tune(
        "matvec_int8",
        key,
        candidates(x.shape[0], x.shape[1], x.dtype, version),
        lambda config: multiply(config=config),
        x.device,
        budget_s=budget_s,
        repeats=repeats,
    )


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.matvec_int8` checks, and on a GPU times."""
    rows, out, inside = make.size(3, 1), make.size(96, 65536), make.size(128, 4096)
    x = make.normal(rows, inside)
    codes = make.whole(-127, 128, out, inside, dtype=torch.int8)
    scale = make.normal(out, 1, dtype=torch.float16, scale=0.01 * inside**-0.5)
    words = interleaved(codes)
    return [
        alone.Example(
            f"matvec_int8, {rows} x [{out:,}, {inside:,}]",
            VERSIONS,
            lambda v: matvec_int8(x, words if v == 4 else codes, scale, version=v),
            lambda: matvec_int8_reference(x.double(), codes, scale.double()),
            matvec_int8_work(x, codes, scale),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
