"""Paged decode over keys and values in few bits, turned into numbers in registers: memory is read in codes alone.

    k̂_j = s_j · c_j + z_j   (v̂_j likewise)     codes c_j [D], a scale s_j and a zero z_j for each token and head
    out  = Σ_j softmax_j(scale · q · k̂_j) · v̂_j

Scales and zeros leave the products: codes are whole numbers (or fp8), exact in float16, and are multiplied as they are.

    q · k̂_j    = s_j · (q · c_j) + z_j · Σ_d q_d
    Σ_j w_j v̂_j = Σ_j (w_j · s_j) · c_j + Σ_j w_j · z_j

Bytes a token and kv head: (D + D_v)·bits/8 and 2 for each scale and zero: with D = D_v = 128, of 512 in bfloat16 "int8"
reads 264, "fp8" 260, "int4" 136. FLOPs: 2·H_q·(D + D_v) a token, as without codes; turning codes into numbers comes on
top, 2 to 4 instructions an element. So it is memory, and close behind it the instructions: at 4.8 TB/s an H200's
multiprocessor has some 6 instructions a lane and byte.

    version 1  a program for each query head; every element becomes s·c + z in float32, without tensor cores
    version 2  a program for each kv head: its query heads share the codes; scales leave the products, tensor cores
    version 3  the tokens are cut into splits, merged by log-sum-exp (`merge`): enough programs for few, long texts

Codes become float16 by moving bits, exactly, for all 256 bytes, on any device:

    int8   0x6400 | c is 1024 + c in float16; minus 1152 is c − 128, and z grows by 128·s: sums around 0 round less
    int4   the same with c − 8; the low halves of a row's bytes are its first D/2 elements, the high halves the rest
    fp8    e4m3  s eeee fff  ->  s 0eeee fff0000000 is c / 256 in float16

16-bit queries are multiplied in float16, after a power of two has been taken out of each row, so that bfloat16 loses
nothing. Weights times scales are taken relative to the tile's greatest scale: small values do not vanish in float16.
A block whose scale is NaN gives NaN, as its `decode` does.

From version 2 on scales are read one tile ahead and the table two: neither is waited for in the turn that needs it.

Formats are those of `workbench.kv.paged_store`: int8 and int4 affine in uint8 (`pack`), fp8 e4m3 without zero; scales
float16. Supported: queries in float16, bfloat16 and float32, D and D_v to 256, even ones for int4, windows and sinks,
any block size and strides between rows. Not yet measured on a GPU.
Sources: scales outside the product, KIVI, arXiv 2402.02750 §3; moving bits, FasterTransformer's converter and Marlin,
arXiv 2408.11743 §3; splits: Dao et al., "Flash-Decoding" (2023).

Tiles, of one sequence and the query heads of a key-value head g:

    codes           | TOKENS x D bytes | TOKENS x D bytes | ... |    found through the table, as in `paged_decode`
    scales, zeros   | TOKENS           | TOKENS           | ... |
    version 1         program (head, b): all tokens, for each query head again
    version 2         program (g, 0, b): all tokens, once for the group
    version 3       |     split 0      |     split 1      |          program (g, split, b): parts and lse -> merge
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from workbench.errors import unknown
from workbench.kernels import alone
from workbench.kernels.launch import (
    Unsupported,
    Work,
    cdiv,
    check_shape,
    check_tensors,
    check_version,
    launch,
    next_power_of_2,
)
from workbench.kernels.merge import merge
from workbench.kernels.ranges import (
    PER_STEP,
    PER_STEP_TENSORS,
    blocks_of,
    check_block_size,
    check_splits,
    check_window,
    choose_splits,
    places_in,
    resident_programs,
    seen_blocks,
    seen_count,
    seen_places,
    seen_tokens,
    split_bounds,
)
from workbench.kernels.tuning import Config, choose, tune

VERSIONS = {
    1: "a program for each query head, numbers in float32",
    2: "a kv head's queries share the codes; scales leave the products",
    3: "splits, merged by log-sum-exp",
}
MAX_SIZE = 256
REGISTERS = {"int8": 168, "int4": 224, "fp8": 168}  # of a thread, 128 values a head, as compiled for 9.0
LOG2_E = math.log2(math.e)


class Kind(NamedTuple):
    """What the kernels know of a format. A code c stands for `factor` · n in units of its scale, n the number they
    make."""

    number: int
    bits: int
    dtype: torch.dtype
    has_zero: bool


FORMATS = {
    "int8": Kind(0, 8, torch.uint8, True),
    "int4": Kind(1, 4, torch.uint8, True),
    "fp8": Kind(2, 8, torch.float8_e4m3fn, False),
}
INT8, INT4, FP8 = (tl.constexpr(FORMATS[name].number) for name in ("int8", "int4", "fp8"))


class Coded(NamedTuple):
    """Keys or values of a layer as they are stored, see `workbench.kv.paged_store.Codes`."""

    codes: torch.Tensor  # [places, G, D · bits / 8] uint8, for "fp8" [places, G, D] float8_e4m3fn
    scale: torch.Tensor  # [places, G, 1] float16
    zero: torch.Tensor | None  # [places, G, 1] float16; None for "fp8"
    format: str

    @property
    def size(self) -> int:
        """D."""
        return self.codes.shape[-1] * 8 // _kind(self.format).bits

    @property
    def bytes_per_token(self) -> int:
        """Of all heads."""
        return self.codes.shape[1] * (self.codes.shape[2] + 2 + 2 * (self.zero is not None))


def _kind(format: str) -> Kind:
    if format not in FORMATS:
        raise unknown("format of quantized keys and values", format, FORMATS)
    return FORMATS[format]


# -- codes to numbers --------------------------------------------------------------------------------------------------


@triton.jit
def numbers_of(codes, HIGH: tl.constexpr, FORMAT: tl.constexpr):
    """Bytes (uint8; int8 for fp8) to float16: c − 128, c − 8 of the low or high half, or c / 256. Exact."""
    if FORMAT == FP8:
        bits = (codes.to(tl.int16) << 7) & -16385  # the sign fills the upper byte; all bits but 14
        numbers = bits.to(tl.float16, bitcast=True)
    elif FORMAT == INT8:
        numbers = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    else:
        half = (codes >> 4) if HIGH else (codes & 15)
        numbers = (half.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    return numbers


@triton.jit
def stored_scales(scale, zero, at, mask, FORMAT: tl.constexpr):
    """As they lie there; 0 where masked."""
    s = tl.load(scale + at, mask=mask, other=0.0)
    z = s
    if FORMAT != FP8:
        z = tl.load(zero + at, mask=mask, other=0.0)
    return s, z


@triton.jit
def scales_of(s, z, FORMAT: tl.constexpr):
    """What goes with `numbers_of`, in float32."""
    s = s.to(tl.float32)
    if FORMAT == FP8:
        s = s * 256.0
        z = tl.zeros_like(s)
    elif FORMAT == INT8:
        z = z.to(tl.float32) + 128.0 * s
    else:
        z = z.to(tl.float32) + 8.0 * s
    return s, z


# -- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=PER_STEP, do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _paged_quantized_heads(
    q,
    k_codes,
    k_scale,
    k_zero,
    v_codes,
    v_scale,
    v_zero,
    tables,
    lengths,
    out,
    scale,
    window,
    sinks,
    group,
    q_row,
    q_head,
    k_place,
    k_head,
    ks_place,
    ks_head,
    v_place,
    v_head,
    vs_place,
    vs_head,
    table_row,
    heads,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ALL_K: tl.constexpr,
    ALL_V: tl.constexpr,
):
    """Version 1. scale: times log2 e."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_head, k_at, v_at = head // group, tl.arange(0, ALL_K), tl.arange(0, ALL_V)
    query = q + sequence * q_row + head * q_head
    q_0 = tl.load(query + k_at, mask=k_at < K_BYTES, other=0.0).to(tl.float32)
    if K_FORMAT == INT4:
        q_1 = tl.load(query + K_BYTES + k_at, mask=k_at < K_BYTES, other=0.0).to(tl.float32)
    number, kept, gap = seen_tokens(tl.load(lengths + sequence), window, sinks)
    maximum, total = -float("inf"), 0.0
    acc_0, acc_1 = tl.zeros([ALL_V], tl.float32), tl.zeros([ALL_V], tl.float32)
    for first in range(0, number, TOKENS):
        i = first + tl.arange(0, TOKENS)
        block, inside = blocks_of(tables + sequence * table_row, i, number, kept, gap, BLOCK_SIZE), i < number
        place = places_in(block, i, kept, gap, BLOCK_SIZE)
        at = k_codes + (place * k_place)[:, None] + kv_head * k_head + k_at[None, :]
        codes = tl.load(at, mask=inside[:, None] & (k_at < K_BYTES)[None, :], other=0)
        s, z = stored_scales(k_scale, k_zero, place * ks_place + kv_head * ks_head, inside, K_FORMAT)
        s, z = scales_of(s, z, K_FORMAT)
        k = numbers_of(codes, False, K_FORMAT).to(tl.float32) * s[:, None] + z[:, None]
        scores = tl.sum(k * q_0[None, :], 1)
        if K_FORMAT == INT4:
            k = numbers_of(codes, True, K_FORMAT).to(tl.float32) * s[:, None] + z[:, None]
            scores += tl.sum(k * q_1[None, :], 1)
        scores = tl.where(inside, scores * scale, -float("inf"))
        new = tl.maximum(maximum, tl.max(scores, 0))
        weights, old = tl.exp2(scores - new), tl.exp2(maximum - new)
        at = v_codes + (place * v_place)[:, None] + kv_head * v_head + v_at[None, :]
        codes = tl.load(at, mask=inside[:, None] & (v_at < V_BYTES)[None, :], other=0)
        s, z = stored_scales(v_scale, v_zero, place * vs_place + kv_head * vs_head, inside, V_FORMAT)
        s, z = scales_of(s, z, V_FORMAT)
        v = numbers_of(codes, False, V_FORMAT).to(tl.float32) * s[:, None] + z[:, None]
        acc_0 = acc_0 * old + tl.sum(weights[:, None] * v, 0)
        if V_FORMAT == INT4:
            v = numbers_of(codes, True, V_FORMAT).to(tl.float32) * s[:, None] + z[:, None]
            acc_1 = acc_1 * old + tl.sum(weights[:, None] * v, 0)
        total = total * old + tl.sum(weights, 0)
        maximum = new
    total = tl.where(total == 0.0, 1.0, total)
    parts: tl.constexpr = 2 if V_FORMAT == INT4 else 1
    target = out + (sequence * heads + head) * V_BYTES * parts + v_at
    tl.store(target, (acc_0 / total).to(out.dtype.element_ty), mask=v_at < V_BYTES)
    if V_FORMAT == INT4:
        tl.store(target + V_BYTES, (acc_1 / total).to(out.dtype.element_ty), mask=v_at < V_BYTES)


