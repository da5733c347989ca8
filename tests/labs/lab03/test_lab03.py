"""Lab 03: what the cache experiments count is exact, what they time is held to an oracle, and their panels show it."""

from __future__ import annotations

import re
import time

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs
from panel_claims import PanelClaims, shown

from workbench import panels
from workbench.errors import WorkbenchError
from workbench.experiments import list_experiments, run_experiment
from workbench.experiments.cached_steps import predicted_step, same_token
from workbench.experiments.inputs import text_ids
from workbench.generation import generate
from workbench.instruments.bench import Bench
from workbench.instruments.costs import kv_bytes
from workbench.instruments.device import PUBLISHED
from workbench.instruments.timing import Stopped
from workbench.kv import Contiguous, Recompute
from workbench.labs.lab03_kv_cache import cache_batch as batches
from workbench.labs.lab03_kv_cache import chunks as chunking
from workbench.labs.lab03_kv_cache import memory, token_times
from workbench.models import PUBLIC_SHAPES, prepare, public_shape
from workbench.models.checkpoints import shipped_names

PANELS = ["token_times", "growth", "memory", "chunks", "cache_batch"]
SMALL = {
    "cache.token_times": {"prompt_tokens": 32, "new_tokens": 6},
    "cache.growth": {"prompt_tokens": 5, "new_tokens": 6, "max_tokens": 16},
    "cache.memory": {"model": "llama-3.1-8b"},
    "cache.chunks": {"prompt_tokens": 64, "repeats": 1},
    "cache.cache_batch": {"sequences": 2, "prompt_tokens": 16, "new_tokens": 3},
}


MOVED = {
    "token_times": {"prompt_tokens": 64},
    "growth": {"shown_tokens": 3},
    "memory": {"batch": 64},
    "chunks": {"prompt_tokens": 128},
    "cache_batch": {"sequences": 16},
}
NAMES = list(SMALL)
GiB = 2**30
CACHE = [e for e in list_experiments(lab=3) if e.name in NAMES]  # the peers have a test file of their own


class LosesKeys(Contiguous):
    """A cache with a mistake: keys of all but the first step are lost."""

    def __init__(self, config):
        super().__init__(config)

    def attend(self, layer, q, k, v, batch):
        shifted = batch.first_positions[0] > 0
        return super().attend(layer, q, 0 * k if shifted else k, v, batch)


class NeverRemembers(Recompute):
    """A cache that gives right tokens and saves nothing."""


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture
def bench() -> DataSheetBench:
    return DataSheetBench()


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


def settings_of(name: str, model) -> dict:
    return SMALL[name] if name == "cache.memory" else {"model": model, **SMALL[name]}


@pytest.fixture
def make(model):
    def made(name: str, **given):
        return shown(name, **{**settings_of(f"cache.{name}", model), **given})

    return made


class TestExperiments(ExperimentClaims):
    lab, small = 3, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


# -- all of them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cache.token_times", "cache.growth", "cache.chunks", "cache.cache_batch"])
def test_a_text_beyond_the_context_is_refused_with_numbers(model, bench, name):
    long = {"prompt_tokens": 512} if name != "cache.growth" else {"prompt_tokens": 200, "new_tokens": 100}
    with pytest.raises(WorkbenchError, match="reads at most 256"):
        run_experiment(name, {**settings_of(name, model), **long}, bench)


def test_times_are_recorded_with_large_models_on_an_accelerator_and_bytes_are_not():
    for e in CACHE:
        runs = e.record_settings("cuda")
        assert len(runs) == (0 if e.name in ("cache.growth", "cache.memory") else 2)
        assert all(e.complete(run)["model"] in PUBLIC_SHAPES for run in runs)


def test_a_wrong_token_is_no_tie_and_a_tie_is_no_wrong_token():
    logits = torch.tensor([1.0, 2.0, 2.0 - 1e-6])
    assert same_token(logits, 1, torch.float32, "token 1") is True
    assert same_token(logits, 2, torch.float32, "token 1") is False
    assert same_token(logits + torch.tensor([0.9, 0, 0]), 0, torch.bfloat16, "token 1") is False
    with pytest.raises(WorkbenchError, match=r"token 1 is 1, and the oracle's is 0 .*thrown away"):
        same_token(logits, 0, torch.float32, "token 1")


# -- cache.decode ----------------------------------------------------------------------------------------------


