"""Decode for multi-head latent attention with absorbed weights: all heads over one row a token, read once.

    s_hj  = scale · q_h · c_j            c_j [R + rot], the latent of token j and its rotary part: the key of every head
    out_h = Σ_j softmax_j(s_h) · c_j[:R]   its first R elements are the value: the same bytes

Bytes: a row of R + rot elements a token, for any number of heads; q and out besides. FLOPs: 2·H·(2·R + rot) a token.
With R = 512, rot = 64 in bfloat16 that is 1,152 bytes and 2,176 FLOPs per head: an intensity of 1.9·H FLOPs per byte.
On an H200 (989 TFLOP/s, 4.8 TB/s: 206) it is memory that decides up to some 100 heads, and the tensor cores with all
128.

    version 1  a program for each head: H programs read the same rows, and multiply without tensor cores
    version 2  a tile of heads shares the rows it loads and multiplies with tensor cores; the value is loaded as if it
               were a tensor of its own, as a kernel for any keys and values does
    version 3  the tile in hand serves as key and as value: each row is loaded once
    version 4  the tokens are cut into splits, merged by log-sum-exp (`merge`): enough programs for few, long texts
    version 5  with fewer than 64 heads a tile the products are transposed: tokens × heads and R × heads. Hopper's
               tensor cores multiply 64 rows at a time; with heads in the columns 16 heads fill them, and both operands
               come from shared memory as they were loaded

From version 2 on the table is read one tile ahead: the compiler keeps several tiles in flight only if their addresses
do not wait for a load of the same turn.

A tile of 64 heads has 64 × 512 float32 sums, half the registers of a multiprocessor: with more heads there are several
tiles, which read the rows at nearly the same time, the later ones from the L2 cache. Splits write R float32 a head and
split, read again by the merge; with 128 heads that is 256 KiB a split, as much as 228 tokens' rows.

Supported: float16, bfloat16 (compiled only) and float32, R from 1 to 512, rot from 0 to 128, any strides between rows,
any block size. No windows. Not yet measured on a GPU: which version is best where, and the share of the bandwidth.
Source: DeepSeek-V2, arXiv 2405.04434 §2.1.2 and appendix C; splits: Dao et al., "Flash-Decoding" (2023); rows shared by
all heads in tiles of 64: FlashMLA (DeepSeek, 2025).

Tiles, of one sequence; a row of latents [R + rot] is key (all of it) and value (its first R) of every head:

    tokens          | TOKENS | TOKENS | TOKENS | TOKENS |          found through the table
    heads, version 1  program (h, b): one head over all rows
    heads 0..15     | x        x      | x        x      |  version 2, 3: program (tile of heads, 0, b), all tokens
    heads 16..31    | x        x      | x        x      |  version 4, 5: program (tile, split, b), parts -> merge
                    |     split 0     |     split 1     |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

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
    choose_splits,
    places_in,
    resident_programs,
    seen_places,
    split_bounds,
)
from workbench.kernels.tuning import Config, choose, tune

VERSIONS = {
    1: "a program for each head",
    2: "a tile of heads, tensor cores; values loaded again",
    3: "each row loaded once, as key and value",
    4: "splits, merged by log-sum-exp",
    5: "transposed: heads in the columns of the tensor cores",
}
MAX_RANK, MAX_ROTARY = 512, 128
HOPPER_SHARED, MIN_SHARED = 232_448, 98_304  # bytes of shared memory that one program may have
LOG2_E = math.log2(math.e)


# -- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=PER_STEP, do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _latent_decode_heads(
    q,
    latents,
    tables,
    lengths,
    out,
    scale,
    heads,
    q_row,
    q_head,
    place_row,
    table_row,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ALL_RANK: tl.constexpr,
    ALL_ROTARY: tl.constexpr,
):
    """Version 1. scale: times log2 e."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rank, rotary = tl.arange(0, ALL_RANK), tl.arange(0, ALL_ROTARY)
    query = q + sequence * q_row + head * q_head
    q_c = tl.load(query + rank, mask=rank < RANK, other=0.0).to(tl.float32)
    q_r = tl.load(query + RANK + rotary, mask=rotary < ROTARY, other=0.0).to(tl.float32)
    end = tl.load(lengths + sequence)
    max_keys, total = -float("inf"), 0.0
    acc = tl.zeros([ALL_RANK], tl.float32)
    for first in range(0, end, TOKENS):
        i = first + tl.arange(0, TOKENS)
        block = blocks_of(tables + sequence * table_row, i, end, 0, 0, BLOCK_SIZE)
        row = places_in(block, i, 0, 0, BLOCK_SIZE) * place_row
        inside = (i < end)[:, None]
        c = tl.load(latents + row[:, None] + rank[None, :], mask=inside & (rank < RANK)[None, :], other=0.0)
        r = tl.load(
            latents + row[:, None] + RANK + rotary[None, :], mask=inside & (rotary < ROTARY)[None, :], other=0.0
        )
        scores = tl.sum(c.to(tl.float32) * q_c[None, :], 1) + tl.sum(r.to(tl.float32) * q_r[None, :], 1)
        scores = tl.where(i < end, scores * scale, -float("inf"))
        new = tl.maximum(max_keys, tl.max(scores, 0))
        weights, old = tl.exp2(scores - new), tl.exp2(max_keys - new)
        acc = acc * old + tl.sum(weights[:, None] * c.to(tl.float32), 0)
        total = total * old + tl.sum(weights, 0)
        max_keys = new
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (sequence * heads + head) * RANK + rank, acc.to(out.dtype.element_ty), mask=rank < RANK)


