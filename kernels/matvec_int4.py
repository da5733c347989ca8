"""A few rows times a weight matrix in 4 bits: y [N, out] = x · Ŵᵀ, ŵ = scale · (code + added) + zero, 1 to 32 rows.

    bytes   out · in / 2 for the codes, 2 · out · in / group for each of scale and zero; x and y as in 16 bits
    FLOPs   2 · N · out · in, and before each of them a nibble becomes a number

A quarter of the bytes, so four times the weights a second: at 4.8 TB/s an H200 gets 9.6 · 10¹² codes a second, and
starts some 30 · 10¹² instructions (132 multiprocessors · 128 lanes · 1.75 GHz). Three for each code is all there is.
That is why codes are multiplied as they are, and scale and zero wait for the sum over their group:

    y = Σ_g  scale_g · Σ_{k in g} code_k·x_k  +  (zero_g + added · scale_g) · Σ_{k in g} x_k

and why the layout below lets a whole word of 8 codes be taken apart by masks.

    version  what it does                                                         what it changes
  1        a nibble is shifted out, converted, scaled and multiplied            the formula, as it stands
  2        scale and zero are applied to sums; up to 4 rows at a time;          from 8 instructions a code to about 3½
           for x of 16 bits a nibble becomes a number by its place in a float
  3        tensor cores, the rows padded to 16; two nibbles become two numbers  about 2½ instructions a code, for 1 row
           by one instruction; `in` divided among programs                      as for 16; codes read once for 32 rows

Version 2: a nibble in the upper bits of a float's fraction, with the bits of 1.0 beside it, is the number 1 + code/16,
made by one instruction. One nibble lower it is 1 + code/256, and three of a word's nibbles share a shift. x is
multiplied by 16, 256 or 4096 instead, and the ones are taken away again with the group's sum, in float32: that adds at
most 4096 times its rounding of 2⁻²⁴, less than x's own in float16. Float32 x goes through plain conversions.

Version 3: 0x4300 over a nibble is 128 + code in bfloat16, 0x6400 is 1024 + code in float16, and two such numbers are
one register. Products of them with x are exact in float32; the 128 goes to the offset. Σ x of a group is a product
too, of ones with x: it comes out in the thread that needs it, where a sum over k would have threads wait for each
other. In float32 there are no tensor cores, and up to 4 rows go through version 2.

Layout (`interleaved`, made once when a model is prepared). A unit of 128 inputs is 16 words of 32 bits. The nibble at
bits 4·i + 16·h of word 4·l + j (i, l, j in 0 … 3, h in 0, 1) is the code of input 32·j + 8·i + 2·l + h of the unit. A
thread loads the four words of one l, 16 bytes. Taken apart by i and h they are what tensor cores expect of lane l in a
product over k = 32·j + 8·i + 2·l + h: pairs 2·l, 2·l + 1 of eight, eight after eight. So the numbers never leave their
thread, x lies in its own order, and 32 neighbouring inputs, the smallest group, are one j. The same for outputs:
version 3 takes the rows of a tile in the order in which they lie in threads (`order_of_rows`).

Reference: Lin et al., AWQ, arXiv 2306.00978 §4.2; Frantar et al., MARLIN, arXiv 2408.11743 §3.4 (codes lie as tensor
cores take them); Kim et al., arXiv 2211.10017 §3.2 (numbers by masks). Groups of any multiple of 32, or the whole row;
groups below 128 take 2 or 4 times the products. Scales and zeros in any float type, or both in one word (`packed`, as a
prepared model has them): then a step of version 3 has 2 barriers and waits for no load, else 4, and for 2 loads.
Instructions were counted in the code compiled for compute capability 9.0; no time has been measured on a GPU yet.

Tiles of the weight [out, in] in words of 8 codes, with scale and zero [out, groups] beside them:

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
import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from workbench.kernels import alone, launch, tuning
from workbench.kernels.arrivals import check_arrivals, counters, enough
from workbench.kernels.matvec import add_parts, check_rows, check_splits, store_outputs
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
    1: "each nibble converted, scaled, multiplied",
    2: "scaled after the sums, nibbles by masks, four rows",
    3: "tensor cores, two nibbles by one mask, and `in` divided among programs",
}


# -- layout ----------------------------------------------------------------------------------------------------------


def interleaved(codes: torch.Tensor) -> torch.Tensor:
    """codes [out, in] of 0 to 15, a byte each -> words [out, 16 · ⌈in/128⌉] int32. A last unit is filled up with
    zeros."""
    launch.check_shape("matvec_int4", "codes", codes, (None, None))
    whole = F.pad(codes.to(torch.int32) & 15, (0, -codes.shape[1] % UNIT))
    parts = whole.view(len(codes), -1, 4, 4, 4, 2)  # [out, units, j, i, l, h]
    words = torch.zeros_like(parts[:, :, :, 0, :, 0])  # [out, units, j, l]
    for i in range(4):
        for h in range(2):
            words |= parts[:, :, :, i, :, h] << (4 * i + 16 * h)
    return words.transpose(2, 3).reshape(len(codes), -1)


def deinterleaved(words: torch.Tensor, in_features: int) -> torch.Tensor:
    """The inverse: codes [out, in] uint8."""
    parts = words.view(len(words), -1, 4, 4).transpose(2, 3)  # [out, units, j, l]
    pairs = [torch.stack([(parts >> (4 * i + 16 * h)) & 15 for h in range(2)], -1) for i in range(4)]
    codes = torch.stack(pairs, 3)  # [out, units, j, i, l, h]
    return codes.reshape(len(words), -1)[:, :in_features].to(torch.uint8)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["N"])
def matvec_int4_one_row(
    x,
    words,
    scale,
    zero,
    y,
    N,
    OUT,
    IN,
    WORDS,
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
    """Version 1: program (o, n) makes BLOCK_OUT outputs of row n, in a tile of words nibble after nibble."""
    rows, n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(1).to(tl.int64)
    safe = tl.minimum(rows, OUT - 1).to(tl.int64)[:, None]
    sums = tl.zeros([BLOCK_OUT, UNITS * 16], tl.float32)
    for start in range(0, WORDS, UNITS * 16):
        at = start + tl.arange(0, UNITS * 16)
        tile = tl.load(words + safe * WORDS + at[None, :], mask=(at < WORDS)[None, :], other=0)
        first_input = at // 16 * 128 + at % 4 * 32 + at % 16 // 4 * 2
        group = tl.minimum(first_input // GROUP, GROUPS - 1)[None, :]
        step, offset = step_and_offset(scale, zero, safe, group, stride_row, stride_group, -added, HAS_ZERO)
        for i in tl.static_range(4):
            for h in tl.static_range(2):
                code = ((tile >> (4 * i + 16 * h)) & 15).to(tl.float32)
                k = first_input + 8 * i + h
                value = tl.load(x + n * stride_x + k, mask=k < IN, other=0.0).to(tl.float32)[None, :]
                sums += (step * code + offset) * value
    tl.store(y + n * OUT + rows, tl.sum(sums, 1).to(y.dtype.element_ty), mask=rows < OUT)


@triton.jit
def pair_of(x, n, N, k, stride_x, IN, PAIRED: tl.constexpr, EVEN: tl.constexpr):
    """x[n, k] and x[n, k + 1] in float32, [1, len(k)] each. PAIRED: both in one load of 32 bits."""
    start = tl.minimum(n, N - 1).to(tl.int64) * stride_x
    if PAIRED:
        at = x.to(tl.pointer_type(tl.int32)) + start // 2 + k // 2
        both = tl.load(at) if EVEN else tl.load(at, mask=k < IN, other=0)
        first = (both & 0xFFFF).to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        second = ((both >> 16) & 0xFFFF).to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        first = tl.load(x + start + k, mask=k < IN, other=0.0).to(tl.float32)
        second = tl.load(x + start + k + 1, mask=k + 1 < IN, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


@triton.jit
def number_of(tile, one, PLACE: tl.constexpr, BY_MASK: tl.constexpr):
    """The nibble at bits PLACE … of each word in float32; BY_MASK: as 1 + code / weight_of(PLACE). one: the bits of
    1.0, an argument of the kernel, so that mask and bits are one instruction (with two constants they are two)."""
    if BY_MASK:
        # nibbles 5, 6, 7 by one shift, 2, 3, 4 by another, 0 and 1 by a third: to bits 19, 15 or 11 of the float
        if PLACE >= 20:
            moved, to = tile >> 9, PLACE - 9
        elif PLACE >= 8:
            moved, to = tile << 3, PLACE + 3
        else:
            moved, to = tile << 15, PLACE + 15
        return ((moved & (15 << to)) | one).to(tl.float32, bitcast=True)
    else:
        return ((tile >> PLACE) & 15).to(tl.float32)


@triton.jit
def weight_of(PLACE: tl.constexpr, BY_MASK: tl.constexpr):
    """By what x is multiplied to make up for the nibble's place in the fraction."""
    if BY_MASK:
        if PLACE >= 20:
            return 2.0 ** (32 - PLACE)
        elif PLACE >= 8:
            return 2.0 ** (20 - PLACE)
        else:
            return 2.0 ** (8 - PLACE)
    else:
        return 1.0