def test_parts_hold_every_token_once_and_the_first_alone():
    for new in (1, 2, 3, 10, 64, 1000):
        parts = token_times.parts_of(new)
        assert [i for part in parts for i in part] == list(range(1, new + 1))
        assert list(parts[0]) == [1]


@pytest.mark.parametrize("arrangement", ["plain", "fast"])
def test_rows_with_and_without_a_cache_are_counted_and_equal_the_formulas(model, bench, arrangement):
    asked = {"model": model, "prompt_tokens": 32, "new_tokens": 20, "arrangement": arrangement}
    found = run_experiment("cache.token_times", asked, bench)
    for way, rows in (("recompute", 20 * 32 + 190), ("contiguous", 51)):
        mine = [m for m in found if m.settings["kv"] == way]
        assert sum(m.counts["rows"] for m in mine) == rows == token_times.rows_in_all(way, 32, 20)
        assert sum(m.counts["model_calls"] for m in mine) == sum(len(m.samples) for m in mine) == 20
        assert [m.settings["phase"] for m in mine] == ["prefill"] + ["decode"] * (len(mine) - 1)
    last = found[-1]
    assert last.check == "all 20 tokens so far equal those without a cache (greedy)"
    assert last.counts["bytes_in_use"] == kv_bytes(model.config, 51, 4)


def test_the_ways_take_turns(model, bench):
    found = run_experiment("cache.token_times", {"model": model, "prompt_tokens": 8, "new_tokens": 17}, bench)
    ways = [m.settings["kv"] for m in found]
    assert ways == ["recompute", "contiguous"] * (len(ways) // 2)


def test_the_prediction_of_a_run_is_the_one_that_is_drawn(model, bench):
    asked = {"model": model, "prompt_tokens": 32, "new_tokens": 3, "arrangement": "fast"}
    drawn = token_times.predict_ways(bench.ceilings(), **asked)
    for m in run_experiment("cache.token_times", asked, bench):
        middle = m.settings["first_token"] + len(m.samples) // 2
        assert (middle, m.predicted, m.limit) in drawn[m.settings["kv"]]
    assert token_times.predict_decode(bench.ceilings(), **asked) == drawn["contiguous"]


def test_a_cached_step_is_predicted_as_one_row_after_the_others(model, bench):
    costs, _ = token_times.predicted_token(bench.ceilings(), model, "contiguous", 32, 5, "fast")
    other, _ = predicted_step(bench.ceilings(), model, new_tokens=[1], contexts=[35])
    assert costs == other and costs.rows == 1
    whole, _ = token_times.predicted_token(bench.ceilings(), model, "recompute", 32, 5, "fast")
    assert whole.rows == 36 and whole.bytes_by_part["kv"] == 0


def test_a_cache_of_ours_that_were_wrong_would_never_be_timed(model, bench, monkeypatch):
    monkeypatch.setattr("workbench.kv.KINDS", {"recompute": Recompute, "contiguous": lambda c, **_: LosesKeys(c)})
    with pytest.raises(WorkbenchError, match=r"with the cache new token .* thrown away"):
        run_experiment("cache.token_times", {"model": model, "prompt_tokens": 32, "new_tokens": 12}, bench)


def test_a_learners_cache_drives_the_model_beside_ours(model, bench):
    asked = {"model": model, "prompt_tokens": 8, "new_tokens": 5}
    found = run_experiment("cache.token_times", asked, bench, {"kv": lambda config: Contiguous(config)})
    yours = [m for m in found if m.settings["kv"] == "yours"]
    assert yours[-1].check.startswith("all 5 tokens so far equal")
    assert sum(m.counts["rows"] for m in yours) == 12


def test_a_learners_cache_that_remembers_nothing_shows_in_its_rows(model, bench):
    asked = {"model": model, "prompt_tokens": 8, "new_tokens": 5}
    found = run_experiment("cache.token_times", asked, bench, {"kv": NeverRemembers})
    rows = {way: sum(m.counts["rows"] for m in found if m.settings["kv"] == way) for way in ("contiguous", "yours")}
    assert rows == {"contiguous": 12, "yours": 50}


def test_a_learners_wrong_token_is_named_where_it_first_differs(model, bench):
    asked = {"model": model, "prompt_tokens": 32, "new_tokens": 12}
    found = run_experiment("cache.token_times", asked, bench, {"kv": LosesKeys})
    last = [m for m in found if m.settings["kv"] == "yours"][-1]
    at, came, expected = map(
        int, re.search(r"new token (\d+) on: yours wrote token (\d+), ours (\d+)", last.check).groups()
    )
    right, wrong = (
        generate(model, text_ids(model, 32), max_new_tokens=12, stop_token_ids=(), kv=kv).tokens
        for kv in ("recompute", LosesKeys)
    )
    assert (came, expected) == (wrong[at - 1], right[at - 1]) and came != expected
    assert 1 < at < 12 and wrong[: at - 1] == right[: at - 1]
    ours = [m for m in found if m.settings["kv"] == "contiguous"][-1]
    assert "equal those" in ours.check  # ours is not judged by theirs


# -- cache.growth ----------------------------------------------------------------------------------------------


def test_every_state_of_the_slot_is_read_from_the_cache_and_equals_the_formula(model, bench):
    asked = {"model": model, "prompt_tokens": 5, "new_tokens": 6, "max_tokens": 16}
    found = run_experiment("cache.growth", asked, bench)
    a_token = 2 * 2 * 2 * 8 * 4  # 2·L·H_kv·D·b of the tiny model in float32
    assert [m.median for m in found] == [a_token * n for n in range(5, 11)]
    assert all(m.median == m.predicted == m.counts["bytes_in_use"] for m in found)
    assert {m.counts["bytes_reserved"] for m in found} == {16 * a_token}
    assert [m.counts["tokens"] for m in found] == [m.counts["rows"] for m in found] == list(range(5, 11))


def test_a_slot_that_is_full_refuses_and_stays_as_it_is(model, bench):
    found = run_experiment(
        "cache.growth", {"model": model, "prompt_tokens": 14, "new_tokens": 9, "max_tokens": 16}, bench
    )
    *fine, refused = found
    assert [m.counts["tokens"] for m in fine] == [14, 15, 16]
    assert refused.settings["refused"] and "would grow to 17 tokens" in refused.check
    assert refused.counts["bytes_in_use"] == fine[-1].counts["bytes_in_use"]


def test_a_prompt_beyond_the_slot_is_refused_with_nothing_in_it(model, bench):
    [only] = run_experiment("cache.growth", {"model": model, "prompt_tokens": 20, "max_tokens": 16}, bench)
    assert only.settings["refused"] and only.counts["tokens"] == 0 and only.median == 0


# -- cache.memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "context", "gib"),
    [
        ("llama-2-7b", 4096, 2),
        ("llama-2-70b", 4096, 1.25),
        ("llama-2-70b", 131_072, 40),
        ("llama-3-8b", 131_072, 16),
        ("llama-3.1-405b", 131_072, 63),
    ],
)
def test_the_published_sizes_come_out(name, context, gib):
    wanted = memory.need(public_shape(name), weights="bfloat16", cache="bfloat16", context=context, batch=1)
    assert wanted.cache_bytes == wanted.sequence_bytes == gib * GiB


