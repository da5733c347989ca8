"""Claims about counted bytes: each formula is what its loops load and store, row by row."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.kernels.ranges import seen_count
from workbench.kernels.traffic import (
    LatentShape,
    Shape,
    Traffic,
    latent_absorbed,
    latent_expanded,
    split_decode,
    split_ranges,
    standard,
    tiled,
    token_bytes,
)


def used(counted: Counter) -> dict[str, int]:
    return {name: number for name, number in counted.items() if number}


def assert_same(got: Traffic, read: Counter, written: Counter) -> None:
    assert used(Counter(got.read)) == used(read) and used(Counter(got.written)) == used(written)
    assert got.bytes == read.total() + written.total() == sum(got.parts.values())


@st.composite
def shapes(draw):
    kv_heads, keys = draw(st.integers(1, 3)), draw(st.integers(1, 30))
    return Shape(
        batch=draw(st.integers(1, 2)),
        queries=draw(st.integers(1, keys)),
        keys=keys,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        size=draw(st.integers(1, 5)),
        value_size=draw(st.one_of(st.none(), st.integers(1, 5))),
        element=draw(st.sampled_from([2, 4])),
    )


# -- prompts -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(shapes(), st.sampled_from([2, 4]))
def test_standard_attention_is_three_operations(shape, score):
    read, written = Counter(), Counter()
    for _ in range(shape.batch):
        for head in range(shape.heads):
            if head % (shape.heads // shape.kv_heads) == 0:
                for _ in range(shape.keys):
                    read["k"] += shape.size * shape.element
                    read["v"] += shape.values * shape.element
            for _ in range(shape.queries):
                read["q"] += shape.size * shape.element
                written["out"] += shape.values * shape.element
                for _ in range(shape.keys):
                    written["scores"] += score
                    read["scores"] += score
                    written["weights"] += score
                    read["weights"] += score
    assert_same(standard(shape, score=score), read, written)


@settings(max_examples=40, deadline=None)
@given(shapes(), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans())
def test_tiled_attention_row_by_row(shape, query_tile, key_tile, causal, together):
    heads_together = shape.heads // shape.kv_heads if together else 1
    read, written = Counter(), Counter()
    for _ in range(shape.batch * shape.heads // heads_together):
        queries = list(range(shape.keys - shape.queries, shape.keys))  # their positions
        while queries:
            mine, queries = queries[:query_tile], queries[query_tile:]
            read["q"] += len(mine) * heads_together * shape.size * shape.element
            keys = list(range(shape.keys))
            while keys and (not causal or keys[0] <= mine[-1]):  # a tile that nobody sees is passed over
                load, keys = keys[:key_tile], keys[key_tile:]
                read["k"] += len(load) * shape.size * shape.element
                read["v"] += len(load) * shape.values * shape.element
            written["out"] += len(mine) * heads_together * shape.values * shape.element
            written["lse"] += len(mine) * heads_together * 4
    got = tiled(
        shape, query_tile=query_tile, key_tile=key_tile, causal=causal, heads_together=heads_together, with_lse=True
    )
    assert_same(got, read, written)


def test_scores_are_what_standard_attention_moves():
    """4,096 tokens, 32 heads of 128 in 16 bits: 4·32·4096²·2 bytes of scores and weights beside 4·32 MiB of all
    else."""
    shape = Shape(1, 4096, 4096, 32, 32, 128)
    parts = standard(shape).parts
    assert parts["scores"] + parts["weights"] == 4 * 32 * 4096**2 * 2 == 4 * 2**30
    assert sum(parts[name] for name in ("q", "k", "v", "out")) == 4 * 32 * 2**20
    loaded = sum(range(128, 4097, 128))  # rows of k, and of v, of all tiles of 128 queries
    assert tiled(shape, query_tile=128, key_tile=64).bytes == 32 * (2 * loaded + 2 * 4096) * 256


def test_larger_tiles_of_queries_read_keys_less_often():
    shape = Shape(1, 1024, 1024, 8, 8, 64)
    one, two, all_rows = (tiled(shape, query_tile=m, key_tile=64, causal=False) for m in (64, 128, 1024))
    assert one.read["k"] == 2 * two.read["k"] == 16 * all_rows.read["k"]
    assert all_rows.bytes == 4 * 1024 * 8 * 64 * 2
    half = tiled(shape, query_tile=64, key_tile=64).read["k"] / one.read["k"]
    assert half == (16 + 1) / 32  # causal: 1 + 2 + … + 16 of 16·16 tiles


# -- a step of decode ----------------------------------------------------------------------------------------------


def simulated_decode(
    lengths, *, heads, kv_heads, size, value_size, stored, splits, tile, rows, block_size, window, sinks
):
    """Program by program, tile by tile, token by token."""
    read, written = Counter(), Counter()
    group = heads // kv_heads
    for length in lengths:
        seen = [t for t in range(length) if window is None or t >= length - window or t < sinks]
        tiles = [seen[i : i + tile] for i in range(0, len(seen), tile)]
        a_split = math.ceil(math.ceil(len(seen) / splits) / tile)  # whole tiles of an even share
        for _ in range(kv_heads):
            for first_row in range(0, group, rows):
                mine = min(rows, group - first_row)
                for split in range(splits):
                    read["lengths"] += 4
                    read["q"] += mine * size * 2
                    known = set()
                    for tokens in tiles[split * a_split : (split + 1) * a_split]:
                        for token in tokens:
                            if block_size is not None and token // block_size not in known:
                                known.add(token // block_size)
                                read["tables"] += 4
                            read["k"] += token_bytes(size, stored)
                            read["v"] += token_bytes(value_size, stored)
                    if splits > 1:
                        written["partial results"] += mine * value_size * 4
                        written["lse"] += mine * 4
                        read["partial results"] += mine * value_size * 4
                        read["lse"] += mine * 4
                written["out"] += mine * value_size * 2
    return read, written


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    stored=st.sampled_from(["float16", "int8", "fp8", "int4", "float32"]),
    splits=st.integers(1, 5),
    tile=st.sampled_from([1, 4, 16]),
    rows=st.integers(1, 5),
    block_size=st.sampled_from([None, 1, 3, 8]),
    window=st.one_of(st.none(), st.integers(1, 70)),
    sinks=st.integers(0, 9),
)
def test_split_and_paged_decode_token_by_token(lengths, kv_heads, group, **options):
    options |= {"heads": group * kv_heads, "kv_heads": kv_heads, "size": 6, "value_size": 4}
    assert_same(split_decode(lengths, **options), *simulated_decode(lengths, **options))


@given(st.integers(0, 200), st.integers(1, 9), st.sampled_from([1, 4, 16]))
def test_splits_cover_every_token_once(number, splits, tile):
    ranges = split_ranges(number, splits, tile)
    assert [t for first, end in ranges for t in range(first, end)] == list(range(number))
    assert all(first % tile == 0 or first == number for first, _ in ranges) and len(ranges) == splits


def test_what_partial_results_cost():
    """A text of 32,768 tokens, 32 heads on 8, D = 128 in 16 bits: 128 MiB of keys and values, 1 MiB for 32 splits."""
    one, split = (split_decode([32_768], heads=32, kv_heads=8, size=128, splits=s) for s in (1, 32))
    assert one.read["k"] + one.read["v"] == 128 * 2**20
    partial = split.parts["partial results"] + split.parts["lse"]
    assert partial == 2 * 32 * 32 * (128 + 1) * 4 and partial / one.bytes < 0.01


def test_bytes_in_few_bits():
    common = {"heads": 32, "kv_heads": 8, "size": 128}
    of = {name: split_decode([1000], **common, stored=name) for name in ("bfloat16", "int8", "fp8", "int4")}
    a_token = {name: (one.read["k"] + one.read["v"]) / 8000 for name, one in of.items()}
    assert a_token == {"bfloat16": 512, "int8": 264, "fp8": 260, "int4": 136}


def test_a_window_reads_what_is_seen():
    got = split_decode([500, 3], heads=2, kv_heads=1, size=8, window=100, sinks=4)
    assert got.read["k"] == (seen_count(500, 100, 4) + 3) * 16 == 107 * 16


# -- latent attention ------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=3),
    shape=st.builds(LatentShape, *[st.integers(1, 6)] * 5, st.sampled_from([2, 4])),
    splits=st.integers(1, 3),
    heads_tile=st.integers(1, 6),
)
def test_latent_attention_in_both_forms_operation_by_operation(lengths, shape, splits, heads_tile):
    b, heads = shape.element, shape.heads
    read, written = Counter(), Counter()
    read["maps"] = heads * (shape.kv_rank * shape.content + shape.kv_rank * shape.value) * b
    expanded, expanded_written = read.copy(), Counter()
    for length in lengths:
        for _ in range(math.ceil(heads / heads_tile)):
            read["lengths"] += 4 * splits
            for _ in range(length):
                read["latents"] += (shape.kv_rank + shape.rotary) * b
        for _ in range(length):
            expanded["latents"] += (shape.kv_rank + shape.rotary) * b
        for _ in range(heads):
            read["q"] += (shape.content + shape.rotary) * b
            written["folded queries"] += (shape.kv_rank + shape.rotary) * b
            read["folded queries"] += splits * (shape.kv_rank + shape.rotary) * b
            written["mixed latents"] += shape.kv_rank * b
            read["mixed latents"] += shape.kv_rank * b
            for counter in (written, expanded_written):
                counter["out"] += shape.value * b
            for _ in range(length):
                for counter in (expanded, expanded_written):
                    counter["k"] += (shape.content + shape.rotary) * b
                    counter["v"] += shape.value * b
            for _ in range(splits):
                expanded["q"] += (shape.content + shape.rotary) * b
                expanded["lengths"] += 4
            if splits > 1:
                for counter, width in (
                    (read, shape.kv_rank),
                    (written, shape.kv_rank),
                    (expanded, shape.value),
                    (expanded_written, shape.value),
                ):
                    counter["partial results"] += splits * width * 4
                    counter["lse"] += splits * 4
    got = latent_absorbed(lengths, shape, splits=splits, heads_tile=heads_tile)
    assert_same(got, read, written)
    assert_same(latent_expanded(lengths, shape, splits=splits), expanded, expanded_written)


def test_absorbing_reads_a_fraction_for_deepseeks_shape():
    """128 heads, 512 + 64: 1,152 bytes per token (2,304 in two tiles of heads) against 1,152 + 2·81,920 with keys and
    values."""
    shape = LatentShape(heads=128, kv_rank=512, rotary=64, content=128, value=128)
    absorbed = [latent_absorbed([n], shape, heads_tile=64).bytes for n in (1000, 2000)]
    expanded = [latent_expanded([n], shape).bytes for n in (1000, 2000)]
    assert (absorbed[1] - absorbed[0], expanded[1] - expanded[0]) == (2_304_000, (1152 + 2 * 81_920) * 1000)
    assert latent_absorbed([1000], shape, block_size=16).read["tables"] == 63 * 4


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Shape(1, 5, 4, 2, 2, 8),
        lambda: Shape(1, 4, 4, 3, 2, 8),
        lambda: Shape(0, 4, 4, 2, 2, 8),
        lambda: Shape(1, 4, 4, 2, 2, 8, 0),
        lambda: tiled(Shape(1, 4, 4, 4, 2, 8), query_tile=0, key_tile=4),
        lambda: tiled(Shape(1, 4, 4, 4, 2, 8), query_tile=4, key_tile=4, heads_together=3),
        lambda: split_decode([4], heads=4, kv_heads=3, size=8),
        lambda: split_decode([4], heads=4, kv_heads=0, size=8),
        lambda: split_decode([4], heads=4, kv_heads=2, size=8, splits=0),
        lambda: token_bytes(3, "int4"),
        lambda: token_bytes(8, "int3"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(WorkbenchError):
        wrong()
