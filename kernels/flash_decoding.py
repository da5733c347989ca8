"""Flash-Decoding: attention of one new token a sequence, the keys split among programs, the parts merged.

    part_s = Σ_{j in s} softmax_{j in s}(scale · q·k_j) · v_j        lse_s = log Σ_{j in s} exp(scale · q·k_j)
    out    = Σ_s exp(lse_s − lse) · part_s                           lse   = log Σ_s exp(lse_s)

q [B, H, D], keys [B, S, G, D], values [B, S, G, Dv], each sequence with a length of its own, on the device. With a
window W the new token sees the last W keys and the first `sinks`.

    must read    the keys and values that are seen, G·(D + Dv)·bytes per token: decode is as fast as memory is
    must compute 2·(D + Dv) FLOPs for each query head and key: H/G FLOPs per byte in 16 bits, far below any device's
    balance

So nothing counts but to keep the memory busy, and that takes many programs with loads under way. A sequence and
key-value head alone are B·G of them: 8 for one text of Llama's shape, and a GPU of 132 processors idles. Keys can be
split because softmax over a union is a weighted mean of softmaxes, the weights given by the log-sum-exp of each part.

    version 1    a program is a sequence and query head: q is one row, products are sums; each key is read H/G times
    version 2    the query heads of a key-value head are the rows of a tile (16 at least, for `tl.dot`): each key is
                 read once
    version 3    the keys of a sequence are split among `splits` programs; the last of them puts the parts together
                 (arrivals=, kernels/merge.py), or `merge`, a launch of its own

Flash-Decoding: Dao, Haziza, Massa, Sizov, 2023. Heads of up to 256 values, padded to a power of two. Block sizes and
the number of splits are defaults that nobody has measured yet; `tune_flash_decode` measures the first.

Tiles, of one sequence and the query heads that share a key-value head (version 1: program (head, sequence) goes over
all keys alone; version 2: one split):

    keys and values   | tile | tile | tile | tile | tile | tile |     read once, by one program each
                      |   split 0   |   split 1   |   split 2   |
    program             (g, 0, b)     (g, 1, b)     (g, 2, b)         each reads the H/G queries [rows, D]
    parts, lse        | part 0      | part 1      | part 2      |  -> merge -> out[b], H/G heads
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from workbench.kernels import alone, launch, tuning
from workbench.kernels.arrivals import check_arrivals, enough
from workbench.kernels.flash_attention import (
    LOG2_E,
    attend_reference,
    check_heads,
    check_indices,
    check_looks,
    fold,
    load_rows,
    padded,
    precision,
    seen_keys,
)
from workbench.kernels.launch import Work, cdiv, next_power_of_2, wait_for_inputs
from workbench.kernels.merge import merge, merge_reference, merge_when_last, merge_work
from workbench.kernels.ranges import PER_STEP_TENSORS, check_splits, choose_splits, resident_programs, split_bounds

__all__ = ["flash_decode", "flash_decode_reference", "flash_decode_work", "merge", "merge_reference", "merge_work"]

VERSIONS: dict[int, str] = {
    1: "a program a query head, no matrix product",
    2: "the query heads of a key-value head share the loaded keys",
    3: "the keys split among programs, merged by log-sum-exp",
}
LARGEST_TILE = 64  # query heads in a tile; a larger group takes several


# -- on the device -----------------------------------------------------------------------------------------------------


@triton.jit
def seen_range(length, WINDOW: tl.constexpr, SINKS: tl.constexpr):
    """(count, sunk, skipped): the new token of a text sees `count` keys; key i of them stands at i, from `sunk` on at i
    + skipped."""
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
        sunk = tl.minimum(first, SINKS)
        return length - first + sunk, sunk, first - sunk
    else:
        return length, 0, 0


@triton.jit
def store_part(out, lse, at, best, total, mixed, inside, column, VALUE: tl.constexpr, WITH_LSE: tl.constexpr):
    """The rows of a tile to out [at, VALUE]; of a split (WITH_LSE) also lse [at], and of an empty one that alone."""
    divisor = tl.where(total == 0.0, 1.0, total)
    result = mixed / divisor[:, None]
    target = out + at[:, None] * VALUE + column[None, :]
    stored = inside[:, None] & (column < VALUE)[None, :]
    if WITH_LSE:
        stored = stored & (total > 0.0)[:, None]
        tl.store(lse + at, (best + tl.log2(divisor)) * 0.6931471805599453, mask=inside)  # −∞ where best is
    tl.store(target, result.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _decode_head_kernel(
    q,
    k,
    v,
    lengths,
    out,
    scale,
    heads,
    q_sequence,
    q_head,
    k_sequence,
    k_token,
    k_head,
    v_sequence,
    v_token,
    v_head,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Version 1. Grid (H, B)."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, value_column = tl.arange(0, PADDED), tl.arange(0, PADDED_VALUE)
    query = tl.load(q + sequence * q_sequence + head * q_head + column, mask=column < SIZE, other=0.0)
    query = query.to(tl.float32)
    count, sunk, skipped = seen_range(tl.load(lengths + sequence), WINDOW, SINKS)
    key_base = k + sequence * k_sequence + head // GROUP * k_head
    value_base = v + sequence * v_sequence + head // GROUP * v_head
    best, total = float("-inf"), 0.0
    mixed = tl.zeros([PADDED_VALUE], tl.float32)
    for start in range(0, count, KEYS):
        index = start + tl.arange(0, KEYS)
        there = index < count
        place = (index + tl.where(index < sunk, 0, skipped)).to(tl.int64)
        key = load_rows(key_base, place * k_token, there, column, SIZE, PADDED, True)
        scores = tl.sum(key.to(tl.float32) * query[None, :], axis=1) * scale
        scores = tl.where(there, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=0))
        weights, shrink = tl.exp2(scores - higher), tl.exp2(best - higher)
        value = load_rows(value_base, place * v_token, there, value_column, VALUE, PADDED_VALUE, True)
        mixed = mixed * shrink + tl.sum(value.to(tl.float32) * weights[:, None], axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        best = higher
    result = mixed / tl.where(total == 0.0, 1.0, total)
    target = out + (sequence * heads + head) * VALUE + value_column
    tl.store(target, result.to(out.dtype.element_ty), mask=value_column < VALUE)


@triton.jit(do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _decode_kernel(
    q,
    k,
    v,
    lengths,
    out,
    lse,
    merged,
    arrivals,
    scale,
    heads,
    q_sequence,
    q_head,
    k_sequence,
    k_token,
    k_head,
    v_sequence,
    v_token,
    v_head,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MERGES: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Versions 2 and 3. Grid (G · TILES, SPLITS, B): neighbours read neighbouring heads of the same keys."""
    of_keys, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    split, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column, value_column = tl.arange(0, PADDED), tl.arange(0, PADDED_VALUE)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < GROUP
    head = of_keys * GROUP + row
    wait_for_inputs(PDL)
    query = load_rows(q + sequence * q_sequence, head * q_head, inside, column, SIZE, PADDED, True)
    count, sunk, skipped = seen_range(tl.load(lengths + sequence), WINDOW, SINKS)
    begin, end = split_bounds(count, split, tl.num_programs(1), KEYS)
    key_base = k + sequence * k_sequence + of_keys * k_head
    value_base = v + sequence * v_sequence + of_keys * v_head
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
    for start in range(begin, end, KEYS):
        index = start + tl.arange(0, KEYS)
        there = index < end
        place = (index + tl.where(index < sunk, 0, skipped)).to(tl.int64)
        key = load_rows(key_base, place * k_token, there, column, SIZE, PADDED, True)
        value = load_rows(value_base, place * v_token, there, value_column, VALUE, PADDED_VALUE, True)
        best, total, mixed = fold(query, key, value, there[None, :], best, total, mixed, scale, True, PRECISION)
    at = (split * tl.num_programs(2) + sequence) * heads + head
    store_part(out, lse, at, best, total, mixed, inside, value_column, VALUE, WITH_LSE)
    if MERGES:
        result = sequence.to(tl.int32) * tl.num_programs(0) + tl.program_id(0)
        first_head, of_tile = of_keys * GROUP + tile * ROWS, tl.minimum(GROUP - tile * ROWS, ROWS)
        here = result, tl.num_programs(1), sequence, tl.num_programs(2), heads, first_head, of_tile
        merge_when_last(out, lse, merged, arrivals, *here, VALUE, PADDED_VALUE, HEADS)