def test_precision_context_and_batch_all_count():
    shape = public_shape("llama-3.1-8b")
    one = memory.need(shape, weights="float32", cache="float32", context=1024, batch=1)
    other = memory.need(shape, weights="int4", cache="int8", context=4096, batch=16)
    assert one.weight_bytes == 4 * shape.num_parameters() == 8 * other.weight_bytes
    assert other.cache_bytes == one.cache_bytes * 16  # a quarter of the bytes, 4 × 16 as many tokens


@pytest.mark.parametrize("card", memory.CARDS_GB)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-3b", "deepseek-v2", "llama-2-13b"])
def test_what_is_said_to_fit_fits_and_one_more_does_not(name, card):
    shape, asked = public_shape(name), {"weights": "int8", "cache": "float16"}
    found = memory.fit(shape, card, **asked, context=2048, batch=4)

    def total(context, batch):
        return memory.need(shape, **asked, context=context, batch=batch).total_bytes

    room = card * 10**9
    assert found.weights_fit == (total(1, 0) <= room)
    if found.weights_fit:
        assert total(2048, found.largest_batch) <= room < total(2048, found.largest_batch + 1)
        assert total(found.longest_context, 4) <= room < total(found.longest_context + 1, 4)
    else:
        assert (found.largest_batch, found.longest_context) == (0, 0)
    assert found.total_fits == (total(2048, 4) <= room)


def test_64_users_of_a_70b_need_more_than_an_80_gb_card_for_the_cache_alone():
    wanted = memory.need(public_shape("llama-2-70b"), weights="int4", cache="bfloat16", context=4096, batch=64)
    assert wanted.cache_bytes == 80 * GiB > 80 * 10**9
    assert memory.both_units(wanted.cache_bytes) == "85.9 GB (80.0 GiB)"


