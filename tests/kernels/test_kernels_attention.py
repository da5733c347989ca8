"""The attention kernels beside their definition: FlashAttention, Flash-Decoding, and both over keys in blocks.

Merging is in its own tests. What is not read is NaN or points nowhere, so that reading it is seen.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_claims import HERE, assert_near, dtypes, on_each_device, poisoned, where_kernels_run

from workbench.kernels import flash_attention as fa
from workbench.kernels import flash_decoding as fd
from workbench.kernels import launch, ranges, tuning
from workbench.kernels import paged_decode as pd
from workbench.kernels import paged_prefill as pp
from workbench.kernels.arrivals import counters
from workbench.kernels.launch import Unsupported, cdiv

LOOKS = ({}, {"window": 20, "sinks": 3})
SMALL = tuning.Config.of(ROWS=16, KEYS=16)  # several tiles in short texts
STEPS = tuning.Config.of(KEYS=16)
few = settings(max_examples=10, deadline=None, derandomize=True)
awkward = st.fixed_dictionaries(
    {
        "group": st.integers(1, 7),
        "groups": st.integers(1, 2),
        "size": st.sampled_from([8, 16, 33, 64, 80, 96]),
        "value": st.sampled_from([4, 24, 64, 100]),
        "window": st.none() | st.integers(1, 30),
        "sinks": st.integers(0, 5),
        "seed": st.integers(0, 999),
    }
)

# how many tokens of each are new, how many were there before
some_texts = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=3).filter(
    lambda texts: any(new for new, _ in texts)
)


def numbers(*shape: int, seed: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def ints(values, device="cpu") -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def starts(sizes, device="cpu") -> torch.Tensor:
    return ints(accumulate(sizes, initial=0), device)


def in_blocks(lengths, block_size, groups, sizes, *, seed=0, dtype=torch.float32, device="cpu"):
    """k, v [places, G, D], tables, lengths: texts in blocks in no order; NaN wherever no token lies, and where there is
    no block the table points far outside."""
    counts = [cdiv(length, block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    k, v = (poisoned(len(order) * block_size, groups, s, dtype=dtype, device=device) for s in sizes)
    tables = torch.full((len(lengths), max([*counts, 1]) + 2), 10**9, dtype=torch.int32)
    for i, (length, count) in enumerate(zip(lengths, counts)):
        for j in range(count):
            tables[i, j] = block = order.pop()
            first, filled = block * block_size, min(block_size, length - j * block_size)
            for at, stored in enumerate((k, v)):
                new = numbers(filled, *stored.shape[1:], seed=seed + 7 * i + 100 * j + at, dtype=dtype)
                stored[first : first + filled] = new.to(device)
    return k, v, tables.to(device), ints(lengths, device)


def wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.double() for t in tensors]


# -- FlashAttention ----------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("version", fa.VERSIONS)
@pytest.mark.parametrize("look", [*LOOKS, {"causal": False}], ids=str)
def test_each_version_of_flash_attention_is_attention_as_defined(device, version, look):
    queries, keys = [5, 0, 1, 20], [5, 12, 33, 50]
    for dtype in dtypes(device):
        q = numbers(sum(queries), 4, 24, seed=1, dtype=dtype, device=device)
        k = numbers(sum(keys), 2, 24, seed=2, dtype=dtype, device=device)
        v = numbers(sum(keys), 2, 16, seed=3, dtype=dtype, device=device)
        at = starts(queries, device), starts(keys, device)
        with launch.launches() as counted:
            out, lse = fa.flash_attention(
                q, k, v, *at, max_queries=20, scale=0.3, with_lse=True, version=version, config=SMALL, **look
            )
        truth, true_lse = fa.flash_attention_reference(*wide(q, k, v), *at, scale=0.3, with_lse=True, **look)
        assert_near(out, truth)
        assert_near(lse, true_lse, 2e-6)
        assert counted.total() == 1 and out.dtype == dtype and lse.dtype == torch.float32


@where_kernels_run
@few
@given(awkward, some_texts)
def test_flash_attention_takes_every_shape(shape, texts):
    device = HERE
    new, keys = [n for n, _ in texts], [n + past for n, past in texts]
    heads = shape["group"] * shape["groups"]
    q = numbers(sum(new), heads, shape["size"], seed=shape["seed"], device=device)
    k = numbers(sum(keys), shape["groups"], shape["size"], seed=shape["seed"] + 1, device=device)
    v = numbers(sum(keys), shape["groups"], shape["value"], seed=shape["seed"] + 2, device=device)
    look = {"window": shape["window"], "sinks": shape["sinks"], "scale": 0.2}
    at = starts(new, device), starts(keys, device)
    truth = fa.flash_attention_reference(*wide(q, k, v), *at, **look)
    assert_near(fa.flash_attention(q, k, v, *at, max_queries=max(new), config=SMALL, **look), truth)


@on_each_device
def test_a_query_before_all_keys_sees_nothing(device):
    """Three queries, two keys: the first stands before the text. Zeros and −∞, and no NaN."""
    q, k = numbers(3, 2, 8, seed=1, device=device), numbers(2, 1, 8, seed=2, device=device)
    for version in fa.VERSIONS:
        out, lse = fa.flash_attention(
            q, k, k, starts([3], device), starts([2], device), max_queries=3, scale=1.0, with_lse=True, version=version
        )
        assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
        assert_near(out[1], k[:1].double().expand(2, -1, -1)[:, 0])


@on_each_device
def test_great_scores_do_not_overflow(device):
    q = numbers(20, 2, 16, seed=1, device=device) * 100
    k, v = numbers(20, 2, 16, seed=2, device=device) * 100, numbers(20, 2, 16, seed=3, device=device)
    at = starts([20], device)
    for version in fa.VERSIONS:
        got = fa.flash_attention(q, k, v, at, at, max_queries=20, scale=1.0, version=version)
        # scores of 10⁵
        assert_near(got, fa.flash_attention_reference(*wide(q, k, v), at, at, scale=1.0), 1e-3)


# -- Flash-Decoding ----------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("look", LOOKS, ids=str)
@pytest.mark.parametrize(("version", "splits"), [(1, None), (2, None), (3, None), (3, 1), (3, 3)])
def test_each_version_of_flash_decoding_is_attention_as_defined(device, version, splits, look):
    lengths = [70, 0, 1, 32]
    for dtype in dtypes(device):
        q = numbers(4, 6, 80, seed=1, dtype=dtype, device=device)
        k = numbers(4, 70, 2, 80, seed=2, dtype=dtype, device=device)
        v = numbers(4, 70, 2, 48, seed=3, dtype=dtype, device=device)
        for i, length in enumerate(lengths):
            k[i, length:] = v[i, length:] = torch.nan
        got = fd.flash_decode(
            q, k, v, ints(lengths, device), scale=0.2, version=version, splits=splits, config=STEPS, **look
        )
        truth = fd.flash_decode_reference(*wide(q, k, v), ints(lengths, device), scale=0.2, **look)
        assert_near(got, truth)
        assert got.dtype == dtype and (got[1] == 0).all()


@where_kernels_run
@few
@given(awkward, st.lists(st.integers(0, 60), min_size=1, max_size=3).filter(any), st.integers(1, 4))
def test_flash_decoding_takes_every_shape_and_every_split(shape, lengths, splits):
    device = HERE
    heads, max_length, seed = shape["group"] * shape["groups"], max(lengths), shape["seed"]
    q = numbers(len(lengths), heads, shape["size"], seed=seed, device=device)
    # heads before tokens in memory, as the contiguous cache has them
    k = numbers(len(lengths), shape["groups"], max_length, shape["size"], seed=seed + 1, device=device).transpose(1, 2)
    v = numbers(len(lengths), max_length, shape["groups"], shape["value"], seed=seed + 2, device=device)
    look = {"window": shape["window"], "sinks": shape["sinks"], "scale": 0.2}
    truth = fd.flash_decode_reference(*wide(q, k, v), ints(lengths, device), **look)
    assert_near(fd.flash_decode(q, k, v, ints(lengths, device), splits=splits, config=STEPS, **look), truth)


@on_each_device
def test_a_large_group_takes_several_tiles(device):
    """96 query heads of one key-value head: a tile holds 64."""
    q, k = numbers(2, 96, 16, seed=1, device=device), numbers(2, 20, 1, 16, seed=2, device=device)
    lengths = ints([20, 7], device)
    truth = fd.flash_decode_reference(*wide(q, k, k), lengths, scale=0.5)
    assert_near(fd.flash_decode(q, k, k, lengths, scale=0.5, splits=2), truth)


def test_splits_follow_from_what_the_host_knows():
    """Both kernels of one new token divide alike: 3 programs of 71 KiB fit a multiprocessor, one wave has 3 · 132."""
    cpu = torch.device("cpu")  # counted as an H200
    q, k, pool = (
        torch.empty(1, 32, 128).bfloat16(),
        torch.empty(1, 32_768, 8, 128, device="meta"),
        torch.empty(1, 8, 128),
    )
    assert fd.default_splits(q, k, k, None, 0) == 49  # 392 programs
    for blocks, splits in ((2048, 49), (64, 4), (1, 1)):
        assert pd.default_splits(q, pool, pool, torch.empty(1, blocks, dtype=torch.int32), 16) == splits
    assert ranges.resident_programs(cpu, warps=4, registers=96, shared=71_680) == 3  # of shared memory
    assert ranges.resident_programs(cpu, warps=8, registers=255, shared=0) == 1  # of registers
    assert ranges.resident_programs(cpu, warps=4, registers=32, shared=1024) == 16  # of 64 warps
    assert ranges.resident_programs(cpu, warps=8, registers=255, shared=1 << 20) == 1  # at least
    assert fd.max_seen(100_000, 500, 12) == 512


# -- keys in blocks ----------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize(("block_size", "look"), [(1, LOOKS[1]), (3, LOOKS[0]), (16, LOOKS[1])], ids=str)
@pytest.mark.parametrize(("version", "splits"), [(1, None), (2, None), (3, None), (3, 3)])
def test_each_version_of_paged_decode_is_attention_as_defined(device, version, splits, look, block_size):
    lengths = [40, 0, 1, 33]
    for dtype in dtypes(device):
        blocks = in_blocks(lengths, block_size, 1, (40, 24), dtype=dtype, device=device)
        q = numbers(4, 3, 40, seed=9, dtype=dtype, device=device)
        out = poisoned(4, 3, 24, dtype=dtype, device=device)
        call = {"block_size": block_size, "scale": 0.2, **look}
        got = pd.paged_decode(q, *blocks, splits=splits, version=version, out=out, config=STEPS, **call)
        k, v, tables, at = blocks
        assert got is out
        assert_near(got, pd.paged_decode_reference(*wide(q, k, v), tables, at, **call))


@on_each_device
@pytest.mark.parametrize(("block_size", "look"), [(1, LOOKS[1]), (3, LOOKS[0]), (16, LOOKS[1])], ids=str)
@pytest.mark.parametrize(("version", "splits"), [(1, None), (2, None), (3, None), (3, 2)])
def test_each_version_of_paged_prefill_is_attention_as_defined(device, version, splits, look, block_size):
    """A part of a prompt, nothing, a decode, a whole prompt."""
    lengths, new = [40, 5, 33, 7], [11, 0, 1, 7]
    for dtype in dtypes(device):
        k, v, tables, at = in_blocks(lengths, block_size, 1, (40, 24), dtype=dtype, device=device)
        q = numbers(sum(new), 3, 40, seed=9, dtype=dtype, device=device)
        out = poisoned(sum(new), 3, 24, dtype=dtype, device=device)
        call = {"block_size": block_size, "scale": 0.2, "max_queries": 11, **look}
        where = tables, starts(new, device), at
        got = pp.paged_prefill(q, k, v, *where, splits=splits, version=version, out=out, config=SMALL, **call)
        assert got is out
        assert_near(got, pp.paged_prefill_reference(*wide(q, k, v), *where, **call))


@where_kernels_run
@few
@given(awkward, some_texts, st.integers(1, 20), st.integers(1, 3))
def test_keys_in_blocks_of_every_size_are_found(shape, texts, block_size, splits):
    """One kernel for all numbers of new tokens, and the one for single tokens on the last of each."""
    device = HERE
    new, lengths = [n for n, _ in texts], [n + past for n, past in texts]
    heads, sizes = shape["group"] * shape["groups"], (shape["size"], shape["value"])
    k, v, tables, at = in_blocks(lengths, block_size, shape["groups"], sizes, seed=shape["seed"], device=device)
    look = {
        "window": shape["window"],
        "sinks": shape["sinks"],
        "scale": 0.2,
        "block_size": block_size,
        "splits": splits,
    }
    q = numbers(sum(new), heads, shape["size"], seed=shape["seed"] + 1, device=device)
    where = tables, starts(new, device), at
    got = pp.paged_prefill(q, k, v, *where, max_queries=max(new), config=SMALL, **look)
    assert_near(got, pp.paged_prefill_reference(*wide(q, k, v), *where, **look))
    q = numbers(len(texts), heads, shape["size"], seed=shape["seed"] + 2, device=device)
    got = pd.paged_decode(q, k, v, tables, at, config=STEPS, **look)
    assert_near(got, pd.paged_decode_reference(*wide(q, k, v), tables, at, **look))


@on_each_device
def test_keys_and_values_side_by_side_are_read_where_they_lie(device):
    """The engine's layout [places, 2, G, D], and the contiguous twin over the same numbers."""
    stored = numbers(64, 2, 2, 16, seed=1, device=device)
    q, lengths = numbers(2, 4, 16, seed=2, device=device), ints([30, 32], device)
    tables = ints(range(8), device).view(2, 4)
    got = pd.paged_decode(q, stored[:, 0], stored[:, 1], tables, lengths, block_size=8, scale=0.3, splits=2)
    k, v = stored.view(2, 32, 2, 2, 16).unbind(2)
    twin = fd.flash_decode(q, k, v, lengths, scale=0.3, splits=2)
    assert torch.equal(got, twin)