# -- splits ------------------------------------------------------------------------------------------------------------


def resident(config: tuning.Config, size: int, dtype: torch.dtype, device: torch.device, rows: int, steps: int) -> int:
    """Programs of a multiprocessor, see `resident_programs`: in shared memory the keys and values of so many steps
    that are under way, the queries and the weights. size: padded."""
    keys = config["KEYS"]
    # as compiled for 9.0, with up to 256 values a head; float32 without tensor cores
    registers = 255 if dtype == torch.float32 else 128 if rows <= 16 else 248
    shared = (2 * steps * keys * size + rows * size + rows * keys) * dtype.itemsize
    return resident_programs(device, warps=config.num_warps, registers=registers, shared=shared)


def default_splits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    sinks: int,
    config: tuning.Config | None = None,
) -> int:
    """The splits that `flash_decode` takes when it is not told."""
    group = q.shape[1] // k.shape[2]
    rows = rows_of(group)
    if config is None:
        config = decode_config("flash_decode", q, v.shape[-1], group)
    size, steps = max(padded(q.shape[-1]), padded(v.shape[-1])), config.num_stages - 1
    return choose_splits(
        len(q) * k.shape[2] * cdiv(group, rows),
        max_seen(k.shape[1], window, sinks),
        q.device,
        resident=resident(config, size, q.dtype, q.device, rows, steps),
        multiple=config["KEYS"],
    )