@triton.jit(do_not_specialize=PER_STEP, do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _paged_quantized_tiles(
    q,
    k_codes,
    k_scale,
    k_zero,
    v_codes,
    v_scale,
    v_zero,
    tables,
    lengths,
    out,
    lse,
    scale,
    window,
    sinks,
    group,
    q_row,
    q_head,
    k_place,
    k_head,
    ks_place,
    ks_head,
    v_place,
    v_head,
    vs_place,
    vs_head,
    table_row,
    heads,
    tiles,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ALL_K: tl.constexpr,
    ALL_V: tl.constexpr,
    TYPE: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Versions 2 and 3. out [splits, B, H, D_v], lse [splits, B, H]. TYPE: of the products. scale: times log2 e."""
    kv_head, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    split, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, here = kv_head * group + row, row < group
    k_at, v_at = tl.arange(0, ALL_K), tl.arange(0, ALL_V)
    query = q + sequence * q_row + head[:, None] * q_head + k_at[None, :]
    mask = here[:, None] & (k_at < K_BYTES)[None, :]
    q_0 = tl.load(query, mask=mask, other=0.0).to(tl.float32)
    greatest = tl.max(tl.abs(q_0), 1)
    if K_FORMAT == INT4:
        q_1 = tl.load(query + K_BYTES, mask=mask, other=0.0).to(tl.float32)
        greatest = tl.maximum(greatest, tl.max(tl.abs(q_1), 1))
    power = (greatest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power == 0.0, 1.0, power)  # 2 to the exponent of the greatest
    q_0 = (q_0 / power[:, None]).to(TYPE)
    q_sum = tl.sum(q_0.to(tl.float32), 1)
    if K_FORMAT == INT4:
        q_1 = (q_1 / power[:, None]).to(TYPE)
        q_sum += tl.sum(q_1.to(tl.float32), 1)
    power *= scale
    number, kept, gap = seen_tokens(tl.load(lengths + sequence), window, sinks)
    begin, end = split_bounds(number, split, tl.num_programs(1), TOKENS)
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total, zeros = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    acc_0 = tl.zeros([ROWS, ALL_V], tl.float32)
    if V_FORMAT == INT4:
        acc_1 = tl.zeros([ROWS, ALL_V], tl.float32)
    table = tables + sequence * table_row
    k_scale, k_zero = k_scale + kv_head * ks_head, k_zero + kv_head * ks_head
    v_scale, v_zero = v_scale + kv_head * vs_head, v_zero + kv_head * vs_head
    i = begin + tl.arange(0, TOKENS)
    place = places_in(blocks_of(table, i, end, kept, gap, BLOCK_SIZE), i, kept, gap, BLOCK_SIZE)
    ahead_block = blocks_of(table, i + TOKENS, end, kept, gap, BLOCK_SIZE)
    next_s, next_z = stored_scales(k_scale, k_zero, place * ks_place, i < end, K_FORMAT)
    next_v_s, next_v_z = stored_scales(v_scale, v_zero, place * vs_place, i < end, V_FORMAT)
    for first in range(begin, end, TOKENS):
        i = first + tl.arange(0, TOKENS)
        inside, ahead = i < end, i + TOKENS
        k_codes_at = k_codes + (place * k_place)[:, None] + kv_head * k_head + k_at[None, :]
        v_codes_at = v_codes + (place * v_place)[:, None] + kv_head * v_head + v_at[None, :]
        s, z = scales_of(next_s, next_z, K_FORMAT)
        v_s, v_z = scales_of(next_v_s, next_v_z, V_FORMAT)
        place = places_in(blocks_of(table, ahead, end, kept, gap, BLOCK_SIZE), ahead, kept, gap, BLOCK_SIZE)
        s_place = places_in(ahead_block, ahead, kept, gap, BLOCK_SIZE)
        ahead_block = blocks_of(table, ahead + TOKENS, end, kept, gap, BLOCK_SIZE)
        next_s, next_z = stored_scales(k_scale, k_zero, s_place * ks_place, ahead < end, K_FORMAT)
        next_v_s, next_v_z = stored_scales(v_scale, v_zero, s_place * vs_place, ahead < end, V_FORMAT)
        codes = tl.load(k_codes_at, mask=inside[:, None] & (k_at < K_BYTES)[None, :], other=0)
        scores = tl.dot(q_0, tl.trans(numbers_of(codes, False, K_FORMAT).to(TYPE)), input_precision="ieee")
        if K_FORMAT == INT4:
            high = numbers_of(codes, True, K_FORMAT).to(TYPE)
            scores = tl.dot(q_1, tl.trans(high), scores, input_precision="ieee")
        scores = (scores * s[None, :] + q_sum[:, None] * z[None, :]) * power[:, None]
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        weights, old = tl.exp2(scores - new[:, None]), tl.exp2(maximum - new)
        total = total * old + tl.sum(weights, 1)
        zeros = zeros * old + tl.sum(weights * v_z[None, :], 1)
        unit = tl.max(v_s, 0)
        unit = tl.where(unit > 0.0, unit, 1.0)
        weights = (weights * (v_s / unit)[None, :]).to(TYPE)
        codes = tl.load(v_codes_at, mask=inside[:, None] & (v_at < V_BYTES)[None, :], other=0)
        low = numbers_of(codes, False, V_FORMAT).to(TYPE)
        acc_0 = acc_0 * old[:, None] + tl.dot(weights, low, input_precision="ieee") * unit
        if V_FORMAT == INT4:
            high = numbers_of(codes, True, V_FORMAT).to(TYPE)
            acc_1 = acc_1 * old[:, None] + tl.dot(weights, high, input_precision="ieee") * unit
        maximum = new
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    target = (split * tl.num_programs(2) + sequence) * heads + head
    mask = here[:, None] & (v_at < V_BYTES)[None, :]
    parts: tl.constexpr = 2 if V_FORMAT == INT4 else 1
    at = out + target[:, None] * (V_BYTES * parts) + v_at[None, :]
    tl.store(at, ((acc_0 + zeros[:, None]) / total[:, None]).to(out.dtype.element_ty), mask=mask)
    if V_FORMAT == INT4:
        result = (acc_1 + zeros[:, None]) / total[:, None]
        tl.store(at + V_BYTES, result.to(out.dtype.element_ty), mask=mask)
    if WITH_LSE:
        whole = (maximum + tl.log2(total)) * 0.6931471805599453
        tl.store(lse + target, tl.where(empty, -float("inf"), whole), mask=here)


# -- calling them ------------------------------------------------------------------------------------------------------


def default_config(version: int, group: int, dtype: torch.dtype, format: str) -> Config:
    """Before anything was measured."""
    if version == 1:
        return Config.of(num_warps=4, num_stages=1, TOKENS=16)
    rows = min(64, max(16, next_power_of_2(group)))
    if dtype == torch.float32:
        return Config.of(num_warps=4, num_stages=1, TOKENS=32, ROWS=16)
    return Config.of(num_warps=4, num_stages=3, TOKENS=128 if format == "int4" else 64, ROWS=rows)


def candidates(version: int, group: int, dtype: torch.dtype, format: str) -> list[Config]:
    """The default, then other tiles of tokens with more or fewer of them in flight."""
    default = default_config(version, group, dtype, format)
    if version == 1:
        others = [Config.of(w, 1, TOKENS=t) for t in (16, 32, 64) for w in (4, 8)]
    else:
        shapes = [(t, s, w) for t in (64, 128, 32) for s in (3, 4, 2) for w in (4, 8)]
        others = [Config.of(w, s, TOKENS=t, ROWS=default["ROWS"]) for t, s, w in shapes]
    return [default, *(one for one in others if one != default)]


def _key(q: torch.Tensor, k: Coded, v: Coded, version: int) -> tuple:
    dtype = str(q.dtype).removeprefix("torch.")
    return version, q.shape[1] // k.codes.shape[1], k.size, v.size, k.format, v.format, dtype


def _check_coded(name: str, coded: Coded, like: torch.Tensor) -> None:
    kind = _kind(coded.format)
    operation = "paged_decode_quantized"
    check_shape(operation, f"codes of {name}", coded.codes, (None, None, None))
    if not 1 <= coded.size <= MAX_SIZE:
        raise Unsupported(f"{operation}: head sizes from 1 to {MAX_SIZE}, got {coded.size} of {name}")
    if coded.codes.dtype != kind.dtype:
        raise Unsupported(
            f"{operation}: codes of {name} in format {coded.format!r} are {kind.dtype}, got {coded.codes.dtype}"
        )
    if kind.has_zero != (coded.zero is not None):
        wanted = "a zero for each scale" if kind.has_zero else "no zeros"
        raise Unsupported(f"{operation}: format {coded.format!r} has {wanted}; check {name}")
    parts = {"scale": coded.scale}
    if coded.zero is not None:
        parts["zero"] = coded.zero
    for part, tensor in parts.items():
        check_shape(operation, f"{part} of {name}", tensor, (*coded.codes.shape[:2], 1))
        check_tensors(operation, dtypes=(torch.float16,), contiguous=False, **_named(f"{part} of {name}", tensor))
    if coded.zero is not None and coded.zero.stride() != coded.scale.stride():
        raise Unsupported(
            f"{operation}: scales and zeros of {name} must lie alike, got strides {coded.scale.stride()} and "
            f"{coded.zero.stride()}"
        )
    check_tensors(operation, dtypes=(kind.dtype,), contiguous=False, **_named(f"codes of {name}", coded.codes))
    if {t.device for t in (coded.codes, *parts.values())} != {like.device}:
        raise Unsupported(f"{operation}: all tensors must be on one device; q is on {like.device}, {name} is not")


def _named(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {name: tensor}


def paged_decode_quantized(
    q: torch.Tensor,
    k: Coded,
    v: Coded,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    splits: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    out: torch.Tensor | None = None,
    version: int = 3,
    config: Config | None = None,
) -> torch.Tensor:
    """q [B, H, D], k and v in codes, tables [B, blocks] int32, lengths [B] int32 -> [B, H, D_v], of q's type.

    H is a multiple of the G heads of k and v, which may have different formats. Block b of a text lies at the places
    tables[·, b]·block_size and after; entries beyond a text's blocks may be anything. A length of 0 gives zeros.
    window: only the last so many tokens are seen, and the first `sinks`. splits: default from the device and the
    table's width, 1 before version 3. out: contiguous, of q's type, is written to and returned. Nothing waits for the
    device, and nothing but the contents of `tables` and `lengths` changes between steps: a CUDA graph can replay the
    call. Raises Unsupported for what the module does not list.
    """
    operation = "paged_decode_quantized"
    check_version(operation, version, VERSIONS)
    check_block_size(operation, block_size)
    reach = check_window(operation, window, sinks)
    check_shape(operation, "q", q, (None, None, None))
    check_tensors(operation, contiguous=False, q=q)
    for name, coded in (("k", k), ("v", v)):
        _check_coded(name, coded, q)
    batch, heads, size = q.shape
    places, kv_heads = k.codes.shape[:2]
    if size != k.size or v.codes.shape[:2] != (places, kv_heads) or not kv_heads or heads % kv_heads:
        raise Unsupported(
            f"{operation}: q [B, H, D] with H a multiple of G, k [places, G, D], v [places, G, D_v]; got q"
            f" {list(q.shape)}, k [{places}, {kv_heads}, {k.size}], v [{v.codes.shape[0]}, {v.codes.shape[1]},"
            f" {v.size}]"
        )
    check_shape(operation, "tables", tables, (batch, None))
    check_shape(operation, "lengths", lengths, (batch,))
    check_tensors(operation, dtypes=(torch.int32,), contiguous=False, tables=tables, lengths=lengths)
    check_tensors(operation, dtypes=(q.dtype, torch.int32), contiguous=False, q=q, tables=tables, out=out)
    if out is None:
        out = torch.empty((batch, heads, v.size), dtype=q.dtype, device=q.device)
    check_shape(operation, "out", out, (batch, heads, v.size))
    check_tensors(operation, dtypes=(q.dtype,), out=out)
    if version < 3 and splits not in (None, 1):
        raise Unsupported(f"{operation}: version 3 has splits; got splits={splits} for version {version}")
    if batch == 0 or heads == 0:
        return out
    group = heads // kv_heads
    default = default_config(version, group, q.dtype, k.format)
    config = config or choose(operation, _key(q, k, v, version), default, q.device)
    tensors = (q, *_raw(k), *_raw(v), tables, lengths)
    strides = (q.stride(0), q.stride(1), *_strides(k), *_strides(v), tables.stride(0), heads)
    sizes = {"K_BYTES": k.codes.shape[2], "V_BYTES": v.codes.shape[2], "BLOCK_SIZE": block_size}
    sizes |= {"K_FORMAT": _kind(k.format).number, "V_FORMAT": _kind(v.format).number}
    sizes |= {f"ALL_{n}": max(16, next_power_of_2(sizes[f"{n}_BYTES"])) for n in "KV"} | config.options
    look = (scale * LOG2_E, reach, sinks, group)
    if version == 1:
        launch(_paged_quantized_heads, (heads, batch), *tensors, out, *look, *strides, **sizes)
        return out
    tiles = cdiv(group, config["ROWS"])
    if version == 2:
        splits = 1
    elif splits is None:
        seen = min(tables.shape[1] * block_size, reach + sinks)
        of_step = config["TOKENS"] * max(2 * k.codes.shape[2], k.codes.shape[2] + v.codes.shape[2])
        held = (max(2, config.num_stages) - 1) * of_step + config["ROWS"] * size * 2
        registers = REGISTERS[k.format]
        resident = resident_programs(q.device, warps=config.num_warps, registers=registers, shared=held)
        splits = choose_splits(kv_heads * tiles * batch, seen, q.device, resident=resident, multiple=config["TOKENS"])
    check_splits(operation, splits)
    parts, lse = out, None
    if splits > 1:
        parts = torch.empty((splits, batch, heads, v.size), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, batch, heads), dtype=torch.float32, device=q.device)
    sizes |= {"TYPE": tl.float32 if q.dtype == torch.float32 else tl.float16, "WITH_LSE": splits > 1}
    grid = (kv_heads * tiles, splits, batch)
    launch(_paged_quantized_tiles, grid, *tensors, parts, lse, *look, *strides, tiles, **sizes)
    if lse is not None:
        merge(parts, lse, out)
    return out


def _raw(coded: Coded) -> tuple[torch.Tensor, ...]:
    """As the kernels load them: bytes, with a sign where the sign is shifted."""
    codes = coded.codes.view(torch.int8) if coded.format == "fp8" else coded.codes
    return codes, coded.scale, coded.scale if coded.zero is None else coded.zero


def _strides(coded: Coded) -> tuple[int, ...]:
    return coded.codes.stride(0), coded.codes.stride(1), coded.scale.stride(0), coded.scale.stride(1)


def tune_paged_quantized(q, k, v, tables, lengths, *, block_size, scale, version=3, budget_s=20.0) -> Config:
    """Time the candidates on these tensors and keep the fastest for the device."""

    def run(config: Config) -> torch.Tensor:
        return paged_decode_quantized(
            q, k, v, tables, lengths, block_size=block_size, scale=scale, version=version, config=config
        )

    some = candidates(version, q.shape[1] // k.codes.shape[1], q.dtype, k.format)
    return tune("paged_decode_quantized", _key(q, k, v, version), some, run, q.device, budget_s=budget_s)


def decoded(coded: Coded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """k̂ or v̂ [places, G, D] in plain PyTorch."""
    if coded.format == "fp8":
        return coded.codes.to(dtype) * coded.scale.to(dtype)
    codes = coded.codes
    if coded.format == "int4":
        codes = torch.cat((codes & 15, codes >> 4), -1)
    assert coded.zero is not None, "a format with zeros"
    return codes.to(dtype) * coded.scale.to(dtype) + coded.zero.to(dtype)


def paged_decode_quantized_reference(
    q: torch.Tensor,
    k: Coded,
    v: Coded,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
) -> torch.Tensor:
    """The same in plain PyTorch, a text at a time, in the type of q."""
    group = q.shape[1] // k.codes.shape[1]
    out = q.new_zeros((*q.shape[:2], v.size))
    for b, length in enumerate(lengths.tolist()):
        at = seen_places(tables[b], length, block_size, window, sinks)
        if len(at):
            keys, values = (
                decoded(Coded(c.codes[at], c.scale[at], None if c.zero is None else c.zero[at], c.format), q.dtype)
                for c in (k, v)
            )
            keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
            weights = torch.softmax(torch.einsum("hd,hsd->hs", q[b], keys) * scale, -1)
            out[b] = torch.einsum("hs,hsd->hd", weights, values)
    return out


def paged_decode_quantized_work(
    q: torch.Tensor,
    k: Coded,
    v: Coded,
    lengths: Sequence[int],
    *,
    block_size: int,
    window: int | None = None,
    sinks: int = 0,
    splits: int = 1,
) -> Work:
    """Codes, scales and zeros of the seen tokens once, q, the used entries of the tables, the lengths; out. Partial
    results of splits are not in it."""
    tokens = sum(seen_count(length, window, sinks) for length in lengths)
    blocks = sum(seen_blocks(length, block_size, window, sinks) for length in lengths)
    batch, heads, size = q.shape
    read = tokens * (k.bytes_per_token + v.bytes_per_token) + q.numel() * q.element_size() + 4 * (blocks + batch)
    written = batch * heads * v.size * q.element_size()
    return Work(read, written, 2 * heads * tokens * (size + v.size), launches=1 + (splits > 1))


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.paged_quantized` checks, and on a GPU times."""
    sequences, tokens = make.size(2, 64), make.size(40, 4096)
    heads, groups, size = make.size(4, 32), make.size(2, 8), make.size(32, 128)
    block, blocks = 16, -(-tokens // 16)
    tables, lengths, scale = make.tables(sequences, blocks), make.each(tokens, sequences), size**-0.5
    places = sequences * blocks * block

    def coded() -> Coded:
        scales, zeros = (make.normal(places, groups, 1, dtype=torch.float16, scale=s) for s in (0.01, 1.0))
        return Coded(make.whole(0, 256, places, groups, size, dtype=torch.uint8), scales, zeros, "int8")

    q, k, v = make.normal(sequences, heads, size), coded(), coded()
    wide_k, wide_v = (Coded(c.codes, c.scale.double(), c.zero.double(), c.format) for c in (k, v) if c.zero is not None)
    look: dict[str, Any] = {"block_size": block, "scale": scale}
    return [
        alone.Example(
            f"paged_decode_quantized, int8, of {sequences} x {tokens:,} keys, {heads} over {groups} heads of {size}",
            VERSIONS,
            lambda version: paged_decode_quantized(q, k, v, tables, lengths, version=version, **look),
            lambda: paged_decode_quantized_reference(q.double(), wide_k, wide_v, tables, lengths, **look),
            paged_decode_quantized_work(q, k, v, lengths.tolist(), block_size=block),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
