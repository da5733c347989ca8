"""Claims about decode over latents and the merge of splits: every version is the definition, whatever lies around
it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_claims import HERE, assert_near, dtypes, on_each_device, poisoned, where_kernels_run

from workbench.kernels import latent_decode as module
from workbench.kernels.latent_decode import (
    VERSIONS,
    candidates,
    default_config,
    latent_decode,
    latent_decode_reference,
    latent_decode_work,
    shared_bytes,
)
from workbench.kernels.launch import INTERPRETED, Unsupported, launches
from workbench.kernels.merge import VERSIONS as MERGES
from workbench.kernels.merge import merge, merge_reference, merge_work
from workbench.kernels.ranges import choose_splits, seen_count, seen_places
from workbench.kernels.tuning import Config

WILD = 2**31 - 1  # in tables, beyond a text's blocks


def paged(lengths, *, heads, rank, rotary, block_size, dtype, device, seed=0):
    """Texts spread over a pool in which all that belongs to nobody is NaN. Tables are wider than any text needs."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // block_size) for n in lengths]
    pool = sum(needed) + 3
    order = torch.randperm(pool, generator=generator).tolist()
    tables = torch.full((len(lengths), max(needed, default=0) + 2), WILD, dtype=torch.int32)
    latents = torch.full((pool * block_size, 1, rank + rotary), math.nan)
    for b, (count, length) in enumerate(zip(needed, lengths)):
        tables[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        places = seen_places(tables[b], length, block_size, None, 0)
        latents[places] = torch.randn(length, 1, rank + rotary, generator=generator)
    q = torch.randn(len(lengths), heads, rank + rotary, generator=generator)
    tensors = (q.to(dtype), latents.to(dtype), tables, torch.tensor(lengths, dtype=torch.int32))
    sizes = {"kv_rank": rank, "block_size": block_size, "scale": (rank + rotary) ** -0.5}
    return [t.to(device) for t in tensors], sizes


def truth(tensors, sizes):
    q, latents, tables, lengths = tensors
    return latent_decode_reference(q.double(), latents.double(), tables, lengths, **sizes)


# -- the merge -----------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("version", MERGES)
@pytest.mark.parametrize(("splits", "width"), [(1, 16), (2, 5), (17, 130), (40, 64)])
def test_merged_parts_are_the_definition(device, version, splits, width):
    parts = torch.randn(splits, 2, 3, width, device=device)
    lse = 20 * torch.randn(splits, 2, 3, device=device)
    for dtype in dtypes(device):
        out = poisoned(2, 3, width, dtype=dtype, device=device)
        with launches() as counted:
            got, whole = merge(parts, lse, out, version=version)
        wanted, wanted_lse = merge_reference(parts.double(), lse.double())
        assert got is out and counted.total() == 1
        assert_near(got, wanted)
        assert_near(whole, wanted_lse, 1e-6)


@on_each_device
@pytest.mark.parametrize("version", MERGES)
def test_an_empty_part_weighs_nothing_whatever_lies_there(device, version):
    parts, lse = torch.randn(5, 2, 2, 24, device=device), torch.randn(5, 2, 2, device=device)
    lse[0], lse[3], lse[:, 1, 1] = -torch.inf, -torch.inf, -torch.inf
    parts[lse == -torch.inf] = math.nan
    out, whole = merge(parts, lse, version=version)
    assert_near(out, merge_reference(parts.double(), lse.double())[0])
    assert (out[1, 1] == 0).all() and whole[1, 1] == -torch.inf


@on_each_device
@pytest.mark.parametrize("version", MERGES)
def test_no_number_stays_none(device, version):
    parts, lse = torch.randn(3, 1, 2, 8, device=device), torch.randn(3, 1, 2, device=device)
    lse[1, 0, 0] = math.nan
    out, whole = merge(parts, lse, version=version)
    assert out[0, 0].isnan().all() and whole[0, 0].isnan() and out[0, 1].isfinite().all()


@where_kernels_run
@pytest.mark.parametrize("version", MERGES)
def test_any_cut_of_the_keys_gives_the_same(version):
    scores, values = 4 * torch.randn(3, 50, dtype=torch.float64), torch.randn(50, 9, dtype=torch.float64)
    cuts = [0, 7, 7, 8, 33, 50]
    pieces = [(scores[:, a:b], values[a:b]) for a, b in pairwise(cuts)]
    parts = torch.stack([torch.softmax(s, 1) @ v for s, v in pieces])[:, None].float().to(HERE)
    lse = torch.stack([torch.logsumexp(s, 1) for s, _ in pieces])[:, None].float().to(HERE)
    assert_near(merge(parts, lse, version=version)[0][0].cpu(), torch.softmax(scores, 1) @ values)


@where_kernels_run
def test_the_merge_refuses_what_it_does_not_do():
    parts, lse = torch.zeros(2, 1, 1, 8, device=HERE), torch.zeros(2, 1, 1, device=HERE)
    for wrong in (
        lambda: merge(parts.half(), lse),
        lambda: merge(parts, lse[:1]),
        lambda: merge(parts[:0], lse[:0]),
        lambda: merge(parts.transpose(0, 3), lse),
        lambda: merge(parts, lse, torch.zeros(1, 1, 9, device=HERE)),
        lambda: merge(parts, lse, version=9),
    ):
        with pytest.raises(Unsupported, match="merge"):
            wrong()


def test_what_a_merge_moves():
    work = merge_work(torch.empty(4, 2, 3, 16))
    assert (work.bytes_read, work.bytes_written) == (4 * 4 * 2 * 3 * 17, 2 * 3 * (64 + 4))
    assert merge_work(torch.empty(4, 2, 3, 16), torch.empty(2, 3, 16).half()).bytes_written == 6 * (32 + 4)


# -- decode over latents ---------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_the_definition(device, version):
    for dtype in dtypes(device):
        tensors, sizes = paged([37, 0, 130], heads=5, rank=32, rotary=16, block_size=16, dtype=dtype, device=device)
        out = poisoned(3, 5, 32, dtype=dtype, device=device)
        assert latent_decode(*tensors, **sizes, version=version, out=out) is out
        assert_near(out, truth(tensors, sizes))
        assert (out[1] == 0).all()


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
def test_deepseeks_shape(device, version):
    dtype = dtypes(device)[-1]
    tensors, sizes = paged([75], heads=17, rank=512, rotary=64, block_size=16, dtype=dtype, device=device)
    splits = 2 if version >= 4 else None
    assert_near(latent_decode(*tensors, **sizes, version=version, splits=splits), truth(tensors, sizes))


@where_kernels_run
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    heads=st.integers(1, 70),
    rank=st.integers(1, 70),
    rotary=st.sampled_from([0, 1, 8, 20]),
    block_size=st.sampled_from([1, 3, 16]),
    version=st.sampled_from([3, 4, 5]),
    splits=st.sampled_from([None, 1, 2, 5]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    seed=st.integers(0, 999),
)
def test_any_shape(lengths, heads, rank, rotary, block_size, version, splits, dtype, seed):
    tensors, sizes = paged(
        lengths, heads=heads, rank=rank, rotary=rotary, block_size=block_size, dtype=dtype, device=HERE, seed=seed
    )
    got = latent_decode(*tensors, **sizes, version=version, splits=splits if version > 3 else None)
    assert_near(got, truth(tensors, sizes))


@where_kernels_run
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("splits", [1, 2, 3, 16])
def test_the_number_of_splits_changes_nothing_but_the_launches(version, splits):
    tensors, sizes = paged(
        [200, 9], heads=4, rank=16, rotary=16, block_size=8, dtype=torch.float32, device=HERE, seed=splits
    )
    with launches() as counted:
        got = latent_decode(*tensors, **sizes, version=version, splits=splits)
    assert_near(got, truth(tensors, sizes))
    assert counted.total() == (1 if splits == 1 else 2)


@where_kernels_run
@pytest.mark.parametrize("version", VERSIONS)
def test_large_scores_and_equal_scores_are_no_trouble(version):
    tensors, sizes = paged([60], heads=3, rank=16, rotary=16, block_size=4, dtype=torch.float32, device=HERE)
    sharp = sizes | {"scale": 300.0}
    assert_near(latent_decode(*tensors, **sharp, version=version), truth(tensors, sharp), 1e-4)
    tensors[0].zero_()
    assert_near(latent_decode(*tensors, **sizes, version=version), truth(tensors, sizes))


@where_kernels_run
@pytest.mark.parametrize("version", VERSIONS)
def test_a_view_of_all_layers_is_taken_as_it_lies(version):
    """The engine's latents are one layer of [L, places, 1, R + rot]; queries may be a slice of a wider tensor."""
    tensors, sizes = paged([21, 5], heads=3, rank=16, rotary=8, block_size=4, dtype=torch.float16, device=HERE)
    q, latents, tables, lengths = tensors
    layers = torch.full((3, *latents.shape), math.nan, dtype=q.dtype, device=HERE)
    layers[1] = latents
    rows = torch.full((len(latents), 1, 40), math.nan, dtype=q.dtype, device=HERE)
    rows[..., 4:28] = latents
    wide = torch.full((2, 3, 30), math.nan, dtype=q.dtype, device=HERE)
    wide[..., :24] = q
    wanted = truth(tensors, sizes)
    assert_near(latent_decode(wide[..., :24], layers[1], tables, lengths, **sizes, version=version), wanted)
    assert_near(latent_decode(q, rows[..., 4:28], tables, lengths, **sizes, version=version), wanted)


@where_kernels_run
def test_what_is_no_number_in_a_text_reaches_its_result_and_no_other():
    tensors, sizes = paged([40, 40], heads=2, rank=16, rotary=8, block_size=8, dtype=torch.float32, device=HERE)
    tensors[1][seen_places(tensors[2][0].cpu(), 40, 8, None, 0)[33].item()] = math.nan
    for version in VERSIONS:
        got = latent_decode(*tensors, **sizes, version=version, splits=2 if version > 3 else None)
        assert got[0].isnan().all() and got[1].isfinite().all()


@where_kernels_run
def test_other_texts_beside_it_do_not_change_a_text():
    tensors, sizes = paged([33, 70, 4], heads=3, rank=16, rotary=8, block_size=8, dtype=torch.float16, device=HERE)
    q, latents, tables, lengths = tensors
    together = latent_decode(*tensors, **sizes, splits=2)
    for b in range(3):
        one = slice(b, b + 1)
        alone = latent_decode(q[one], latents, tables[one], lengths[one], **sizes, splits=2)
        assert torch.equal(alone[0], together[b])


@where_kernels_run
def test_no_texts_need_no_launch():
    tensors, sizes = paged([], heads=2, rank=16, rotary=8, block_size=8, dtype=torch.float16, device=HERE)
    with launches() as counted:
        assert latent_decode(*tensors, **sizes).shape == (0, 2, 16)
    assert counted.total() == 0


@where_kernels_run
def test_what_is_refused_and_why():
    tensors, sizes = paged([9], heads=2, rank=16, rotary=8, block_size=8, dtype=torch.float32, device=HERE)
    q, latents, tables, lengths = tensors

    def refused(match, *, q=q, latents=latents, tables=tables, lengths=lengths, **changes):
        with pytest.raises(Unsupported, match=match):
            latent_decode(q, latents, tables, lengths, **(sizes | changes))

    refused("versions 1, 2, 3, 4, 5", version=6)
    refused("kv_rank from 1 to 512", kv_rank=25)
    refused("kv_rank from 1 to 512", kv_rank=0)
    refused("one type", latents=latents.half())
    refused("must be one of", q=q.double())
    refused("must be one of int32", tables=tables.long())
    refused("must be one of int32", lengths=lengths.long())
    refused("shape", latents=latents[:, 0])
    refused("shape", lengths=lengths.repeat(2))
    refused("block_size", block_size=0)
    refused("splits", splits=0)
    refused("splits", splits=2, version=3)
    refused("contiguous in its last axis", q=q.transpose(1, 2).contiguous().transpose(1, 2))
    refused("shape", out=torch.empty(1, 2, 24, device=HERE))
    if INTERPRETED:
        refused("bfloat16", q=q.bfloat16(), latents=latents.bfloat16())


def test_what_a_step_moves_by_hand():
    """Two texts of 20 and 3 tokens in blocks of 16, 4 heads of 8 + 4 in float16: 23 rows of 24 bytes, 3 table
    entries."""
    work = latent_decode_work(torch.empty(2, 4, 12).half(), [20, 3], kv_rank=8, block_size=16)
    assert work.bytes_read == 23 * 24 + 2 * 4 * 24 + 4 * (3 + 2)
    assert work.bytes_written == 2 * 4 * 8 * 2
    assert work.flops == 23 * 4 * 2 * (12 + 8)


def test_intensity_grows_with_the_heads():
    def intensity(heads):
        work = latent_decode_work(torch.empty(1, heads, 576).half(), [100_000], kv_rank=512, block_size=16)
        return work.intensity

    assert intensity(64) < 989e12 / 4.8e12 < intensity(128)  # FLOPs per byte of an H200


# -- block sizes and splits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 16, 20, 64, 128])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_defaults_fit_the_shared_memory(version, heads, dtype):
    for shared in (module.HOPPER_SHARED, 166_912, module.MIN_SHARED):  # H200, A100, consumer cards
        config = default_config(version, heads, 576, dtype, shared)
        if version > 1:
            assert shared_bytes(version, config, 576, dtype.itemsize) <= shared
    some = candidates(version, heads, 576, dtype)
    assert some[0] == default_config(version, heads, 576, dtype) and len(set(some)) == len(some) > 1


@where_kernels_run
def test_tuned_sizes_are_used(monkeypatch):
    tensors, sizes = paged([30], heads=3, rank=16, rotary=8, block_size=8, dtype=torch.float16, device=HERE)
    asked = []

    def choose(kernel, key, default, device):
        asked.append((kernel, key))
        return Config.of(4, 1, HEADS=16, TOKENS=16)

    monkeypatch.setattr(module, "choose", choose)
    assert_near(latent_decode(*tensors, **sizes), truth(tensors, sizes))
    assert asked == [("latent_decode", (5, 3, 24, 16, "float16"))]


def test_splits_fill_the_device_and_stay_worth_their_while():
    device = torch.device("cpu")  # counted as an H200
    assert choose_splits(1, 10**6, device) == 256  # the most
    assert choose_splits(8, 10**6, device, resident=2) == 33  # 264 programs
    assert choose_splits(8, 1000, device) == 3  # at least 256 tokens each
    assert choose_splits(300, 10**6, device) == 1
    assert choose_splits(2, 10**5, device, resident=1) == 66
    assert choose_splits(0, 0, device) == 1


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.one_of(st.none(), st.integers(1, 70)), st.integers(0, 70), st.sampled_from([1, 4, 16]))
def test_seen_places_are_as_many_as_counted_and_in_order(length, window, sinks, block_size):
    table = torch.arange(64, dtype=torch.int32)
    places = seen_places(table, length, block_size, window, sinks)
    assert len(places) == seen_count(length, window, sinks)
    seen = [t for t in range(length) if window is None or t >= length - window or t < sinks]
    assert places.tolist() == seen
