"""Claims about paged decode over codes: what is stored is what is read, exactly, and attention over it is the
definition."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_claims import HERE, assert_near, dtypes, on_each_device, poisoned, where_kernels_run

from workbench.errors import WorkbenchError
from workbench.kernels import paged_quantized as module
from workbench.kernels.launch import Unsupported, launch, launches
from workbench.kernels.paged_quantized import (
    VERSIONS,
    Coded,
    candidates,
    decoded,
    default_config,
    numbers_of,
    paged_decode_quantized,
    paged_decode_quantized_reference,
    paged_decode_quantized_work,
)
from workbench.kernels.ranges import seen_blocks, seen_places
from workbench.kernels.tuning import Config
from workbench.kv.paged_store import PAGED_FORMATS, Codes
from workbench.quantization.formats import decode, encode, fit

WILD = 2**31 - 1  # in tables, beyond a text's blocks


def coded(x: torch.Tensor, name: str) -> Coded:
    scale, zero = fit(x, PAGED_FORMATS[name], -1)
    return Coded(encode(x, scale, zero, PAGED_FORMATS[name]), scale, zero, name)


def moved(one: Coded, device: str) -> Coded:
    zero = None if one.zero is None else one.zero.to(device)
    return Coded(one.codes.to(device), one.scale.to(device), zero, one.format)


def paged(
    lengths,
    *,
    group=3,
    kv_heads=2,
    size=32,
    value=32,
    block_size=4,
    formats=("int8", "int8"),
    dtype=torch.float32,
    device=HERE,
    seed=0,
    spread=1.0,
    offset=0.5,
):
    """Texts spread over a pool where every scale that belongs to nobody is NaN. Tables are wider than any text
    needs."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // block_size) for n in lengths]
    pool = sum(needed) + 3
    order = torch.randperm(pool, generator=generator).tolist()
    tables = torch.full((len(lengths), max(needed, default=0) + 2), WILD, dtype=torch.int32)
    free = torch.ones(pool * block_size, dtype=torch.bool)
    for b, (count, length) in enumerate(zip(needed, lengths)):
        tables[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        free[seen_places(tables[b], length, block_size, None, 0)] = False
    both = []
    for width, name in zip((size, value), formats):
        x = spread * (torch.randn(pool * block_size, kv_heads, width, generator=generator) + offset)
        one = coded(x, name)
        one.scale[free] = math.nan
        both.append(moved(one, device))
    q = torch.randn(len(lengths), group * kv_heads, size, generator=generator).to(dtype)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    tensors = [q.to(device), *both, tables.to(device), lengths.to(device)]
    return tensors, {"block_size": block_size, "scale": size**-0.5}


def truth(tensors, sizes):
    q, *others = tensors
    return paged_decode_quantized_reference(q.double(), *others, **sizes)


# -- codes to numbers ------------------------------------------------------------------------------------------


@triton.jit
def _all_numbers(codes, out, HIGH: tl.constexpr, FORMAT: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, numbers_of(tl.load(codes + at), HIGH, FORMAT))


def numbers(name: str, high: bool, device: str) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes = codes.view(torch.int8) if name == "fp8" else codes
    out = poisoned(256, dtype=torch.float16, device=device)
    launch(_all_numbers, (1,), codes, out, HIGH=high, FORMAT=module.FORMATS[name].number)
    return out.double().cpu()


@on_each_device
def test_all_256_bytes_become_their_numbers(device):
    byte = torch.arange(256)
    assert torch.equal(numbers("int8", False, device), byte.double() - 128)
    assert torch.equal(numbers("int4", False, device), (byte % 16).double() - 8)
    assert torch.equal(numbers("int4", True, device), (byte // 16).double() - 8)
    e4m3 = byte.to(torch.uint8).view(torch.float8_e4m3fn).double()
    e4m3[127], e4m3[255] = 480, -480  # NaN in e4m3: `encode` makes none, `decode` gives the same
    assert torch.equal(256 * numbers("fp8", False, device), e4m3)


@pytest.mark.parametrize("name", PAGED_FORMATS)
def test_codes_are_decoded_as_the_store_decodes_them(name):
    one = coded(torch.randn(20, 2, 16) + 1, name)
    assert torch.equal(decoded(one), decode(one.codes, one.scale, one.zero, PAGED_FORMATS[name]))


@where_kernels_run
@pytest.mark.parametrize("name", PAGED_FORMATS)
def test_what_the_paged_store_writes_is_what_the_kernel_reads(name):
    class Shape:
        num_kv_heads, head_dim, value_head_dim, kv_layers = 2, 16, 32, (0, 1, 2)

    store = Codes(Shape, 40, torch.float32, HERE, name)
    k, v, at = torch.randn(24, 2, 16), torch.randn(24, 2, 32), torch.randperm(40)[:24]
    store.write(1, at.to(HERE), k.to(HERE), v.to(HERE))
    half = len(store.tensors) // 2
    keys, values = (
        Coded(p[0][1], p[1][1], p[2][1] if len(p) == 3 else None, name)
        for p in (store.tensors[:half], store.tensors[half:])
    )
    q, tables = torch.randn(1, 4, 16, device=HERE), at.to(HERE, torch.int32)[None]  # blocks of one token
    lengths = torch.tensor([24], dtype=torch.int32, device=HERE)
    got = paged_decode_quantized(q, keys, values, tables, lengths, block_size=1, scale=0.25)
    read_k, read_v = (x.double() for x in store.read(1, at.to(HERE)))
    weights = torch.softmax(torch.einsum("gid,sgd->gis", q[0].double().view(2, 2, 16), read_k) / 4, -1)
    assert_near(got[0], torch.einsum("gis,sgd->gid", weights, read_v).flatten(0, 1))
    work = paged_decode_quantized_work(q, keys, values, [24], block_size=1)
    in_cache = 24 * Codes.bytes_per_token(Shape, torch.float32, name) // 3  # of three layers
    assert work.bytes_read == in_cache + q.nbytes + 4 * (24 + 1)


# -- attention over codes ----------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", PAGED_FORMATS)
def test_every_version_is_the_definition(device, version, name):
    # bfloat16 too in the interpreter: products are in float16
    for dtype in {*dtypes(device), torch.bfloat16}:
        tensors, sizes = paged([19, 0, 37], formats=(name, name), dtype=dtype, device=device)
        out = poisoned(3, 6, 32, dtype=dtype, device=device)
        assert paged_decode_quantized(*tensors, **sizes, version=version, out=out) is out
        assert_near(out, truth(tensors, sizes))
        assert (out[1] == 0).all()


@where_kernels_run
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=2),
    group=st.sampled_from([1, 3, 8, 17]),
    kv_heads=st.integers(1, 2),
    size=st.sampled_from([2, 16, 20, 64]),
    value=st.sampled_from([2, 16, 24, 64]),
    formats=st.tuples(st.sampled_from(list(PAGED_FORMATS)), st.sampled_from(list(PAGED_FORMATS))),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.one_of(st.none(), st.integers(1, 90)),
    sinks=st.integers(0, 9),
    version=st.sampled_from([2, 3]),
    splits=st.sampled_from([None, 1, 2, 5]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    seed=st.integers(0, 999),
)
def test_any_shape(
    lengths, group, kv_heads, size, value, formats, block_size, window, sinks, version, splits, dtype, seed
):
    tensors, sizes = paged(
        lengths,
        group=group,
        kv_heads=kv_heads,
        size=size,
        value=value,
        block_size=block_size,
        formats=formats,
        dtype=dtype,
        seed=seed,
    )
    look = sizes | {"window": window, "sinks": sinks}
    got = paged_decode_quantized(*tensors, **look, version=version, splits=splits if version == 3 else None)
    assert_near(got, truth(tensors, look))


@where_kernels_run
@pytest.mark.parametrize("splits", [1, 2, 3, 16])
def test_the_number_of_splits_changes_nothing_but_the_launches(splits):
    tensors, sizes = paged([200, 9], formats=("fp8", "int4"))
    with launches() as counted:
        got = paged_decode_quantized(*tensors, **sizes, splits=splits)
    assert_near(got, truth(tensors, sizes))
    assert counted.total() == (1 if splits == 1 else 2)


@where_kernels_run
@pytest.mark.parametrize("name", PAGED_FORMATS)
@pytest.mark.parametrize("spread", [1e-5, 1e-2, 300.0])
def test_small_and_large_numbers_keep_their_precision(name, spread):
    """float16 does not hold a weight of 0.01 times a scale of 10⁻⁷."""
    tensors, sizes = paged([60], formats=(name, name), dtype=torch.bfloat16, spread=spread)
    for version in VERSIONS:
        got = paged_decode_quantized(*tensors, **sizes, version=version)
        assert_near(got, truth(tensors, sizes), 8e-3)


@where_kernels_run
@pytest.mark.parametrize("version", VERSIONS)
def test_queries_beyond_float16_are_no_trouble(version):
    tensors, sizes = paged([40], formats=("int8", "fp8"), dtype=torch.bfloat16)
    tensors[0] = tensors[0] * 1e6
    sizes["scale"] *= 1e-6
    assert_near(paged_decode_quantized(*tensors, **sizes, version=version), truth(tensors, sizes))
    tensors[0].zero_()
    assert_near(paged_decode_quantized(*tensors, **sizes, version=version), truth(tensors, sizes))


@where_kernels_run
def test_blocks_of_one_value_have_a_scale_of_zero():
    tensors, sizes = paged([20], formats=("int8", "int8"))
    q, k, _, tables, lengths = tensors
    flat = moved(coded(torch.full((len(k.codes), 2, 32), 0.75), "int8"), HERE)
    assert (flat.scale == 0).all()
    for version in VERSIONS:
        got = paged_decode_quantized(q, k, flat, tables, lengths, **sizes, version=version)
        assert_near(got, torch.full_like(got, 0.75).double())


@where_kernels_run
@pytest.mark.parametrize("name", PAGED_FORMATS)
def test_what_was_no_number_reaches_its_text_and_head_and_no_other(name):
    tensors, sizes = paged([40, 40], formats=(name, name))
    place = seen_places(tensors[3][0].cpu(), 40, 4, None, 0)[31].item()
    for part in (1, 2):
        tensors[part].scale[place, 1] = math.nan
        for version in VERSIONS:
            got = paged_decode_quantized(*tensors, **sizes, version=version, splits=2 if version == 3 else None)
            assert got[0, 3:].isnan().all() and got[0, :3].isfinite().all() and got[1].isfinite().all()
        tensors[part].scale[place, 1] = 0.01


@where_kernels_run
def test_other_texts_beside_it_do_not_change_a_text():
    tensors, sizes = paged([33, 70, 4], formats=("int4", "int8"), dtype=torch.float16)
    q, k, v, tables, lengths = tensors
    together = paged_decode_quantized(*tensors, **sizes, splits=2)
    for b in range(3):
        one = slice(b, b + 1)
        alone = paged_decode_quantized(q[one], k, v, tables[one], lengths[one], **sizes, splits=2)
        assert torch.equal(alone[0], together[b])


@where_kernels_run
def test_no_texts_need_no_launch():
    tensors, sizes = paged([])
    with launches() as counted:
        assert paged_decode_quantized(*tensors, **sizes).shape == (0, 6, 32)
    assert counted.total() == 0


@where_kernels_run
def test_what_is_refused_and_why():
    tensors, sizes = paged([9], formats=("int8", "fp8"))
    q, k, v, tables, lengths = tensors

    def refused(match, *, q=q, k=k, v=v, tables=tables, lengths=lengths, kind=Unsupported, **changes):
        with pytest.raises(kind, match=match):
            paged_decode_quantized(q, k, v, tables, lengths, **(sizes | changes))

    refused("versions 1, 2, 3", version=4)
    refused("int4", k=k._replace(format="int3"), kind=WorkbenchError)
    refused("a zero for each scale", k=k._replace(zero=None))
    refused("no zeros", v=v._replace(zero=k.zero))
    refused("float8_e4m3fn", v=v._replace(codes=k.codes))
    refused("must be one of float16", k=k._replace(scale=k.scale.float()))
    refused("shape", k=k._replace(scale=k.scale[..., 0]))
    refused("must lie alike", k=k._replace(zero=k.zero.repeat(1, 1, 2)[..., :1]))
    refused("multiple of G", q=q[:, :5])
    refused("multiple of G", q=q[..., :30])
    refused("must be one of", q=q.double())
    refused("must be one of int32", tables=tables.long())
    refused("shape", lengths=lengths.repeat(2))
    refused("splits", splits=0)
    refused("splits", splits=2, version=2)
    refused("window", window=0)
    refused("sinks", sinks=-1)
    refused("block_size", block_size=0)
    refused("1 to 256", k=moved(coded(torch.randn(40, 2, 512), "int4"), HERE), q=torch.zeros(1, 6, 512, device=HERE))


@where_kernels_run
def test_what_a_step_moves_by_hand():
    """Texts of 20 and 3 tokens in blocks of 16, window 5 and 2 sinks: 7 + 3 tokens in 2 + 1 blocks. G = 2, D = 32, D_v
    = 16."""
    tensors, _ = paged([20, 3], value=16, block_size=16, formats=("int8", "int4"), dtype=torch.float16)
    q, k, v, _, _ = tensors
    work = paged_decode_quantized_work(q, k, v, [20, 3], block_size=16, window=5, sinks=2)
    a_token = 2 * ((32 + 4) + (8 + 4))
    assert work.bytes_read == 10 * a_token + 2 * 6 * 32 * 2 + 4 * (3 + 2)
    assert work.bytes_written == 2 * 6 * 16 * 2
    assert work.flops == 10 * 6 * 2 * (32 + 16)


def test_bytes_of_a_token_are_those_the_module_names():
    of = {n: coded(torch.randn(1, 1, 128), n).bytes_per_token * 2 for n in PAGED_FORMATS}
    assert of == {"int8": 264, "fp8": 260, "int4": 136}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.one_of(st.none(), st.integers(1, 70)), st.integers(0, 70), st.sampled_from([1, 3, 16]))
def test_seen_blocks_are_those_of_the_seen_tokens(length, window, sinks, block_size):
    seen = {t // block_size for t in range(length) if window is None or t >= length - window or t < sinks}
    assert seen_blocks(length, block_size, window, sinks) == len(seen)


def test_candidates_differ_and_begin_with_the_default():
    for version in VERSIONS:
        for dtype in (torch.float16, torch.float32):
            some = candidates(version, 4, dtype, "int4")
            assert some[0] == default_config(version, 4, dtype, "int4") and len(set(some)) == len(some) > 1


@where_kernels_run
def test_tuned_sizes_are_used(monkeypatch):
    tensors, sizes = paged([50], formats=("int4", "fp8"), dtype=torch.float16)
    asked = []

    def choose(kernel, key, default, device):
        asked.append((kernel, key))
        return Config.of(4, 1, ROWS=16, TOKENS=16)

    monkeypatch.setattr(module, "choose", choose)
    assert_near(paged_decode_quantized(*tensors, **sizes), truth(tensors, sizes))
    assert asked == [("paged_decode_quantized", (3, 3, 32, 32, "int4", "fp8", "float16"))]