@on_each_device
@few
@given(
    texts=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4, 16, 70]),
    groups=st.sampled_from([1, 2]),
    value=st.sampled_from([16, 24]),
    splits=st.sampled_from([2, 5, 70]),
    half=st.booleans(),
)
def test_the_last_program_merges_the_splits(device, texts, group, groups, value, splits, half):
    """One launch with the numbers of two, empty splits and empty texts too, and counters that are zeros again."""
    dtype = dtypes(device)[-1 if half else 0]
    if device == "cpu" and splits > 5:  # in the interpreter, where each program takes its time, 70 are many
        texts, groups = texts[:1], 1
    k, v, tables, lengths = in_blocks(texts, 4, groups, (16, value), dtype=dtype, device=device)
    q = numbers(len(texts), group * groups, 16, seed=1, dtype=dtype, device=device)
    count, call = counters(device), {"block_size": 4, "scale": 0.3, "splits": splits}
    apart = pd.paged_decode(q, k, v, tables, lengths, **call)
    truth = pd.paged_decode_reference(*wide(q, k, v), tables, lengths, block_size=4, scale=0.3)
    for _ in range(2):
        out = poisoned(*apart.shape, dtype=dtype, device=device)
        with launch.launches() as counted:
            pd.paged_decode(q, k, v, tables, lengths, out=out, arrivals=count, **call)
        assert counted.total() == 1 and not count.any()
        assert_near(out, truth)
        assert_near(out, apart.double())
    with launch.launches() as counted:
        pd.paged_decode(q, k, v, tables, lengths, arrivals=count[: len(texts) * groups - 1], **call)
    assert counted.total() == 2  # too few counters
    longest = max(max(texts), 1)
    keys, values = (
        numbers(len(texts), longest, groups, 16, seed=2, device=device),
        numbers(len(texts), longest, groups, value, seed=3, device=device),
    )
    q = q.float()
    with launch.launches() as counted:
        got = fd.flash_decode(q, keys, values, lengths, scale=0.3, splits=splits, arrivals=count)
    assert counted.total() == 1 and not count.any()
    assert_near(got, fd.flash_decode_reference(*wide(q, keys, values), lengths, scale=0.3))


