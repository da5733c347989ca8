"""What the products with a weight in codes share, 8 bits (`matvec_int8`) and 4 (`matvec_int4`): scales and zeros of
groups, the order in which rows lie in tensor cores, what is accepted, and how the work is cut."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from workbench.errors import is_whole
from workbench.kernels import launch
from workbench.kernels.arrivals import is_last
from workbench.kernels.matvec import FEW_ROWS, all_parts, padded_rows, splits_for, store_outputs, store_product

UNIT = 128  # inputs of a step


@triton.jit
def step_and_offset(scale, zero, rows, group, stride_row, stride_group, less, HAS_ZERO: tl.constexpr):
    """scale and zero − less · scale of these outputs and groups, in float32. scale may be words of `packed`: four
    bytes are what a thread can ask for before it needs them (cp.async), two are not."""
    at = rows * stride_row + group * stride_group
    if scale.dtype.element_ty == tl.int32:
        word = tl.load(scale + at)
        step = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = -less * step + (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        step = tl.load(scale + at).to(tl.float32)
        offset = -less * step
        if HAS_ZERO:
            offset += tl.load(zero + at).to(tl.float32)
    return step, offset


def packed(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """[out, groups] int32, group after group: float16 scale in the lower half of each word, zero in the upper."""
    both = torch.stack((scale, zero), -1).transpose(0, 1).contiguous()
    return both.view(torch.int32)[..., 0].T


def unpacked(scale: torch.Tensor, zero: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scale, zero or None) as floats, of `packed` words too."""
    if scale.dtype != torch.int32:
        return scale, zero
    halves = scale.T.contiguous().view(torch.float16).unflatten(-1, (-1, 2))
    return halves[..., 0].T, halves[..., 1].T


@triton.jit
def order_of_rows(m, WARPS: tl.constexpr):
    """Which row of a loaded tile is row m of the product: warps load 8 rows each, and again 8, and multiply 16."""
    return m // (16 * WARPS) * (16 * WARPS) + m // 8 % 2 * (8 * WARPS) + m // 16 % WARPS * 8 + m % 8


@triton.jit
def sums_of_inputs(values, ones):
    """Σ of each row of values [ROWS, inputs], to be added to sums [BLOCK_OUT, ROWS]. In 16 bits as a product with
    ones [BLOCK_OUT, inputs]: it comes out in the thread that needs it, without a barrier and a shuffle."""
    if values.dtype == tl.float32:
        return tl.sum(values, 1)[None, :]
    else:
        return tl.dot(ones, tl.trans(values), input_precision="ieee")


@triton.jit
def end_product(y, parts, arrivals, total, n, N, rows, OUT, MERGES: tl.constexpr):
    """total [BLOCK_OUT, ROWS] to y [splits, N, OUT], in the part of this program's split. MERGES: to parts, and the
    last split of these outputs adds all parts up, in the order of the splits, for y [N, OUT]."""
    if MERGES:
        store_product(parts, total, n, N, rows, OUT)
        if is_last(arrivals, tl.program_id(0), tl.num_programs(2)):
            there = (rows < OUT)[:, None] & (n < N)[None, :]
            total = tl.zeros(total.shape, tl.float32)
            for split in range(0, tl.num_programs(2)):
                at = (split * N + n).to(tl.int64)[None, :] * OUT + rows[:, None]
                total += tl.load(parts + at, mask=there, other=0.0, cache_modifier=".cg")
            store_product(y, total, n, N, rows, OUT, False, False)
    else:
        store_product(y, total, n, N, rows, OUT)


@triton.jit
def end_few_rows(y, parts, arrivals, n, N, rows, OUT, ROWS: tl.constexpr, MERGES: tl.constexpr):
    """When rows n … n + ROWS − 1 of this split are in parts: the same."""
    if MERGES:  # noqa: SIM102 - both sides of an `and` would be compiled
        if is_last(arrivals, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.num_programs(2)):
            for row in tl.static_range(ROWS):
                total = all_parts(parts, parts, n + row, N, rows, OUT, 0, 0.0, False)
                store_outputs(y, y, total, n + row, N, rows, OUT, False, False, False)


def check_group(name: str, group: int | None, in_features: int) -> int:
    """Inputs that share a scale. Raises Unsupported for groups that do not divide."""
    if group is None or group == in_features:
        return in_features
    if not is_whole(group) or group < 32 or group % 32 or in_features % group:
        raise launch.Unsupported(
            f"{name}: a group is a multiple of 32 inputs that divides `in`, or the whole row; got {group!r} of"
            f" {in_features}"
        )
    return group


def check_scales(
    name: str,
    x: torch.Tensor,
    out: int,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group: int,
    added,
    *,
    most: int,
) -> None:
    """Raise Unsupported unless scale and zero are floats [out, in / group] on x's device, laid out alike in any order,
    or scale `packed` words that have both; and added a whole number from −most to most."""
    launch.check_shape(name, "scale", scale, (out, x.shape[1] // group))
    in_words = scale.dtype == torch.int32
    if in_words and zero is not None:
        raise launch.Unsupported(f"{name}: scale in words of 32 bits has the zeros in it; give no zero beside them")
    if zero is not None:
        launch.check_shape(name, "zero", zero, tuple(scale.shape))
        if zero.stride() != scale.stride():
            raise launch.Unsupported(
                f"{name}: zero must lie as scale does; its strides are {zero.stride()}, scale's {scale.stride()}"
            )
    if not is_whole(added) or not -most <= added <= most:
        raise launch.Unsupported(f"{name}: added is a whole number from -{most} to {most}, got {added!r}")
    for what, one in (("scale", scale), ("zero", zero)):
        if one is not None:
            given: dict[str, Any] = {what: one.as_strided((1,), (1,)), "x": x[:0]}
            launch.check_tensors(name, dtypes=(*launch.FLOATS, *[torch.int32] * in_words), **given)


def on_tensor_cores(rows: int, dtype: torch.dtype, version: int) -> bool:
    return version >= 3 and (rows > FEW_ROWS or dtype != torch.float32)


def padded(rows: int, dtype: torch.dtype, version: int) -> int:
    """What a kernel is compiled for: 1, 2 or 4 rows, and on tensor cores 16 or 32."""
    if version >= 4 or on_tensor_cores(rows, dtype, version):
        return 16 if rows <= 16 else 32
    return padded_rows(rows, dtype, min(version, 2))


def splits_of(splits: int | None, version: int, programs: int, blocks: int, device: torch.device) -> int:
    """Into how many parts `in` is divided, of so many blocks; 1 before version 3."""
    if version < 3:
        return 1
    return splits_for(programs, blocks, device, least=4) if splits is None else splits


def key_of(rows: int, out_features: int, in_features: int, group: int, dtype: torch.dtype, version: int) -> tuple:
    """What the best blocks depend on."""
    short = str(dtype).removeprefix("torch.")
    return (padded(rows, dtype, version), out_features, in_features, group, short, version)
