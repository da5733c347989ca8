"""Attention of any number of new tokens per sequence over keys in blocks: prompts, parts of prompts, drafts, decodes
beside them.

    query i of a sequence with n new tokens and `length` in all stands at length − n + i, and sees the keys up to its
    own, with a window the last W of them and the first `sinks`; key t lies at table[t // block] · block + t % block

    must read and write    q, out, and once the keys and values that are seen, G·(D + Dv)·bytes per token, 4 bytes a
    block
                           of table
    must compute           2·(D + Dv) FLOPs for each query head and each key it sees

One kernel for everything, because a row of a tile does not care whose token it is: row r of a sequence and key-value
head is token r // group, query head r % group. A decode is a tile of `group` rows, eight drafted tokens are 8·group
rows, a prompt is many tiles. The keys were written before; that a prompt's own keys come through the table too is what
a part of a prompt needs.

    version 1    all keys of the text masked in every tile
    version 2    from the window's first key to the diagonal, masks only in tiles that a border crosses, the longest
                 tiles first
    version 3    few rows over long texts (drafts to verify): the keys split among programs, merged as in
                 `flash_decoding`

Online softmax: `flash_attention.fold`. FlashAttention-2: Dao, arXiv 2307.08691; PagedAttention: Kwon et al., arXiv
2309.06180; parts of prompts beside decodes: Sarathi-Serve, arXiv 2403.02310. Heads of up to 256 values, any block size.
The block sizes are defaults that nobody has measured yet; `tune_paged_prefill` does.

A batch with one long part of a prompt has programs enough and is not split: beside it a decode over a very long text is
one program a key-value head, and the last to end.

Tiles, of one sequence's n new tokens and the heads of one key-value head, as in `flash_attention`, through the table:

                            cached tokens        | new tokens
    table[b]                | 7 | 2 | 5 | 0 | 9  | 3 | 8 |     keys of a step lie in the blocks that the table names
    rows (token, head) tile 0 | x   x   x   x   x | x  .        program: reads its rows of q once, the keys it sees a
                       tile 1 | x   x   x   x   x | x  x        step at a time, writes its rows of out
    version 3               |   split 0   |    split 1    |     a program each for rows and split: parts, lse -> merge
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from workbench.errors import is_whole
from workbench.kernels import alone, launch, tuning
from workbench.kernels.flash_attention import (
    LOG2_E,
    attend_reference,
    candidates,
    check_indices,
    check_looks,
    fold,
    load_rows,
    padded,
    precision,
    rows_config,
    seen_keys,
    tile_rows,
)
from workbench.kernels.flash_decoding import merge, part_tensors, resident, store_part
from workbench.kernels.launch import Unsupported, Work, cdiv
from workbench.kernels.paged_decode import check_out, check_paged, gather, places, seen_blocks
from workbench.kernels.ranges import PER_STEP, PER_STEP_TENSORS, check_splits, choose_splits, split_bounds

VERSIONS: dict[int, str] = {
    1: "all keys in every tile, masked",
    2: "from the window to the diagonal, masked at borders only",
    3: "few rows over long texts: keys split among programs, merged",
}


@triton.jit(do_not_specialize=PER_STEP, do_not_specialize_on_alignment=PER_STEP_TENSORS)
def _paged_prefill_kernel(
    q,
    k,
    v,
    tables,
    query_starts,
    lengths,
    out,
    lse,
    scale,
    tokens,
    splits,
    heads,
    groups,
    table_row,
    q_token,
    q_head,
    k_place,
    k_head,
    v_place,
    v_head,
    SKIP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
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
):
    """Grid (tiles of ROWS rows · splits · G, B), neighbours in G. SKIP: versions 2 and 3."""
    program, sequence = tl.program_id(0), tl.program_id(1)
    of_keys, split = program % groups, program // groups % splits
    # those with most keys first
    tile = tl.num_programs(0) // groups // splits - 1 - program // groups // splits
    start_token = tl.load(query_starts + sequence)
    new = tl.load(query_starts + sequence + 1) - start_token
    if tile * ROWS < new * GROUP:
        length = tl.load(lengths + sequence)
        column, value_column = tl.arange(0, PADDED), tl.arange(0, PADDED_VALUE)
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = row < new * GROUP
        head = of_keys * GROUP + row % GROUP
        token = (start_token + row // GROUP).to(tl.int64)
        query = load_rows(q, token * q_token + head * q_head, inside, column, SIZE, PADDED, True)
        past = length - new
        position = past + row // GROUP
        # keys that some row sees: `sunk` at the beginning of the text, then from `first` to before `last`
        first, sunk, last, all_see = 0, 0, length, 0
        if SKIP:
            last_row = tl.minimum(tile * ROWS + ROWS, new * GROUP) - 1
            last = past + last_row // GROUP + 1
            if WINDOW > 0:
                first = tl.maximum(past + tile * ROWS // GROUP - WINDOW + 1, 0)
                sunk = tl.minimum(first, SINKS)
            else:
                all_see = past + tile * ROWS // GROUP + 1
        begin, end = split_bounds(sunk + last - first, split, splits, KEYS)
        border = tl.maximum(tl.minimum(all_see // KEYS * KEYS, end // KEYS * KEYS), begin)
        table = tables + sequence.to(tl.int64) * table_row
        key_base, value_base = k + of_keys * k_head, v + of_keys * v_head
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
        for start in range(begin, border, KEYS):
            at = start + tl.arange(0, KEYS)
            place = places(table, at, at, BLOCK_SIZE, False)
            key = load_rows(key_base, place * k_place, at, column, SIZE, PADDED, False)
            value = load_rows(value_base, place * v_place, at, value_column, VALUE, PADDED_VALUE, False)
            best, total, mixed = fold(query, key, value, at, best, total, mixed, scale, False, PRECISION)
        for start in range(border, end, KEYS):
            index = start + tl.arange(0, KEYS)
            there = index < end
            at = index + tl.where(index < sunk, 0, first - sunk)
            place = places(table, at, there, BLOCK_SIZE, True)
            key = load_rows(key_base, place * k_place, there, column, SIZE, PADDED, True)
            value = load_rows(value_base, place * v_place, there, value_column, VALUE, PADDED_VALUE, True)
            seen = there[None, :] & (at[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & ((at[None, :] > position[:, None] - WINDOW) | (at[None, :] < SINKS))
            best, total, mixed = fold(query, key, value, seen, best, total, mixed, scale, True, PRECISION)
        at = (split.to(tl.int64) * tokens + token) * heads + head
        store_part(out, lse, at, best, total, mixed, inside, value_column, VALUE, WITH_LSE)


# -- the call ----------------------------------------------------------------------------------------------------------


def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    max_queries: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    splits: int | None = None,
    out: torch.Tensor | None = None,
    version: int = 3,
    config: tuning.Config | None = None,
) -> torch.Tensor:
    """q [N, H, D], k [places, G, D], v [places, G, Dv], tables [B, blocks], query_starts [B+1], lengths [B] -> [N, H,
    Dv].

    tables, query_starts and lengths: int32, on the device, not read here. lengths count the new tokens too, whose keys
    are written already. max_queries: at least as many new tokens as any sequence has; more only cost empty programs.
    What a row of `tables` must hold is as in `paged_decode`. splits: None for a choice from max_queries and the width
    of `tables`. out: written and returned. One launch, and one more to merge where splits > 1. Raises Unsupported.
    """
    name = "paged_prefill"
    launch.check_version(name, version, VERSIONS)
    check_paged(name, q, k, v, tables, lengths, block_size=block_size)
    launch.check_shape(name, "query_starts", query_starts, (len(tables) + 1,))
    check_indices(name, q.device, query_starts=query_starts)
    check_looks(name, scale, window, sinks)
    check_splits(name, splits)
    if not is_whole(max_queries) or max_queries < 0:
        raise Unsupported(f"{name}: max_queries must be a whole number of at least 0, got {max_queries!r}")
    (tokens, heads, size), groups, value, batch = q.shape, k.shape[1], v.shape[-1], len(tables)
    if out is None:
        out = q.new_empty((tokens, heads, value))
    else:
        check_out(name, out, q, (tokens, heads, value))
    group = heads // groups
    if config is None:
        config = rows_config(name, q, value, max_queries * group)
    tiles = cdiv(max_queries * group, config["ROWS"]) if tokens else 0
    if version < 3:
        splits = 1
    elif splits is None:
        wide, steps = max(padded(size), padded(value)), (config.num_stages - 1) // 2
        splits = choose_splits(
            batch * tiles * groups,
            _max_keys(tables, block_size, max_queries, window, sinks),
            q.device,
            resident=resident(config, wide, q.dtype, q.device, config["ROWS"], steps),
            multiple=config["KEYS"],
        )
    parts, lse = part_tensors(out, splits)
    launch.launch(
        _paged_prefill_kernel,
        (tiles * splits * groups, batch),
        q,
        k,
        v,
        tables,
        query_starts,
        lengths,
        parts,
        lse,
        scale * LOG2_E,
        tokens,
        splits,
        heads,
        groups,
        tables.stride(0),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        SKIP=version > 1,
        BLOCK_SIZE=block_size,
        GROUP=group,
        SIZE=size,
        VALUE=value,
        PADDED=padded(size),
        PADDED_VALUE=padded(value),
        WINDOW=window or 0,
        SINKS=sinks,
        WITH_LSE=splits > 1,
        PRECISION=precision(q.dtype),
        **config.options,
    )
    if splits > 1:
        merge(parts, lse, out=out)
    return out


def _max_keys(tables: torch.Tensor, block_size: int, max_queries: int, window: int | None, sinks: int) -> int:
    longest = tables.shape[1] * block_size
    return longest if window is None else min(longest, window + max_queries - 1 + sinks)


def tune_paged_prefill(
    q,
    k,
    v,
    tables,
    query_starts,
    lengths,
    *,
    max_queries: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    budget_s: float = 20.0,
) -> tuning.Config:
    """Measure on such a call, and keep the fastest for all of its head size, number of rows and dtype."""
    size = max(padded(q.shape[-1]), padded(v.shape[-1]))
    rows = tile_rows(max_queries * (q.shape[1] // k.shape[1]))

    def run(config: tuning.Config) -> None:
        look: dict[str, Any] = {"max_queries": max_queries, "block_size": block_size, "scale": scale, "window": window}
        paged_prefill(q, k, v, tables, query_starts, lengths, **look, sinks=sinks, config=config)

    found = candidates(size, rows, q.dtype, paged=True)
    return tuning.tune("paged_prefill", (size, rows, q.dtype), found, run, q.device, budget_s=budget_s)


# -- the twin, and what cannot be done without
# ------------------------------------------------------------------------------


def paged_prefill_reference(
    q,
    k,
    v,
    tables,
    query_starts,
    lengths,
    *,
    max_queries: int | None = None,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    splits: int | None = None,
) -> torch.Tensor:
    """The plain twin: gather, then attend, a sequence at a time. In float64 where that came, else in float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=wide, device=q.device)
    for i, ((a, b), length) in enumerate(zip(pairwise(query_starts.tolist()), lengths.tolist())):
        keys, values = (gather(stored, tables[i], length, block_size) for stored in (k, v))
        out[a:b] = attend_reference(q[a:b], keys, values, scale=scale, window=window, sinks=sinks)[0]
    return out