@on_each_device
def test_nan_in_a_value_stays_where_the_last_program_merges(device):
    """Of a split that is empty nothing is read, whatever lies in its place."""
    k, v, tables, lengths = in_blocks([20, 6], 4, 1, (16, 16), device=device)
    v[tables[0, 1].item() * 4] = float("nan")
    q = numbers(2, 2, 16, seed=1, device=device)
    got = pd.paged_decode(q, k, v, tables, lengths, block_size=4, scale=0.3, splits=4, arrivals=counters(device))
    assert got[0].isnan().all() and got[1].isfinite().all()


@on_each_device
def test_the_same_call_serves_other_lengths_and_tables(device):
    """What a captured graph does: tensors change in place, the grid does not."""
    k, v, tables, lengths = in_blocks([50, 20], 4, 1, (16, 16), device=device)
    q, out = numbers(2, 2, 16, seed=1, device=device), poisoned(2, 2, 16, dtype=torch.float32, device=device)
    for now in ([50, 20], [0, 13], [1, 20]):
        lengths.copy_(ints(now))
        with launch.launches() as counted:
            pd.paged_decode(q, k, v, tables, lengths, block_size=4, scale=0.3, splits=3, out=out)
        assert counted.total() == 2
        truth = pd.paged_decode_reference(*wide(q, k, v), tables, lengths, block_size=4, scale=0.3)
        assert_near(out, truth)


