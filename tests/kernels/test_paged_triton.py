"""The paged cache attended over by kernels: the same numbers as over what is gathered, in exactly so many launches.

The kernels alone are in test_kernels_attention.py; what the cache promises, in test_paged.py and test_kv.py.
"""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import random_decoder, tiny_config
from kernel_claims import on_each_device
from test_kv_contiguous import relative_difference, text
from test_kv_smaller import LATENT

from workbench.errors import WorkbenchError
from workbench.kernels import launch
from workbench.kv import Paged
from workbench.kv.paged_triton import KernelStep
from workbench.models import Batch, prepare
from workbench.serving import Engine, Request, SchedulerSettings

NEAR = 1e-5  # float32, through all layers; measured about 1e-6
SHAPES = {
    "gqa": {},
    "mqa": {"num_kv_heads": 1},
    "windows": {"num_layers": 3, "sliding_window": 6, "global_layers": (1,)},
    "sinks": {"sliding_window": 6, "attention_sinks": 2},
    "shared": {"num_layers": 4, "kv_sources": (0, 0, 2, 2)},
    "latent": {"num_kv_heads": 4, "head_dim": 12, "family": "deepseek_v3", "latent_attention": LATENT},
}
CODED = ("int8", "fp8", "int4")


def model_of(shape: str, device: str = "cpu"):
    """Arranged with torch on every device, so that what is launched is the cache's attention alone."""
    model = random_decoder(tiny_config(vocab_size=64, **SHAPES[shape])).to(device)
    return prepare(model, linear="plain", kernels="torch")


def both(model, device: str = "cpu", **given) -> tuple[Paged, Paged]:
    """Gathered, and by kernels."""
    room = {"max_sequences": 6, "max_tokens": 64, "block_size": 4, "device": device}
    return tuple(Paged(model.config, **{**room, **given}, attention=attention) for attention in ("sdpa", "triton"))


@torch.no_grad()
def send(model, kv, *, parents=None, **new: list[int]) -> torch.Tensor:
    first = [kv.lengths.get(name, 0) for name in new]
    tensors = {"device": kv.store.tensors[0].device}
    batch = Batch.of(list(new.values()), first_positions=first, sequences=list(new), parents=parents, **tensors)
    return model(batch, kv)


def send_both(model, caches, **new) -> tuple[float, dict[str, int]]:
    """How far the logits are apart, and what was launched by the one with kernels."""
    expected = send(model, caches[0], **new)
    with launch.launches() as counted:
        got = send(model, caches[1], **new)
    return relative_difference(got, expected), dict(counted)


# -- the same numbers --------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [
        ("gqa", 1),
        ("gqa", 3),
        ("gqa", 16),
        ("mqa", 16),
        ("windows", 3),
        ("windows", 16),
        ("sinks", 1),
        ("sinks", 3),
        ("shared", 3),
    ],
)
def test_prompts_decodes_and_both_beside_each_other_are_as_gathered(device, shape, block_size):
    model = model_of(shape, device)
    layers, caches = model.config.num_layers, both(model, device, block_size=block_size)
    for new, kernel in (
        ({"a": text(9), "b": text(1), "c": text(23)}, "_paged_prefill_kernel"),
        ({"c": [1], "a": [2], "b": [3]}, "_paged_decode_kernel"),
        ({"a": [4], "c": text(5), "d": text(7)}, "_paged_prefill_kernel"),
    ):
        apart, launched = send_both(model, caches, **new)
        assert apart < NEAR and launched == {kernel: layers}


@on_each_device
@pytest.mark.parametrize("kept", ["latent", *CODED])
def test_latents_and_few_bits_go_through_their_kernels_where_single_tokens_come(device, kept):
    coded = kept in CODED
    model = model_of("gqa" if coded else kept, device)
    caches = both(model, device, format=kept if coded else None)
    kernel = "quantized" if coded else "latent"
    assert "gathered" in caches[1].attention_reason
    apart, launched = send_both(model, caches, a=text(9), b=text(12))
    assert apart < NEAR and launched == {}
    for new in ({"a": [1], "b": [2]}, {"a": [3], "b": text(3), "c": [4]}):
        apart, launched = send_both(model, caches, **new)
        assert apart < NEAR
        assert sum(launched.values()) == model.config.num_layers and all(kernel in name for name in launched)


def test_one_query_head_a_key_and_heads_that_are_no_power_of_two():
    model = prepare(random_decoder(tiny_config(vocab_size=64, head_dim=10, num_heads=6, num_kv_heads=6)))
    caches = both(model)
    assert send_both(model, caches, a=text(9))[0] < NEAR
    assert send_both(model, caches, a=[1])[0] < NEAR


def test_forks_copies_swaps_and_cuts_leave_the_kernels_the_right_tables():
    model = model_of("sinks")
    caches = both(model, block_size=3, num_blocks=30)
    assert send_both(model, caches, a=text(10))[0] < NEAR
    for kv in caches:
        kv.fork("a", "b")
    assert send_both(model, caches, a=[1], b=[2])[0] < NEAR  # the last block is copied for one of them
    assert caches[1].tables.copies == 1
    for kv in caches:
        kv.swap_out("a")
    assert send_both(model, caches, b=text(4), c=text(8))[0] < NEAR  # into blocks that were a's
    for kv in caches:
        kv.swap_in("a")
        kv.truncate("b", 6)
    assert send_both(model, caches, a=[3], b=[4], c=[5])[0] < NEAR
    for kv in caches:
        kv.release("c")
    assert send_both(model, caches, a=text(2), d=text(5))[0] < NEAR
    caches[1].tables.check()


