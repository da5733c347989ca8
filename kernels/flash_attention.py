"""FlashAttention, forward: attention whose n × S scores are never written to memory.

    out_i = Σ_j softmax_j(scale · q_i·k_j) · v_j        lse_i = log Σ_j exp(scale · q_i·k_j)

over the keys j that query i may see: those up to its own position, with a window W the last W of them and the first
`sinks` of the text. Sequences of any lengths lie one after the other (ragged, "varlen"); H query heads share G
key-value heads.

    must read and write    q, k, v once, out once: (N·H·(D + Dv) + S·G·(D + Dv)) · bytes
    must compute           2·(D + Dv) FLOPs for each query head and each key it sees
    does not write         N·S·H scores, which the definition writes and reads twice

How: keys come in tiles. Of what was seen so far each query row keeps the largest score m, l = Σ exp(s − m), and Σ exp(s
− m)·v. A tile with a larger score makes both sums smaller by exp(m_old − m_new): the online softmax, `fold` below,
which all attention kernels share. Powers are of 2, with log2 e inside the scale: the hardware has exp2 and not exp.

    version 1    a program is a tile of queries of one head, and goes over all keys; what may not be seen is masked
    version 2    goes from the window's first key to the diagonal; masks only in tiles that a border crosses
    version 3    the query heads of a key-value head are rows of one tile, so keys are loaded once for all of them (row
                 r is token r // group, head r % group); the longest tiles begin first

FlashAttention: Dao et al., arXiv 2205.14135 §3.1; FlashAttention-2: arXiv 2307.08691 §3.1 (causal skipping, late
division).
Sinks: Xiao et al., arXiv 2309.17453. Heads of up to 256 values, padded to a power of two. The block sizes are defaults
that nobody has measured yet; `tune_flash_attention` does.

Tiles, of one head of one sequence (x: read and multiplied, .: in version 1 read too, later not):

                     keys and values, tiles of KEYS
                     | 0 | 1 | 2 | 3 |
    queries, tile 0  | x | . | . | . |   program (0, head, sequence): reads its queries once, keys from left to right,
            tile 1   | x | x | . | . |   program (1, head, sequence)  and writes its tile of out and lse
            tile 2   | x | x | x | . |   program (2, head, sequence)
            tile 3   | x | x | x | x |   version 3: a tile is some tokens times the SHARE heads that have these keys,
                                         program (tile, head // SHARE, sequence), the last tile first
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from workbench.errors import is_whole
from workbench.kernels import alone, launch, tuning
from workbench.kernels.launch import Unsupported, Work, cdiv, next_power_of_2

VERSIONS: dict[int, str] = {
    1: "a tile of queries over all keys, masked everywhere",
    2: "from the window to the diagonal, masked at borders only",
    3: "the query heads of a key-value head in one tile",
}
LARGEST_HEAD = 256
LOG2_E = math.log2(math.e)


# -- what the attention kernels share: on the device ------------------------------------------------------------------


@triton.jit
def fold(q, k, v, seen, best, total, mixed, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax: rows q [M, D] look at a tile of keys k [n, D], values v [n, Dv].

    scale: with log2 e inside. seen: [M, n], or [1, n] for all rows, looked at where MASKED. best [M]: the largest score
    so far (−∞ at first), total [M]: Σ 2^(s − best), mixed [M, Dv]: Σ 2^(s − best) · v. Returns the three after the
    tile.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    # of a row that has seen nothing yet: −∞ − (−∞) is no number
    safe = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(best - safe)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
    return higher, total, mixed


@triton.jit
def load_rows(base, offsets, inside, columns, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """[n, PADDED] rows of SIZE values at base + offsets [n], zeros beyond; rows that are not inside are not read."""
    at = base + offsets[:, None] + columns[None, :]
    if MASKED:
        if SIZE == PADDED:
            return tl.load(at, mask=inside[:, None], other=0.0)
        else:
            return tl.load(at, mask=inside[:, None] & (columns < SIZE)[None, :], other=0.0)
    else:
        if SIZE == PADDED:
            return tl.load(at)
        else:
            return tl.load(at, mask=(columns < SIZE)[None, :], other=0.0)


# -- what they share: on the host
# ---------------------------------------------------------------------------------------


def padded(size: int) -> int:
    """A head size as the kernels hold it: a power of two, at least 16, which is the least `tl.dot` takes."""
    return max(16, next_power_of_2(size))


def precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: as float32, not in tf32's ten bits. 16-bit types do not ask."""
    return "ieee" if dtype == torch.float32 else "tf32"