@on_each_device
def test_a_place_beyond_two_to_the_31_values_is_found(device):
    """Offsets in 64 bits: 40,000 places of 65,536 values each. Memory that nobody touches is not used."""
    rows, places = 65_536, 40_000
    k = torch.empty(rows * places, dtype=torch.float16, device=device)
    k = torch.as_strided(k, (places, 1, 16), (rows, 16, 1))
    k[-1] = numbers(1, 16, seed=1, device=device)
    q = numbers(1, 2, 16, seed=2, dtype=torch.float16, device=device)
    call = {"block_size": 1, "scale": 1.0}
    table, one = ints([places - 1], device).view(1, 1), ints([1], device)
    expected = k[-1].expand(1, 2, 16)
    for version in pd.VERSIONS:
        assert torch.equal(pd.paged_decode(q, k, k, table, one, version=version, **call), expected)
    got = pp.paged_prefill(q, k, k, table, starts([1], device), one, max_queries=1, **call)
    assert torch.equal(got, expected)


# -- empty edges -------------------------------------------------------------------------------------------------------


@where_kernels_run
def test_nothing_launches_nothing():
    device = HERE
    q, k, none = (numbers(0, 4, 16, seed=1, device=device), numbers(8, 2, 16, seed=2, device=device), ints([], device))
    table = torch.zeros((0, 2), dtype=torch.int32, device=device)
    with launch.launches() as counted:
        empty = [
            fa.flash_attention(q, k, k, starts([0], device), starts([8], device), max_queries=0, scale=1.0),
            fd.flash_decode(q, k[None][:0], k[None][:0], none, scale=1.0),
            pd.paged_decode(q, k, k, table, none, block_size=4, scale=1.0),
            pp.paged_prefill(q, k, k, table, starts([], device), none, max_queries=0, block_size=4, scale=1.0),
        ]
    assert all(out.shape == (0, 4, 16) for out in empty) and counted.total() == 0


