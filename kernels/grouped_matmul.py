"""The grouped product of a mixture of experts: rows sorted by expert, y[p] = W[e(p)] · x[p], each its expert's matrix.

    x [N, in]            hidden states of a step; `rows` says which of them each of P = N·k places reads
    starts [E + 1]       the places of expert e are starts[e] … starts[e + 1] − 1
    weight [E, out, in]  -> y [P, out]

Cannot do without: the matrices of the D different experts that have places, D·out·in·b bytes, x and y once,
(N·in + P·out)·b; 2·P·out·in FLOPs. So P/D FLOPs per byte in 16 bits: while experts have few rows each, the time is
that of reading D matrices, and D = E·(1 − (1 − k/E)^N) in the mean where all are chosen alike.

`starts` stays on the device: one launch whatever the router chose, and the host does not wait for it. A loop over
experts waits once a layer and launches a product for each.

Reference: Gale et al., MegaBlocks, arXiv 2211.15841: experts as blocks of one product, with no row dropped or padded to
a capacity.

Versions:
    1   one place a program, multiplied and added: the matrix of an expert is read again for each of its rows.
    2   ROWS places of one expert on tensor cores: read once for all of them. The host does not know how many tiles an
        expert has, so every expert gets as many programs as all places together could fill; most end at once.
    3   as many programs as tiles there can be, ⌊(P + min(E, P)·(ROWS − 1)) / ROWS⌋; each finds its expert and tile from
        the sums of `starts`. The grid grows with P + E and not with P·E.

Weights are float32, float16 or bfloat16, x of the same type; sums are float32, and float32 is not multiplied in tf32.
The order of sums depends on the shapes alone. Block sizes are reasoned, not tuned; no time has been measured yet.

Tiles, of 3 experts with 3, 0 and 2 places, ROWS = 2:

    places            0 1 | 2 . | 3 4         the tile of places 2 and 3 is not made: it would need two experts
    expert              0     0     2         program (o, t) of version 3: BLOCK_OUT outputs of tile t;
    tile of v3          0     1     2         a fourth program finds that there is no tile 3, and ends
    y^T [out, places]   = W[expert] [BLOCK_OUT, in] · x^T [in, ROWS], BLOCK_IN columns at a time
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels import alone
from workbench.kernels.flash_attention import check_indices, precision
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
from workbench.kernels.tuning import Config

VERSIONS = {
    1: "one place a program",
    2: "tiles, for every expert as many as for all",
    3: "as many tiles as there can be",
}
MAX_EXPERTS = 1024  # whose starts a program holds at once


class Inputs(NamedTuple):
    """What is read."""

    x: torch.Tensor
    weight: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor


class Shape(NamedTuple):
    """What is compiled in."""

    experts: int
    padded: int  # experts as a power of two
    out: int
    size: int  # of a row of x
    gathers: bool  # places read the rows that `rows` names
    precision: str


@triton.jit
def _ends(starts, SHAPE: tl.constexpr):
    """[padded] where the places of each expert end; beyond the last expert so far that no place comes after."""
    expert = tl.arange(0, SHAPE.padded)
    return tl.load(starts + 1 + expert, mask=expert < SHAPE.experts, other=0x7FFFFFFF)


@triton.jit
def _one_place(inputs, y, SHAPE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Version 1. Grid (P, tiles of out)."""
    x, weight, starts, rows = inputs
    OUT: tl.constexpr = SHAPE.out
    IN: tl.constexpr = SHAPE.size
    place = tl.program_id(0)
    expert = tl.sum((_ends(starts, SHAPE) <= place).to(tl.int32), 0).to(tl.int64)  # so many end before
    row = place.to(tl.int64)
    if SHAPE.gathers:
        row = tl.load(rows + place).to(tl.int64)
    out = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for start in range(0, IN, BLOCK_IN):
        k = start + tl.arange(0, BLOCK_IN)
        at = (expert * OUT + tl.minimum(out, OUT - 1))[:, None] * IN + k[None, :]
        tile = tl.load(weight + at, mask=(k < IN)[None, :], other=0.0).to(tl.float32)
        values = tl.load(x + row * IN + k, mask=k < IN, other=0.0).to(tl.float32)
        sums += tile * values[None, :]
    total = tl.sum(sums, 1)
    tl.store(y + place.to(tl.int64) * OUT + out, total.to(y.dtype.element_ty), mask=out < OUT)