def max_seen(longest: int, window: int | None, sinks: int) -> int:
    """Keys that a new token of a text of at most `longest` tokens sees at most."""
    return longest if window is None else min(longest, window + sinks)


def rows_of(group: int) -> int:
    """Query heads in a tile: a power of two, at least the 16 that `tl.dot` takes."""
    return max(16, min(LARGEST_TILE, next_power_of_2(group)))


# -- the call ----------------------------------------------------------------------------------------------------------


def flash_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    splits: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    arrivals: torch.Tensor | None = None,
    version: int = 3,
    config: tuning.Config | None = None,
) -> torch.Tensor:
    """q [B, H, D], k [B, S, G, D], v [B, S, G, Dv], lengths [B] int32 ≤ S -> [B, H, Dv].

    What lies beyond a length is not read. q, k, v may be strided views whose last axis is contiguous. A length of 0
    gives zeros.
    splits: None for `choose_splits`. One launch, and one more to merge where splits > 1; none more with arrivals, as in
    `paged_decode`. Raises Unsupported.
    """
    name = "flash_decode"
    launch.check_version(name, version, VERSIONS)
    launch.check_shape(name, "q", q, (None, None, None))
    batch, heads, size = q.shape
    for what, tensor in (("k", k), ("v", v)):
        launch.check_shape(name, what, tensor, (batch, None, None, None))
    launch.check_shape(name, "lengths", lengths, (batch,))
    launch.check_tensors(name, multiplies=True, contiguous=False, q=q, k=k, v=v)
    check_indices(name, q.device, lengths=lengths)
    group = check_heads(name, q, k, v)
    check_looks(name, scale, window, sinks)
    check_splits(name, splits)
    check_arrivals(name, arrivals, q.device)
    groups, value = k.shape[2], v.shape[-1]
    out = q.new_empty((batch, heads, value))
    if config is None:
        config = decode_config("flash_decode", q, value, group)
    common = {
        "GROUP": group,
        "SIZE": size,
        "VALUE": value,
        "PADDED": padded(size),
        "PADDED_VALUE": padded(value),
        "WINDOW": window or 0,
        "SINKS": sinks,
    }
    strides = (*q.stride()[:2], *k.stride()[:3], *v.stride()[:3])
    if version == 1:
        launch.launch(
            _decode_head_kernel,
            (heads, batch),
            q,
            k,
            v,
            lengths,
            out,
            scale * LOG2_E,
            heads,
            *strides,
            **common,
            KEYS=config["KEYS"],
            num_warps=config.num_warps,
        )
        return out
    rows = rows_of(group)
    tiles = cdiv(group, rows)
    if version == 2:
        splits = 1
    elif splits is None:
        splits = default_splits(q, k, v, window, sinks, config)
    parts, lse = part_tensors(out, splits)
    merges = splits > 1 and enough(arrivals, batch * groups * tiles)
    launch.launch(
        _decode_kernel,
        (groups * tiles, splits, batch),
        q,
        k,
        v,
        lengths,
        parts,
        lse,
        out,
        arrivals if merges else lse,
        scale * LOG2_E,
        heads,
        *strides,
        **common,
        TILES=tiles,
        WITH_LSE=splits > 1,
        PRECISION=precision(q.dtype),
        ROWS=rows,
        MERGES=merges,
        HEADS=min(rows, launch.next_power_of_2(group)),
        **config.options,
    )
    if splits > 1 and not merges:
        merge(parts, lse, out=out)
    return out