# -- what must be done
# -----------------------------------------------------------------------------------------------------


def test_work_is_what_a_hand_counts():
    """Two query heads to a key-value head of 8 and 4 values, two bytes a value."""
    k, v = torch.zeros(12, 1, 8, dtype=torch.float16), torch.zeros(12, 1, 4, dtype=torch.float16)
    q = torch.zeros(3, 2, 8, dtype=torch.float16)
    # three queries at positions 2, 3, 4 of a text of five: 3 + 4 + 5 pairs of a query and a key
    work = fa.flash_attention_work(q, k[:5], v[:5], starts([3]), starts([5]), with_lse=True)
    assert work.bytes_read == 2 * (3 * 2 * 8 + 5 * (8 + 4)) + 4 * 4
    assert work.bytes_written == 2 * 3 * 2 * 4 + 4 * 3 * 2
    assert (work.flops, work.launches) == (12 * 2 * 2 * (8 + 4), 1)
    windowed = fa.flash_attention_work(q, k[:5], v[:5], starts([3]), starts([5]), window=2, sinks=1)
    assert windowed.flops == (3 + 3 + 3) * 2 * 2 * 12  # keys 1 2 and sink 0; 2 3 and 0; 3 4 and 0
    # one token each; texts of 5 and 2 in blocks of 4: 7 keys, 3 blocks
    tables, lengths = torch.zeros((2, 2), dtype=torch.int32), ints([5, 2])
    work = pd.paged_decode_work(q[:2], k, v, tables, lengths, block_size=4)
    assert work.bytes_read == 2 * (2 * 2 * 8 + 7 * 12) + 4 * (2 + 3)
    assert (work.bytes_written, work.flops, work.launches) == (2 * 2 * 2 * 4, 7 * 2 * 2 * 12, 1)
    assert pd.paged_decode_work(q[:2], k, v, tables, lengths, block_size=4, splits=3).launches == 2
    twin = fd.flash_decode_work(q[:2], k[None, :5].expand(2, -1, -1, -1), v[None, :5], lengths)
    # the table's three entries
    assert (twin.flops, work.bytes_read - twin.bytes_read) == (work.flops, 4 * 3)
    # and 2 + 1 new tokens of the same texts: pairs 4 + 5 and 2
    work = pp.paged_prefill_work(q, k, v, tables, starts([2, 1]), lengths, max_queries=2, block_size=4)
    assert work.bytes_read == 2 * (3 * 2 * 8 + 7 * 12) + 4 * (3 + 3 + 2)
    assert (work.flops, work.bytes_written) == (11 * 2 * 2 * 12, 2 * 3 * 2 * 4)


