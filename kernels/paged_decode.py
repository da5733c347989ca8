"""Attention of one new token a sequence over keys that lie in blocks anywhere, found through a table.

    out_b = Σ_t softmax_t(scale · q_b·K[place(b, t)]) · V[place(b, t)]
    place(b, t) = table_b[t // block] · block + t % block

The same as `flash_decoding`, whose header has the bounds and the reason for splits; here the keys are not copied
together first.

    must read    the keys and values that are seen, G·(D + Dv)·bytes per token, and 4 bytes a block of the table
    must compute 2·(D + Dv) FLOPs for each query head and key

A key is G·D values in a row, so where it lies costs nothing as long as a row is long: 256 bytes of a head are two whole
cache lines. What the table costs is that the address of a key comes out of memory itself: it has to be asked for one
step ahead. The table is small and read by all heads, so it stays in the cache; the compiler's pipeline asks for it
first (stages below).

    version 1    a program is a sequence and key-value head and goes from block to block: small blocks make small steps
    version 2    steps of many keys, each looked up: a step may begin and end within a block, and blocks may have any
                 size
    version 3    the keys split among programs, merged by the last of them (`merge.merge_when_last`), or by a launch of
                 its own (`merge.merge`)

The query heads of a key-value head are the rows of one tile (16 at least), so keys are read once for all of them.
Lengths and tables are read on the device alone, and the grid follows from shapes: a captured CUDA graph can replay it
with others.

PagedAttention: Kwon et al., arXiv 2309.06180 §4.3 (version 1 but for the tile). Heads of up to 256 values, any block
size. Block sizes and splits are defaults that nobody has measured yet; `tune_paged_decode` measures the first.

Tiles, of one sequence and the query heads of a key-value head g, in blocks of 4 tokens:

    table[b]       | 7 | 2 | 5 | 0 | 9 | 3 |                  token t lies at table[b, t // 4] * 4 + t % 4
    tokens         |0..3|4..7|8..11|12..15|16..19|20..23|
    version 1      program (g, b): block after block
    version 2      program (g, b): KEYS tokens a step, each looked up
    version 3      |  split 0      |  split 1           |     program (g, 0, b) and (g, 1, b): parts and lse -> merge
    all read the queries [rows, D] of the group once, and write them a row of out (or of a part) each
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from workbench.errors import is_whole
from workbench.kernels import alone, launch, tuning
from workbench.kernels.arrivals import check_arrivals, counters, enough
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
)
from workbench.kernels.flash_decoding import (
    candidates,
    decode_config,
    decode_work,
    max_seen,
    merge,
    part_tensors,
    resident,
    rows_of,
    seen_range,
    store_part,
)
from workbench.kernels.launch import Unsupported, Work, cdiv, wait_for_inputs
from workbench.kernels.merge import merge_when_last
from workbench.kernels.ranges import PER_STEP, PER_STEP_TENSORS, check_splits, choose_splits, split_bounds

VERSIONS: dict[int, str] = {
    1: "from block to block",
    2: "steps of many keys, each looked up in the table",
    3: "the keys split among programs, merged by log-sum-exp",
}


@triton.jit
def places(table, at, there, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """[n] int64: where the tokens at positions `at` of a text lie."""
    if MASKED:
        block = tl.load(table + at // BLOCK_SIZE, mask=there, other=0)
    else:
        block = tl.load(table + at // BLOCK_SIZE)
    return block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE


@triton.jit(do_not_specialize=PER_STEP, do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _by_block_kernel(
    q,
    k,
    v,
    tables,
    lengths,
    out,
    scale,
    heads,
    table_row,
    q_sequence,
    q_head,
    k_place,
    k_head,
    v_place,
    v_head,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Version 1. Grid (G · TILES, B). KEYS: a block, padded to a power of two of 16 at least."""
    of_keys, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    sequence = tl.program_id(1).to(tl.int64)
    column, value_column = tl.arange(0, PADDED), tl.arange(0, PADDED_VALUE)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < GROUP
    head = of_keys * GROUP + row
    query = load_rows(q + sequence * q_sequence, head * q_head, inside, column, SIZE, PADDED, True)
    length = tl.load(lengths + sequence)
    first, from_block = 0, 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
        if SINKS == 0:
            from_block = first // BLOCK_SIZE
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
    for index in range(from_block, tl.cdiv(length, BLOCK_SIZE)):
        block = tl.load(tables + sequence * table_row + index).to(tl.int64)
        inner = tl.arange(0, KEYS)
        at = index * BLOCK_SIZE + inner
        seen = (inner < BLOCK_SIZE) & (at < length)
        if WINDOW > 0:
            seen = seen & ((at >= first) | (at < SINKS))
        place = block * BLOCK_SIZE + inner
        key = load_rows(k + of_keys * k_head, place * k_place, seen, column, SIZE, PADDED, True)
        value = load_rows(v + of_keys * v_head, place * v_place, seen, value_column, VALUE, PADDED_VALUE, True)
        best, total, mixed = fold(query, key, value, seen[None, :], best, total, mixed, scale, True, PRECISION)
    at = sequence * heads + head
    store_part(out, out, at, best, total, mixed, inside, value_column, VALUE, False)