def test_what_a_block_held_before_is_never_seen_even_when_it_was_no_number():
    model = model_of("gqa")
    caches = both(model, num_blocks=6, max_sequences=3)
    for stored in caches[1].store.tensors:
        stored.fill_(float("nan"))
    assert send_both(model, caches, a=text(5), b=text(9))[0] < NEAR
    assert send_both(model, caches, a=[1], b=[2])[0] < NEAR


@pytest.mark.parametrize("shape", ["gqa", "latent"])
def test_trees_are_gathered_beside_texts_that_are_not(shape):
    model = model_of(shape)
    caches = both(model)
    assert send_both(model, caches, a=text(6), b=text(9), c=text(4))[0] < NEAR
    tree = [-1, 0, 0, 1]
    apart, launched = send_both(model, caches, a=[1, 2, 3, 4], b=[5], c=[6, 7, 8], parents=[tree, None, None])
    assert apart < NEAR and sum(launched.values()) == model.config.num_layers
    for kv in caches:
        kv.keep("a", 7, [7, 9])
    apart, launched = send_both(model, caches, a=[1, 2, 3, 4], parents=[tree])
    assert apart < NEAR and launched == {}  # nothing but trees


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_engine_with_few_blocks_writes_the_same_texts(preemption):
    """Greedy, with parts of prompts beside decodes, and blocks so few that sequences are preempted."""
    model = prepare(random_decoder(tiny_config(vocab_size=64, sliding_window=12, attention_sinks=2)))
    settings = SchedulerSettings(max_running=3, chunk=6, preemption=preemption)
    requests = [Request(i, tuple(text(n, seed=n)), 7) for i, n in enumerate((11, 5, 9))]
    written = []
    for attention in ("sdpa", "triton"):
        it = Engine(model, settings, num_blocks=10, block_size=4, attention=attention)
        with launch.launches() as counted:
            found = it.run(requests)
        written.append({one.request_id: one.token_ids for one in found})
        assert it.scheduler.preemptions > 0, "the pool was too large for this claim"
        kernels = {"_paged_decode_kernel", "_paged_prefill_kernel"}
        assert counted.keys() == (kernels if attention == "triton" else set())
    assert written[0] == written[1] and len(written[0]) == 3


# -- what a step shares
# ---------------------------------------------------------------------------------------------------


def test_tables_go_to_the_device_once_a_step_padded_to_few_widths():
    step = KernelStep.of([[5, 0, 3], [7]], [10, 2], [1, 1], 4, 64, "cpu")
    assert step.tables.tolist() == [[5, 0, 3, 0], [7, 0, 0, 0]] and step.lengths.tolist() == [10, 2]
    assert step.query_starts is None and step.rows is None
    assert {t.dtype for t in (step.tables, step.lengths)} == {torch.int32}
    shared = {t.untyped_storage().data_ptr() for t in (step.tables, step.lengths)}
    assert len(shared) == 1  # one copy
    step = KernelStep.of([[5, 0, 3], [7]], [10, 2], [3, 1], 4, 12, "cpu", rows=[0, 1, 2, 5])
    assert step.tables.shape == (2, 3)  # never wider than the longest text allowed
    assert step.query_starts.tolist() == [0, 3, 4] and step.max_queries == 3
    assert step.rows.tolist() == [0, 1, 2, 5]
    widths = {KernelStep.of([[0] * n], [n], [1], 1, 10**6, "cpu").tables.shape[1] for n in range(1, 200)}
    assert widths == {1, 2, 4, 8, 16, 32, 64, 128, 256}


# -- which it is, and why
# ----------------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_taken():
    config = tiny_config()
    for asked in ("eager", "sdpa", "triton"):
        kv = Paged(config, attention=asked)
        assert (kv.attention, kv.attention_reason) == (asked, "as asked")
    with pytest.raises(WorkbenchError, match="did you mean 'triton'"):
        Paged(config, attention="tritn")


def test_what_kernels_cannot_do_is_refused_before_anything_is_allocated(monkeypatch):
    def refused(match: str, config=None, **given) -> None:
        with pytest.raises(WorkbenchError, match=match) as error:
            Paged(config or tiny_config(), attention="triton", **given)
        assert "attention='sdpa'" in str(error.value)

    monkeypatch.setattr("workbench.kv.paged.require_pool", lambda *_: pytest.fail("asked for room"))
    refused("float32, float16, bfloat16", dtype=torch.float64)
    refused("head sizes from 1 to 256", tiny_config(head_dim=512))
    latents = {**SHAPES["latent"], "sliding_window": 6}
    refused("this model has windows", tiny_config(**latents))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "workbench.kernels.latent_decode", None)
        refused("no kernel for this kind of cache", tiny_config(**SHAPES["latent"]))
    monkeypatch.setattr(launch, "why_not", lambda device: "capability 8.0 or newer is needed")
    refused("capability 8.0")


def test_auto_on_a_device_that_cannot_gathers_and_says_why(monkeypatch):
    from workbench.kv import paged_attention, paged_triton

    config, cuda = tiny_config(), torch.device("cuda")
    settings = {"block_size": 4, "dtype": torch.float16, "format": None}
    kind = paged_triton.KeysAndValues
    for reason, expected in (("too old", ("sdpa", "too old")), ("", ("triton", "a CUDA device that runs the kernels"))):
        monkeypatch.setattr(paged_triton, "why_not", lambda *_, answer=reason, **__: answer)
        assert paged_attention.choose_attention("auto", config, kind, device=cuda, **settings) == expected