def part_tensors(out: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the splits write: parts [splits, *out] and lse [splits, *out without Dv], float32; for one split `out`
    itself."""
    if splits == 1:
        return out, out
    shape = (splits, *out.shape)
    return out.new_empty(shape, dtype=torch.float32), out.new_empty(shape[:-1], dtype=torch.float32)


def decode_config(kernel: str, q: torch.Tensor, value: int, group: int) -> tuning.Config:
    """The measured one, or a default: 16 KiB of keys a step, two steps under way."""
    size = max(padded(q.shape[-1]), padded(value))
    key = size, rows_of(group), q.dtype
    default = _default(size, q.dtype, paged=kernel.startswith("paged"))
    return tuning.choose(kernel, key, default, q.device)


def _default(size: int, dtype: torch.dtype, paged: bool) -> tuning.Config:
    """Of three stages the compiler makes two steps of keys under way. Where their addresses come out of a table it
    spends stages on that: of three it makes one step, which is loaded while nothing computes, of five again two (seen
    in what it makes of them for compute capability 9.0)."""
    keys = max(16, min(128, 16_384 // (size * dtype.itemsize)))
    return tuning.Config.of(num_warps=4, num_stages=5 if paged else 3, KEYS=keys)


def candidates(size: int, dtype: torch.dtype, paged: bool = False) -> list[tuning.Config]:
    """What `tune_flash_decode` and `tune_paged_decode` (paged) try, the default first. size: padded."""
    found = [_default(size, dtype, paged)]
    few, more, most = (3, 5, 7) if paged else (2, 3, 4)
    for keys in (64, 128, 32, 16):
        for warps, stages in ((4, more), (2, more), (4, most), (4, few), (2, most), (8, more)):
            if keys * size * dtype.itemsize <= 32_768:
                found.append(tuning.Config.of(num_warps=warps, num_stages=stages, KEYS=keys))
    return list(dict.fromkeys(found))


def tune_flash_decode(
    q,
    k,
    v,
    lengths,
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    splits: int | None = None,
    budget_s: float = 20.0,
) -> tuning.Config:
    """Measure on such a call, and keep the fastest for all of its head size, group and dtype."""
    size = max(padded(q.shape[-1]), padded(v.shape[-1]))
    key = size, rows_of(q.shape[1] // k.shape[2]), q.dtype

    def run(config: tuning.Config) -> None:
        look: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks, "splits": splits}
        flash_decode(q, k, v, lengths, **look, config=config)

    found = candidates(size, q.dtype)
    return tuning.tune("flash_decode", key, found, run, q.device, budget_s=budget_s)


# -- the twin, and what cannot be done without
# ------------------------------------------------------------------------------


def flash_decode_reference(
    q, k, v, lengths, *, scale: float, splits: int | None = None, window: int | None = None, sinks: int = 0
) -> torch.Tensor:
    """The plain twin, a sequence at a time. In float64 where that came, else in float32."""
    look: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks}
    rows = [
        attend_reference(q[i : i + 1], k[i, :length], v[i, :length], **look)[0]
        for i, length in enumerate(lengths.tolist())
    ]
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.cat(rows) if rows else q.new_empty((0, q.shape[1], v.shape[-1]), dtype=wide)


def flash_decode_work(
    q, k, v, lengths, *, scale: float = 1.0, splits: int | None = None, window: int | None = None, sinks: int = 0
) -> Work:
    """Reads the lengths: not for a timed region. Keys that are seen count once; what splits pass on to `merge` does
    not."""
    if splits is None:
        splits = default_splits(q, k, v, window, sinks)
    return decode_work(q, v.shape[-1], k.shape[2], lengths.tolist(), window, sinks, splits)


def decode_work(q, value: int, groups: int, lengths: list[int], window, sinks, splits: int, blocks: int = 0) -> Work:
    """Of one new token a sequence. blocks: entries of block tables that are read."""
    batch, heads, size = q.shape
    seen = sum(seen_keys(length - 1, window, sinks) for length in lengths if length)
    of_queries = batch * heads * size * q.element_size() + 4 * (batch + blocks)
    of_keys = seen * groups * (size + value) * q.element_size()
    written = batch * heads * value * q.element_size()
    return Work(of_queries + of_keys, written, 2 * seen * heads * (size + value), launches=1 if splits == 1 else 2)


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.flash_decoding` checks, and on a GPU times."""
    sequences, tokens = make.size(2, 64), make.size(40, 2048)
    heads, groups, size = make.size(4, 32), make.size(2, 8), make.size(32, 128)
    q = make.normal(sequences, heads, size)
    k, v = (make.normal(sequences, tokens, groups, size) for _ in range(2))
    lengths, scale = make.each(tokens, sequences), size**-0.5
    return [
        alone.Example(
            f"flash_decode of {sequences} x {tokens:,} keys, {heads} over {groups} heads of {size}",
            VERSIONS,
            lambda version: flash_decode(q, k, v, lengths, scale=scale, version=version),
            lambda: flash_decode_reference(q.double(), k.double(), v.double(), lengths, scale=scale),
            flash_decode_work(q, k, v, lengths),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