@triton.jit(do_not_specialize=PER_STEP, do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _paged_decode_kernel(
    q,
    k,
    v,
    tables,
    lengths,
    out,
    lse,
    merged,
    arrivals,
    scale,
    heads,
    table_row,
    q_sequence,
    q_head,
    k_place,
    k_head,
    v_place,
    v_head,
    BLOCK_SIZE: tl.constexpr,
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
    table = tables + sequence * table_row
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
    for start in range(begin, end, KEYS):
        index = start + tl.arange(0, KEYS)
        there = index < end
        place = places(table, index + tl.where(index < sunk, 0, skipped), there, BLOCK_SIZE, True)
        key = load_rows(k + of_keys * k_head, place * k_place, there, column, SIZE, PADDED, True)
        value = load_rows(v + of_keys * v_head, place * v_place, there, value_column, VALUE, PADDED_VALUE, True)
        best, total, mixed = fold(query, key, value, there[None, :], best, total, mixed, scale, True, PRECISION)
    at = (split * tl.num_programs(2) + sequence) * heads + head
    store_part(out, lse, at, best, total, mixed, inside, value_column, VALUE, WITH_LSE)
    if MERGES:
        result = sequence.to(tl.int32) * tl.num_programs(0) + tl.program_id(0)
        first_head, of_tile = of_keys * GROUP + tile * ROWS, tl.minimum(GROUP - tile * ROWS, ROWS)
        here = result, tl.num_programs(1), sequence, tl.num_programs(2), heads, first_head, of_tile
        merge_when_last(out, lse, merged, arrivals, *here, VALUE, PADDED_VALUE, HEADS)


# -- the call ----------------------------------------------------------------------------------------------------------


def check_paged(operation: str, q, k, v, tables, lengths, *, block_size: int) -> None:
    """What paged_decode and paged_prefill ask of keys in blocks. Raises Unsupported."""
    launch.check_shape(operation, "q", q, (None, None, None))
    launch.check_shape(operation, "k", k, (None, None, None))
    launch.check_shape(operation, "v", v, (None, None, None))
    launch.check_shape(operation, "tables", tables, (None, None))
    launch.check_shape(operation, "lengths", lengths, (len(tables),))
    launch.check_tensors(operation, multiplies=True, contiguous=False, q=q, k=k, v=v)
    check_indices(operation, q.device, tables=tables, lengths=lengths)
    check_heads(operation, q, k, v)
    if not is_whole(block_size) or block_size < 1:
        raise Unsupported(f"{operation}: block_size must be a whole number of at least 1, got {block_size!r}")


def check_out(operation: str, out: torch.Tensor, q: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise Unsupported unless the result can be written there."""
    launch.check_shape(operation, "out", out, shape)
    launch.check_tensors(operation, dtypes=(q.dtype,), out=out)
    if out.device != q.device:
        raise Unsupported(f"{operation}: out is on {out.device} and q on {q.device}")


def paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    splits: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    out: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    version: int = 3,
    config: tuning.Config | None = None,
) -> torch.Tensor:
    """q [B, H, D], k [places, G, D], v [places, G, Dv], tables [B, blocks] int32, lengths [B] int32 -> [B, H, Dv].

    Of a row of `tables` the first ⌈length / block_size⌉ entries are read, what stands beyond may be anything; each must
    be one of the blocks, and block_size · blocks at least the longest length: they lie on the device, so nothing here
    checks it. k and v may be strided views whose last axis is contiguous. A length of 0 gives zeros.
    splits: None for `choose_splits`, from the width of `tables`. out: written and returned. One launch, and one more to
    merge where splits > 1; none more with arrivals, int32 zeros (`kernels.arrivals`), one for each sequence and tile of
    heads, which are zeros again afterwards. Raises Unsupported.
    """
    name = "paged_decode"
    launch.check_version(name, version, VERSIONS)
    check_paged(name, q, k, v, tables, lengths, block_size=block_size)
    check_looks(name, scale, window, sinks)
    check_splits(name, splits)
    check_arrivals(name, arrivals, q.device)
    (batch, heads, size), groups, value = q.shape, k.shape[1], v.shape[-1]
    launch.check_shape(name, "tables", tables, (batch, None))
    if out is None:
        out = q.new_empty((batch, heads, value))
    else:
        check_out(name, out, q, (batch, heads, value))
    group = heads // groups
    rows = rows_of(group)
    tiles = cdiv(group, rows)
    if config is None:
        config = decode_config("paged_decode", q, value, group)
    options = {
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "TILES": tiles,
        "SIZE": size,
        "VALUE": value,
        "PADDED": padded(size),
        "PADDED_VALUE": padded(value),
        "WINDOW": window or 0,
        "SINKS": sinks,
        "PRECISION": precision(q.dtype),
        "ROWS": rows,
        **config.options,
    }
    strides = (tables.stride(0), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    if version == 1:
        options["KEYS"] = padded(block_size)
        launch.launch(
            _by_block_kernel,
            (groups * tiles, batch),
            q,
            k,
            v,
            tables,
            lengths,
            out,
            scale * LOG2_E,
            heads,
            *strides,
            **options,
        )
        return out
    if version == 2:
        splits = 1
    elif splits is None:
        splits = default_splits(q, k, v, tables, block_size, window, sinks, config)
    parts, lse = part_tensors(out, splits)
    merges = splits > 1 and enough(arrivals, batch * groups * tiles)
    launch.launch(
        _paged_decode_kernel,
        (groups * tiles, splits, batch),
        q,
        k,
        v,
        tables,
        lengths,
        parts,
        lse,
        out,
        arrivals if merges else lse,
        scale * LOG2_E,
        heads,
        *strides,
        **options,
        MERGES=merges,
        HEADS=min(rows, launch.next_power_of_2(group)),
        WITH_LSE=splits > 1,
    )
    if splits > 1 and not merges:
        merge(parts, lse, out=out)
    return out


def default_splits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    window: int | None = None,
    sinks: int = 0,
    config: tuning.Config | None = None,
) -> int:
    """The splits that `paged_decode` takes when it is not told."""
    group = q.shape[1] // k.shape[1]
    rows = rows_of(group)
    if config is None:
        config = decode_config("paged_decode", q, v.shape[-1], group)
    size, steps = max(padded(q.shape[-1]), padded(v.shape[-1])), (config.num_stages - 1) // 2
    return choose_splits(
        len(q) * k.shape[1] * cdiv(group, rows),
        max_seen(tables.shape[1] * block_size, window, sinks),
        q.device,
        resident=resident(config, size, q.dtype, q.device, rows, steps),
        multiple=config["KEYS"],
    )


def tune_paged_decode(
    q,
    k,
    v,
    tables,
    lengths,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    splits: int | None = None,
    budget_s: float = 20.0,
) -> tuning.Config:
    """Measure on such a call, and keep the fastest for all of its head size, group and dtype."""
    size = max(padded(q.shape[-1]), padded(v.shape[-1]))
    key, arrivals = (size, rows_of(q.shape[1] // k.shape[1]), q.dtype), counters(q.device, q.shape[0] * q.shape[1])

    def run(config: tuning.Config) -> None:
        look: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks, "splits": splits}
        paged_decode(q, k, v, tables, lengths, block_size=block_size, **look, config=config, arrivals=arrivals)

    return tuning.tune("paged_decode", key, candidates(size, q.dtype, paged=True), run, q.device, budget_s=budget_s)


# -- the twin, and what cannot be done without
# ------------------------------------------------------------------------------


def gather(stored: torch.Tensor, table: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """[length, …] the first tokens of a text, out of their blocks: what a kernel does without."""
    at = torch.arange(length, device=stored.device)
    return stored[table.long()[at // block_size] * block_size + at % block_size]


def paged_decode_reference(
    q,
    k,
    v,
    tables,
    lengths,
    *,
    block_size: int,
    scale: float,
    splits: int | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> torch.Tensor:
    """The plain twin: gather, then attend, a sequence at a time. In float64 where that came, else in float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=wide, device=q.device)
    for i, length in enumerate(lengths.tolist()):
        keys, values = (gather(stored, tables[i], length, block_size) for stored in (k, v))
        look: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks}
        out[i] = attend_reference(q[i : i + 1], keys, values, **look)[0][0]
    return out


def paged_decode_work(
    q,
    k,
    v,
    tables,
    lengths,
    *,
    block_size: int,
    scale: float = 1.0,
    splits: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    merges: bool = False,
) -> Work:
    """Reads the lengths: not for a timed region. Keys that are seen count once; what splits pass on to `merge` does
    not. merges: with arrivals, so that `merge` is no launch."""
    if splits is None:
        splits = default_splits(q, k, v, tables, block_size, window, sinks)
    texts = lengths.tolist()
    blocks = sum(seen_blocks(length, block_size, window, sinks) for length in texts)
    work = decode_work(q, v.shape[-1], k.shape[1], texts, window, sinks, splits, blocks)
    return replace(work, launches=min(work.launches, 1)) if merges else work


def seen_blocks(length: int, block_size: int, window: int | None, sinks: int, queries: int = 1) -> int:
    """Blocks with a key that one of the last `queries` tokens of a text sees."""
    first = 0 if window is None else max(0, length - queries - window + 1)
    of_window = set(range(first // block_size, cdiv(length, block_size)))
    return len(of_window | set(range(cdiv(min(sinks, first), block_size))))


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.paged_decode` checks, and on a GPU times."""
    sequences, tokens = make.size(2, 64), make.size(40, 2048)
    heads, groups, size = make.size(4, 32), make.size(2, 8), make.size(32, 128)
    block, blocks = 16, -(-tokens // 16)
    tables, lengths, scale = make.tables(sequences, blocks), make.each(tokens, sequences), size**-0.5
    q = make.normal(sequences, heads, size)
    k, v = (make.normal(sequences * blocks * block, groups, size) for _ in range(2))
    return [
        alone.Example(
            f"paged_decode of {sequences} x {tokens:,} keys, {heads} over {groups} heads of {size}",
            VERSIONS,
            lambda version: paged_decode(q, k, v, tables, lengths, block_size=block, scale=scale, version=version),
            lambda: paged_decode_reference(
                q.double(), k.double(), v.double(), tables, lengths, block_size=block, scale=scale
            ),
            paged_decode_work(q, k, v, tables, lengths, block_size=block),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
