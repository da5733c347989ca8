"""Tiers below the pool: what is evicted comes back as it was, or is computed again, and the engine's tokens are those
of an engine without tiers."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import gc
import json
import os
import stat
from itertools import count

import pytest
import torch
from conftest import random_decoder, tiny_config
from test_engine import check_empty, ragged, tokens
from test_kv_state import model_of

from workbench.cli_serving import _tiers, add_options, engine_maker
from workbench.errors import WorkbenchError
from workbench.kv import disk_tier
from workbench.kv.disk_tier import ENTRY, PAGE, DiskTier
from workbench.kv.offload import OffloadedBlocks, TierBooks, TieredTables
from workbench.kv.paged import Paged
from workbench.kv.prefix import HashChain
from workbench.kv.soak import Failure
from workbench.kv.tier_soak import PlainCopies, TierWalk, make_tiered_pool, soak_tiers
from workbench.kv.tiers import KVTiers, ReadAheadError
from workbench.models import prepare
from workbench.models.config import LatentAttentionShape
from workbench.serving import Engine, Request, SchedulerSettings, TierSettings
from workbench.serving.api.forecast import Forecast
from workbench.serving.api.link import EngineThread
from workbench.serving.api.metrics import Metrics
from workbench.serving.api.process import news_from_json, news_to_json
from workbench.serving.load_costs import LoadCosts, break_even_bandwidth, break_even_tokens, load_seconds
from workbench.serving.offloading import LOOKED_AHEAD, MAX_PROBLEMS, MEASURE_AGAIN
from workbench.speculation import ModelDraft

V, BLOCK = 64, 4
MODEL = random_decoder(tiny_config(vocab_size=V), seed=0)  # float32
OTHER = random_decoder(tiny_config(vocab_size=V), seed=5)
SMALL = random_decoder(tiny_config(vocab_size=V, num_layers=1), seed=1)
MLA = LatentAttentionShape(None, 16, 4, 8, 8)
LATENT = random_decoder(tiny_config(vocab_size=V, num_kv_heads=4, head_dim=12, latent_attention=MLA), seed=2)
BLOCK_BYTES = KVTiers(Paged(MODEL.config, num_blocks=1, block_size=BLOCK, prefix="hash"), host_bytes=10**5).block_bytes
REQUESTS = ragged(12)
RUNS, STEPS = 30, 60


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small wait for each other on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sizes(folder, host: int = 0, disk: int = 0, **given) -> TierSettings:
    """Tiers of so many blocks."""
    path = folder / "kv" if disk else None
    size = {"host_bytes": host * BLOCK_BYTES, "disk_path": path, "disk_bytes": disk * BLOCK_BYTES}
    return TierSettings(**{**size, "load": "always", **given})


def engine(tiers: TierSettings | None, model=MODEL, *, num_blocks: int = 22, **given) -> Engine:
    own = {name: given.pop(name) for name in ("prefix", "draft", "format", "asynchronous", "graphs") if name in given}
    settings = SchedulerSettings(**{"max_running": 4} | given)
    return Engine(model, settings, num_blocks=num_blocks, block_size=BLOCK, tiers=tiers, **own)


def served(it: Engine, rounds: int = 2, requests=REQUESTS) -> dict:
    """The texts of all requests, which come again when all are done."""
    texts = {}
    for at in range(rounds):
        again = [dataclasses.replace(request, id=(at, request.id)) for request in requests]
        texts |= {one.request_id: one.token_ids for one in it.run(again)}
    return texts


def ask(it: Engine, prompt, name="asked", new: int = 4):
    [one] = it.run([Request(name, tuple(prompt), new, stop_token_ids=())])
    return one


def fill(it: Engine, seed: int = 1000, prompts: int = 8) -> None:
    """Other prompts take the pool: what it had is evicted."""
    for at in range(prompts):
        ask(it, tokens(40, seed + at), ("filling", seed, at), 1)


# -- the same tokens ---------------------------------------------------------------------------------------------------

KINDS = {
    "host": ({}, {"host": 200}),
    "small host": ({}, {"host": 9}),
    "disk": ({}, {"disk": 60}),
    "host and disk": ({}, {"host": 12, "disk": 100}),
    "nothing is prefetched": ({}, {"host": 12, "disk": 100, "prefetch": 0}),
    "by the rule": ({}, {"host": 12, "disk": 100, "load": "break_even"}),
    "radix tree": ({"prefix": "radix"}, {"host": 12, "disk": 100}),
    "swapped": ({"preemption": "swap", "num_blocks": 18}, {"host": 12, "disk": 100}),
    "recomputed, short budget": ({"num_blocks": 18, "token_budget": 9, "chunk": 3}, {"host": 60}),
    "drafts": ({"draft_tokens": 3, "draft": lambda: ModelDraft(SMALL)}, {"host": 12, "disk": 100}),
    "int8": ({"format": "int8"}, {"host": 12, "disk": 100}),
    "one step ahead": ({"asynchronous": True}, {"host": 12, "disk": 100}),
    "prefill first": ({"batching": "prefill_first"}, {"host": 12, "disk": 100}),
    "latent attention": ({"model": LATENT}, {"host": 12, "disk": 100}),
    "recorded steps": ({"graphs": True, "draft_tokens": 0}, {"host": 12, "disk": 100}),
    "prepared": ({"model": prepare(MODEL)}, {"host": 12, "disk": 100}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_an_engine_without_tiers(kind, tmp_path):
    given, tiers = KINDS[kind]
    given = {name: value() if name == "draft" else value for name, value in given.items()}
    without = served(engine(None, **given))
    it = engine(sizes(tmp_path, **tiers), **given)
    assert served(it) == without
    assert it.scheduler.preemptions > 0 or kind in ("prefill first", "latent attention")
    assert 0 < it.offloading.hit_tokens < it.offloading.query_tokens
    check_empty(it)
    it.offloading.tiers.below.check()
    it.close()
    assert not it.offloading.problems


def test_a_prefix_comes_back_from_where_it_was_evicted_to_and_the_request_says_so(tmp_path):
    it = engine(sizes(tmp_path, host=100))
    prompt = tokens(41, 7)
    first = ask(it, prompt, "first")
    fill(it)
    reports = []
    [again] = it.run([Request("again", tuple(prompt), 4, stop_token_ids=())], watch=reports.append)
    assert again.token_ids == first.token_ids
    assert (first.hit_tokens, again.hit_tokens) == (0, 40)  # all but the last token
    assert it.offloading.hit_tokens == 40 and it.scheduler.hit_tokens == 0
    assert reports[0].rows == 1 and 0 < reports[0].load_s < reports[0].seconds and not reports[1].load_s


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed(tmp_path):
    it = engine(sizes(tmp_path, host=100))
    prompt = tokens(41, 7)
    ask(it, prompt, "first")
    fill(it)
    before = it.offloading.hit_tokens
    [one] = it.run([Request("again", tuple(prompt), 2, stop_token_ids=(), prompt_log_probs=0)])
    assert one.hit_tokens == 0 and it.offloading.hit_tokens == before and None not in one.prompt_log_probs[1:]


def test_tenants_do_not_find_each_others_blocks(tmp_path):
    it = engine(sizes(tmp_path, host=200))
    prompt = tuple(tokens(41, 7))
    for name in ("first", "second"):
        [one] = it.run([Request(name, prompt, 1, stop_token_ids=(), tenant=name)])
        fill(it, 2000 + len(name))
        assert one.hit_tokens == 0
    [again] = it.run([Request("third", prompt, 1, stop_token_ids=(), tenant="first")])
    assert again.hit_tokens == 40


def test_a_step_that_an_error_stops_after_a_load_is_planned_again(tmp_path, monkeypatch):
    it = engine(sizes(tmp_path, host=100))
    prompt = tokens(41, 7)
    first = ask(it, prompt, "first")
    fill(it)
    run, failures = it._step.run, count()

    def fails_once(*given, **more):
        if not next(failures):
            raise RuntimeError("planted")
        return run(*given, **more)

    monkeypatch.setattr(it._step, "run", fails_once)
    it.add(Request("again", tuple(prompt), 4, stop_token_ids=()))
    with pytest.raises(RuntimeError, match="planted"):
        it.step()
    [again] = it.run()
    assert again.token_ids == first.token_ids and again.hit_tokens == 40
    check_empty(it)


# -- what is waited for --------------------------------------------------------------------------------------------


def test_blocks_of_waiting_requests_are_read_from_disk_before_their_turn(tmp_path):
    it = engine(sizes(tmp_path, host=60, disk=300), max_running=1, num_blocks=14)
    prompts = [tokens(41, at) for at in range(3)]
    first = [ask(it, prompt, at).token_ids for at, prompt in enumerate(prompts)]
    fill(it, prompts=20)
    below = it.offloading.tiers.below
    assert not below.counts["disk", "loaded"] and len(below.tiers[1]) > 30
    for at, prompt in enumerate(prompts):
        it.add(Request(("again", at), tuple(prompt), 4, stop_token_ids=()))
    done, steps = [], 0
    while not it.idle:
        done += it.step().finished
        it.offloading.tiers.take_prefetched(wait=True)
        steps += 1
    assert [one.token_ids for one in done] == first and [one.hit_tokens for one in done] == [40] * 3
    counts = below.counts
    assert counts["disk", "loaded"] == 10  # of the first, which did not wait
    assert counts["host", "prefetched"] == counts["host", "loaded"] == 20
    assert not below.tiers[0].pins and not below.tiers[1].pins
    it.close()


def test_a_block_that_is_dropped_while_it_is_read_does_not_come_back(tmp_path):
    it = engine(sizes(tmp_path, host=4, disk=300))
    prompt = tokens(41, 7)
    ask(it, prompt, "first")
    fill(it)
    tiers = it.offloading.tiers
    known = tiers.tables.following((), prompt)
    key = next(key for key, tier in known if tier == "disk")
    assert tiers.prefetch(key, 1) and not tiers.prefetch(known[-1][0], 1)
    it.kv.forget_prefix(prompt)
    assert tiers.take_prefetched(wait=True) == 0
    assert tiers.below.where(key) is None and not tiers.below.counts["disk", "corrupt"]
    tiers.below.check()
    it.close()


# -- what goes wrong -----------------------------------------------------------------------------------------------


def spoil(path, slots) -> None:
    """Change a byte in the middle of these slots of the file."""
    capacity = json.loads(path.read_bytes()[disk_tier.HEADER.size : PAGE].rstrip(b"\0"))["slots"]
    data_at = -(-(PAGE + capacity * ENTRY.size) // PAGE) * PAGE
    with open(path, "r+b") as file:
        for slot in slots:
            at = data_at + slot * BLOCK_BYTES + BLOCK_BYTES // 2
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))


def test_a_corrupt_block_on_disk_is_reported_counted_dropped_and_computed_again(tmp_path):
    it = engine(sizes(tmp_path, disk=300))
    prompt = tokens(41, 7)
    first = ask(it, prompt, "first")
    fill(it)
    tiers = it.offloading.tiers
    known = tiers.tables.following((), prompt)
    assert len(known) == 10
    spoil(tmp_path / "kv", [tiers.below.tiers[0].slots[known[6][0]]])
    again = ask(it, prompt, "again")
    assert again.token_ids == first.token_ids and again.hit_tokens == 6 * BLOCK
    assert tiers.below.counts["disk", "corrupt"] == 1 and known[6][0] not in tiers.below.tiers[0]
    assert len(it.offloading.problems) == 1 and "1 block of the disk tier" in it.offloading.problems[0]
    assert [one.corrupt for one in it.offloading.totals().tiers] == [1]
    fill(it, 5000)
    assert ask(it, prompt, "once more").hit_tokens == 40  # written again when it was evicted again
    check_empty(it)
    tiers.below.check()
    it.close()


def test_a_corrupt_block_that_is_prefetched_is_dropped(tmp_path):
    it = engine(sizes(tmp_path, host=4, disk=300))
    prompt = tokens(41, 7)
    ask(it, prompt, "first")
    fill(it)
    tiers = it.offloading.tiers
    key = tiers.tables.following((), prompt)[3][0]
    spoil(tmp_path / "kv", [tiers.below.tiers[1].slots[key]])
    tiers.prefetch(key, 1)
    assert tiers.take_prefetched(wait=True) == 0
    assert tiers.below.where(key) is None and tiers.below.counts["disk", "corrupt"] == 1
    it.close()


def test_a_read_ahead_that_fails_is_reported_and_the_engine_goes_on(tmp_path, monkeypatch):
    it = engine(sizes(tmp_path, host=4, disk=300))
    prompt = tokens(41, 7)
    first = ask(it, prompt, "first")
    fill(it)
    tiers = it.offloading.tiers
    key = tiers.tables.following((), prompt)[3][0]
    with monkeypatch.context() as broken:
        broken.setattr(tiers.disk, "read", lambda *given: 1 / 0)
        assert tiers.prefetch(key, 1)
        tiers._reading[key].exception()  # waits until the thread has failed
    assert ask(it, prompt, "again").token_ids == first.token_ids
    (problem,) = it.offloading.problems
    assert problem == "1 read ahead from disk failed (ZeroDivisionError: division by zero)"
    assert [one.failed for one in it.offloading.totals().tiers] == [0, 1]
    it.offloading.problems.extend("x" * 1000)
    assert len(it.offloading.problems) == MAX_PROBLEMS
    check_empty(it)
    it.close()


def test_blocks_that_may_hold_nan_are_found_in_no_tier_and_not_after_a_restart(tmp_path):
    it = engine(sizes(tmp_path, disk=300))
    prompt = tokens(41, 7)
    ask(it, prompt, "first")
    fill(it)
    it.kv.forget_prefix(prompt)
    it.close()
    later = engine(sizes(tmp_path, disk=300))
    assert not later.offloading.tiers.tables.following((), prompt)
    assert len(later.offloading.tiers.below.tiers[0]) > 50  # the others are
    later.close()


def test_a_full_tier_evicts_and_never_holds_more_than_it_may(tmp_path):
    it = engine(sizes(tmp_path, host=3, disk=5))
    fill(it, prompts=12)
    totals = {one.tier: one for one in it.offloading.totals().tiers}
    assert (totals["host"].blocks, totals["disk"].blocks) == (3, 5)
    assert totals["disk"].evicted == it.offloading.tiers.below.counts["disk", "written"] - 5 > 50
    it.close()


def test_a_tier_whose_blocks_are_all_in_use_passes_on_what_is_evicted():
    copies = PlainCopies()
    copies.memory = [[None]] * 3
    below = OffloadedBlocks({"host": 1, "disk": 1}, copies)
    assert below.store(b"a", 0)
    with below.pinned([b"a"]):
        assert below.store(b"b", 1) and below.where(b"b").name == "disk"
        with below.pinned([b"b"]):
            assert not below.store(b"c", 2)
    assert below.counts == {
        ("host", "written"): 1,
        ("disk", "written"): 1,
        ("host", "refused"): 2,
        ("disk", "refused"): 1,
    }
    assert below.store(b"c", 2) and below.where(b"a").name == "disk"


def test_a_slot_is_listed_only_when_it_is_whole(tmp_path, monkeypatch):
    given = {"model": "m", "layout": {}}
    tier = DiskTier(tmp_path / "kv", 2, 64, **given)
    content = torch.arange(64, dtype=torch.uint8)
    tier.write(0, b"a" * 32, content)
    tier.write(1, b"b" * 32, content)
    monkeypatch.setattr(disk_tier, "checksum", lambda key, content: 1 / 0)  # it ends between content and entry
    with pytest.raises(ZeroDivisionError):
        tier.write(0, b"c" * 32, content + 1)
    monkeypatch.undo()
    tier.close()
    again = DiskTier(tmp_path / "kv", 2, 64, **given)
    assert again.listed == {b"b" * 32: 1}
    into = torch.zeros(64, dtype=torch.uint8)
    assert again.read(1, b"b" * 32, into) and torch.equal(into, content)
    assert not again.read(1, b"x" * 32, into) and not again.read(0, b"c" * 32, into)
    again.close()


def test_an_earlier_engines_file_is_found_again_with_the_last_write_of_a_key_and_the_oldest_first(tmp_path):
    given = {"model": "m", "layout": {}}
    tier = DiskTier(tmp_path / "kv", 3, 64, **given)
    content = torch.zeros(64, dtype=torch.uint8)
    for slot, key in ((0, b"a"), (2, b"b"), (1, b"a")):
        tier.write(slot, key * 32, content)
    tier.close()
    again = DiskTier(tmp_path / "kv", 3, 64, **given)
    assert list(again.listed.items()) == [(b"a" * 32, 1), (b"b" * 32, 2)]
    books = TierBooks("disk", 3)
    books.adopt(again.listed)
    assert books.take() == 0 and books.take() is None
    again.close()


def test_a_key_that_is_listed_twice_is_forgotten_whole(tmp_path):
    """Else the engine after the next finds the older entry, though the prefix was forgotten."""
    given, key = {"model": "m", "layout": {}}, b"k" * 32
    tier = DiskTier(tmp_path / "kv", 3, 64, **given)
    for slot in (0, 1):
        tier.write(slot, key, torch.full((64,), slot, dtype=torch.uint8))
    tier.close()
    again = DiskTier(tmp_path / "kv", 3, 64, **given)
    again.unlist(again.listed[key])
    again.close()
    after = DiskTier(tmp_path / "kv", 3, 64, **given)
    assert after.listed == {}
    after.close()


@pytest.mark.parametrize("way", [("pool", "host"), ("host", "disk"), ("disk", "host"), ("host", "pool")])
def test_an_interrupted_move_loses_no_slot_and_no_pin(way):
    class Interrupted(PlainCopies):
        def move(self, key, source, target):
            if (source.tier, target.tier) == way and self.armed:
                raise KeyboardInterrupt
            return super().move(key, source, target)

    copies = Interrupted()
    copies.armed, copies.memory = False, [[at] for at in range(4)]
    below = OffloadedBlocks({"host": 1, "disk": 2}, copies)
    a, b = b"a" * 32, b"b" * 32
    assert below.store(a, 0) and below.store(b, 1)  # b in the host, a on disk
    copies.armed = True
    with pytest.raises(KeyboardInterrupt):
        if way == ("host", "pool"):
            below.fetch(b, 3)
        elif way == ("disk", "host"):
            below.prefetch(a)
        else:
            below.store(b"c" * 32, 2)
    below.check()
    copies.armed = False
    assert below.store(b"d" * 32, 2)
    below.check()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_who_was_being_loaded_when_a_step_broke_can_still_be_aborted(error, tmp_path, monkeypatch):
    it, prompt = engine(sizes(tmp_path, host=100)), tokens(41, 7)
    ask(it, prompt, "first")
    fill(it)

    def broken(*given):
        raise error

    monkeypatch.setattr(it.offloading.tiers, "_to_pool", broken)
    for name in ("loads", "waits"):
        it.add(Request(name, tuple(prompt), 4, stop_token_ids=()))
    with pytest.raises(error):
        it.step()
    assert it.why_broken
    for name in ("loads", "waits"):
        assert [one.finish_reason for one in it.abort(name)] == ["abort"]
    assert it.idle
    check_empty(it)
    it.offloading.tiers.below.check()


def test_what_was_read_ahead_of_a_block_that_was_dropped_meanwhile_is_not_used(tmp_path):
    it = engine(sizes(tmp_path, host=12, disk=100))
    tiers = it.offloading.tiers
    fill(it)
    host, disk = tiers.below.tiers
    key = next(key for key in disk.slots if key not in host)
    assert tiers.prefetch(key, 1)
    tiers._reading[key].result()
    tiers.below.drop(key)
    slot = disk.take()
    new = torch.full((tiers.block_bytes,), 7, dtype=torch.uint8)
    tiers.disk.write(slot, key, new)
    disk.put(key, slot)
    assert tiers.take_prefetched() == 1
    assert torch.equal(tiers.host.slot(host.slots[key]), new)
    it.close()


def test_a_read_ahead_that_fails_keeps_no_file_and_no_block(tmp_path, monkeypatch):
    it = engine(sizes(tmp_path, host=12, disk=100))
    tiers = it.offloading.tiers
    fill(it)
    keys = [key for key in tiers.below.tiers[1].slots if key not in tiers.below.tiers[0]][:4]
    read = tiers.disk.read
    monkeypatch.setattr(tiers.disk, "read", lambda slot, key, into: 1 / 0 if key in keys[:2] else read(slot, key, into))
    assert all(tiers.prefetch(key, 8) for key in keys)
    with pytest.raises(ReadAheadError, match=r"2 reads ahead from disk failed \(ZeroDivisionError: division by zero\)"):
        it.close()
    assert all(key in tiers.below.tiers[0] for key in keys[2:])
    it.close()
    tiers.below.check()
    assert not tiers.below.tiers[0].pins and not tiers._reading
    engine(sizes(tmp_path, host=12, disk=100)).close()  # the file is free


# -- the file ------------------------------------------------------------------------------------------------------


def test_two_engines_do_not_share_a_file_and_the_next_one_finds_what_the_first_left(tmp_path):
    it, prompt = engine(sizes(tmp_path, disk=300)), tokens(41, 7)
    first = ask(it, prompt, "first")
    fill(it)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o600
    with pytest.raises(WorkbenchError, match="in use by another engine"):
        engine(sizes(tmp_path, disk=300))
    it.close()
    it.close()
    later = engine(sizes(tmp_path, disk=300))
    again = ask(later, prompt, "again")
    assert again.token_ids == first.token_ids and again.hit_tokens == 40
    assert ask(it, prompt, "without the file").token_ids == first.token_ids
    later.close()


def test_an_engine_that_is_gone_has_left_its_file(tmp_path):
    it = engine(sizes(tmp_path, disk=300))
    fill(it)
    del it
    gc.collect()
    engine(sizes(tmp_path, disk=300)).close()


def test_a_file_of_another_model_shape_or_size_is_refused_and_left_as_it_was(tmp_path):
    it = engine(sizes(tmp_path, disk=20))
    fill(it)
    it.close()
    content = (tmp_path / "kv").read_bytes()
    for make, words in (
        (lambda: engine(sizes(tmp_path, disk=20), OTHER), "of another model"),
        (lambda: engine(sizes(tmp_path, disk=40), format="int8"), "of blocks of another layout"),
        (lambda: engine(sizes(tmp_path, disk=21)), "of 20 blocks, and 21 were asked for"),
    ):
        with pytest.raises(WorkbenchError, match=words):
            make()
    assert (tmp_path / "kv").read_bytes() == content
    engine(sizes(tmp_path, disk=20)).close()


def changed(path, at: int, to: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(to)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: changed(path, 0, b"x"), "no file of a disk tier"),
        (lambda path: path.write_bytes(b"a letter"), "no file of a disk tier"),
        (lambda path: changed(path, 8, b"\x07"), "format version 7, and this is 1"),
        (lambda path: changed(path, disk_tier.HEADER.size + 5, b"!!"), "header of .* is damaged"),
        (lambda path: changed(path, 12, b"\xff\xff\xff\xff"), "header of .* is damaged"),
        (lambda path: os.truncate(path, PAGE * 2), "has 8,192 bytes, and its header says"),
        (lambda path: path.chmod(0o640), "can be read or written by others"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot write .*name another"),
        (lambda path: (path.rename(path.with_name("there")), path.symlink_to("there")), "is a link"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "no plain file"),
    ],
)
def test_a_file_that_is_none_is_refused(damage, words, tmp_path):
    engine(sizes(tmp_path, disk=300)).close()
    damage(tmp_path / "kv")
    with pytest.raises(WorkbenchError, match=words):
        engine(sizes(tmp_path, disk=300))


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(WorkbenchError, match=r"cannot write .*: File name too long"):
        engine(TierSettings(disk_path=tmp_path / ("k" * 300), disk_bytes=2**20))


def test_a_full_disk_is_an_error_at_the_start_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WorkbenchError, match=r"cannot write .*kv: No space left on device; make room on the disk"):
        engine(sizes(tmp_path, disk=300))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("disk_bytes", [2**62, 2**63 - 1, 10**30])
def test_a_file_larger_than_what_is_free_is_refused_before_any_of_it_is_taken(disk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: pytest.fail("taken"))
    with pytest.raises(WorkbenchError, match=r"a disk tier of .* bytes does not fit: .* are free in"):
        engine(TierSettings(disk_path=tmp_path / "kv", disk_bytes=disk_bytes))
    assert not list(tmp_path.iterdir())


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "tiers need host_bytes"),
        ({"host_bytes": -1}, "host_bytes must be a whole number"),
        ({"host_bytes": 1, "disk_bytes": 1}, "a file and a size"),
        ({"disk_path": "x"}, "a file and a size"),
        ({"host_bytes": 1, "load": "brake_even"}, "did you mean 'break_even'"),
        ({"host_bytes": 1, "prefetch": 1.5}, "prefetch must be a whole number"),
        ({"disk_path": 3, "disk_bytes": 1}, "disk_path must be a path"),
        ({"disk_path": "", "disk_bytes": 1}, "disk_path must be a path of a file, got ''"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, words):
    with pytest.raises(WorkbenchError, match=words):
        TierSettings(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefix": None}, "there is none"),
        ({"remember": False}, "there is none"),
        ({"batching": "static"}, "static batching"),
        ({"model": model_of("linear_attention", "hybrid", context_length=128)}, "states beside its blocks"),
    ],
)
def test_engines_that_cannot_have_tiers_say_why(given, words, tmp_path):
    with pytest.raises(WorkbenchError, match=words):
        engine(sizes(tmp_path, host=100), **given)


def test_a_tier_smaller_than_a_block_and_tiers_that_are_none_are_refused(tmp_path):
    with pytest.raises(WorkbenchError, match="host tier of 100 bytes holds no block"):
        engine(TierSettings(host_bytes=100))
    with pytest.raises(WorkbenchError, match="tiers of an engine are TierSettings, got dict"):
        engine({"host_bytes": 100})
    with pytest.raises(WorkbenchError, match=r"needs .*, and .* are free"):
        engine(TierSettings(host_bytes=2**50))


# -- the rule ------------------------------------------------------------------------------------------------------


def test_the_break_even_is_where_both_take_as_long():
    bytes_per_token, prefill_s = 6144.0, 2e-4
    least = break_even_bandwidth(bytes_per_token, prefill_s)
    assert load_seconds(100, bytes_per_token, least) == pytest.approx(100 * prefill_s)
    assert break_even_tokens(bytes_per_token, least, prefill_s, 1e-3) == float("inf")
    tokens_ = break_even_tokens(bytes_per_token, 4 * least, prefill_s, 1e-3)
    assert load_seconds(tokens_, bytes_per_token, 4 * least, 1e-3) == pytest.approx(tokens_ * prefill_s)
    assert break_even_tokens(bytes_per_token, 4 * least, prefill_s) == 0


def test_blocks_are_loaded_as_far_as_that_saves_time():
    costs = LoadCosts(block_size=16, block_bytes=1000)
    assert costs.worth_loading(["disk"] * 3) == 3  # nothing is known yet
    costs.note_prefill(160, 1.6)  # 0.16 s a block
    costs.note_prefill(3, 100.0)  # too few rows to say anything
    costs.note_load("host", 10, 0.1)
    costs.note_load("disk", 10, 2.0)
    assert costs.bandwidth("host") == pytest.approx(1e5) and costs.bandwidth("elsewhere") is None
    assert costs.worth_loading(["host"] * 3 + ["disk"] * 5) == 3
    assert costs.worth_loading(["disk"] * 2 + ["host"]) == 3  # what the last saves pays for the first two
    assert costs.worth_loading(["disk"] * 5 + ["host"]) == 0
    assert costs.predicted_s({"host": 2, "disk": 1}) == pytest.approx(0.22)


def test_a_slow_tier_is_left_alone_and_the_prompt_computed(tmp_path):
    it = engine(sizes(tmp_path, host=100, load="break_even"))
    prompt = tokens(41, 7)
    first = ask(it, prompt, "first")
    fill(it)
    assert it.offloading.costs.prefill_s_per_token > 0
    it.offloading.costs.block_s["host"] = 1e3
    again = ask(it, prompt, "again")
    assert again.token_ids == first.token_ids and again.hit_tokens == 0
    it.offloading.costs.block_s["host"] = 1e-9
    fill(it, 3000)
    assert ask(it, prompt, "once more").hit_tokens == 40


def test_a_tier_that_was_slow_once_is_measured_again(tmp_path):
    it = engine(sizes(tmp_path, host=100, load="break_even"))
    prompt = tokens(41, 7)
    ask(it, prompt, "first")
    fill(it)
    costs = it.offloading.costs
    costs.block_s["host"], costs.prefill_s_per_token = 1e3, 1.0
    hits = []
    for at in range(MEASURE_AGAIN):
        hits.append(ask(it, prompt, at, 1).hit_tokens)
        it.kv.tables.grow({"in the way": it.kv.tables.num_available * BLOCK})
        it.kv.tables.release("in the way")
    assert hits == [0] * (MEASURE_AGAIN - 1) + [BLOCK] and costs.block_s["host"] < 1e3
    costs.prefill_s_per_token = 1e4
    assert ask(it, prompt, "again").hit_tokens == 40


def test_no_more_is_hashed_for_those_that_wait_than_once(tmp_path, monkeypatch):
    it = engine(sizes(tmp_path, host=30, disk=30), max_running=1)
    looked = []
    on_disk = it.offloading._on_disk
    monkeypatch.setattr(it.offloading, "_on_disk", lambda one: looked.append(one.id) or on_disk(one))
    for at in range(LOOKED_AHEAD + 2):
        it.add(Request(at, tuple(tokens(20, at)), 3, stop_token_ids=()))
    it.run()
    assert sorted(looked) == [(at, 0) for at in range(1, LOOKED_AHEAD + 2)]  # the first need not wait
    it.close()


# -- the server ----------------------------------------------------------------------------------------------------


def arguments(*given: str):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(["stdlib-1m", *given])


def test_options_of_the_server_make_the_tiers(tmp_path):
    made = _tiers(arguments("--host-cache-gib", "0.5", "--disk-cache", str(tmp_path / "kv"), "--disk-cache-gib", "2"))
    assert made == TierSettings(host_bytes=2**29, disk_path=tmp_path / "kv", disk_bytes=2**31)
    assert _tiers(arguments()) is None
    for given, words in (
        (("--load", "always"), "--load always is about tiers"),
        (("--disk-cache-gib", "1"), "a file and a size"),
        (("--host-cache-gib", "nan"), "--host-cache-gib must be a number"),
    ):
        with pytest.raises(WorkbenchError, match=words):
            engine_maker(arguments(*given))


def test_the_servers_metrics_count_what_the_engine_counts_and_loads_do_not_spoil_the_forecast(tmp_path):
    it = engine(sizes(tmp_path, host=5, disk=200))
    metrics, forecast, link = Metrics("tiny", 22, BLOCK), Forecast(4, 512), EngineThread(it)
    noted = []
    for at in (*range(10), *range(5)):
        it.add(Request((at, it.now_s), tuple(tokens(41, at % 10)), 2, stop_token_ids=()))
        while not it.idle:
            news = link._news(it.step(), [])
            assert news_from_json(json.loads(json.dumps(news_to_json(news)))).offload == news.offload
            metrics.step(news, 1.0)
            forecast.note(news)
            noted.append((news.seconds, news.load_s))
    values = {
        (one.name, *[v for k, v in one.labels.items() if k != "model_name"]): one.value
        for family in metrics.registry.collect()
        for one in family.samples
    }
    totals, below = it.offloading.totals(), it.offloading.tiers.below
    assert values["vllm:external_prefix_cache_queries_total",] == totals.query_tokens > 500
    assert values["vllm:external_prefix_cache_hits_total",] == totals.hit_tokens == 5 * 40
    moved = {(one.source, one.target): one.bytes // BLOCK_BYTES for one in totals.moves}
    down, up = moved["pool", "host"], moved["disk", "pool"] + moved.get(("host", "pool"), 0)
    assert values["vllm:kv_offload_total_bytes_total", "GPU_to_CPU"] == down * BLOCK_BYTES
    assert values["vllm:kv_offload_total_bytes_total", "CPU_to_GPU"] == up * BLOCK_BYTES == 50 * BLOCK_BYTES
    assert values["vllm:kv_offload_tiering_write_bytes_total", "1:disk"] == moved["host", "disk"] * BLOCK_BYTES
    assert values["vllm:kv_offload_total_time_total", "CPU_to_GPU"] > 0
    assert values["workbench:tier_blocks", "host"] == 5 and values["workbench:tier_blocks", "disk"] == len(
        below.tiers[1]
    )
    assert values["workbench:tier_corrupt_blocks_total", "disk"] == 0
    assert values["workbench:tier_failed_reads_total", "disk"] == 0
    assert sum(load_s > 0 for _, load_s in noted) == 5
    assert [s for _, s in forecast._steps] == [pytest.approx(s - load_s) for s, load_s in noted]
    it.close()


# -- the soak ------------------------------------------------------------------------------------------------------


def test_any_history_of_three_tiers_agrees_with_plain_lists():
    soaked = soak_tiers(RUNS, STEPS)
    assert soaked.failure is None, str(soaked.failure)
    for kind, counts in soaked.counts.items():
        assert counts["steps"] == RUNS * STEPS
        for what in ("written", "clean", "evicted", "loaded", "prefetched", "corrupt", "refused", "pin", "forget"):
            assert counts[what] > 0, f"{what} never happened with {kind}"


def not_written_back(monkeypatch):
    monkeypatch.setattr(OffloadedBlocks, "store", lambda self, key, block: True)


def pinned_is_evicted(monkeypatch):
    monkeypatch.setattr(TierBooks, "victim", lambda self: next(iter(self.slots), None))


def newest_is_evicted(monkeypatch):
    right = TierBooks.victim
    monkeypatch.setattr(TierBooks, "victim", lambda self: next((k for k in reversed(self.slots)), None) or right(self))


def a_hit_does_not_count_as_use(monkeypatch):
    monkeypatch.setattr(TierBooks, "use", lambda self, key: None)


def evicted_is_not_passed_down(monkeypatch):
    right = OffloadedBlocks._store
    monkeypatch.setattr(
        OffloadedBlocks, "_store", lambda self, level, key, source: not level and right(self, level, key, source)
    )


def corrupt_is_used(monkeypatch):
    right = PlainCopies.move

    def move(self, key, source, target):
        self.spoiled.discard(source)
        return right(self, key, source, target)

    monkeypatch.setattr(PlainCopies, "move", move)


def corrupt_is_kept(monkeypatch):
    monkeypatch.setattr(OffloadedBlocks, "_report_corrupt", lambda self, tier, key: None)


def untrusted_is_kept(monkeypatch):
    monkeypatch.setattr(OffloadedBlocks, "drop", lambda self, key: None)


def keys_without_tenant(monkeypatch):
    right = HashChain.keys_of
    monkeypatch.setattr(HashChain, "keys_of", lambda self, token_ids, tenant, key=None: right(self, token_ids, "", key))


def written_to_a_slot_in_use(monkeypatch):
    monkeypatch.setattr(TierBooks, "take", lambda self: self._free.pop() if len(self._free) > 1 else 0)


def loads_one_too_many(monkeypatch):
    right = OffloadedBlocks.fetch
    monkeypatch.setattr(OffloadedBlocks, "fetch", lambda self, key, block: right(self, key, block) or True)


def loads_the_last_token(monkeypatch):
    def following(self, blocks, token_ids, tenant=""):
        before = self.keyed.key_of(blocks[-1]) if blocks else None
        return self.below.leading(self.keyed.keys_of(token_ids[len(blocks) * self.block_size :], tenant, before))

    monkeypatch.setattr(TieredTables, "following", following)


def loaded_is_not_indexed(monkeypatch):
    right = TieredTables.load

    def load(self, sequence, token_ids, keys, tenant=""):
        return right(self, sequence, (), keys, tenant)

    monkeypatch.setattr(TieredTables, "load", load)


PLANTED = (
    not_written_back,
    pinned_is_evicted,
    newest_is_evicted,
    a_hit_does_not_count_as_use,
    evicted_is_not_passed_down,
    corrupt_is_used,
    corrupt_is_kept,
    untrusted_is_kept,
    keys_without_tenant,
    written_to_a_slot_in_use,
    loads_one_too_many,
    loads_the_last_token,
    loaded_is_not_indexed,
)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch)
    failure = soak_tiers(RUNS, STEPS).failure
    assert isinstance(failure, Failure) and failure.calls
    monkeypatch.undo()
    assert TierWalk(failure.seed, failure.kind).run(failure.step) is None


def test_what_a_radix_tree_forgets_with_an_evicted_block_is_dropped_with_its_keys():
    pool = make_tiered_pool(4, 2, "radix", {"host": 4})
    copies = pool.below._copies
    copies.memory = [[None, None] for _ in range(4)]
    for name, text in (("a", [0, 1]), ("b", [0, 1, 2, 2])):
        pool.grow({name: len(text)})
        pool.remember(name, text)
    pool.release("a")  # its block is the one that is known, and b's second block hangs on it
    pool.grow({"c": 4})
    assert [key for key, _ in pool.following((), [0, 1, 2, 2, 0])] == list(pool.below.tiers[0].slots)
    assert len(pool.keyed) == 0 and not pool.keyed._keys
