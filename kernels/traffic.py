"""Bytes that attention moves to and from device memory, algorithm by algorithm. Counted from the loops, nothing is run.

What a program loads it keeps until it ends; what two programs load counts twice, since nothing here is a cache between
them. An L2 cache can only make it less. Sizes in elements, B sequences, H query heads, G key-value heads, D and D_v:

    standard          q + k + v + out, and the n × S scores written, read, written as weights, read:   4·B·H·n·S more
    tiled             a program per head and M queries: q and out once, k and v again for each of the ⌈n / M⌉ tiles
    split decode      a program per kv head and split: k and v once; q for each split; 4·B·H·(D_v + 1) bytes of partial
                      result a split, written and read
    paged             the same, and 4 bytes of table for each block that a program reads from
    in few bits       the same, with D·bits/8 bytes per token and head, and 2 for each scale and zero
    latent, absorbed  R + rot elements a token for each tile of heads, H·R·(content + value) of weights, two small
                      tensors
    latent, expanded  R + rot elements a token once, the same weights, keys and values of every head written and read

Sources: Dao et al., arXiv 2205.14135 §3 and theorem 2 (standard, tiled); Dao et al., "Flash-Decoding" (2023); Kwon et
al., arXiv 2309.06180 (paged); DeepSeek-V2, arXiv 2405.04434 §2.1.2 (latent).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.errors import WorkbenchError, is_whole, unknown

FLOAT32 = 4  # bytes: partial results and log-sum-exps
INDEX = 4  # bytes: an entry of a table, a length
SCALE = 2  # bytes: a scale or a zero
STORED = {  # bits of an element, and scales and zeros of a token and head
    "float32": (32, 0),
    "float16": (16, 0),
    "bfloat16": (16, 0),
    "int8": (8, 2),
    "fp8": (8, 1),
    "int4": (4, 2),
}


@dataclass(frozen=True)
class Traffic:
    """Bytes by what they belong to."""

    read: Mapping[str, int]
    written: Mapping[str, int]

    @property
    def bytes_read(self) -> int:
        return sum(self.read.values())

    @property
    def bytes_written(self) -> int:
        return sum(self.written.values())

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def parts(self) -> dict[str, int]:
        """Read and written together, in the order of the algorithm; nothing that is 0."""
        names = dict.fromkeys((*self.read, *self.written))
        sums = {name: self.read.get(name, 0) + self.written.get(name, 0) for name in names}
        return {name: number for name, number in sums.items() if number}


def token_bytes(size: int, stored: str) -> int:
    """Of one token and head of `size` elements: size · bits / 8, and 2 for each scale and zero."""
    if stored not in STORED:
        raise unknown("type of stored keys and values", stored, STORED)
    bits, scales = STORED[stored]
    if size * bits % 8:
        raise WorkbenchError(f"{size} elements of {bits} bits do not fill whole bytes")
    return size * bits // 8 + scales * SCALE


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not is_whole(size) or size < 1:
            raise WorkbenchError(f"{name} must be a whole number from 1, got {size!r}")


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# -- prompts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """B sequences of S keys each, the queries of the last n of them."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    value_size: int | None = None  # default: size
    element: int = 2  # bytes

    def __post_init__(self) -> None:
        sizes = {"value_size": self.values} if self.value_size is not None else {}
        names = ("batch", "queries", "keys", "heads", "kv_heads", "size", "element")
        _positive(**sizes, **{name: getattr(self, name) for name in names})
        if self.queries > self.keys or self.heads % self.kv_heads:
            raise WorkbenchError(
                f"queries are the last of the keys and heads a multiple of kv_heads; got {self.queries} queries,"
                f" {self.keys} keys, {self.heads} heads, {self.kv_heads} kv_heads"
            )

    @property
    def values(self) -> int:
        return self.size if self.value_size is None else self.value_size

    @property
    def q_bytes(self) -> int:
        return self.batch * self.queries * self.heads * self.size * self.element

    @property
    def out_bytes(self) -> int:
        return self.batch * self.queries * self.heads * self.values * self.element