def test_the_run_allocates_the_shipped_caches_and_they_are_as_large_as_said(bench):
    said, *tried = run_experiment("cache.memory", {"context": 512, "batch": 4, "cache": "float16"}, bench)
    assert said.settings["source"] == "formula" and said.median == 4 * 512 * 131_072
    shipped = [m for m in tried if m.settings["model"].startswith("stdlib")]
    assert [m.settings["model"] for m in shipped] == shipped_names(states=False)
    for m in shipped:
        assert m.settings["source"] == "allocated" and m.median == m.predicted > 0
        assert "as the formula says" in m.check


def test_a_shape_too_large_is_refused_with_both_numbers_and_nothing_is_allocated(bench, monkeypatch):
    made = []
    honest = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: (made.append(a), honest(*a, **k))[1])
    asked = {"model": "llama-3.1-405b", "context": 131_072, "batch": 1024}
    last = run_experiment("cache.memory", asked, bench)[-1]
    assert last.settings["source"] == "not allocated" and last.median == 0
    assert re.search(
        r"refused, nothing allocated: .* needs [\d.]+ TB, and [\d.]+ [GT]B are free on cpu|needs [\d,]+ TB", last.check
    )
    assert max(torch.Size(a[0]).numel() for a in made) < 10**9  # only the shipped models' caches
    assert last.counts["bytes_needed"] > last.counts["bytes_available"]


def test_latent_caches_are_counted_by_their_own_formula_and_allocated_so(bench):
    said, *_, last = run_experiment("cache.memory", {"model": "deepseek-v2", "context": 1024}, bench)
    assert said.median == 60 * (512 + 64) * 1024 * 2
    assert last.settings["source"] == "allocated"
    assert last.median == last.predicted == 60 * (512 + 64) * 1024 * (2 if bench.device != "cpu" else 4)


# -- cache.chunks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "size"), [(10, 1), (10, 3), (10, 7), (10, 10), (64, 64), (1, 1)])
def test_pieces_cover_the_prompt_once(prompt, size):
    cut = chunking.pieces(prompt, size)
    assert [i for a, b in cut for i in range(a, b)] == list(range(prompt))
    assert all(b - a == size for a, b in cut[:-1])


def test_however_it_is_cut_the_rows_are_the_same_and_so_is_the_next_token(model, bench):
    found = run_experiment("cache.chunks", {"model": model, "prompt_tokens": 128, "repeats": 2}, bench)
    assert [m.settings["chunk"] for m in found] == [1, 3, 7, 64, 128]
    assert [m.counts["model_calls"] for m in found] == [128, 43, 19, 2, 1]
    for m in found:
        assert m.counts["rows"] == 128 and len(m.samples) == 2
        assert "equals that of one pass without a cache" in m.check and m.counts["largest_difference"] < 1e-5


@pytest.mark.parametrize(("prompt", "size"), [(20, 3), (16, 8), (7, 7), (9, 1)])
def test_the_time_of_chunks_is_the_sum_of_their_steps(model, bench, prompt, size):
    seconds, _ = chunking.predicted_chunks(bench.ceilings(), model, prompt, size, "fast")
    steps = [
        predicted_step(bench.ceilings(), model, new_tokens=[b - a], contexts=[a])[1].seconds
        for a, b in chunking.pieces(prompt, size)
    ]
    assert seconds == pytest.approx(sum(steps))


def test_the_sum_over_many_chunks_is_close_without_predicting_all(model, bench):
    seconds, _ = chunking.predicted_chunks(bench.ceilings(), model, 201, 2, "fast")
    steps = [
        predicted_step(bench.ceilings(), model, new_tokens=[b - a], contexts=[a])[1].seconds
        for a, b in chunking.pieces(201, 2)
    ]
    assert seconds == pytest.approx(sum(steps), rel=0.01)


def test_a_learners_mask_that_is_wrong_for_later_chunks_is_told_so(model, bench):
    found = run_experiment(
        "cache.chunks", {"model": model, "prompt_tokens": 64, "repeats": 1}, bench, {"kv": LosesKeys}
    )
    yours = {m.settings["chunk"]: m.check for m in found if m.settings["by"] == "yours"}
    assert "equals that of one pass" in yours[64]
    assert any("Look at the mask and the positions" in check for check in yours.values())