def check_heads(operation: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """H / G, from q [..., H, D], k [..., G, D], v [..., G, Dv]. Raises Unsupported."""
    heads, size, groups = q.shape[-2], q.shape[-1], k.shape[-2]
    if k.shape[-1] != size:
        raise Unsupported(f"{operation}: q has heads of {size} values and k of {k.shape[-1]}; they must be equal")
    if v.shape[:-1] != k.shape[:-1]:
        raise Unsupported(
            f"{operation}: k and v must agree but for the head size, got {list(k.shape)} and {list(v.shape)}"
        )
    if groups < 1 or heads < 1 or heads % groups:
        raise Unsupported(f"{operation}: the {heads} query heads must be a multiple of the {groups} key-value heads")
    for name, of in (("D", size), ("Dv", v.shape[-1])):
        if not 1 <= of <= LARGEST_HEAD:
            raise Unsupported(
                f"{operation}: head sizes from 1 to {LARGEST_HEAD} are supported, got {name} = {of}; latents of latent "
                "attention are for latent_decode"
            )
    if not (q.dtype == k.dtype == v.dtype):
        raise Unsupported(
            f"{operation}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; convert q with "
            "q.to(k.dtype)"
        )
    return heads // groups


def check_looks(operation: str, scale: float, window: int | None, sinks: int) -> None:
    """Raise Unsupported for a scale, window or number of sinks that makes no sense."""
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise Unsupported(f"{operation}: scale must be a finite number, got {scale!r}")
    if window is not None and (not is_whole(window) or window < 1):
        raise Unsupported(f"{operation}: window must be None or a whole number of at least 1, got {window!r}")
    if not is_whole(sinks) or sinks < 0:
        raise Unsupported(f"{operation}: sinks must be a whole number of at least 0, got {sinks!r}")


def check_indices(operation: str, device: torch.device, **tensors: torch.Tensor) -> None:
    """Raise Unsupported unless these are int32, contiguous in the last axis, on the device of q."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32 or tensor.device != device:
            raise Unsupported(f"{operation}: {name} must be int32 on {device}, got {tensor.dtype} on {tensor.device}")
        if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise Unsupported(f"{operation}: {name} must be contiguous in its last axis")


def seen_keys(position: int, window: int | None, sinks: int) -> int:
    """How many keys the query at this position sees, its own among them."""
    first = 0 if window is None else max(0, position - window + 1)
    return position + 1 - first + min(sinks, first)


# -- the kernels -------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What is read."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor


class Strides(NamedTuple):
    """Values from one token, and from one head, to the next."""

    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int


class Shape(NamedTuple):
    """What is compiled in: heads, how many of them share keys and a tile, a head's sizes, how products are rounded."""

    heads: int
    group: int
    share: int
    size: int
    value_size: int  # `value` is what a constexpr calls its own
    padded: int
    padded_value: int
    precision: str


class Look(NamedTuple):
    """What is compiled in: which keys are seen, and whether lse is written. window 0: all."""

    causal: bool
    window: int
    sinks: int
    with_lse: bool


@triton.jit
def _flash_all_keys_kernel(
    inputs, outputs, strides, scale, SHAPE: tl.constexpr, LOOK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Version 1. Grid (tiles of ROWS queries, H, B)."""
    q, k, v, query_starts, key_starts = inputs
    out, lse = outputs
    q_token, q_head, k_token, k_head, v_token, v_head = strides
    GROUP: tl.constexpr = SHAPE.group
    SIZE: tl.constexpr = SHAPE.size
    VALUE: tl.constexpr = SHAPE.value_size
    PADDED: tl.constexpr = SHAPE.padded
    PADDED_VALUE: tl.constexpr = SHAPE.padded_value
    PRECISION: tl.constexpr = SHAPE.precision
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_query, first_key = tl.load(query_starts + sequence), tl.load(key_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - first_query
    keys = tl.load(key_starts + sequence + 1) - first_key
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < queries:
        column, value_column = tl.arange(0, PADDED), tl.arange(0, PADDED_VALUE)
        token = (first_query + row).to(tl.int64)
        query = load_rows(q + head * q_head, token * q_token, row < queries, column, SIZE, PADDED, True)
        position = keys - queries + row
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
        for start in range(0, keys, KEYS):
            at = start + tl.arange(0, KEYS)
            there = at < keys
            place = (first_key + at).to(tl.int64)
            key = load_rows(k + head // GROUP * k_head, place * k_token, there, column, SIZE, PADDED, True)
            value = load_rows(
                v + head // GROUP * v_head, place * v_token, there, value_column, VALUE, PADDED_VALUE, True
            )
            seen = there[None, :]
            if LOOK.causal:
                seen = seen & (at[None, :] <= position[:, None])
                if LOOK.window > 0:
                    seen = seen & ((at[None, :] > position[:, None] - LOOK.window) | (at[None, :] < LOOK.sinks))
            best, total, mixed = fold(query, key, value, seen, best, total, mixed, scale, True, PRECISION)
        divisor = tl.where(total == 0.0, 1.0, total)
        result = mixed / divisor[:, None]
        target = out + (token * SHAPE.heads + head)[:, None] * VALUE + value_column[None, :]
        inside = (row < queries)[:, None] & (value_column < VALUE)[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
        if LOOK.with_lse:
            of_rows = (best + tl.log2(divisor)) * 0.6931471805599453  # of a row that sees nothing −∞, as best is
            tl.store(lse + token * SHAPE.heads + head, of_rows, mask=row < queries)


@triton.jit
def _flash_kernel(
    inputs, outputs, strides, scale, SHAPE: tl.constexpr, LOOK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Versions 2 (SHARE = 1) and 3 (SHARE = GROUP): SHARE heads in a tile. Grid (tiles of ROWS rows, H / SHARE, B)."""
    q, k, v, query_starts, key_starts = inputs
    out, lse = outputs
    q_token, q_head, k_token, k_head, v_token, v_head = strides
    GROUP: tl.constexpr = SHAPE.group
    SHARE: tl.constexpr = SHAPE.share
    SIZE: tl.constexpr = SHAPE.size
    VALUE: tl.constexpr = SHAPE.value_size
    PADDED: tl.constexpr = SHAPE.padded
    PADDED_VALUE: tl.constexpr = SHAPE.padded_value
    PRECISION: tl.constexpr = SHAPE.precision
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with most keys first
    sequence = tl.program_id(2)
    first_query, first_key = tl.load(query_starts + sequence), tl.load(key_starts + sequence)
    queries = tl.load(query_starts + sequence + 1) - first_query
    keys = tl.load(key_starts + sequence + 1) - first_key
    if tile * ROWS < queries * SHARE:
        column, value_column = tl.arange(0, PADDED), tl.arange(0, PADDED_VALUE)
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = row < queries * SHARE
        head = tl.program_id(1) * SHARE + row % SHARE
        of_keys = tl.program_id(1) * SHARE // GROUP
        token = (first_query + row // SHARE).to(tl.int64)
        query = load_rows(q, token * q_token + head * q_head, inside, column, SIZE, PADDED, True)
        past = keys - queries
        position = past + row // SHARE
        # keys that some row sees: `sunk` at the beginning of the text, then from `first` to before `last`
        first, sunk, last, all_see = 0, 0, keys, keys
        if LOOK.causal:
            last_row = tl.minimum(tile * ROWS + ROWS, queries * SHARE) - 1
            last = tl.maximum(past + last_row // SHARE + 1, 0)
            all_see = tl.maximum(past + tile * ROWS // SHARE + 1, 0)
            if LOOK.window > 0:
                first = tl.maximum(past + tile * ROWS // SHARE - LOOK.window + 1, 0)
                sunk = tl.minimum(first, LOOK.sinks)
                all_see = 0
        count = sunk + last - first
        border = all_see // KEYS * KEYS
        key_base, value_base = k + of_keys * k_head, v + of_keys * v_head
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
        for start in range(0, border, KEYS):
            at = start + tl.arange(0, KEYS)
            place = (first_key + at).to(tl.int64)
            key = load_rows(key_base, place * k_token, at, column, SIZE, PADDED, False)
            value = load_rows(value_base, place * v_token, at, value_column, VALUE, PADDED_VALUE, False)
            best, total, mixed = fold(query, key, value, at, best, total, mixed, scale, False, PRECISION)
        for start in range(border, count, KEYS):
            index = start + tl.arange(0, KEYS)
            there = index < count
            at = index + tl.where(index < sunk, 0, first - sunk)
            place = (first_key + at).to(tl.int64)
            key = load_rows(key_base, place * k_token, there, column, SIZE, PADDED, True)
            value = load_rows(value_base, place * v_token, there, value_column, VALUE, PADDED_VALUE, True)
            seen = there[None, :]
            if LOOK.causal:
                seen = seen & (at[None, :] <= position[:, None])
                if LOOK.window > 0:
                    seen = seen & ((at[None, :] > position[:, None] - LOOK.window) | (at[None, :] < LOOK.sinks))
            best, total, mixed = fold(query, key, value, seen, best, total, mixed, scale, True, PRECISION)
        divisor = tl.where(total == 0.0, 1.0, total)
        result = mixed / divisor[:, None]
        target = out + (token * SHAPE.heads + head)[:, None] * VALUE + value_column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside[:, None] & (value_column < VALUE)[None, :])
        if LOOK.with_lse:
            of_rows = (best + tl.log2(divisor)) * 0.6931471805599453  # of a row that sees nothing −∞, as best is
            tl.store(lse + token * SHAPE.heads + head, of_rows, mask=inside)


# -- the call ----------------------------------------------------------------------------------------------------------


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    *,
    max_queries: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    with_lse: bool = False,
    version: int = 3,
    config: tuning.Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """q [N, H, D], k [S, G, D], v [S, G, Dv], starts [B+1] int32 -> out [N, H, Dv], with_lse: and lse [N, H] float32.

    Sequence b has the queries query_starts[b] … query_starts[b+1] − 1 and the keys key_starts[b] … key_starts[b+1] − 1;
    its queries are the last of its keys. max_queries: at least as many as any sequence has (more only cost empty
    programs); the starts themselves stay on the device and are not read here. A row that sees nothing gives zeros and
    an lse of −∞. q, k, v: contiguous in their last axis. One launch. Raises Unsupported.
    """
    name = "flash_attention"
    launch.check_version(name, version, VERSIONS)
    for what, tensor in (("q", q), ("k", k), ("v", v)):
        launch.check_shape(name, what, tensor, (None, None, None))
    launch.check_shape(name, "query_starts", query_starts, (None,))
    launch.check_shape(name, "key_starts", key_starts, (len(query_starts),))
    launch.check_tensors(name, multiplies=True, contiguous=False, q=q, k=k, v=v)
    check_indices(name, q.device, query_starts=query_starts, key_starts=key_starts)
    group = check_heads(name, q, k, v)
    check_looks(name, scale, window, sinks)
    if window is not None and not causal:
        raise Unsupported(f"{name}: a window looks back from a query, so it goes with causal=True")
    if not is_whole(max_queries) or max_queries < 0:
        raise Unsupported(f"{name}: max_queries must be a whole number of at least 0, got {max_queries!r}")
    (tokens, heads, size), value = q.shape, v.shape[-1]
    out = q.new_empty((tokens, heads, value))
    lse = torch.empty((tokens, heads) if with_lse else (0,), dtype=torch.float32, device=q.device)
    share = group if version == 3 else 1
    if config is None:
        config = rows_config(name, q, value, max_queries * share)
    shape = Shape(heads, group, share, size, value, padded(size), padded(value), precision(q.dtype))
    look = Look(causal, window or 0, sinks, with_lse)
    strides = Strides(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    batch, tiles = max(0, len(query_starts) - 1), cdiv(max_queries * share, config["ROWS"])
    if tokens == 0:
        tiles = 0
    kernel, grid = (_flash_all_keys_kernel if version == 1 else _flash_kernel), (tiles, heads // share, batch)
    inputs = Inputs(q, k, v, query_starts, key_starts)
    of_call = (inputs, (out, lse), strides, scale * LOG2_E)
    launch.launch(kernel, grid, *of_call, SHAPE=shape, LOOK=look, **config.options)
    return (out, lse) if with_lse else out


def rows_config(kernel: str, q: torch.Tensor, value: int, rows: int) -> tuning.Config:
    """The measured one, or a default. rows: the most that a sequence and key-value head has."""
    size = max(padded(q.shape[-1]), padded(value))
    least = tile_rows(rows)
    default = _default(size, least, q.dtype, paged=kernel.startswith("paged"))
    return tuning.choose(kernel, (size, least, q.dtype), default, q.device)


def tile_rows(rows: int) -> int:
    """Of a tile that is not larger than it has to be: a power of two from 16 to 128."""
    return max(16, min(128, next_power_of_2(max(rows, 1))))


def _default(size: int, rows: int, dtype: torch.dtype, paged: bool) -> tuning.Config:
    """Tiles of 16 KiB of keys, two of them under way, which takes more stages where they are looked up in a table."""
    keys = max(16, min(64, 16_384 // (size * dtype.itemsize)))
    if dtype == torch.float32:
        rows = 16  # no tensor core multiplies these: larger tiles are spilled
    elif size > 128:
        rows = min(rows, 64)
    warps = 8 if rows * size >= 128 * 128 else 4
    return tuning.Config.of(num_warps=warps, num_stages=5 if paged else 3, ROWS=rows, KEYS=keys)


def candidates(size: int, rows: int, dtype: torch.dtype, paged: bool = False) -> list[tuning.Config]:
    """What `tune_flash_attention` and `tune_paged_prefill` (paged) try, the default first. size: padded; rows:
    `tile_rows`."""
    found = [_default(size, rows, dtype, paged)]
    few, more = (3, 5) if paged else (2, 3)
    for tile in (128, 64, 32, 16):
        for keys in (64, 128, 32):
            for warps, stages in ((8, more), (4, more), (4, few), (8, few)):
                if tile <= rows and keys * size * dtype.itemsize <= 65_536:
                    found.append(tuning.Config.of(num_warps=warps, num_stages=stages, ROWS=tile, KEYS=keys))
    return list(dict.fromkeys(found))


def tune_flash_attention(
    q,
    k,
    v,
    query_starts,
    key_starts,
    *,
    max_queries: int,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    causal: bool = True,
    budget_s: float = 20.0,
) -> tuning.Config:
    """Measure on such a call, and keep the fastest for all of its head size, number of rows and dtype."""
    size = max(padded(q.shape[-1]), padded(v.shape[-1]))
    rows = tile_rows(max_queries * (q.shape[1] // k.shape[1]))

    def run(config: tuning.Config) -> None:
        look: dict[str, Any] = {"scale": scale, "window": window, "sinks": sinks, "causal": causal}
        flash_attention(q, k, v, query_starts, key_starts, max_queries=max_queries, **look, config=config)

    return tuning.tune(
        "flash_attention", (size, rows, q.dtype), candidates(size, rows, q.dtype), run, q.device, budget_s=budget_s
    )


# -- the twin, and what cannot be done without
# ----------------------------------------------------------------------------


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence by the definition: q [n, H, D], k [S, G, D], v [S, G, Dv] -> out [n, H, Dv], lse [n, H].

    Computes in float64 where that came, else in float32, and returns that.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k, v = (t.to(wide).repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,shd->nhs", q.to(wide), k) * scale
    if causal:
        query_at = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        key_at = torch.arange(len(k), device=q.device)[None, :]
        seen = key_at <= query_at
        if window is not None:
            seen &= (key_at > query_at - window) | (key_at < sinks)
        scores = scores.masked_fill(~seen[:, None, :], -math.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return torch.einsum("nhs,shd->nhd", weights, v), lse


def flash_attention_reference(
    q,
    k,
    v,
    query_starts,
    key_starts,
    *,
    max_queries: int | None = None,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    with_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The plain twin, a sequence at a time. In float64 where that came, else in float32."""
    look: dict[str, Any] = {"scale": scale, "causal": causal, "window": window, "sinks": sinks}
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((len(q), q.shape[1], v.shape[-1]), dtype=wide, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=wide, device=q.device)
    for (a, b), (c, d) in zip(pairwise(_numbers(query_starts)), pairwise(_numbers(key_starts))):
        out[a:b], lse[a:b] = attend_reference(q[a:b], k[c:d], v[c:d], **look)
    return (out, lse) if with_lse else out


def flash_attention_work(
    q,
    k,
    v,
    query_starts,
    key_starts,
    *,
    max_queries: int | None = None,
    scale: float = 1.0,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    with_lse: bool = False,
) -> Work:
    """Reads the starts: not for a timed region. Keys count once a sequence, and all of them."""
    pairs = 0
    for (a, b), (c, d) in zip(pairwise(_numbers(query_starts)), pairwise(_numbers(key_starts))):
        if causal:
            pairs += sum(seen_keys(at, window, sinks) for at in range(max(0, d - c - (b - a)), d - c))
        else:
            pairs += (b - a) * (d - c)
    tokens, heads, size = q.shape
    value = v.shape[-1]
    written = tokens * heads * (value * q.element_size() + 4 * with_lse)
    starts = 4 * (len(query_starts) + len(key_starts))
    return Work(_bytes(q) + _bytes(k) + _bytes(v) + starts, written, 2 * pairs * heads * (size + value))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _numbers(starts: torch.Tensor | Sequence[int]) -> list[int]:
    return starts.tolist() if isinstance(starts, torch.Tensor) else list(starts)


# -- by itself ------------------------------------------------------------------------------------------------------


def examples(make: alone.Make) -> list[alone.Example]:
    """What `python -m workbench.kernels.flash_attention` checks, and on a GPU times."""
    sequences, tokens = make.size(2, 4), make.size(40, 4096)
    heads, groups, size = make.size(4, 32), make.size(2, 8), make.size(32, 128)
    q = make.normal(sequences * tokens, heads, size)
    k, v = (make.normal(sequences * tokens, groups, size) for _ in range(2))
    starts, scale = make.starts(sequences, tokens), size**-0.5
    return [
        alone.Example(
            f"flash_attention of {sequences} x {tokens:,} tokens, {heads} over {groups} heads of {size}",
            VERSIONS,
            lambda version: flash_attention(q, k, v, starts, starts, max_queries=tokens, scale=scale, version=version),
            lambda: flash_attention_reference(q.double(), k.double(), v.double(), starts, starts, scale=scale),
            flash_attention_work(q, k, v, starts, starts),
        )
    ]


if __name__ == "__main__":
    alone.main(examples)
