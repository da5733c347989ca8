"""Claims about the cost of smaller caches: windows, latents, shared layers, codes, held to the real modules."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import random_decoder, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from test_costs import Watch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from workbench.errors import WorkbenchError
from workbench.instruments import cost_memory
from workbench.instruments import costs as cost_model
from workbench.instruments.cost_quantized import CODE_FORMATS, Groups
from workbench.instruments.costs import (
    COUNTED_KVS,
    attention_costs,
    causal_pairs,
    decode_costs,
    kv_bytes,
    largest_batch,
    prefill_costs,
    quantized_bytes_per_element,
    step_costs,
    weights_read,
)
from workbench.kv import KINDS, kv_for, make_kv
from workbench.kv.quantized import GROUP, KV_FORMATS
from workbench.kv.window import REWIND
from workbench.models.attention import causal_mask
from workbench.models.batch import Batch
from workbench.models.config import LatentAttentionShape, YarnScaling
from workbench.models.fast import prepare
from workbench.models.latent import absorbing_pays
from workbench.models.shapes import public_shape


def latent_config(*, query_rank=24, value=8, **changes):
    """H 4, content 8, rotary 4, kv_rank 16."""
    shape = LatentAttentionShape(query_rank, 16, 4, 8, value)
    family = {"family": "deepseek_v3", "num_kv_heads": 4, "head_dim": 12, "latent_attention": shape}
    return tiny_config(**{"vocab_size": 96, **family, **changes})


SHAPES = {
    "plain": tiny_config(vocab_size=96),
    "windows": tiny_config(vocab_size=96, family="mistral", sliding_window=4),
    "windows, a global layer, sinks": tiny_config(
        vocab_size=96, num_layers=3, sliding_window=4, global_layers=(1,), attention_sinks=2
    ),
    "shared layers": tiny_config(vocab_size=96, family="qwen3", qk_norm=True, num_layers=5, kv_sources=(0, 0, 0, 3, 3)),
    "shared layers with windows": tiny_config(
        vocab_size=96, num_layers=4, kv_sources=(0, 0, 2, 2), sliding_window=5, attention_sinks=1
    ),
    "latents": latent_config(),
    "latents, q at once": latent_config(query_rank=None, value=12),
    "latents, windows, sinks": latent_config(num_layers=3, sliding_window=4, global_layers=(1,), attention_sinks=1),
    "gemma": tiny_config(
        vocab_size=96,
        family="gemma3_text",
        num_layers=3,
        qk_norm=True,
        post_norms=True,
        zero_centered_norms=True,
        activation="gelu_tanh",
        embedding_scale=5.66,
        query_pre_attn_scalar=8,
        sliding_window=4,
        global_layers=(2,),
        local_rope_theta=1000.0,
        rope_scaling=YarnScaling(4.0, 64),
    ),
}
WINDOWED = [name for name, config in SHAPES.items() if config.sliding_window]
WIDE = [name for name, config in SHAPES.items() if None in map(config.window_of, range(config.num_layers))]
LATENT = [name for name, config in SHAPES.items() if config.latent_attention]
SHARING = [name for name, config in SHAPES.items() if config.kv_sources]
CASES = [
    *((name, "recompute", {}) for name in SHAPES),
    *((name, "contiguous", {}) for name in SHAPES),
    *((name, "window", {"rewind": 2}) for name in WINDOWED),
    *((name, "window", {"window": 5, "sinks": 1, "rewind": 2}) for name in WIDE),
    *((name, "latent", {"form": form}) for name in LATENT for form in ("auto", "absorbed", "expanded")),
    *((name, "shared_layers", {}) for name in SHARING),
    *((name, "quantized", {"format": "int8", "group": 4}) for name in SHAPES),
    ("plain", "quantized", {"format": "fp8", "group": 6}),
    ("windows, a global layer, sinks", "quantized", {"format": "int4", "group": 6}),
]
cases = pytest.mark.parametrize(
    ("name", "kind", "kv_settings"), CASES, ids=[f"{k} {'-'.join(map(str, s.values()))} {n}" for n, k, s in CASES]
)
# (new tokens, contexts): steps of one token, chunks, ragged batches, prompts; some make new groups, some come round
STEPS = [
    ([1], [7]),
    ([1, 1], [8, 7]),
    ([2], [24]),
    ([3, 1, 2], [5, 9, 7]),
    ([12], [0]),
    ([5, 2, 9], [0, 0, 0]),
    ([9], [10]),
    ([1, 20], [6, 9]),
    ([1, 1, 1], [21, 21, 21]),
    ([25], [0]),
]


class Begun:
    """A kv whose `begin` has been: what it prepares once a step is not seen by whoever watches the model."""

    def __init__(self, kv, batch):
        kv.begin(batch)
        if hasattr(kv, "_step_of"):  # prepares at the first attend
            kv._step_of(batch)
        self.attend = kv.attend

    def begin(self, batch): ...


def watched(model, kind, kv_settings, new, past, watch, **room):
    """Let `watch` see the step that brings `new` tokens after `past` others."""
    if kind == "recompute":
        kv = make_kv(kind, model.config, **room)
    else:
        if kind == "quantized":  # which is what is counted
            room = {"attention": "sdpa"} | room
        kv = kv_for(kind, model, max_sequences=3, max_tokens=40, **kv_settings, **room)
    with torch.inference_mode():
        if any(past):
            model(Batch.of([[1] * n for n in past]), kv)
        batch = Batch.of([[1] * n for n in new], first_positions=past)
        begun = Begun(kv, batch)
        with watch:
            model(batch, begun)
    return watch


def counted(config, kind, kv_settings, new, past, itemsize=4, **other):
    return step_costs(
        config,
        new_tokens=new,
        contexts=past,
        logit_rows=len(new),
        weight_bytes_per_element=itemsize,
        kv=kind,
        kv_settings=kv_settings,
        kv_bytes_per_element=4,
        **other,
    )


def steps_of(kind, steps=STEPS):
    return [(new, past) for new, past in steps if kind != "recompute" or not any(past)]


class NoEmpty(Watch):
    """Watch, but an allocation starts nothing, and a mask is not an activation."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if "empty" in str(operation):
            return operation(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(operation, types, args, kwargs)
        if str(operation).startswith("aten.scaled_dot_product"):
            masks = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dtype == torch.bool]
            self.read -= sum(t.numel() for t in masks)
        return out