def test_chunks_of_ours_that_were_wrong_would_never_be_timed(model, bench, monkeypatch):
    monkeypatch.setattr("workbench.kv.KINDS", {"recompute": Recompute, "contiguous": lambda c, **_: LosesKeys(c)})
    with pytest.raises(WorkbenchError, match="thrown away"):
        run_experiment("cache.chunks", {"model": model, "prompt_tokens": 64, "repeats": 1}, bench)


# -- cache.batch -----------------------------------------------------------------------------------------------


def test_sizes_and_lengths_of_a_batch():
    assert batches.batch_sizes(8) == [1, 2, 4, 8] and batches.batch_sizes(1) == [1]
    lengths = batches.ragged_lengths(8, 256)
    assert lengths[-1] == 256 and lengths == sorted(set(lengths)) and min(lengths) > 128
    assert batches.gain_lengths(256) == [4, 16, 64, 256] and batches.gain_lengths(8) == [4, 8]


@pytest.mark.parametrize("arrangement", ["plain", "fast"])
def test_sequences_together_write_what_each_writes_alone(model, bench, arrangement):
    asked = {"model": model, "sequences": 4, "prompt_tokens": 64, "new_tokens": 5, "arrangement": arrangement}
    found = run_experiment("cache.cache_batch", asked, bench)
    part = [m for m in found if m.settings["part"] == "batch"]
    assert [(m.settings["way"], m.settings["batch"]) for m in part] == [
        ("one by one", 1),
        ("together", 1),
        ("together", 2),
        ("together", 4),
    ]
    assert [m.counts["rows"] for m in part] == [16, 4, 8, 16]
    assert [m.counts["model_calls"] for m in part] == [16, 4, 4, 4]
    assert part[-1].check == "all 20 tokens equal those of each sequence alone"


def test_steps_with_and_without_a_cache_are_compared_at_every_length(model, bench):
    found = run_experiment(
        "cache.cache_batch", {"model": model, "sequences": 1, "prompt_tokens": 64, "new_tokens": 2}, bench
    )
    gain = [m for m in found if m.settings["part"] == "gain"]
    assert [(m.settings["length"], m.settings["way"], m.counts["rows"]) for m in gain] == [
        (n, way, rows) for n in (4, 16, 64) for way, rows in (("recompute", n), ("contiguous", 1))
    ]
    first = [m for m in found if m.settings["part"] == "first token"]
    assert [m.counts["rows"] for m in first] == [64, 64]  # one token asked: nothing to leave out


def test_a_small_model_on_a_large_card_is_launch_bound_and_gains_nothing_from_a_cache():
    gain = batches.predict_gain(PUBLISHED["h100-sxm"], model="stdlib-10m", prompt_tokens=64, arrangement="plain")
    for _, without, cached in gain:
        assert without.limit == cached.limit == "launch"
        assert without.seconds <= cached.seconds


def test_a_batch_that_mixed_up_its_sequences_would_never_be_timed(model, bench, monkeypatch):
    honest = batches._Together.send

    def swapped(self, new):
        honest(self, new)
        if len(self.names) > 1:
            self.logits = self.logits.flip(0)

    monkeypatch.setattr(batches._Together, "send", swapped)
    with pytest.raises(WorkbenchError, match=r"together, token .* thrown away"):
        run_experiment(
            "cache.cache_batch", {"model": model, "sequences": 4, "prompt_tokens": 64, "new_tokens": 5}, bench
        )


def test_experiments_leave_no_sequence_behind_when_they_are_stopped(model, bench, monkeypatch):
    made = []
    honest = batches.kv_for
    monkeypatch.setattr(batches, "kv_for", lambda *a, **k: (made.append(honest(*a, **k)), made[-1])[1])
    bench.report = lambda text: bench.stop.set() if text.startswith("together: 2") else None
    with pytest.raises(Stopped):
        run_experiment(
            "cache.cache_batch", {"model": model, "sequences": 2, "prompt_tokens": 16, "new_tokens": 3}, bench
        )
    assert made and all(not kv.lengths for kv in made)


# -- panels ----------------------------------------------------------------------------------------------------


def test_the_calculator_looks_at_no_ceilings(model):
    class NoCeilings(Bench):
        def ceilings(self):
            pytest.fail("the machine was measured for a sum of bytes")

    panel = panels.memory(bench=NoCeilings(), model="llama-2-70b", batch=64)
    assert panel.wait(30) and "85.9 GB (80.0 GiB)" in panel.said
    assert "10^9" in panel.said and "error" not in panel.status.value


