"""One attention from several over parts of the keys, merged by their log-sum-exp.

    part i    lse_i = log Σ_{j in part i} exp(s_j)      part_i = Σ_{j in part i} exp(s_j − lse_i) · v_j
    merged    lse   = log Σ_i exp(lse_i)                out    = Σ_i exp(lse_i − lse) · part_i

It is exact: a softmax over all keys is a softmax over the parts of softmaxes within them. Any cut of the keys will do:
splits of a long text (Flash-Decoding), a shared beginning and the rest, keys on several devices.

Bytes: every part read once (4·D_v + 4 a part, sequence and head), the result written. FLOPs: about 2·D_v for each part
and head; memory decides, and with few sequences the launch.
Source: Dao et al., "Flash-Decoding for long-context inference" (2023); the rule itself: Milakov and Gimelshein,
arXiv 1805.02867 §3.1.

    version 1  one part after the other, rescaling the sum whenever a greater lse comes (online softmax)
    version 2  all lse first: then every part has its final weight, and blocks of parts are in flight at once

`merge_when_last` does the same within the launch that makes the parts, by the last of its programs.

A part of no keys has lse −∞ and weighs nothing, whatever lies in its place. Where all are empty: zeros, lse −∞. NaN
stays.

Tiles, of row r = sequence and head:

    parts[0, r]   | COLUMNS | COLUMNS |      program (r, 0) reads the left column of all parts and all lse[:, r],
    parts[1, r]   |    :    |    :    |      program (r, 1) the right one; version 2 takes PARTS parts at a time
    parts[2, r]   |    v    |    v    |
    out[r]        | COLUMNS | COLUMNS |      each writes its columns; program (r, 0) writes lse[r], too
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workbench.kernels import alone
from workbench.kernels.arrivals import is_last
from workbench.kernels.launch import (
    FLOATS,
    Unsupported,
    Work,
    check_shape,
    check_tensors,
    check_version,
    launch,
    next_power_of_2,
)
from workbench.kernels.tuning import Config, choose

VERSIONS = {1: "one part after the other, rescaled", 2: "all lse first, then blocks of parts"}
LSE_AT_ONCE = (16, 256, 4096)
MAX_PARTS = LSE_AT_ONCE[-1]
DEFAULT = Config.of(num_warps=4, num_stages=1, COLUMNS=128, PARTS=16)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_online(parts, lse, out, merged, rows, splits, width, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    maximum, total = -float("inf"), 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for i in range(splits):
        one = tl.load(lse + i * rows + row)
        wide = tl.where(one == -float("inf"), 0, width)  # NaN is not passed over
        new = tl.maximum(maximum, one, propagate_nan=tl.PropagateNan.ALL)
        safe = tl.where(new == -float("inf"), 0.0, new)
        old, weight = tl.exp(maximum - safe), tl.exp(one - safe)
        part = tl.load(parts + (i * rows + row) * width + column, mask=column < wide, other=0.0)
        acc = acc * old + part * weight
        total = total * old + weight
        maximum = new
    empty = total == 0.0
    acc = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(out + row * width + column, acc.to(out.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(merged + row, tl.where(empty, -float("inf"), maximum + tl.log(tl.where(empty, 1.0, total))))


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_blocks(
    parts, lse, out, merged, rows, splits, width, ALL: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    every = tl.arange(0, ALL)
    all_lse = tl.load(lse + every * rows + row, mask=every < splits, other=-float("inf"))
    maximum = tl.max(all_lse, 0)
    maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.sum(tl.exp(all_lse - maximum), 0)
    empty = total == 0.0
    whole = maximum + tl.log(tl.where(empty, 1.0, total))
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, splits, PARTS):
        i = first + tl.arange(0, PARTS)
        one = tl.load(lse + i * rows + row, mask=i < splits, other=-float("inf"))
        wide = tl.where(one == -float("inf"), 0, width)  # NaN is not passed over
        at = (i * rows + row)[:, None] * width + column[None, :]
        acc += tl.sum(
            tl.load(parts + at, mask=column[None, :] < wide[:, None], other=0.0) * tl.exp(one - whole)[:, None], 0
        )
    tl.store(out + row * width + column, acc.to(out.dtype.element_ty), mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(merged + row, tl.where(empty, -float("inf"), whole))


@triton.jit
def merge_when_last(
    parts,
    lse,
    out,
    arrivals,
    result,
    splits,
    sequence,
    sequences,
    heads,
    first_head,
    count,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Call at the end of a split's program, whose part of `count` heads from first_head on is stored: the last of a
    result's programs (`arrivals`) merges all parts of these heads to out [sequences, heads, VALUE].

    HEADS: count or more, a power of two. As many parts are in flight at once as have 8,192 values.
    """
    if is_last(arrivals, result, splits):
        TILE: tl.constexpr = HEADS * PADDED_VALUE
        PARTS: tl.constexpr = 1 if TILE > 8192 else 64 if TILE < 128 else 8192 // TILE
        head, column = tl.arange(0, HEADS), tl.arange(0, PADDED_VALUE)
        inside = head < count
        row = sequence.to(tl.int64) * heads + first_head + head
        best = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, PADDED_VALUE], tl.float32)
        for first in range(0, splits, PARTS):
            i = first + tl.arange(0, PARTS)
            at = i[:, None] * (sequences * heads).to(tl.int64) + row[None, :]  # [PARTS, HEADS]
            there = (i < splits)[:, None] & inside[None, :]
            one = tl.load(lse + at, mask=there, other=-float("inf"), cache_modifier=".cg")
            values = at[:, :, None] * VALUE + column[None, None, :]
            known = there[:, :, None] & (column < VALUE)[None, None, :]
            part = tl.load(parts + values, mask=known, other=0.0, cache_modifier=".cg")
            part = tl.where((one == -float("inf"))[:, :, None], 0.0, part)  # not written; NaN is not passed over
            higher = tl.maximum(best, tl.max(one, 0))
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            weight, old = tl.exp(one - safe[None, :]), tl.exp(best - safe)
            acc = acc * old[:, None] + tl.sum(part * weight[:, :, None], 0)
            total = total * old + tl.sum(weight, 0)
            best = higher
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        stored = inside[:, None] & (column < VALUE)[None, :]
        tl.store(out + row[:, None] * VALUE + column[None, :], acc.to(out.dtype.element_ty), mask=stored)