@cases
def test_launches_equal_those_of_the_real_decoder_and_kv(name, kind, kv_settings):
    plain = random_decoder(SHAPES[name])
    check_launches(plain, "plain", kind, kv_settings, STEPS)
    check_launches(prepare(plain, linear="plain"), "fast", kind, kv_settings, [STEPS[0], STEPS[4]])


@pytest.mark.parametrize(
    ("name", "kind", "kv_settings"), [*{(k, *s.values()): (n, k, s) for n, k, s in CASES}.values()]
)
def test_launches_in_bfloat16_are_those_of_the_real_decoder_too(name, kind, kv_settings):
    """One shape for each kv and its settings: what a type adds does not depend on the shape."""
    plain = random_decoder(SHAPES[name]).to(torch.bfloat16)
    check_launches(plain, "plain", kind, kv_settings, STEPS[3:5])
    check_launches(prepare(plain, linear="plain"), "fast", kind, kv_settings, [STEPS[0], STEPS[4]])


def check_launches(model, arrangement, kind, kv_settings, steps):
    for new, past in steps_of(kind, steps):
        real = watched(model, kind, kv_settings, new, past, NoEmpty())
        itemsize = model.dtype.itemsize
        costs = counted(model.config, kind, kv_settings, new, past, itemsize, arrangement=arrangement)
        assert costs.launches == real.launches, (arrangement, new, past)


@pytest.mark.slow
@cases
def test_flops_equal_what_torch_counts_in_the_real_module_and_kv(name, kind, kv_settings):
    config = SHAPES[name]
    model = random_decoder(config)
    for new, past in steps_of(kind, STEPS[3:7]):
        counter = watched(model, kind, kv_settings, new, past, FlopCounterMode(display=False), attention="eager")
        assert counted(config, kind, kv_settings, new, past).rectangle_flops == counter.get_total_flops(), (new, past)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("lengths", [[1], [12], [5, 1, 9]], ids=str)
def test_activation_bytes_equal_what_products_and_attention_read_and_write(name, lengths):
    config = SHAPES[name]
    real = watched(random_decoder(config), "recompute", {}, lengths, [0] * len(lengths), NoEmpty())
    costs = counted(config, "recompute", {}, lengths, [0] * len(lengths))
    assert costs.bytes_by_part["activations"] == 4 * (real.read + real.written)