def standard(shape: Shape, *, score: int = 2) -> Traffic:
    """Three operations: scores = q kᵀ, weights = softmax(scores), out = weights v. A causal mask saves nothing.

    Each operation reads its inputs and writes its result once. score: bytes of a score and of a weight.
    """
    square = shape.batch * shape.heads * shape.queries * shape.keys * score
    rows = shape.batch * shape.keys * shape.kv_heads * shape.element
    read = {"q": shape.q_bytes, "k": rows * shape.size, "v": rows * shape.values}
    read |= {"scores": square, "weights": square}
    return Traffic(read, {"scores": square, "weights": square, "out": shape.out_bytes})


def tiled(
    shape: Shape,
    *,
    query_tile: int,
    key_tile: int,
    causal: bool = True,
    heads_together: int = 1,
    with_lse: bool = False,
) -> Traffic:
    """FlashAttention: a program for each sequence, `heads_together` query heads of one kv head, and tile of queries.

    Tile t of the queries ends at query e = min((t + 1)·M, n), which sees the first S − n + e keys; causal: the program
    loads tiles of keys as far as that, ⌈(S − n + e) / N⌉·N rows (never more than S), of k and of v. Otherwise all S.
    """
    _positive(query_tile=query_tile, key_tile=key_tile, heads_together=heads_together)
    if (shape.heads // shape.kv_heads) % heads_together:
        raise WorkbenchError(
            f"heads_together must divide the {shape.heads // shape.kv_heads} heads of a kv head, got {heads_together}"
        )
    loaded = 0
    for first in range(0, shape.queries, query_tile):
        end = min(first + query_tile, shape.queries)
        seen = shape.keys - shape.queries + end if causal else shape.keys
        loaded += min(_up(seen, key_tile), shape.keys)
    rows = shape.batch * shape.heads // heads_together * loaded * shape.element
    lse = shape.batch * shape.queries * shape.heads * FLOAT32 * with_lse
    return Traffic(
        {"q": shape.q_bytes, "k": rows * shape.size, "v": rows * shape.values}, {"out": shape.out_bytes, "lse": lse}
    )


# -- a step of decode --------------------------------------------------------------------------------------------------


def split_ranges(number: int, splits: int, tile: int) -> list[tuple[int, int]]:
    """[first, end) of each split of so many tokens, in whole tiles; the last may be empty, first = end."""
    span = _up(-(-number // splits), tile)
    return [(min(i * span, number), min((i + 1) * span, number)) for i in range(splits)]


def split_decode(
    lengths: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int | None = None,
    stored: str = "float16",
    element: int = 2,
    splits: int = 1,
    tile: int = 64,
    rows: int | None = None,
    block_size: int | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> Traffic:
    """One new token for each text: a program for each text, kv head (of whose query heads it takes `rows`) and split.

    Every program reads its length and its queries, and of its stretch of the seen tokens the keys and values, as they
    are `stored`. With more than one split each writes its result in float32 with its log-sum-exp, and a second launch
    reads all of them and writes out. rows: default all query heads of a kv head; fewer read the keys again. block_size:
    the keys lie in blocks, and a program reads an entry of the table for each block that it meets. element: bytes of q
    and out.
    """
    values = size if value_size is None else value_size
    group = heads // kv_heads if kv_heads else 0
    rows = group if rows is None else rows
    _positive(heads=heads, kv_heads=kv_heads, size=size, value_size=values, splits=splits, tile=tile, rows=rows)
    if heads % kv_heads:
        raise WorkbenchError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    batch, tiles = len(lengths), kv_heads * -(-group // rows)
    tokens = blocks = 0
    for length in lengths:
        start = max(0, length - window) if window is not None else 0
        kept = min(sinks, start)
        tokens += length - start + kept
        if block_size is not None:
            for first, end in split_ranges(length - start + kept, splits, tile):
                blocks += _blocks(first, end, kept, start, block_size)
    read = {
        "q": batch * heads * size * element * splits,
        "k": tiles * tokens * token_bytes(size, stored),
        "v": tiles * tokens * token_bytes(values, stored),
        "tables": tiles * blocks * INDEX,
        "lengths": batch * tiles * splits * INDEX,
    }
    return _with_splits(read, {"out": batch * heads * values * element}, batch * heads, values, splits)


def _blocks(first: int, end: int, kept: int, start: int, block_size: int) -> int:
    """Blocks that hold the numbered tokens first … end − 1: below `kept` a token is its number, from there it follows
    `start`."""
    before = (first, min(end, kept))
    after = (max(first, kept) - kept + start, end - kept + start)
    spans = [(a // block_size, (b - 1) // block_size) for a, b in (before, after) if a < b]
    shared = len(spans) == 2 and spans[0][1] == spans[1][0]
    return sum(b - a + 1 for a, b in spans) - shared


def _with_splits(read: dict, written: dict, results: int, width: int, splits: int) -> Traffic:
    """Partial results of `results` rows, where there is more than one split."""
    partial = splits * results * width * FLOAT32 * (splits > 1)
    lse = splits * results * FLOAT32 * (splits > 1)
    return Traffic(
        {**read, "partial results": partial, "lse": lse}, {"partial results": partial, "lse": lse, **written}
    )


# -- latent attention --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentShape:
    """Of a layer with latent attention; `element` bytes everywhere."""

    heads: int
    kv_rank: int
    rotary: int
    content: int
    value: int
    element: int = 2

    @property
    def up_bytes(self) -> int:
        """The maps from latents to keys and to values."""
        return self.heads * self.kv_rank * (self.content + self.value) * self.element

    @property
    def q_bytes(self) -> int:
        """Of one token."""
        return self.heads * (self.content + self.rotary) * self.element

    @property
    def out_bytes(self) -> int:
        return self.heads * self.value * self.element

    @property
    def row_bytes(self) -> int:
        return (self.kv_rank + self.rotary) * self.element


def latent_absorbed(
    lengths: Sequence[int],
    shape: LatentShape,
    *,
    splits: int = 1,
    heads_tile: int | None = None,
    block_size: int | None = None,
    tile: int = 64,
) -> Traffic:
    """One new token for each text; the maps go into the query and the result.

    Three operations: q and half of the maps give the folded queries [B, H, R + rot]; a program for each text, tile of
    heads and split reads those and the rows of its tokens; the mixed latents [B, H, R] and the other half of the maps
    give out.
    """
    heads_tile = shape.heads if heads_tile is None else heads_tile
    inner = split_decode(
        lengths,
        heads=shape.heads,
        kv_heads=1,
        size=shape.kv_rank + shape.rotary,
        value_size=shape.kv_rank,
        element=shape.element,
        splits=splits,
        tile=tile,
        rows=heads_tile,
        block_size=block_size,
    )
    batch, tiles = len(lengths), -(-shape.heads // heads_tile)
    folded, mixed = batch * shape.heads * shape.row_bytes, inner.written["out"]
    read = {"q": batch * shape.q_bytes, "maps": shape.up_bytes, "folded queries": inner.read["q"]}
    read |= {"latents": tiles * sum(lengths) * shape.row_bytes, "mixed latents": mixed}
    read |= {name: inner.read[name] for name in ("tables", "lengths", "partial results", "lse")}
    written = {"folded queries": folded, "mixed latents": mixed, "out": batch * shape.out_bytes}
    return Traffic(read, written | {name: inner.written[name] for name in ("partial results", "lse")})


def latent_expanded(lengths: Sequence[int], shape: LatentShape, *, splits: int = 1) -> Traffic:
    """One new token for each text; keys and values of every head are made from the latents anew, written, and attended
    over.

    The rotary part is the same for all heads, but lies in the key of each.
    """
    batch, tokens = len(lengths), sum(lengths)
    keys = tokens * shape.q_bytes
    values = tokens * shape.out_bytes
    read = {"latents": tokens * shape.row_bytes, "maps": shape.up_bytes, "k": keys, "v": values}
    read |= {"q": batch * shape.q_bytes * splits, "lengths": batch * shape.heads * splits * INDEX}
    written = {"k": keys, "v": values, "out": batch * shape.out_bytes}
    return _with_splits(read, written, batch * shape.heads, shape.value, splits)