@given(st.integers(0, 40), st.integers(1, 9), st.none() | st.integers(1, 30), st.integers(0, 9), st.integers(1, 5))
def test_blocks_and_keys_that_are_seen_are_counted_one_by_one(length, block_size, window, sinks, queries):
    queries = min(queries, length)
    seen = [
        {t for t in range(at + 1) if window is None or t > at - window or t < sinks}
        for at in range(length - queries, length)
    ]
    assert [fa.seen_keys(at, window, sinks) for at in range(length - queries, length)] == list(map(len, seen))
    if queries:
        blocks = {t // block_size for t in set().union(*seen)}
        assert pd.seen_blocks(length, block_size, window, sinks, queries) == len(blocks)


# -- what is refused ---------------------------------------------------------------------------------------------------


@where_kernels_run
def test_what_is_not_supported_is_refused_by_name():
    device = HERE
    k, v, tables, lengths = in_blocks([5], 4, 2, (16, 16), device=device)
    q = numbers(1, 4, 16, seed=1, device=device)
    call = {"block_size": 4, "scale": 1.0}

    def refused(match, q=q, k=k, v=v, tables=tables, lengths=lengths, **changes):
        with pytest.raises(Unsupported, match=match):
            pd.paged_decode(q, k, v, tables, lengths, **{**call, **changes})

    refused("float32, float16, bfloat16", q.double(), k.double(), v.double())
    refused("one dtype", q.half())
    refused("multiple of the 2 key-value heads", q[:, :3])
    refused("heads of 16", k=k[..., :8])
    refused(r"head sizes from 1 to 256", *(t.new_zeros(*t.shape[:2], 300) for t in (q, k, v)))
    refused("contiguous in its last axis", q=q.mT.contiguous().mT)
    refused("tables must be int32", tables=tables.long())
    refused("lengths must have shape", lengths=lengths.expand(2))
    refused("block_size", block_size=0)
    refused("window", window=0)
    refused("sinks", sinks=-1)
    refused("scale", scale=float("nan"))
    refused("splits", splits=0)
    refused("out must have shape", out=q[:, :2])
    refused("versions 1, 2, 3", version=4)
    at = starts([1], device)
    with pytest.raises(Unsupported, match="query_starts must have shape"):
        pp.paged_prefill(q, k, v, tables, lengths, lengths, max_queries=1, **call)
    with pytest.raises(Unsupported, match="max_queries"):
        pp.paged_prefill(q, k, v, tables, at, lengths, max_queries=-1, **call)
    with pytest.raises(Unsupported, match="causal"):
        fa.flash_attention(q, k, v, at, at, max_queries=1, scale=1.0, causal=False, window=3)
    if launch.INTERPRETED:
        refused("bfloat16", *(t.bfloat16() for t in (q, k, v)))


# -- tuning ------------------------------------------------------------------------------------------------------------


@where_kernels_run
def test_every_candidate_gives_the_same_and_the_fastest_is_kept(monkeypatch, tmp_path):
    device = HERE
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    k, v, tables, lengths = in_blocks([9, 20], 4, 1, (16, 16), device=device)
    q, call = numbers(2, 2, 16, seed=1, device=device), {"block_size": 4, "scale": 1.0}
    truth = pd.paged_decode_reference(*wide(q, k, v), tables, lengths, **call)
    for config in {c["KEYS"]: c for c in fd.candidates(16, q.dtype, paged=True)}.values():
        assert_near(pd.paged_decode(q, k, v, tables, lengths, config=config, **call), truth)
    best = pd.tune_paged_decode(q, k, v, tables, lengths, budget_s=0.01, **call)
    assert best in fd.candidates(16, q.dtype, paged=True)
    found = tuning.table_for(device).configs
    assert found["paged_decode", str((16, 16, q.dtype))] == best
    at = starts([1, 1], device)
    for tune in (
        lambda: fd.tune_flash_decode(
            q,
            k[None, :20].nan_to_num().expand(2, -1, -1, -1),
            v[None, :20].nan_to_num().expand(2, -1, -1, -1),
            lengths,
            scale=1.0,
            budget_s=0.01,
        ),
        lambda: pp.tune_paged_prefill(q, k, v, tables, at, lengths, max_queries=1, budget_s=0.01, **call),
        lambda: fa.tune_flash_attention(q, k[:2], v[:2], at, at, max_queries=1, scale=1.0, budget_s=0.01),
    ):
        assert isinstance(tune(), tuning.Config)
    assert {kernel for kernel, _ in found} == {"paged_decode", "flash_decode", "paged_prefill", "flash_attention"}
