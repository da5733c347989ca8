"""The loop over blocks: the same attention as over gathered keys, for every shape of batch; and why it is not taken."""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_kv_contiguous import relative_difference, text

from workbench.errors import WorkbenchError
from workbench.kv import Paged
from workbench.kv.paged_blocks import FEW_TOKENS, SOURCE
from workbench.models import Batch, prepare
from workbench.native import build
from workbench.native.compiler import OFF
from workbench.serving import Engine, Request, SchedulerSettings

NEAR = 1e-5
COMPILED = not isinstance(build.library(SOURCE), str)
needs_compiler = pytest.mark.skipif(not COMPILED, reason=f"the loop over blocks: {build.library(SOURCE)}")


def filled(rng: random.Random, *, attention: str, block_size: int, lengths: list[int], **shape) -> Paged:
    """A cache of one layer whose sequences have random contents in random blocks."""
    config = tiny_config(num_layers=1, context_length=512, **shape)
    blocks = sum(-(-n // block_size) for n in lengths) + 3
    room = {"max_sequences": len(lengths), "num_blocks": blocks, "block_size": block_size}
    kv = Paged(config, attention=attention, **room)
    rng.shuffle(kv.tables._free)
    torch.manual_seed(0)
    for stored in kv.store.tensors:
        stored.normal_()
    return kv


def attended(kv: Paged, lengths: list[int], new: list[int]) -> torch.Tensor:
    """Attention of `new` tokens at the end of texts of these lengths, whatever lies in their blocks."""
    config, draw = kv.config, torch.Generator().manual_seed(1)
    first = [length - n for length, n in zip(lengths, new)]
    past = [(i, n) for i, n in enumerate(first) if n]
    if past:
        batch = Batch.of([[0] * n for _, n in past], sequences=[i for i, _ in past])
        kv.begin(batch)
        kv._layers_done = config.num_layers  # what lies there is good enough
    batch = Batch.of([[0] * n for n in new], first_positions=first, sequences=list(range(len(new))))
    kv.begin(batch)
    q, k, v = (
        torch.randn((sum(new), heads, config.head_dim), generator=draw)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    return kv.attend(0, q, k, v, batch)


@needs_compiler
@pytest.mark.parametrize("size", [8, 16, 24, 32, 48, 64, 80, 96, 128])
@pytest.mark.parametrize(("kv_heads", "group"), [(4, 1), (2, 2), (1, 3), (1, 8), (2, 6)])
def test_random_texts_in_random_blocks_are_attended_as_gathered(size, kv_heads, group):
    rng = random.Random(size + kv_heads)
    shape = {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": size}
    block_size = rng.choice([1, 2, 5, 16, 64])
    lengths = [1, 2, 15, 16, 17, 512, *(rng.randint(1, 200) for _ in range(5))]
    new = [min(length, rng.choice([1, 1, 1, 2, FEW_TOKENS, FEW_TOKENS + 1, 40])) for length in lengths]
    results = []
    for attention in ("eager", "blocks"):
        rng.seed(size)
        kv = filled(rng, attention=attention, block_size=block_size, lengths=lengths, **shape)
        results.append(attended(kv, lengths, new))
    assert (results[0] - results[1]).abs().max() < NEAR


@needs_compiler
@pytest.mark.parametrize("window", [1, 6, 40])
@pytest.mark.parametrize("sinks", [0, 1, 20])
def test_windows_and_sinks_are_seen_and_nothing_else(window, sinks):
    lengths = [1, 5, 6, 7, 21, 60, 200]
    shape = {"sliding_window": window, "attention_sinks": sinks, "head_dim": 16}
    for new in ([1] * 7, [1, 1, 3, 7, 8, 8, 2]):
        results = []
        for attention in ("eager", "blocks"):
            kv = filled(random.Random(1), attention=attention, block_size=4, lengths=lengths, **shape)
            results.append(attended(kv, lengths, new))
        assert (results[0] - results[1]).abs().max() < NEAR


def model_of(**shape):
    return prepare(random_decoder(tiny_config(vocab_size=64, **shape)))


@torch.no_grad()
def send_both(model, caches, parents=None, **new: list[int]) -> float:
    """How far the logits after these new tokens are apart."""
    results = []
    for kv in caches:
        first = [kv.lengths.get(name, 0) for name in new]
        batch = Batch.of(list(new.values()), first_positions=first, sequences=list(new), parents=parents, logits="all")
        results.append(model(batch, kv))
    return relative_difference(results[1], results[0])


def both(model, attention: str = "blocks", **given):
    room = {"max_sequences": 6, "max_tokens": 64, "block_size": 4, "prefix": "hash"} | given
    return [Paged(model.config, attention=kind, **room) for kind in ("eager", attention)]


@needs_compiler
@pytest.mark.parametrize("shape", [{}, {"sliding_window": 6, "attention_sinks": 2}, {"kv_sources": (0, 0)}])
def test_forks_copies_swaps_cuts_trees_and_prefix_hits_leave_the_loop_the_right_tables(shape):
    model = model_of(**shape)
    caches = both(model, block_size=3, num_blocks=40)
    for stored in caches[1].store.tensors:
        stored.fill_(float("nan"))  # what nobody wrote is not read
    assert send_both(model, caches, a=text(10)) < NEAR
    for kv in caches:
        kv.fork("a", "b")
    assert send_both(model, caches, a=[1], b=[2]) < NEAR  # the last block is copied for one of them
    for kv in caches:
        kv.swap_out("a")
    assert send_both(model, caches, b=text(4), c=text(20)) < NEAR  # into blocks that were a's
    for kv in caches:
        kv.swap_in("a")
        kv.truncate("b", 6)
    assert send_both(model, caches, a=[3], b=[4], c=[5]) < NEAR
    assert send_both(model, caches, a=[1, 2, 3, 4], b=[5], c=[6, 7], parents=[[-1, 0, 0, 1], None, None]) < NEAR
    for kv in caches:
        kv.keep("a", 13, [14])
        kv.remember("c", [*text(20), 5, 6, 7])
        assert kv.open("d", text(20)) == 18
    assert send_both(model, caches, a=[1], d=text(20)[18:], e=text(12)) < NEAR
    caches[1].tables.check()


@needs_compiler
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_engine_with_few_blocks_writes_the_same_texts(preemption):
    model = model_of(sliding_window=12, attention_sinks=2)
    settings = SchedulerSettings(max_running=3, chunk=6, preemption=preemption)
    requests = [Request(i, tuple(text(n, seed=n)), 7) for i, n in enumerate((11, 5, 9))]
    written = []
    for attention in ("sdpa", "auto"):
        engine = Engine(model, settings, num_blocks=10, block_size=4, attention=attention)
        assert engine.kv.attention == ("sdpa" if attention == "sdpa" else "blocks")
        written.append({one.request_id: one.token_ids for one in engine.run(requests)})
        assert engine.scheduler.preemptions > 0, "the pool was too large for this claim"
    assert written[0] == written[1] and len(written[0]) == 3


@needs_compiler
def test_a_bfloat16_model_whose_keys_are_kept_in_float32_is_attended_by_the_loop():
    model = prepare(random_decoder(tiny_config(vocab_size=64)).bfloat16())
    caches = both(model, "auto", dtype=torch.bfloat16)
    assert caches[1].attention == "blocks"
    assert send_both(model, caches, a=text(9), b=text(2)) < 0.05
    assert send_both(model, caches, a=[1], b=[2]) < 0.05


# -- why not ---------------------------------------------------------------------------------------------------------


def test_where_the_loop_cannot_attend_auto_gathers_and_says_why():
    for word, given in (("float16", {"dtype": torch.float16}), ("in int8", {"format": "int8"})):
        kv = Paged(tiny_config(), **given)
        assert (kv.attention, word in kv.attention_reason) == ("sdpa", True)
        with pytest.raises(WorkbenchError, match=f"attention='blocks' here: .*{word}.*attention='sdpa'"):
            Paged(tiny_config(), attention="blocks", **given)


@needs_compiler
def test_a_head_size_that_the_loop_does_not_know_is_gathered():
    kv = Paged(tiny_config(head_dim=10))
    assert (kv.attention, kv.attention_reason) == ("sdpa", "the loop knows no heads of size 10")


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    """A machine where nothing was compiled yet."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    build.library.cache_clear()
    yield tmp_path / "cache" / "native"
    build.library.cache_clear()


def test_without_a_compiler_keys_are_gathered(nothing_compiled, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    kv = Paged(tiny_config())
    assert kv.attention == "sdpa" and "no C++ compiler was found" in kv.attention_reason
    build.library.cache_clear()
    monkeypatch.setenv(OFF, "1")
    assert build.library(SOURCE) == f"{OFF} is set"


@pytest.mark.parametrize(("program", "said"), [("exit 3", "exit code 3"), ("echo no room >&2; exit 1", "no room")])
def test_a_compiler_that_fails_is_quoted_and_leaves_no_file(nothing_compiled, monkeypatch, tmp_path, program, said):
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{program}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    kv = Paged(tiny_config())
    assert kv.attention == "sdpa" and said in kv.attention_reason
    assert not nothing_compiled.exists() or not list(nothing_compiled.iterdir())


@needs_compiler
def test_it_is_compiled_once_a_machine(nothing_compiled, monkeypatch):
    assert not isinstance(build.library(SOURCE), str)
    build.library.cache_clear()
    monkeypatch.setattr(build, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert not isinstance(build.library(SOURCE), str)
    assert len(list(nothing_compiled.iterdir())) == 1


# -- gathered, where there is no loop ----------------------------------------------------------------------------------


def test_what_is_gathered_at_once_stays_within_a_cpu_s_caches(monkeypatch):
    """One copy of the keys of 256 sequences takes longer for each of them than copies of a few."""
    from workbench.kv import paged_step

    config = tiny_config()
    a_token = 2 * config.num_kv_heads * config.head_dim * 4
    monkeypatch.setattr(paged_step, "GATHERED_BYTES", 25 * a_token)
    kv = Paged(config, max_sequences=8, attention="sdpa")
    for new, first in ((10, 0), (1, 10)):
        kv.begin(Batch.of([[0] * new] * 7, first_positions=[first] * 7))
        kv._layers_done = config.num_layers
    assert [group.read_at[None].shape for group in kv._step.groups] == [(2, 11), (2, 11), (2, 11), (1, 11)]
    assert [len(group) for group in paged_step._alike([0, 1, 2, 3], [10, 10, 10, 50], 20)] == [1, 2, 1]