@pytest.mark.parametrize("name", sorted(PUBLIC_SHAPES))
def test_the_calculator_draws_every_public_shape(make, name):
    panel = make("memory")
    view = panel.view({"model": name, "weights": "int4", "cache": "int8", "context": 1024, "batch": 4096})
    assert len(view.rows) == len(memory.CARDS_GB) and "bytes" in view.words


def test_regimes_are_named_in_words(make):
    assert "launch-bound" in make("token_times").said  # a tiny model on an H100's data sheet
    assert "launch-bound" in make("chunks").said
    assert "no gain to speak of: the step is launch-bound" in make("cache_batch").said


def test_a_learners_cache_is_drawn_and_its_first_wrong_token_is_named(make):
    panel = make("token_times", new_tokens=12)
    plain = panel.run() and panel.snapshot().data
    panel.run(kv=LosesKeys)
    assert "with your kv" in panel.status.value and panel.snapshot().data != plain
    assert re.search(r"With your cache: not the tokens of ours, from new token \d+ on", panel.said)
    panel.run(kv=lambda config: Contiguous(config))
    assert "With your cache: all 12 tokens so far equal" in panel.said


def test_a_learners_chunks_are_judged_in_words(make):
    panel = make("chunks")
    panel.run(kv=LosesKeys)
    assert "Look at the mask and the positions" in panel.said
    panel.run(kv=lambda config: Contiguous(config))
    assert "in every one of these chunkings the next token equals" in panel.said


def test_a_learners_mistake_is_shown_in_the_status_line(make):
    def broken(config):
        raise TypeError("no such thing <b>")

    panel = make("token_times")
    with pytest.raises(TypeError):
        panel.run(kv=broken)
    assert "TypeError: no such thing &lt;b&gt;" in panel.status.value


@pytest.mark.parametrize("name", ["token_times", "growth", "chunks", "cache_batch"])
def test_stop_ends_a_run_within_a_second(make, name):
    """The best of three, because a machine that runs ten other things takes a second to do nothing at all."""
    long = {
        "token_times": {"new_tokens": 200},
        "growth": {"new_tokens": 200, "max_tokens": 256},
        "chunks": {"prompt_tokens": 128, "repeats": 20},
        "cache_batch": {"sequences": 64, "prompt_tokens": 64, "new_tokens": 128},
    }
    panel = make(name, **long[name])
    taken = []
    for _ in range(3):
        panel.run_button.click()
        while "running: " not in panel.status.value:
            assert panel._worker.is_alive()
            time.sleep(0.005)
        started = time.monotonic()
        panel.stop_button.click()
        panel._worker.join(30)
        taken.append(time.monotonic() - started)
        assert panel.wait(30) and "stopped" in panel.status.value
    assert min(taken) < 1.0


def test_the_slot_shown_follows_the_slider_and_says_when_it_is_full(make):
    panel = make("growth", prompt_tokens=14, new_tokens=9)
    assert "at 16 the cache will refuse" in panel.said
    panel.run(shown_tokens=1)
    assert "15 tokens hold" in panel.said and "would grow to 17 tokens" in panel.said
    panel.configure(shown_tokens=0)
    assert panel.wait(30) and "14 tokens hold" in panel.said


def test_a_fast_model_that_is_handed_over_is_used_as_it_is(model, bench):
    fast = prepare(model)
    found = run_experiment("cache.token_times", {"model": fast, "prompt_tokens": 8, "new_tokens": 3}, bench)
    assert found[-1].settings["model"] == "tiny" and "equal those" in found[-1].check
    with pytest.raises(WorkbenchError, match="arranged for inference already"):
        run_experiment("cache.token_times", {"model": fast, "arrangement": "plain"}, bench)


def test_hostile_text_from_a_model_is_shown_inert():
    class Hostile:
        vocab_size = 4096

        def encode(self, _):
            return [5, 6, 7]

        def decode(self, ids):
            return "<script>x</script>" * len(ids)

        def token_text(self, _):
            return "<script>x</script>"

    hostile = random_decoder(tiny_config(), tokenizer=Hostile(), name="<img src=x>")
    for name in ("growth", "token_times"):
        small = {"max_tokens": 32} if name == "growth" else {}
        panel = getattr(panels, name)(model=hostile, prompt_tokens=8, new_tokens=3, bench=DataSheetBench(), **small)
        panel.run()
        shown = panel.said + panel.extra.value + panel.table.value + panel.status.value
        assert "<script" not in shown and "<img" not in shown and "error" not in panel.status.value