def merge(
    parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor | None = None, *, version: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """parts [splits, B, H, D_v] and lse [splits, B, H], float32 -> out [B, H, D_v], lse [B, H] float32.

    out: a contiguous tensor to write to, of any float type; default a new one in float32.
    Raises Unsupported for other shapes and types, and for more than 4,096 parts.
    """
    check_version("merge", version, VERSIONS)
    check_shape("merge", "parts", parts, (None,) * 4)
    check_shape("merge", "lse", lse, tuple(parts.shape[:-1]))
    check_tensors("merge", dtypes=(torch.float32,), parts=parts, lse=lse)
    splits, batch, heads, width = parts.shape
    if not 1 <= splits <= MAX_PARTS:
        raise Unsupported(f"merge: 1 to {MAX_PARTS:,} parts, got {splits:,}; merge groups of them first")
    if width < 1:
        raise Unsupported("merge: values have at least one element, got parts of width 0")
    if out is None:
        out = torch.empty((batch, heads, width), dtype=torch.float32, device=parts.device)
    check_shape("merge", "out", out, (batch, heads, width))
    check_tensors("merge", dtypes=FLOATS, parts=parts, out=out)
    merged = torch.empty((batch, heads), dtype=torch.float32, device=parts.device)
    rows = batch * heads
    if rows == 0:
        return out, merged
    config = choose("merge", (splits, width), DEFAULT, parts.device)
    columns = min(config["COLUMNS"], next_power_of_2(width))
    common = (parts, lse, out, merged, rows, splits, width)
    grid = (rows, -(-width // columns))
    if version == 1:
        launch(_merge_online, grid, *common, COLUMNS=columns, num_warps=config.num_warps)
    else:
        # not the next power of two of splits: that changes as texts grow, and each is compiled
        every = next(size for size in LSE_AT_ONCE if splits <= size)
        sizes = {"ALL": every, "PARTS": config["PARTS"], "COLUMNS": columns}
        launch(_merge_blocks, grid, *common, **sizes, num_warps=config.num_warps)
    return out, merged


def merge_reference(parts: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch, in the type of its inputs."""
    whole = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(whole == -torch.inf, 0.0, whole))
    parts = torch.where((lse == -torch.inf)[..., None], 0.0, parts)
    return (weights[..., None] * parts).sum(0), whole


def merge_work(parts: torch.Tensor, out: torch.Tensor | None = None) -> Work:
    """Bytes and FLOPs: a weight for each part and head (subtract, exponential), a multiply-add for each element."""
    splits, batch, heads, width = parts.shape
    size = 4 if out is None else out.element_size()
    written = batch * heads * (width * size + 4)
    return Work(4 * splits * batch * heads * (width + 1), written, splits * batch * heads * (2 * width + 2))


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.merge` checks, and on a GPU times."""
    splits, batch, heads, width = make.size(5, 64), make.size(2, 64), make.size(3, 32), make.size(48, 128)
    parts = make.normal(splits, batch, heads, width, dtype=torch.float32)
    lse = make.normal(splits, batch, heads, dtype=torch.float32)
    return [
        alone.Example(
            f"merge of {splits} parts, {batch} x {heads} heads of {width}",
            VERSIONS,
            lambda v: merge(parts, lse, version=v)[0],
            lambda: merge_reference(parts.double(), lse.double())[0],
            merge_work(parts),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