class Traffic(TorchDispatchMode):
    """Bytes that the operations read and write; of copies what is copied, of lookups what is found."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out, name = operation(*args, **(kwargs or {})), str(operation)
        given, ours, made = (
            [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (args, (args, kwargs), out)
        )
        known = {t.untyped_storage().data_ptr() for t in ours}
        works = operation._schema.is_mutable or any(t.untyped_storage().data_ptr() not in known for t in made)
        if "empty" in name or not works:
            return out
        if name.startswith(("aten.index_put", "aten.index_copy")):
            moved = [ours[-1], ours[-1]]
        elif name.startswith(("aten.index", "aten.embedding")):
            moved = [*made, *made]
        else:
            moved = [*(given[1:] if name.startswith("aten.copy_") else given), *made]
        self.bytes += sum(t.numel() * t.element_size() for t in moved)
        return out


@pytest.mark.slow
@cases
def test_bytes_are_those_of_the_real_operations_but_for_single_numbers(name, kind, kv_settings):
    """A quantized kv of these tiny heads has about as many scales as numbers, and what is done to them is not counted.
    The value of a latent is a view of its key and counted once."""
    config = SHAPES[name]
    model = random_decoder(config)
    for new, past in [([1], [38]), ([30], [0])]:
        if kind == "recompute" and any(past):
            continue
        real = watched(model, kind, kv_settings, new, past, Traffic()).bytes
        costs = counted(config, kind, kv_settings, new, past)
        assert costs.bytes == pytest.approx(real, rel=0.17 if kind == "quantized" else 0.07), (new, past)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("arrangement", ["plain", "fast"])
def test_every_weight_is_read_once_whatever_the_attention(name, arrangement):
    config = SHAPES[name]
    kinds = ["contiguous", *(["latent"] if config.latent_attention else [])]
    for kind in kinds:
        costs = counted(config, kind, {}, [1, 1], [9, 3], arrangement=arrangement)
        assert costs.bytes_by_part["weights"] == 4 * weights_read(config, 2, 2), kind


@cases
def test_kv_bytes_are_what_a_real_kv_holds(name, kind, kv_settings):
    config, model = SHAPES[name], random_decoder(SHAPES[name])
    room = {} if kind == "recompute" else {"max_tokens": 40, **kv_settings}
    for steps in ([3], [30], [8, 1, 1, 1, 9, 1]):
        kv, done = make_kv(kind, config, **room), 0
        for new in steps:
            if kind == "recompute":
                kv.release(0) if kv.lengths else None
                done = 0
            model(Batch.of([[1] * new], first_positions=[done]), kv)
            done += new
        assert kv_bytes(config, done, 4, kv=kind, kv_settings=kv_settings) == kv.bytes_in_use, steps


# -- by hand -------------------------------------------------------------------------------------------------


def test_a_rolling_buffer_is_read_whole_and_no_further():
    # two layers of W 4 and 2 sinks, one global; H_kv 2, D 8
    config = SHAPES["windows, a global layer, sinks"]
    ring = 2 + (4 - 1) + 16  # sinks, window, rewind
    for context, rolled in ((9, 10), (ring - 1, ring), (100, ring)):
        costs = decode_costs(config, batch=3, context=context, weight_bytes_per_element=4, kv="window")
        read = 2 * rolled + (context + 1)
        assert costs.bytes_by_part["kv"] == 3 * (read + 3) * 2 * 2 * 8 * 4
        pairs = 2 * min(context + 1, 4 + 2) + (context + 1)
        assert costs.flops_by_part["attention"] == 3 * pairs * 4 * 4 * 8


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("sinks", [0, 2])
def test_causal_pairs_with_sinks_are_the_true_entries_of_the_mask(window, sinks):
    for past in range(6):
        for new in range(1, 9):
            mask = causal_mask(new, past + new, window, torch.device("cpu"), sinks)
            assert causal_pairs(new, past, window, sinks) == int(mask.sum()), (past, new)


def test_both_forms_of_latent_attention_by_hand():
    config = latent_config(num_layers=1)  # H 4, content 8, rotary 4, value 8, kv_rank 16
    new, past = 2, 10
    pairs, every = 11 + 12, 12
    absorbed, expanded = (
        attention_costs(
            config, new_tokens=[new], contexts=[past], weight_bytes_per_element=4, kv="latent", latent_form=form
        )
        for form in ("absorbed", "expanded")
    )
    assert absorbed.flops == 2 * new * 4 * 16 * (8 + 8) + 2 * pairs * 4 * (16 + 4 + 16)
    assert expanded.flops == 2 * every * 16 * 4 * (8 + 8) + 2 * pairs * 4 * (12 + 8)
    for costs in (absorbed, expanded):  # the latents are read once, the new ones written
        assert costs.bytes_by_part["kv"] == (every + new) * (16 + 4) * 4
        assert costs.bytes_by_part["weights"] == 16 * 4 * (8 + 8) * 4
    assert [o.name for o in absorbed.operations] == ["absorb", "attention", "restore"]
    assert [o.name for o in expanded.operations] == ["expand", "attention"]
    # of every head, read by attention; before that written, the content part twice
    keys = every * 4 * (12 + 8)
    assert expanded.operation("attention").activation_bytes == 4 * (new * 4 * 12 + new * 20 + keys + new * 4 * 8)
    written = every * 4 * (8 + 8) + every * 4 * 12
    assert expanded.operation("expand").bytes_written == 4 * written
    scores = 4 * new * every  # in memory between the two products of the absorbed form
    read_and_written = new * 4 * 20 + new * 20 + new * 4 * 16
    assert absorbed.operation("attention").activation_bytes == 4 * (read_and_written + 2 * scores)


def test_a_layer_that_shares_neither_projects_nor_writes_keys_but_reads_them():
    config = tiny_config(num_layers=4)  # H_kv 2, D 8, d 32
    own, shared = (
        decode_costs(c, batch=1, context=9, weight_bytes_per_element=4, arrangement="plain")
        for c in (config, replace(config, kv_sources=(0, 0, 2, 2)))
    )
    assert own.flops - shared.flops == 2 * 2 * 2 * 32 * 16  # two layers without k and v
    assert own.flops_by_part["attention"] == shared.flops_by_part["attention"]
    assert own.bytes_by_part["kv"] == 4 * (10 + 1) * 2 * 16 * 4
    assert shared.bytes_by_part["kv"] == (4 * 10 + 2) * 2 * 16 * 4
    query, new, result = 32, 2 * 16, 32  # values that attention reads beside the cache, and writes
    assert own.operation("attention").activation_bytes == 4 * (query + new + result) * 4
    assert shared.operation("attention").activation_bytes == (4 * (query + result) + 2 * new) * 4
    assert kv_bytes(replace(config, kv_sources=(0, 0, 2, 2)), 100) == kv_bytes(config, 100) / 2


def test_a_quantized_cache_reads_codes_and_scales_and_the_recent_part_as_it_came():
    config = tiny_config(num_layers=3)  # H_kv 2, D 8
    costs = decode_costs(
        config,
        batch=1,
        context=99,
        weight_bytes_per_element=2,
        kv="quantized",
        kv_settings={"format": "int4", "group": 8},
    )
    groups, recent = 13 - 2, 99 - 11 * 8  # ceil(99 / 8) − 2; the 100th token makes no new group
    group = 2 * (8 * 16 / 2 + (8 + 8) * 2 * 2)  # two heads: codes of keys and values, scales and zeros
    assert costs.bytes_by_part["kv"] == 3 * (groups * group + recent * 2 * 16 * 2 + 1 * 2 * 16 * 2)
    assert costs.flops_by_part["attention"] == 3 * 4 * 4 * 8 * 100


def test_the_formats_are_those_of_the_quantized_kv():
    assert CODE_FORMATS.keys() == KV_FORMATS.keys()
    for name, codes in CODE_FORMATS.items():
        real = KV_FORMATS[name]
        assert (codes.bits, codes.has_zero) == (real.bits, real.has_zero)
    assert (cost_memory.REWIND, cost_memory.GROUP) == (REWIND, GROUP)
    assert set(COUNTED_KVS) == set(KINDS)


def test_a_paged_kv_is_counted_as_what_lies_in_its_blocks():
    latent = tiny_config(num_kv_heads=4, head_dim=12, latent_attention=LatentAttentionShape(None, 16, 4, 8, 8))
    for config, like in ((tiny_config(), "contiguous"), (latent, "latent")):
        step = {"batch": 3, "context": 100, "weight_bytes_per_element": 2}
        assert decode_costs(config, **step, kv="paged") == decode_costs(config, **step, kv=like)
        assert kv_bytes(config, 33, 4, kv="paged") == kv_bytes(config, 33, 4, kv=like)


def test_a_quantized_number_takes_its_bits_and_its_share_of_scales():
    config = tiny_config(head_dim=64)
    assert quantized_bytes_per_element(config, "fp8") == 1 + 2 * (1 / 32 + 1 / 64) / 2
    assert quantized_bytes_per_element(config, "int4", 64) == 0.5 + 2 * 2 * (1 / 64 + 1 / 64) / 2
    long = kv_bytes(config, 100_000, 2, kv="quantized", kv_settings={"format": "int4"})
    assert long / config.kv_values_per_token() / 100_000 == pytest.approx(
        quantized_bytes_per_element(config, "int4"), rel=1e-2
    )


# -- DeepSeek's shape ------------------------------------------------------------------------------------------


def forms(context, new=1):
    config = public_shape("deepseek-v3")
    return [
        attention_costs(
            config, new_tokens=[new], contexts=[context], weight_bytes_per_element=2, kv="latent", latent_form=form
        )
        for form in ("absorbed", "expanded")
    ]


@pytest.mark.parametrize(("name", "layers"), [("deepseek-v2", 60), ("deepseek-v3", 61)])
def test_deepseek_caches_576_values_a_token_a_layer_where_every_head_would_be_71_times_that(name, layers):
    config = public_shape(name)
    assert kv_bytes(config, 1) == kv_bytes(config, 1, kv="latent") == (512 + 64) * layers * 2
    expanded = kv_bytes(config, 1, kv="contiguous")
    assert expanded == 128 * (192 + 128) * layers * 2
    assert expanded / kv_bytes(config, 1) == pytest.approx(71.1, abs=0.05)


def test_the_forms_of_deepseek_cross_where_the_formula_says():
    shape = public_shape("deepseek-v3").latent_attention
    for new in (1, 64, 128, 170):
        absorbed, expanded = forms(10**6, new)
        assert absorbed.flops < expanded.flops and absorbing_pays(shape, new), new
    for new in (171, 256, 1024):
        absorbed, expanded = forms(10**6, new)
        assert absorbed.flops > expanded.flops and not absorbing_pays(shape, new), new


def test_absorbing_saves_a_decode_step_of_deepseek_nearly_all_bytes_and_flops():
    absorbed, expanded = forms(4096)
    assert absorbed.bytes_by_part["kv"] == expanded.bytes_by_part["kv"] == 61 * (4097 + 1) * 576 * 2
    assert expanded.flops > 100 * absorbed.flops and expanded.bytes > 10 * absorbed.bytes
    assert absorbed.operation("attention").flops / absorbed.bytes_by_part["kv"] == pytest.approx(
        2 * 128 * 1088 / 1152, rel=1e-3
    )


def test_attention_beside_experts_is_counted_whole():
    config = public_shape("deepseek-v3")
    whole = attention_costs(
        config, new_tokens=[1], contexts=[99], weight_bytes_per_element=1, kv="latent", projections=True
    )
    matrices = sum(o.weight_bytes for o in whole.operations if o.part == "projections")
    norms = 61 * (1536 + 512)
    assert matrices + norms == 61 * config._attention_parameters(0)


def test_attention_alone_is_a_part_of_the_step():
    for name, kind, kv_settings in CASES:
        if kind == "recompute":
            continue
        config, step = SHAPES[name], {"new_tokens": [3, 1], "contexts": [9, 20]}
        whole = counted(config, kind, kv_settings, *step.values())
        for projections in (False, True):
            alone = attention_costs(
                config,
                **step,
                weight_bytes_per_element=4,
                kv=kind,
                kv_settings=kv_settings,
                kv_bytes_per_element=4,
                projections=projections,
            )
            assert set(alone.operations) <= set(whole.operations)
            assert ("o" in [o.name for o in alone.operations]) == projections


# -- any shape -------------------------------------------------------------------------------------------------

heads = st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3)])
sizes = {
    "num_layers": st.integers(1, 5),
    "head_dim": st.sampled_from([2, 4, 8]),
    "hidden_size": st.sampled_from([8, 24]),
    "qk_norm": st.booleans(),
}
texts = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=4)
ARRANGED = st.sampled_from(["plain", "fast"])


@st.composite
def configs(draw, **more):
    q, kv = draw(heads)
    return tiny_config(num_heads=q, num_kv_heads=kv, **{k: draw(v) for k, v in (sizes | more).items()})


def of(config, texts, kind="contiguous", arrangement="plain", **other):
    new, past = zip(*texts)
    return step_costs(
        config,
        new_tokens=new,
        contexts=past,
        logit_rows=1,
        weight_bytes_per_element=4,
        kv=kind,
        arrangement=arrangement,
        **other,
    )


@settings(max_examples=60, deadline=None)
@given(configs(), texts, st.integers(1, 50), ARRANGED, st.data())
def test_a_longer_context_never_costs_less(config, texts, more, arrangement, data):
    longer = [(n, past + more) for n, past in texts]
    for kind in ("contiguous", "window"):
        shape = config
        if kind == "window":
            shape = replace(
                config, sliding_window=data.draw(st.integers(1, 60)), attention_sinks=data.draw(st.integers(0, 3))
            )
        short, long = (of(shape, t, kind, arrangement) for t in (texts, longer))
        assert long.flops >= short.flops
        # a chunk is written over a full ring with copies, so that more may be less
        if all(n == 1 for n, _ in texts):
            assert long.bytes >= short.bytes and long.bytes_by_part["kv"] >= short.bytes_by_part["kv"]


@settings(max_examples=60, deadline=None)
@given(configs(), texts, ARRANGED, st.integers(0, 2))
def test_a_window_that_is_never_reached_costs_what_no_window_costs(config, texts, arrangement, sinks):
    window = max(n + past for n, past in texts)
    windowed = replace(config, sliding_window=window, attention_sinks=sinks)
    whole = of(config, texts, "contiguous", arrangement)
    assert of(windowed, texts, "contiguous", arrangement) == whole
    assert of(windowed, texts, "window", arrangement) == whole
    assert of(config, texts, "window", arrangement, kv_settings={"window": window, "sinks": sinks}) == whole


@settings(max_examples=60, deadline=None)
@given(configs(), texts, ARRANGED, st.sampled_from(["contiguous", "quantized"]))
def test_fewer_kv_heads_never_move_more_and_attend_as_much(config, texts, arrangement, kind):
    counts = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
    found = [of(replace(config, num_kv_heads=n), texts, kind, arrangement) for n in counts]  # MQA … MHA
    for fewer, more in pairwise(found):
        assert fewer.bytes < more.bytes and fewer.bytes_by_part["kv"] < more.bytes_by_part["kv"]
        assert fewer.flops_by_part["attention"] == more.flops_by_part["attention"]
        assert fewer.launches == more.launches
    for n, costs in zip(counts, found):
        if kind == "contiguous":
            assert costs.bytes_by_part["kv"] * counts[-1] == found[-1].bytes_by_part["kv"] * n


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        LatentAttentionShape,
        st.none() | st.integers(1, 40),
        st.integers(1, 40),
        st.sampled_from([2, 4]),
        st.integers(1, 8).map(lambda n: 2 * n),
        st.integers(1, 16),
    ),
    st.integers(1, 6),
    texts,
    ARRANGED,
)
def test_the_auto_form_takes_for_each_sequence_what_pays(shape, num_heads, texts, arrangement):
    config = tiny_config(
        family="deepseek_v3",
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=shape.key_head_dim,
        latent_attention=shape,
    )
    auto, absorbed, expanded = (
        of(config, texts, "latent", arrangement, latent_form=form) for form in ("auto", "absorbed", "expanded")
    )
    pays = [absorbing_pays(shape, n) for n, _ in texts]
    assert auto == absorbed if all(pays) else auto == expanded if not any(pays) else True
    alone = [
        attention_costs(config, new_tokens=[n], contexts=[past], weight_bytes_per_element=4, kv="latent")
        for n, past in texts
    ]
    together = of(config, texts, "latent", arrangement)
    assert sum(a.operation("attention").flops for a in alone) == together.operation("attention").flops
    latents = sum(n + past + n for n, past in texts) * config.kv_values_per_token() * 4
    for costs in (absorbed, expanded, auto):
        assert costs.bytes_by_part["kv"] == latents


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.none() | st.integers(1, 40), st.integers(0, 9), st.lists(st.integers(1, 30), max_size=9))
def test_groups_count_every_token_once(group, window, sinks, steps):
    groups, past = Groups(group, window, sinks if window else 0), 0
    for new in steps:
        past += new
        assert groups.count(past) * group + groups.recent(past) == past
        assert group < groups.recent(past) <= 2 * group or groups.count(past) == 0
        assert groups.held(past) <= groups.count(past)
        first, in_group, _ = groups.look(past)
        assert (
            in_group * group <= first and min(past + 1, groups.window or math.inf) <= groups.seen(1, past) <= past + 1
        )


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "change", "words"),
    [
        ("plain", {"kv": "latents"}, "did you mean 'latent'"),
        ("plain", {"kv": "latent"}, "this shape \\(llama\\) has none"),
        ("latents", {"kv": "latent", "latent_form": "absorb"}, "did you mean 'absorbed'"),
        ("latents", {"kv": "latent", "kv_settings": {"form": "expand"}}, "did you mean 'expanded'"),
        ("latents", {"kv": "contiguous", "latent_form": "absorbed"}, "nothing to absorb"),
        ("latents", {"kv": "latent", "kv_settings": {"window": 4}}, "unknown kv 'latent' setting 'window'"),
        ("plain", {"kv": "window"}, "this shape has none"),
        ("plain", {"kv": "window", "kv_settings": {"window": 0}}, "at least 1"),
        ("plain", {"kv": "window", "kv_settings": {"window": 4, "rewind": 0}}, "at least 1"),
        ("plain", {"kv": "window", "kv_settings": {"sinks": 4}}, "this shape has none"),
        ("plain", {"kv": "window", "kv_settings": {"window": 4, "sinks": -1}}, "at least 0"),
        ("windows", {"kv": "window", "kv_settings": {"window": 4}}, "has its window of 4"),
        ("windows, a global layer, sinks", {"kv": "window", "kv_settings": {"sinks": 4}}, "goes with a window"),
        ("plain", {"kv": "contiguous", "kv_settings": {"window": 4}}, "unknown kv 'contiguous' setting"),
        ("plain", {"kv": "shared_layers"}, "each of the 2 layers has its own"),
        ("plain", {"kv": "quantized", "kv_settings": {"format": "int5"}}, "unknown format"),
        ("plain", {"kv": "quantized", "kv_settings": {"format": "int4", "group": 3}}, "even"),
        ("plain", {"kv": "quantized", "kv_settings": {"group": 1}}, "at least 2"),
        ("plain", {"kv": "quantized", "kv_bytes_per_element": 0}, "above 0"),
        (
            "latents",
            {"kv": "latent", "kv_settings": {"form": "expanded"}, "latent_form": "absorbed"},
            "give one of them",
        ),
    ],
)
def test_what_a_kv_or_shape_does_not_have_is_refused(shape, change, words):
    good = {"new_tokens": [1], "contexts": [9], "weight_bytes_per_element": 2}
    for call in (lambda **k: step_costs(logit_rows=1, **k), attention_costs):
        with pytest.raises(WorkbenchError, match=words):
            call(config=SHAPES[shape], **{**good, **change})


def test_a_shape_with_a_part_that_is_not_counted_is_refused(monkeypatch):
    config = replace(SHAPES["plain"], qk_norm=True)
    monkeypatch.setattr(cost_model, "COUNTED_FIELDS", [f for f in cost_model.COUNTED_FIELDS if f != "qk_norm"])
    for call in (decode_costs, prefill_costs):
        size = {"context": 9} if call is decode_costs else {"prompt": 9}
        with pytest.raises(WorkbenchError, match="qk_norm = True is not counted"):
            call(config, batch=1, **size, weight_bytes_per_element=2)
        assert call(SHAPES["plain"], batch=1, **size, weight_bytes_per_element=2).flops


def test_the_largest_batch_grows_as_the_kv_shrinks():
    config = replace(public_shape("llama-2-7b"), sliding_window=1024, global_layers=(0, 8, 16, 24))
    room = {"memory_bytes": 80e9, "tokens": 4096}
    whole, windows, codes = (
        largest_batch(config, **room, kv=kv, kv_settings=how)
        for kv, how in (("contiguous", {}), ("window", {}), ("quantized", {"format": "int4"}))
    )
    assert largest_batch(config, **room) == whole < windows < codes
    one = kv_bytes(config, 4096, kv="window")
    weights = 2 * config.num_parameters()
    assert weights + windows * one <= 80e9 < weights + (windows + 1) * one
    with pytest.raises(WorkbenchError, match="keeps nothing"):
        largest_batch(config, **room, kv="recompute")