def paged_prefill_work(
    q,
    k,
    v,
    tables,
    query_starts,
    lengths,
    *,
    max_queries: int,
    block_size: int,
    scale: float = 1.0,
    window: int | None = None,
    sinks: int = 0,
    splits: int = 1,
) -> Work:
    """Reads starts and lengths: not for a timed region. A key that some new token sees counts once a sequence."""
    (tokens, heads, size), groups, value = q.shape, k.shape[1], v.shape[-1]
    pairs, keys, blocks = 0, 0, 0
    for (a, b), length in zip(pairwise(query_starts.tolist()), lengths.tolist()):
        past, new = length - (b - a), b - a
        if not new:
            continue
        pairs += sum(seen_keys(at, window, sinks) for at in range(past, length))
        first = 0 if window is None else max(0, past - window + 1)
        keys += length - first + min(sinks, first)
        blocks += seen_blocks(length, block_size, window, sinks, new)
    small = 4 * (blocks + len(query_starts) + len(lengths))
    read = tokens * heads * size + keys * groups * (size + value)
    return Work(
        read * q.element_size() + small,
        tokens * heads * value * q.element_size(),
        2 * pairs * heads * (size + value),
        launches=1 if splits == 1 else 2,
    )


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.paged_prefill` checks, and on a GPU times."""
    sequences, tokens = make.size(2, 32), make.size(40, 4096)
    heads, groups, size = make.size(4, 32), make.size(2, 8), make.size(32, 128)
    block, blocks = 16, -(-tokens // 16)
    tables, lengths, scale = make.tables(sequences, blocks), make.each(tokens, sequences), size**-0.5
    new = make.size(20, 256)
    starts = make.starts(sequences, new)
    q = make.normal(sequences * new, heads, size)
    k, v = (make.normal(sequences * blocks * block, groups, size) for _ in range(2))
    look: dict[str, Any] = {"max_queries": new, "block_size": block, "scale": scale}
    return [
        alone.Example(
            f"paged_prefill of the last {new} of {sequences} x {tokens:,}, {heads} over {groups} heads of {size}",
            VERSIONS,
            lambda version: paged_prefill(q, k, v, tables, starts, lengths, version=version, **look),
            lambda: paged_prefill_reference(q.double(), k.double(), v.double(), tables, starts, lengths, **look),
            paged_prefill_work(q, k, v, tables, starts, lengths, **look),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