@triton.jit
def _multiply_tile(inputs, y, out, expert, first, end, SHAPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Outputs `out` of places first … end − 1, at most ROWS, of an expert."""
    x, weight, _, rows = inputs
    OUT: tl.constexpr = SHAPE.out
    IN: tl.constexpr = SHAPE.size
    place = first + tl.arange(0, ROWS)
    row = tl.minimum(place, end - 1).to(tl.int64)  # beyond the last its own again: never stored, and no mask
    if SHAPE.gathers:
        row = tl.load(rows + row).to(tl.int64)
    of_weight = weight + (expert.to(tl.int64) * OUT + tl.minimum(out, OUT - 1))[:, None] * IN
    total = tl.zeros([out.shape[0], ROWS], tl.float32)
    for start in range(0, IN, BLOCK_IN):
        k = start + tl.arange(0, BLOCK_IN)
        if IN % BLOCK_IN == 0:
            tile = tl.load(of_weight + k[None, :])
            values = tl.load(x + row[:, None] * IN + k[None, :])
        else:
            tile = tl.load(of_weight + k[None, :], mask=(k < IN)[None, :], other=0.0)
            values = tl.load(x + row[:, None] * IN + k[None, :], mask=(k < IN)[None, :], other=0.0)
        total = tl.dot(tile, tl.trans(values), total, input_precision=SHAPE.precision)
    at = place.to(tl.int64)[None, :] * OUT + out[:, None]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(out < OUT)[:, None] & (place < end)[None, :])


@triton.jit
def _tiles_of_each(inputs, y, SHAPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Version 2. Grid (tiles of out, E, tiles of all places)."""
    starts, expert = inputs.starts, tl.program_id(1)
    first = tl.load(starts + expert) + tl.program_id(2) * ROWS
    end = tl.load(starts + expert + 1)
    if first < end:
        out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        _multiply_tile(inputs, y, out, expert, first, end, SHAPE, ROWS, BLOCK_IN)


@triton.jit
def _tiles_there_are(
    inputs, y, SHAPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr
):
    """Version 3. Grid (tiles of out, tiles that there can be)."""
    starts, tile = inputs.starts, tl.program_id(1)
    experts = tl.arange(0, SHAPE.padded)
    there = experts < SHAPE.experts
    begin = tl.load(starts + experts, mask=there, other=0)
    count = tl.load(starts + 1 + experts, mask=there, other=0) - begin
    tiles = tl.cumsum((count + ROWS - 1) // ROWS, axis=0)  # up to and with each expert
    expert = tl.sum((tiles <= tile).to(tl.int32), 0)
    if expert < SHAPE.experts:
        before = tl.sum(tl.where(experts == expert - 1, tiles, 0), 0)  # tiles of the experts before it
        first = tl.load(starts + expert) + (tile - before) * ROWS
        end = tl.load(starts + expert + 1)
        out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        _multiply_tile(inputs, y, out, expert, first, end, SHAPE, ROWS, BLOCK_IN)


def default_config(places: int, experts: int, dtype: torch.dtype) -> Config:
    """Tiles of as many places as an expert has in the mean, from 16 to 128. Few rows: long rows of the matrix, so that
    many bytes are on their way; many rows: wide tiles, so that what is loaded is multiplied often."""
    each = cdiv(places, max(1, min(experts, places)))
    rows = max(16, min(128, next_power_of_2(each)))
    if dtype == torch.float32:  # on no tensor cores, so that tiles stay in registers
        return Config.of(ROWS=min(rows, 32), BLOCK_OUT=32, BLOCK_IN=32, num_warps=4, num_stages=2)
    if rows < 64:
        return Config.of(ROWS=rows, BLOCK_OUT=64, BLOCK_IN=128, num_warps=4, num_stages=4)
    return Config.of(ROWS=rows, BLOCK_OUT=128, BLOCK_IN=64, num_warps=8, num_stages=3)


def tile_bound(places: int, experts: int, rows: int) -> int:
    """How many tiles of so many rows experts can need for so many places: each that has any may waste rows − 1."""
    return (places + min(experts, places) * (rows - 1)) // rows


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    version: int = 3,
    *,
    rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """y [P, out], y[p] = weight[e] · x[rows[p]] for the places p = starts[e] … starts[e + 1] − 1 of each expert e.

    x: [N, in]; without rows place p reads row p, and P = N. weight: [E, out, in] in x's type. starts: [E + 1] int32,
    from 0 rising to P. rows: [P] int32, from 0 to N − 1. The numbers of both lie on the device and are not checked.
    Raises Unsupported.
    """
    name = "grouped_matmul"
    check_version(name, version, VERSIONS)
    check_shape(name, "x", x, (None, None))
    check_shape(name, "weight", weight, (None, None, x.shape[1]))
    experts, out_features, in_features = weight.shape
    if not (1 <= experts <= MAX_EXPERTS and out_features and in_features):
        raise Unsupported(
            f"{name}: weight holds 1 to {MAX_EXPERTS} matrices of at least one number, got {list(weight.shape)}"
        )
    check_shape(name, "starts", starts, (experts + 1,))
    places = len(x) if rows is None else len(rows)
    if rows is not None:
        check_shape(name, "rows", rows, (None,))
    y = torch.empty((places, out_features), dtype=x.dtype, device=x.device) if out is None else out
    check_shape(name, "out", y, (places, out_features))
    if not x.dtype == weight.dtype == y.dtype:
        raise Unsupported(f"{name}: x, weight and out must have one type, got {x.dtype}, {weight.dtype} and {y.dtype}")
    check_tensors(name, multiplies=version > 1, x=x, weight=weight, out=y)
    check_indices(name, x.device, starts=starts, **({} if rows is None else {"rows": rows}))
    gathers = rows is not None
    inputs = Inputs(x, weight, starts, starts if rows is None else rows)
    padded = max(2, next_power_of_2(experts))
    shape = Shape(experts, padded, out_features, in_features, gathers, precision(x.dtype))
    if version == 1:
        options = {"BLOCK_OUT": 16, "BLOCK_IN": min(256, max(16, next_power_of_2(in_features)))}
        launch(_one_place, (places, cdiv(out_features, 16)), inputs, y, SHAPE=shape, **options, num_warps=4)
        return y
    config = config or default_config(places, experts, x.dtype)
    across, tile = cdiv(out_features, config["BLOCK_OUT"]), config["ROWS"]
    if version == 2:
        launch(_tiles_of_each, (across, experts, cdiv(places, tile)), inputs, y, SHAPE=shape, **config.options)
    else:
        grid = (across, tile_bound(places, experts, tile))
        launch(_tiles_there_are, grid, inputs, y, SHAPE=shape, **config.options)
    return y


# -- the oracle and the work -----------------------------------------------------------------------------------------


def grouped_matmul_reference(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, *, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """One product for each expert, in at least float32, rounded once; float64 in, float64 out."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x if rows is None else x[rows.long()]
    bounds = starts.tolist()
    parts = [x[a:b].to(wide) @ matrix.to(wide).T for matrix, a, b in zip(weight, bounds, bounds[1:])]
    return torch.cat(parts).to(weight.dtype)


def grouped_matmul_work(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, *, rows: torch.Tensor | None = None
) -> Work:
    """The matrices of the experts that have places, x, y and the places once. Reads `starts`, so waits for a device."""
    places = len(x) if rows is None else len(rows)
    different = int((starts.diff() > 0).sum())
    _, out_features, in_features = weight.shape
    read = different * out_features * in_features * weight.element_size() + x.nbytes
    read += starts.nbytes + (0 if rows is None else rows.nbytes)
    written = places * out_features * x.element_size()
    return Work(read, written, 2 * places * out_features * in_features, 1 if places else 0)


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.grouped_matmul` checks, and on a GPU times: gate and up of Qwen3-30B-A3B's
    experts (128, of which 8 a token, d = 2048, F = 768), for a step of 32 rows and a prompt of 2,048."""
    experts, each = make.size(6, 128), make.size(2, 8)
    size, wide = make.size(40, 2048), make.size(24, 2 * 768)
    weight = make.normal(experts, wide, size, scale=size**-0.5)
    return [_example(make, weight, count, each) for count in (make.size(5, 32), make.size(33, 2048))]


def _example(make: alone.Make, weight: torch.Tensor, count: int, each: int) -> alone.Example:
    """So many rows, each through `each` experts, all chosen alike."""
    experts, wide, size = weight.shape
    x = make.normal(count, size)
    chosen = make.normal(count, experts, dtype=torch.float32).topk(each).indices.flatten()
    starts = torch.zeros(experts + 1, dtype=torch.int32, device=x.device)
    starts[1:] = torch.bincount(chosen, minlength=experts).cumsum(0)
    rows = (chosen.argsort(stable=True) // each).int()
    return alone.Example(
        f"grouped_matmul of {count:,} rows, {each} of {experts} experts, {size:,} × {wide:,}",
        VERSIONS,
        lambda version: grouped_matmul(x, weight, starts, version, rows=rows),
        lambda: grouped_matmul_reference(x.double(), weight.double(), starts, rows=rows),
        grouped_matmul_work(x, weight, starts, rows=rows),
    )


if __name__ == "__main__":
    alone.main(examples)
