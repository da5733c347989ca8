"""Lab 11, more than one engine: what is sent is as the formula says, tokens are those of one engine, and no arrangement
of devices serves more than its prefills allow. And the panels show every state."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import pytest
import torch
from conftest import random_decoder, tiny_config
from experiment_claims import ExperimentClaims, brief_runs
from panel_claims import PanelClaims

from workbench.errors import WorkbenchError
from workbench.experiments import experiment
from workbench.instruments.bench import Bench
from workbench.instruments.costs import kv_bytes
from workbench.labs.lab11_serving import pools, processes, replicas, transfer
from workbench.labs.lab11_serving.panels import pools as pools_panel
from workbench.models.checkpoints import load, shipped_tokenizer
from workbench.models.digest import model_digest
from workbench.panels.plots import matching
from workbench.parallel.alpha_beta import AlphaBeta
from workbench.parallel.disaggregated import DecodeEngine, InProcess, LinkLost, PrefillEngine
from workbench.parallel.replicas import LocalReplica
from workbench.serving.engine import Engine
from workbench.serving.load import workload
from workbench.serving.pool_goodput import arrangements

SMALL = {
    "server.transfer": {"context": 64, "repeats": 1},
    "server.beside_twin": {"requests": 8, "rate": 50.0, "repeats": 1},
    "server.pools": {"requests": 6},
    "server.replicas": {"documents": 3, "asked": 4, "document_tokens": 32, "repeats": 1},
}
MOVED = {
    "transfer": {"context": 96},
    "beside_twin": {"rate": 10.0},
    "pools": {"tpot_slo": 0.01},
    "replicas": {"asked": 5},
}


@pytest.fixture(scope="module")
def model():
    config = tiny_config(vocab_size=4096, context_length=256)
    return random_decoder(config, tokenizer=shipped_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def runs(model):
    return brief_runs(SMALL, model)


class TestExperiments(ExperimentClaims):
    lab, small = 11, SMALL


class TestPanels(PanelClaims):
    small, moved = SMALL, MOVED


@pytest.mark.parametrize("name", SMALL)
def test_a_slider_can_stand_at_every_default(name):
    for one in experiment(name).settings:
        if one.kind == "float":
            assert one.step and (one.default - one.low) / one.step == pytest.approx(
                round((one.default - one.low) / one.step)
            )


# -- a prompt's rows -----------------------------------------------------------------------------------------------


def test_rows_have_the_formulas_bytes_and_times_are_predicted_by_alpha_and_beta(runs, model):
    made = runs["server.transfer"]
    assert [m.settings["tokens"] for m in matching(made, measured="prefill")] == [32, 64]
    for m in matching(made, measured="send"):
        c = m.counts
        assert c["bytes"] == kv_bytes(model.config, m.settings["tokens"] - 1, 4)
        assert m.predicted == pytest.approx(AlphaBeta(c["alpha_s"], c["beta_s_per_byte"]).message_s(c["bytes"]))
    assert len(matching(made, measured="send")) == 2 * len(transfer.LINKS)
    assert len(matching(made, measured="pair")) == 2 * len(transfer.LINKS) * len(transfer.SENDING)


def test_the_pairs_first_token_waits_for_all_rows_or_for_those_of_the_last_layer(runs):
    """Prefill 100 ms, rows 40 ms in 4 layers, α 1 ms, a step 5 ms; and where the link is slower than the model."""
    one = transfer.Runs.of(range(101))
    one.prefill, one.decode, one.bytes = [0.1], [0.005], 1000
    link = AlphaBeta(0.001, 0.04 / 1000)
    assert transfer.expected_s(one, link, 4, transfer.AFTER) == pytest.approx(0.1 + 0.04 + 0.001 + 0.005)
    assert transfer.expected_s(one, link, 4, transfer.LAYERWISE) == pytest.approx(0.1 + 0.01 + 0.001 + 0.005)
    slow = AlphaBeta(0.001, 0.4 / 1000)
    assert transfer.expected_s(one, slow, 4, transfer.LAYERWISE) == pytest.approx(0.025 + 0.4 + 0.001 + 0.005)
    flat = AlphaBeta(0.001, 0.0)
    assert transfer.expected_s(one, flat, 4, transfer.AFTER) == pytest.approx(0.106)
    for m in matching(runs["server.transfer"], measured="pair"):
        own = {"tokens": m.settings["tokens"]}
        [prefill] = matching(runs["server.transfer"], measured="prefill", **own)
        assert m.predicted >= median(prefill.samples) + prefill.counts["decode_s"]


@contextmanager
def beside(model):
    """A decode engine, and a thread that prefills for it once in every way."""
    ours, theirs = InProcess.pair()
    settings, pool = transfer.settings_for(64), transfer.pool(64)
    each = [PrefillEngine(model, settings, link=theirs, layerwise=one, **pool) for one in (False, True)]

    def work():
        with suppress(LinkLost):
            transfer.send_rows(each[0])
            for engine in each:
                transfer.prefill_one(engine)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield DecodeEngine(model, settings, link=ours, **pool)
    finally:
        ours.close()
        thread.join(10)
    assert not thread.is_alive()


def alone(model) -> Engine:
    return Engine(model, transfer.settings_for(64), **transfer.pool(64))


def test_a_turn_takes_a_time_of_everything_and_writes_the_same_tokens_everywhere(model):
    runs = transfer.Runs.of(range(5, 45))
    with beside(model) as decode:
        transfer.take_turn(runs, 0, alone(model), {"shm": decode})
        assert not decode.kv.lengths and decode.kv.num_available == decode.kv.num_blocks
    assert runs.bytes == kv_bytes(model.config, 39, 4) and len(runs.written) == transfer.NEW_TOKENS
    taken = [runs.prefill, runs.decode, runs.sent["shm"], *(runs.pair["shm", one] for one in transfer.SENDING)]
    assert all(len(samples) == 1 and samples[0] > 0 for samples in taken)


def test_other_tokens_than_one_engine_writes_and_prompts_that_do_not_come_end_a_run(model):
    runs = transfer.Runs.of(range(5, 45))
    other = random_decoder(model.config, seed=1)
    with beside(model) as decode, pytest.raises(WorkbenchError, match="wrote other tokens than one engine"):
        transfer.take_turn(runs, 0, alone(other), {"shm": decode})
    with beside(model) as decode:
        transfer.time_sending(decode, runs.ids)
        decode.receiver.digest = "another"
        decode.run([runs.request(decode, 0)])
        assert decode.problems, "of which a turn says"
    with beside(model) as decode, pytest.raises(LinkLost, match="a message 'offer' came in place of 'layer'"):
        decode.receiver.want("a", runs.ids, "", 0.0)
        transfer.heard(decode.link, "layer")


def test_prompts_are_doubled_up_to_the_longest():
    assert transfer.lengths(64) == (32, 64) and transfer.lengths(512) == (64, 128, 256, 512)
    assert transfer.lengths(1022) == (127, 255, 511, 1022)


def test_a_model_in_memory_is_written_for_the_other_process_and_its_folder_is_gone_afterwards(model):
    with processes.for_processes(Bench(), model) as (folder, prepared):
        assert Path(folder).is_dir() and model_digest(prepared) == model_digest(load(folder)) == model_digest(model)
    assert not Path(folder).exists()
    bench = Bench()
    bench.device = "cuda"
    with pytest.raises(WorkbenchError, match="share the CPU"), processes.for_processes(bench, model):
        raise AssertionError("not there")
    threads = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), processes.one_thread():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == threads


# -- two processes and their simulation ------------------------------------------------------------------------------


def test_means_of_two_processes_stand_beside_those_of_the_twin(runs):
    ttft, tpot = runs["server.beside_twin"]
    assert (ttft.settings["measured"], tpot.settings["measured"]) == ("ttft", "tpot")
    for m in (ttft, tpot):
        assert len(m.samples) == 1 and m.counts["real_s"] == m.median > 0
        assert m.predicted > 0 and m.counts["replayed_s"] > 0 and "all 8 requests" in m.check


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_questions_are_answered_alike_and_no_more_is_found_than_the_formula_allows(runs):
    made = {m.settings["measured"]: m for m in runs["server.replicas"]}
    assert list(made) == [*replicas.CONTENDERS]
    for name, m in made.items():
        c = m.counts
        assert 0 <= c["hit_tokens"] <= replicas.max_hits(name, 3, 4, 32) == c["max_hit_tokens"]
        assert c["tokens_per_s"] == pytest.approx(12 * replicas.NEW_TOKENS / m.median)
        assert c["on_replica_0"] + c.get("on_replica_1", 0) == 12
    assert made["round_robin"].counts["on_replica_0"] == 6 and "on_replica_1" not in made[replicas.WIDE].counts
    assert made["round_robin"].counts["as_fast_as_in_turns"] == 1


def test_each_document_is_computed_once_or_on_each_engine():
    assert replicas.max_hits("prefix", 5, 6, 200) == (30 - 5) * 192 == replicas.max_hits(replicas.WIDE, 5, 6, 200)
    assert replicas.max_hits("round_robin", 5, 6, 192) == (30 - 2 * 5) * 192
    assert replicas.max_hits("round_robin", 4, 6, 192) == (24 - 4) * 192, "an even number: each on one engine"
    first, second = (replicas.questions(3, 2, 32, 64, tenant) for tenant in "ab")
    assert [one.prompt_ids for one in first] == [one.prompt_ids for one in second]
    assert len({one.prompt_ids[:32] for one in first}) == 3 and {one.tenant for one in second} == {"b"}


def test_a_question_that_ends_with_an_error_ends_the_run(model):
    made = [LocalReplica(Engine(model, replicas.EACH, num_blocks=64)) for _ in range(2)]
    asked = replicas.questions(3, 2, 32, model.config.vocab_size, "a")
    served = replicas.Served()
    replicas.serve(Bench(), made, "prefix", asked, served)
    assert len(served.texts) == sum(served.requests) == 6 and served.hits == [0], "all were begun at once"
    broken = [dataclasses.replace(one, prompt_ids=one.prompt_ids * 9) for one in asked]
    with pytest.raises(WorkbenchError, match="context"):
        replicas.serve(Bench(), made, "prefix", broken, served)


# -- arrangements of devices -----------------------------------------------------------------------------------------


def test_every_arrangement_has_whole_groups_and_no_more_than_its_prefills_allow(runs):
    made = runs["server.pools"]
    assert [m.settings["arrangement"] for m in made] == [
        *("prefill first", "chunked 128", "chunked 256", "chunked 512", "chunked 2048"),
        *("1P2D", "1P1D", "2P1D", "5P1D"),
    ]
    assert all(pools.DEVICES % (p + d) == 0 for p, d in pools.RATIOS)
    for m in made:
        assert 0 <= m.median < m.predicted and m.counts["runs"] > 2
        assert (m.counts["attainment"] >= pools.SHARE) == (m.median > 0)
    shares = {m.settings["arrangement"]: m.counts["prefill_share"] for m in made}
    assert shares["prefill first"] == shares["chunked 256"] == 1 and shares["2P1D"] == pytest.approx(2 / 3)


def test_prefill_alone_is_the_mean_of_prompts_one_at_a_time(runs):
    asked = workload("code")
    counted = lambda shape: shape.rows * 1e-5  # noqa: E731
    prompts = [one.prompt_tokens for one in asked.draw(6, seed=0)]
    assert pools.mean_prefill_s(asked, 6, counted) == pytest.approx(1e-5 * sum(prompts) / 6)
    assert {pools.kind_of(one) for one in arrangements()} == {*pools.KINDS}


def test_the_words_compare_with_prefill_first_and_with_chunks(runs):
    def good(m, value):
        return dataclasses.replace(m, samples=[value])

    values = {"prefill first": 2.0, "chunked 256": 8.0, "2P1D": 6.0}
    made = [good(m, values.get(m.settings["arrangement"], 1.0)) for m in runs["server.pools"]]
    words = pools_panel._words(made, {"workload": "code"})
    assert "best 2P1D: 6, 3.0 × that." in words and "best 256 tokens: 8, 4.0 × that of prefill first" in words
    assert "has 0.75 times the goodput" in words
    assert "×" not in pools_panel._words([good(m, 0.0) for m in made], {"workload": "code"})