@triton.jit(do_not_specialize=PER_STEP, do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _latent_decode_tiles(
    q,
    latents,
    tables,
    lengths,
    out,
    lse,
    scale,
    heads,
    q_row,
    q_head,
    place_row,
    table_row,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_RANK: tl.constexpr,
    ALL_ROTARY: tl.constexpr,
    AGAIN: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Versions 2 (AGAIN: the value is loaded again) to 4. out [splits, B, H, R], lse [splits, B, H]. scale: times log2
    e."""
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    split, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rank, rotary = tl.arange(0, ALL_RANK), tl.arange(0, ALL_ROTARY)
    query = q + sequence * q_row + head[:, None] * q_head
    here, in_rank, in_rotary = head < heads, rank < RANK, rotary < ROTARY
    q_c = tl.load(query + rank[None, :], mask=here[:, None] & in_rank[None, :], other=0.0)
    q_r = tl.load(query + RANK + rotary[None, :], mask=here[:, None] & in_rotary[None, :], other=0.0)
    begin, end = split_bounds(tl.load(lengths + sequence), split, tl.num_programs(1), TOKENS)
    max_keys = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, ALL_RANK], tl.float32)
    table = tables + sequence * table_row
    i = begin + tl.arange(0, TOKENS)
    place = places_in(blocks_of(table, i, end, 0, 0, BLOCK_SIZE), i, 0, 0, BLOCK_SIZE)
    for first in range(begin, end, TOKENS):
        i = first + tl.arange(0, TOKENS)
        at, inside = latents + (place * place_row)[:, None], (i < end)[:, None]
        block = blocks_of(table, i + TOKENS, end, 0, 0, BLOCK_SIZE)  # for the next tile
        place = places_in(block, i + TOKENS, 0, 0, BLOCK_SIZE)
        c = tl.load(at + rank[None, :], mask=inside & in_rank[None, :], other=0.0)
        scores = tl.dot(q_c, tl.trans(c), input_precision="ieee")
        if ROTARY > 0:
            r = tl.load(at + RANK + rotary[None, :], mask=inside & in_rotary[None, :], other=0.0)
            scores = tl.dot(q_r, tl.trans(r), scores, input_precision="ieee")
        scores = tl.where((i < end)[None, :], scores * scale, -float("inf"))
        new = tl.maximum(max_keys, tl.max(scores, 1))
        weights, old = tl.exp2(scores - new[:, None]), tl.exp2(max_keys - new)
        if AGAIN:
            c = tl.load(at + rank[None, :], mask=inside & in_rank[None, :], other=0.0, volatile=True)
        acc = tl.dot(weights.to(c.dtype), c, acc * old[:, None], input_precision="ieee")
        total = total * old + tl.sum(weights, 1)
        max_keys = new
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    target = (split * tl.num_programs(2) + sequence) * heads + head
    mask = here[:, None] & in_rank[None, :]
    tl.store(out + target[:, None] * RANK + rank[None, :], acc.to(out.dtype.element_ty), mask=mask)
    if WITH_LSE:
        whole = (max_keys + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
        tl.store(lse + target, tl.where(empty, -float("inf"), whole), mask=here)


@triton.jit(do_not_specialize=PER_STEP, do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _latent_decode_transposed(
    q,
    latents,
    tables,
    lengths,
    out,
    lse,
    scale,
    heads,
    q_row,
    q_head,
    place_row,
    table_row,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_RANK: tl.constexpr,
    ALL_ROTARY: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Version 5: as `_latent_decode_tiles`, with scores [tokens, heads] and sums [R, heads]."""
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    split, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rank, rotary = tl.arange(0, ALL_RANK), tl.arange(0, ALL_ROTARY)
    query = q + sequence * q_row + head[:, None] * q_head
    here, in_rank, in_rotary = head < heads, rank < RANK, rotary < ROTARY
    q_c = tl.load(query + rank[None, :], mask=here[:, None] & in_rank[None, :], other=0.0)
    q_r = tl.load(query + RANK + rotary[None, :], mask=here[:, None] & in_rotary[None, :], other=0.0)
    begin, end = split_bounds(tl.load(lengths + sequence), split, tl.num_programs(1), TOKENS)
    max_keys = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([ALL_RANK, HEADS], tl.float32)
    table = tables + sequence * table_row
    i = begin + tl.arange(0, TOKENS)
    place = places_in(blocks_of(table, i, end, 0, 0, BLOCK_SIZE), i, 0, 0, BLOCK_SIZE)
    for first in range(begin, end, TOKENS):
        i = first + tl.arange(0, TOKENS)
        at, inside = latents + (place * place_row)[:, None], (i < end)[:, None]
        block = blocks_of(table, i + TOKENS, end, 0, 0, BLOCK_SIZE)  # for the next tile
        place = places_in(block, i + TOKENS, 0, 0, BLOCK_SIZE)
        c = tl.load(at + rank[None, :], mask=inside & in_rank[None, :], other=0.0)
        scores = tl.dot(c, tl.trans(q_c), input_precision="ieee")
        if ROTARY > 0:
            r = tl.load(at + RANK + rotary[None, :], mask=inside & in_rotary[None, :], other=0.0)
            scores = tl.dot(r, tl.trans(q_r), scores, input_precision="ieee")
        scores = tl.where(inside, scores * scale, -float("inf"))
        new = tl.maximum(max_keys, tl.max(scores, 0))
        weights, old = tl.exp2(scores - new[None, :]), tl.exp2(max_keys - new)
        acc = tl.dot(tl.trans(c), weights.to(c.dtype), acc * old[None, :], input_precision="ieee")
        total = total * old + tl.sum(weights, 0)
        max_keys = new
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[None, :]
    target = (split * tl.num_programs(2) + sequence) * heads + head
    mask = here[None, :] & in_rank[:, None]
    tl.store(out + target[None, :] * RANK + rank[:, None], acc.to(out.dtype.element_ty), mask=mask)
    if WITH_LSE:
        whole = (max_keys + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
        tl.store(lse + target, tl.where(empty, -float("inf"), whole), mask=here)


# -- calling them ------------------------------------------------------------------------------------------------------


def shared_bytes(version: int, config: Config, width: int, size: int) -> int:
    """About what a program holds in shared memory: its queries, and the tiles in flight."""
    straight = version == 5 or config["HEADS"] >= 64  # tiles that Hopper's tensor cores read where they lie
    tiles = max(1, config.num_stages - (0 if straight else 1))
    if version == 2 and config.num_stages > 1:
        tiles *= 2  # a row is loaded twice
    return (tiles * config["TOKENS"] + config["HEADS"]) * width * size + 4096


def _shared_limit(device: torch.device) -> int:
    if device.type == "cpu":
        return HOPPER_SHARED
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", MIN_SHARED)


def default_config(version: int, heads: int, width: int, dtype: torch.dtype, shared: int = HOPPER_SHARED) -> Config:
    """Before anything was measured: tiles of tokens as large as the shared memory holds in flight."""
    if version == 1:
        return Config.of(num_warps=8, num_stages=1, TOKENS=16)
    if dtype == torch.float32:
        return Config.of(num_warps=8, num_stages=1, TOKENS=16, HEADS=16)
    tile = min(64, max(16, next_power_of_2(heads)))
    if version == 5 or tile == 64:
        shapes = [(tile, tokens, stages, 8) for tokens in (64, 32, 16) for stages in (2, 1)]
    else:
        shapes = [(tile, tokens, stages, 4) for tokens in (32, 16) for stages in (3, 2)]
    shapes.append((16, 16, 1, 4))
    for heads_tile, tokens, stages, warps in shapes:
        config = Config.of(warps, stages, HEADS=heads_tile, TOKENS=tokens)
        if shared_bytes(version, config, width, dtype.itemsize) <= shared:
            break
    return config


def candidates(version: int, heads: int, width: int, dtype: torch.dtype) -> list[Config]:
    """The default, then what else may be best: smaller tiles of tokens for more stages, fewer heads a program."""
    default = default_config(version, heads, width, dtype)
    if version == 1:
        others = [Config.of(w, 1, TOKENS=t) for t in (8, 16, 32) for w in (4, 8)]
    elif dtype == torch.float32:
        others = [Config.of(w, 1, TOKENS=16, HEADS=16) for w in (4, 8)]
    else:
        max_keys = default["HEADS"]
        tiles = [tile for tile in (64, 32, 16) if tile <= max_keys]
        shapes = ((64, 2, 8), (32, 3, 4), (32, 4, 4), (32, 3, 8), (64, 3, 8), (64, 2, 4), (16, 4, 4))
        others = [Config.of(w, s, TOKENS=t, HEADS=tile) for tile in tiles for t, s, w in shapes]
    return [default, *(one for one in others if one != default)]


def _key(q: torch.Tensor, kv_rank: int, version: int) -> tuple:
    return version, min(q.shape[1], 128), q.shape[2], kv_rank, str(q.dtype).removeprefix("torch.")


def latent_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    kv_rank: int,
    block_size: int,
    scale: float,
    splits: int | None = None,
    out: torch.Tensor | None = None,
    version: int = 5,
    config: Config | None = None,
) -> torch.Tensor:
    """q [B, H, R + rot], latents [places, 1, R + rot], tables [B, blocks] int32, lengths [B] int32 -> [B, H, R].

    Block b of a text lies at the places tables[·, b]·block_size and after; entries beyond a text's blocks may be
    anything. A length of 0 gives zeros. splits: default from the device and the table's width, 1 before version 4. out:
    contiguous, of q's type, is written to and returned. Nothing waits for the device, and nothing but the contents of
    `tables` and `lengths` changes between steps: a CUDA graph can replay the call.
    Raises Unsupported for what the module does not list.
    """
    check_version("latent_decode", version, VERSIONS)
    check_block_size("latent_decode", block_size)
    check_shape("latent_decode", "q", q, (None, None, None))
    batch, heads, width = q.shape
    check_shape("latent_decode", "latents", latents, (None, 1, width))
    check_shape("latent_decode", "tables", tables, (batch, None))
    check_shape("latent_decode", "lengths", lengths, (batch,))
    if not 1 <= kv_rank <= min(width, MAX_RANK) or width - kv_rank > MAX_ROTARY:
        raise Unsupported(
            f"latent_decode: kv_rank from 1 to {MAX_RANK} and a rotary part of 0 to {MAX_ROTARY} behind it, got"
            f" kv_rank {kv_rank} of rows of {width}"
        )
    check_tensors("latent_decode", multiplies=version > 1, contiguous=False, q=q, latents=latents)
    if latents.dtype != q.dtype:
        raise Unsupported(f"latent_decode: q and latents must have one type, got {q.dtype} and {latents.dtype}")
    check_tensors("latent_decode", dtypes=(torch.int32,), contiguous=False, tables=tables, lengths=lengths)
    if lengths.stride(0) != 1 and batch > 1:
        raise Unsupported("latent_decode: lengths must be contiguous; call .contiguous() first")
    if out is None:
        out = torch.empty((batch, heads, kv_rank), dtype=q.dtype, device=q.device)
    check_shape("latent_decode", "out", out, (batch, heads, kv_rank))
    check_tensors("latent_decode", dtypes=(q.dtype,), out=out)
    check_tensors("latent_decode", dtypes=(q.dtype, torch.int32), contiguous=False, q=q, tables=tables, out=out)
    if batch == 0 or heads == 0:
        return out
    rotary = width - kv_rank
    if config is None:
        default = default_config(version, heads, width, q.dtype, _shared_limit(q.device))
        config = choose("latent_decode", _key(q, kv_rank, version), default, q.device)
    sizes = {"RANK": kv_rank, "ROTARY": rotary, "BLOCK_SIZE": block_size}
    sizes |= {"ALL_RANK": max(16, next_power_of_2(kv_rank)), "ALL_ROTARY": max(16, next_power_of_2(rotary))}
    strides = (heads, q.stride(0), q.stride(1), latents.stride(0), tables.stride(0))
    if version < 4 and splits not in (None, 1):
        raise Unsupported(f"latent_decode: versions 4 and 5 have splits; got splits={splits} for version {version}")
    if version == 1:
        arguments: tuple[Any, ...] = (q, latents, tables, lengths, out, scale * LOG2_E, *strides)
        launch(_latent_decode_heads, (heads, batch), *arguments, **sizes, **config.options)
        return out
    tiles = cdiv(heads, config["HEADS"])
    if version < 4:
        splits = 1
    elif splits is None:
        held = shared_bytes(version, config, width, q.element_size())
        registers = 255 if config["HEADS"] >= 64 else 200  # of a thread, as compiled for 9.0
        resident = resident_programs(q.device, warps=config.num_warps, registers=registers, shared=held)
        max_keys = tables.shape[1] * block_size
        splits = choose_splits(tiles * batch, max_keys, q.device, resident=resident, multiple=config["TOKENS"])
    check_splits("latent_decode", splits)
    parts, lse = out, None
    if splits > 1:
        parts = torch.empty((splits, batch, heads, kv_rank), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, batch, heads), dtype=torch.float32, device=q.device)
    arguments = (q, latents, tables, lengths, parts, lse, scale * LOG2_E, *strides)
    sizes["WITH_LSE"] = splits > 1
    grid = (tiles, splits, batch)
    if version == 5 and config["HEADS"] < 64:
        launch(_latent_decode_transposed, grid, *arguments, **sizes, **config.options)
    else:
        launch(_latent_decode_tiles, grid, *arguments, **sizes, AGAIN=version == 2, **config.options)
    if lse is not None:
        merge(parts, lse, out)
    return out


def tune_latent_decode(q, latents, tables, lengths, *, kv_rank, block_size, scale, version=5, budget_s=20.0) -> Config:
    """Time the candidates on these tensors and keep the fastest for the device."""

    def run(config: Config) -> torch.Tensor:
        return latent_decode(
            q,
            latents,
            tables,
            lengths,
            kv_rank=kv_rank,
            block_size=block_size,
            scale=scale,
            version=version,
            config=config,
        )

    key, some = _key(q, kv_rank, version), candidates(version, q.shape[1], q.shape[2], q.dtype)
    return tune("latent_decode", key, some, run, q.device, budget_s=budget_s)


def latent_decode_reference(
    q: torch.Tensor,
    latents: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    kv_rank: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """The same in plain PyTorch, a text at a time, in the type of its inputs."""
    out = q.new_zeros((*q.shape[:2], kv_rank))
    for b, length in enumerate(lengths.tolist()):
        if length:
            rows = latents[seen_places(tables[b], length, block_size, None, 0), 0]
            out[b] = torch.softmax(q[b] @ rows.T * scale, -1) @ rows[:, :kv_rank]
    return out


def latent_decode_work(
    q: torch.Tensor, lengths: Sequence[int], *, kv_rank: int, block_size: int, splits: int = 1
) -> Work:
    """Each row once, q, the used entries of the tables and the lengths; out. Partial results of splits are not in
    it."""
    batch, heads, width = q.shape
    tokens, size = sum(lengths), q.element_size()
    blocks = sum(cdiv(length, block_size) for length in lengths)
    read = (tokens * width + q.numel()) * size + 4 * (blocks + batch)
    flops = 2 * heads * tokens * (width + kv_rank)
    return Work(read, batch * heads * kv_rank * size, flops, launches=1 + (splits > 1))


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.latent_decode` checks, and on a GPU times."""
    sequences, tokens, heads = make.size(2, 64), make.size(40, 8192), make.size(4, 16)
    rank, width, block = make.size(32, 512), make.size(48, 576), make.size(16, 64)
    q = make.normal(sequences, heads, width, scale=width**-0.5)
    blocks = -(-tokens // block)
    latents = make.normal(sequences * blocks * block, 1, width)
    tables, lengths = make.tables(sequences, blocks), make.each(tokens, sequences)
    look: dict[str, Any] = {"kv_rank": rank, "block_size": block, "scale": 1.0}
    return [
        alone.Example(
            f"latent_decode of {sequences} x {tokens:,} tokens, {heads} heads over {rank} + {width - rank}",
            VERSIONS,
            lambda v: latent_decode(q, latents, tables, lengths, version=v, **look),
            lambda: latent_decode_reference(q.double(), latents.double(), tables, lengths, **look),
            latent_decode_work(q, lengths.tolist(), kv_rank=rank, block_size=block),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