@triton.jit
def sums_of_32(sums, BLOCK_OUT: tl.constexpr, UNITS: tl.constexpr):
    """[BLOCK_OUT, UNITS · 16 words] -> [BLOCK_OUT, UNITS · 4]: over the words of one j, which are 32 inputs."""
    return tl.reshape(tl.sum(tl.reshape(sums, (BLOCK_OUT, UNITS, 4, 4)), 2), (BLOCK_OUT, UNITS * 4))


@triton.jit(do_not_specialize=["N"])
def matvec_int4_few_rows(
    x,
    words,
    scale,
    zero,
    y,
    N,
    OUT,
    IN,
    WORDS,
    GROUP,
    GROUPS,
    stride_x,
    stride_row,
    stride_group,
    added,
    base,
    blocks_a_split,
    parts,
    arrivals,
    HAS_ZERO: tl.constexpr,
    MERGES: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (o, c, s): BLOCK_OUT outputs of rows ROWS·c … for the s-th part of `in`; a tile is UNITS · 128 inputs.

    EVEN: tiles divide `in`. PAIRED: x has 16 bits, and pairs of it are loaded as one word.
    """
    rows, n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(1) * ROWS
    safe = tl.minimum(rows, OUT - 1).to(tl.int64)[:, None]
    in_tile, part = tl.arange(0, UNITS * 16), tl.arange(0, UNITS * 4)
    total0 = tl.zeros([BLOCK_OUT, UNITS * 4], tl.float32)
    total1, total2, total3 = total0, total0, total0
    first = tl.program_id(2) * blocks_a_split
    last = tl.minimum(first + blocks_a_split, tl.cdiv(WORDS, UNITS * 16))
    for block in tl.range(first, last, num_stages=STAGES):
        at = block * (UNITS * 16) + in_tile
        if EVEN:
            tile = tl.load(words + safe * WORDS + at[None, :])
        else:
            tile = tl.load(words + safe * WORDS + at[None, :], mask=(at < WORDS)[None, :], other=0)
        group = tl.minimum((block * (UNITS * 4) + part) * 32 // GROUP, GROUPS - 1)[None, :]
        step, offset = step_and_offset(scale, zero, safe, group, stride_row, stride_group, -added, HAS_ZERO)
        k = at // 16 * 128 + at % 4 * 32 + at % 16 // 4 * 2
        sums0 = tl.zeros([BLOCK_OUT, UNITS * 16], tl.float32)
        ones0, all0 = tl.zeros([1, UNITS * 16], tl.float32), tl.zeros([1, UNITS * 16], tl.float32)
        sums1, sums2, sums3, ones1, ones2, ones3, all1, all2, all3 = (
            sums0,
            sums0,
            sums0,
            ones0,
            ones0,
            ones0,
            all0,
            all0,
            all0,
        )
        for i in tl.static_range(4):
            low, high = number_of(tile, base, 4 * i, PAIRED), number_of(tile, base, 4 * i + 16, PAIRED)
            low_weight, high_weight = weight_of(4 * i, PAIRED), weight_of(4 * i + 16, PAIRED)
            a, b = pair_of(x, n, N, k + 8 * i, stride_x, IN, PAIRED, EVEN)
            sums0 += low * (a * low_weight)
            sums0 += high * (b * high_weight)
            ones0 += a * low_weight + b * high_weight
            all0 += a + b
            if ROWS > 1:
                a, b = pair_of(x, n + 1, N, k + 8 * i, stride_x, IN, PAIRED, EVEN)
                sums1 += low * (a * low_weight)
                sums1 += high * (b * high_weight)
                ones1 += a * low_weight + b * high_weight
                all1 += a + b
            if ROWS > 2:
                a, b = pair_of(x, n + 2, N, k + 8 * i, stride_x, IN, PAIRED, EVEN)
                sums2 += low * (a * low_weight)
                sums2 += high * (b * high_weight)
                ones2 += a * low_weight + b * high_weight
                all2 += a + b
            if ROWS > 3:
                a, b = pair_of(x, n + 3, N, k + 8 * i, stride_x, IN, PAIRED, EVEN)
                sums3 += low * (a * low_weight)
                sums3 += high * (b * high_weight)
                ones3 += a * low_weight + b * high_weight
                all3 += a + b
        total0 += scaled(sums0, ones0, all0, step, offset, PAIRED, BLOCK_OUT, UNITS)
        if ROWS > 1:
            total1 += scaled(sums1, ones1, all1, step, offset, PAIRED, BLOCK_OUT, UNITS)
        if ROWS > 2:
            total2 += scaled(sums2, ones2, all2, step, offset, PAIRED, BLOCK_OUT, UNITS)
        if ROWS > 3:
            total3 += scaled(sums3, ones3, all3, step, offset, PAIRED, BLOCK_OUT, UNITS)
    own = parts if MERGES else y
    store_outputs(own, own, tl.sum(total0, 1), n, N, rows, OUT, False)
    if ROWS > 1:
        store_outputs(own, own, tl.sum(total1, 1), n + 1, N, rows, OUT, False)
    if ROWS > 2:
        store_outputs(own, own, tl.sum(total2, 1), n + 2, N, rows, OUT, False)
    if ROWS > 3:
        store_outputs(own, own, tl.sum(total3, 1), n + 3, N, rows, OUT, False)
    end_few_rows(y, parts, arrivals, n, N, rows, OUT, ROWS, MERGES)


@triton.jit
def scaled(sums, ones, every, step, offset, BY_MASK: tl.constexpr, BLOCK_OUT: tl.constexpr, UNITS: tl.constexpr):
    """scale · Σ code·x + offset · Σ x of each 32 inputs, [BLOCK_OUT, UNITS · 4]. ones: what the masks' 1 + … added."""
    codes = sums_of_32(sums, BLOCK_OUT, UNITS)
    if BY_MASK:
        codes -= sums_of_32(ones, 1, UNITS)
    return step * codes + offset * sums_of_32(every, 1, UNITS)


@triton.jit(do_not_specialize=["N"])
def matvec_int4_many_rows(
    x,
    words,
    scale,
    zero,
    y,
    N,
    OUT,
    IN,
    WORDS,
    GROUP,
    GROUPS,
    stride_x,
    stride_row,
    stride_group,
    added,
    base,
    blocks_a_split,
    parts,
    arrivals,
    HAS_ZERO: tl.constexpr,
    MERGES: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Version 3: all rows, padded to ROWS, on tensor cores; 128 inputs a step. PARTS: groups in a step."""
    m, n, k = tl.arange(0, BLOCK_OUT), tl.arange(0, ROWS), tl.arange(0, 128)
    first_row = tl.program_id(0) * BLOCK_OUT
    loaded = tl.minimum(first_row + m, OUT - 1).to(tl.int64)
    rows = first_row + order_of_rows(m, WARPS)
    safe = tl.minimum(rows, OUT - 1).to(tl.int64)
    tile_of = words + loaded[:, None] * WORDS + tl.arange(0, 16)[None, :]
    x_of = x + n.to(tl.int64)[:, None] * stride_x
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    ones = tl.full([BLOCK_OUT, 128], 1.0, x.dtype.element_ty)
    first = tl.program_id(2) * blocks_a_split
    last = tl.minimum(first + blocks_a_split, tl.cdiv(IN, 128))
    for unit in tl.range(first, last, num_stages=STAGES):
        tile = tl.load(tile_of + unit * 16)
        at = unit * 128 + k
        there = (n < N)[:, None] if EVEN else (n < N)[:, None] & (at < IN)[None, :]
        values = tl.load(x_of + at[None, :], mask=there, other=0.0)
        numbers = numbers_of(tile, base, x.dtype.element_ty, BLOCK_OUT, WARPS)
        for part in tl.static_range(PARTS):
            if PARTS == 1:
                inside = values
            else:
                inside = tl.where((k // (128 // PARTS) == part)[None, :], values, 0.0).to(values.dtype)
            codes = tl.dot(numbers, tl.trans(inside), input_precision="ieee")
            group = tl.minimum((unit * 128 + part * (128 // PARTS)) // GROUP, GROUPS - 1)
            less = counted_beside(x.dtype.element_ty) - added
            step, offset = step_and_offset(scale, zero, safe, group, stride_row, stride_group, less, HAS_ZERO)
            every = sums_of_inputs(inside, ones)
            total += step[:, None] * codes + offset[:, None] * every
    end_product(y, parts, arrivals, total, n, N, rows, OUT, MERGES)


@triton.jit
def numbers_of(tile, base, dtype: tl.constexpr, BLOCK_OUT: tl.constexpr, WARPS: tl.constexpr):
    """Words [BLOCK_OUT, 16] as base + code [BLOCK_OUT, 128], rows in `order_of_rows`. All that moves is the names."""
    tile = tl.reshape(tile, (BLOCK_OUT // (16 * WARPS), 2, WARPS, 8, 4, 4))  # again, half, warp, row, l, j
    tile = tl.reshape(tl.permute(tile, (0, 2, 1, 3, 5, 4)), (BLOCK_OUT, 4, 4))  # m, j, l
    even = tl.join(pairs_of(tile, base, 0, dtype), pairs_of(tile, base, 8, dtype))
    odd = tl.join(pairs_of(tile, base, 4, dtype), pairs_of(tile, base, 12, dtype))
    both = tl.permute(tl.join(even, odd), (0, 1, 4, 5, 2, 3))  # m, j, i // 2, i % 2, l, h
    return tl.reshape(both, (BLOCK_OUT, 128))


@triton.jit
def pairs_of(tile, base, PLACE: tl.constexpr, dtype: tl.constexpr):
    """The nibbles at PLACE and PLACE + 16 of each word as base + code, in a last axis of 2."""
    both = (tile >> PLACE) & 0x000F000F
    if dtype == tl.float32:
        low, high = (both & 15).to(dtype), (both >> 16).to(dtype)
    else:
        both = both | base
        low = (both & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
        high = ((both >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def counted_beside(dtype: tl.constexpr):
    """What a masked nibble counts beside its code in this type."""
    if dtype == tl.float16:
        return 1024.0
    elif dtype == tl.bfloat16:
        return 128.0
    else:
        return 0.0


ONE = 0x3F800000  # 1.0 in float32
PAIRED_BASE = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300, torch.float32: 0}  # 1024, 128 twice


# -- the operation ---------------------------------------------------------------------------------------------------


def matvec_int4(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group: int | None = None,
    added: int = 0,
    splits: int | None = None,
    arrivals: torch.Tensor | None = None,
    version: int = 3,
    config: Config | None = None,
) -> torch.Tensor:
    """x [N ≤ 32, in] · Ŵᵀ -> [N, out] in x's type, with ŵ = scale · (code + added) + zero.

    words [out, 16 · ⌈in/128⌉] int32: `interleaved` codes. scale, zero [out, in/group], best laid out group after group
    (`scale.T.contiguous().T`). group: inputs that share a scale, None for the whole row. added: what symmetric codes
    are stored above, negative. scale may be words of `matvec_codes.packed`, which have zero in them. splits,
    arrivals, config: as of `matvec`.
    Raises Unsupported for more rows, other types and groups, and shapes that do not fit.
    """
    name = "matvec_int4"
    launch.check_version(name, version, VERSIONS)
    rows, group, zero_at = _checked(name, x, words, scale, zero, group, added)
    tensor_cores = on_tensor_cores(rows, x.dtype, version)
    launch.check_tensors(name, multiplies=tensor_cores, contiguous=False, x=x)
    launch.check_tensors(name, dtypes=(torch.int32,), words=words)
    check_splits(name, splits, version)
    check_arrivals(name, arrivals, x.device)
    out_features, in_features = len(words), x.shape[1]
    y = x.new_empty(rows, out_features)
    if not y.numel():
        return y
    config = config or chosen(rows, out_features, in_features, group, x.dtype, x.device, version)
    programs, chunks, blocks = _cut(rows, out_features, in_features, config, x.dtype, version)
    arguments = (
        x,
        words,
        scale,
        zero_at,
        y,
        rows,
        out_features,
        in_features,
        words.shape[1],
        group,
        scale.shape[1],
        x.stride(0),
        *scale.stride(),
        float(added),
    )
    has = {"HAS_ZERO": zero is not None, "num_warps": config.num_warps}
    if version == 1:
        launch.launch(
            matvec_int4_one_row,
            (programs, rows),
            *arguments,
            **has,
            BLOCK_OUT=config["BLOCK_OUT"],
            UNITS=config["UNITS"],
        )
        return y
    splits = splits_of(splits, version, programs * chunks, blocks, x.device)
    parts = y if splits == 1 else x.new_empty(splits, rows, out_features, dtype=torch.float32)
    merges = splits > 1 and enough(arrivals, programs * chunks)
    to, ends = (y, (parts, arrivals)) if merges else (parts, (parts, parts))
    arguments = (*arguments[:4], to, *arguments[5:])
    shared = {
        "MERGES": merges,
        "EVEN": in_features % (128 * config["UNITS"]) == 0,
        "ROWS": padded(rows, x.dtype, version),
        "BLOCK_OUT": config["BLOCK_OUT"],
        "STAGES": config.num_stages,
    }
    each = launch.cdiv(blocks, splits)
    if tensor_cores:
        launch.launch(
            matvec_int4_many_rows,
            (programs, 1, splits),
            *arguments,
            PAIRED_BASE[x.dtype],
            each,
            *ends,
            **has,
            **shared,
            PARTS=128 // math.gcd(group, 128) if scale.shape[1] > 1 else 1,
            WARPS=config.num_warps,
        )
    else:
        launch.launch(
            matvec_int4_few_rows,
            (programs, chunks, splits),
            *arguments,
            ONE,
            each,
            *ends,
            **has,
            **shared,
            PAIRED=in_pairs(x),
            UNITS=config["UNITS"],
        )
    if splits > 1 and not merges:
        add_parts(parts, y, None)
    return y


def _checked(
    name: str, x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group, added
) -> tuple[int, int, torch.Tensor]:
    """(rows, group, a zero to point at). Raises Unsupported."""
    rows, in_features = check_rows(name, x), x.shape[1]
    group = check_group(name, group, in_features)
    launch.check_shape(name, "words", words, (None, 16 * launch.cdiv(in_features, UNIT)))
    check_scales(name, x, len(words), scale, zero, group, added, most=15)
    return rows, group, scale if zero is None else zero


def in_pairs(x: torch.Tensor) -> bool:
    """Whether two neighbours of x are one word of 32 bits."""
    return x.element_size() == 2 and not (x.shape[1] % 2 or x.stride(0) % 2 or x.data_ptr() % 4)


def _cut(
    rows: int, out_features: int, in_features: int, config: Config, dtype: torch.dtype, version: int
) -> tuple[int, int, int]:
    """(blocks of outputs, chunks of rows, steps over `in`)."""
    programs = launch.cdiv(out_features, config["BLOCK_OUT"])
    chunks = 1 if on_tensor_cores(rows, dtype, version) else launch.cdiv(rows, padded(rows, dtype, version))
    return programs, chunks, launch.cdiv(in_features, UNIT * config["UNITS"])


def matvec_int4_reference(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group: int | None = None,
    added: int = 0,
) -> torch.Tensor:
    """The numbers written down and multiplied, in float32, or in float64 where x is float64."""
    wide, in_features = torch.promote_types(x.dtype, torch.float32), x.shape[1]
    group = in_features if group is None else group
    scale, zero = unpacked(scale, zero)
    codes = deinterleaved(words, in_features).to(wide).unflatten(1, (-1, group)) + added
    numbers = codes * scale.to(wide)[..., None]
    if zero is not None:
        numbers = numbers + zero.to(wide)[..., None]
    return (x.to(wide) @ numbers.flatten(1).T).to(x.dtype)


def matvec_int4_work(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group: int | None = None,
    splits: int | None = None,
    merges: bool = False,
    version: int = 3,
) -> launch.Work:
    """Words, scales, zeros and x read once, y written once; 2 FLOPs for each weight and row.
    merges: with arrivals, so that no launch adds the parts up."""
    (rows, in_features), out_features = x.shape, len(words)
    read = sum(one.numel() * one.element_size() for one in (x, words, scale, zero) if one is not None)
    config = chosen(rows, out_features, in_features, group or in_features, x.dtype, x.device, version)
    programs, chunks, blocks = _cut(rows, out_features, in_features, config, x.dtype, version)
    divided = splits_of(splits, version, programs * chunks, blocks, x.device) > 1
    count = 1 + (divided and not merges) if rows and out_features else 0
    return launch.Work(read, rows * out_features * x.element_size(), 2 * rows * out_features * in_features, count)


# -- block sizes -----------------------------------------------------------------------------------------------------


def candidates(rows: int, in_features: int, dtype: torch.dtype, version: int = 3) -> list[Config]:
    """Configs worth timing, the default first. UNITS: steps of 128 inputs in a tile."""
    if on_tensor_cores(rows, dtype, version):
        sizes = [(128, 4, 4), (64, 4, 4), (128, 4, 6), (64, 4, 6), (128, 8, 4), (256, 8, 4), (128, 4, 1)]
        return [Config.of(warps, stages, BLOCK_OUT=out, UNITS=1) for out, warps, stages in sizes]
    max_units = launch.next_power_of_2(launch.cdiv(in_features, UNIT))
    wide = [(64, 4, 4, 1), (32, 4, 4, 1), (64, 2, 4, 1), (32, 8, 4, 1), (64, 4, 4, 3)]
    if version == 1:
        wide = [(16, 4, 4, 1), (32, 4, 4, 1)]
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
    return tuning.choose("matvec_int4", key, candidates(rows, in_features, dtype, version)[0], device)


def tune_matvec_int4(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group: int | None = None,
    added: int = 0,
    version: int = 3,
    budget_s: float = 5.0,
    repeats: int = 5,
) -> Config:
    """Time the candidates for tensors like these and keep the fastest in this device's table."""
    given: dict[str, Any] = {"group": group, "added": added, "version": version, "arrivals": counters(x.device)}
    multiply = functools.partial(matvec_int4, x, words, scale, zero, **given)
    key = key_of(x.shape[0], len(words), x.shape[1], group or x.shape[1], x.dtype, version)
    return tuning.tune(
        "matvec_int4",
        key,
        candidates(x.shape[0], x.shape[1], x.dtype, version),
        lambda config: multiply(config=config),
        x.device,
        budget_s=budget_s,
        repeats=repeats,
    )


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.matvec_int4` checks, and on a GPU times."""
    rows, out, inside = make.size(3, 1), make.size(40, 131072), make.size(256, 4096)
    x = make.normal(rows, inside)
    groups = inside // 128
    words = make.whole(-(2**31), 2**31, out, 16 * groups)
    scale, zero = (make.normal(groups, out, dtype=torch.float16, scale=size * inside**-0.5).T for size in (0.2, 1.0))
    return [
        alone.Example(
            f"matvec_int4, {rows} x [{out:,}, {inside:,}], groups of 128",
            VERSIONS,
            lambda v: matvec_int4(x, words, scale, zero, group=128, version=v),
            lambda: matvec_int4_reference(x.double(), words, scale.double(), zero.double(), group=128),
            matvec_int4_work(x, words, scale, zero, group=128),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
