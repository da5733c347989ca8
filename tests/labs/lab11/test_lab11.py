"""Lab 11: what comes over the socket is what the engine writes, counted exactly; and its panels show every state."""

from __future__ import annotations

import pytest
from conftest import random_decoder, tiny_config
from experiment_claims import DataSheetBench, ExperimentClaims, brief_runs
from panel_claims import PanelClaims, shown

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.experiments import experiment, run_experiment
from workbench.labs.lab11_serving import loads, offload, overload
from workbench.labs.lab11_serving.breakdown import KINDS, PARTS, REST, TOKEN
from workbench.labs.lab11_serving.choose import ARRANGEMENTS, DEFAULT, Configuration, Served, better, grid
from workbench.labs.lab11_serving.definitions import DUE, SENT, TOOLS
from workbench.labs.lab11_serving.knee import SHARES
from workbench.labs.lab11_serving.live import phases
from workbench.labs.lab11_serving.loopback import ask, body_for, loopback, on_a_loop, text_of
from workbench.labs.lab11_serving.ordering import NEW_TOKENS, ORDERS, QUESTION, pool, questions
from workbench.labs.lab11_serving.panels.overload import bins
from workbench.labs.lab11_serving.tiers import SOURCES, Predicted, lengths_of
from workbench.models.checkpoints import shipped_tokenizer
from workbench.serving import Engine, Request, SchedulerSettings

# as many key heads as query heads, and most of it in its layers
DEEP = random_decoder(tiny_config(vocab_size=512, num_layers=16, num_kv_heads=4), name="deep")
SMALL = {
    "server.breakdown": {"prompt_tokens": 12, "new_tokens": 6, "repeats": 2},
    "server.overhead": {"engine": "thread", "requests": 4, "slots": 2, "max_new_tokens": 12, "repeats": 2},
    "server.definitions": {"requests": 24, "max_running": 2, "load": 3.0},
    "server.knee": {"requests": 8, "max_running": 4},
    "server.overload": {"seconds": 0.5, "max_running": 4},
    "server.ordering": {"documents": 12, "asked": 3, "document_tokens": 64, "repeats": 1},
    "server.tiers": {"longest": 128, "points": 2, "link_ms": 2.0, "repeats": 1},
    "server.choose": {"weights": "as they are", "requests": 8, "checked": 2, "repeats": 1},
    "server.offload": {"model": DEEP, "batch": 2, "prompt_tokens": 4, "new_tokens": 3, "device": 1.0, "repeats": 2},
    "server.live": {"seconds": 0.6, "max_running": 2, "every": 0.2},
}
MOVED = {
    "breakdown": {"new_tokens": 7},
    "overhead": {"slots": 3},
    "definitions": {"load": 1.2},
    "knee": {"max_running": 5},
    "overload": {"max_running": 5},
    "ordering": {"asked": 4},
    "tiers": {"link_ms": 3.0},
    "choose": {"goal": "cost"},
    "offload": {"batch": 4},
    "live": {"max_running": 3},
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


def by(made, *names):
    return {tuple(m.settings[name] for name in names) if len(names) > 1 else m.settings[names[0]]: m for m in made}


@pytest.mark.parametrize("name", SMALL)
def test_a_slider_can_stand_at_every_default(name):
    """A page moves it to the nearest step from its lower end, and what was measured is then of other settings."""
    for one in experiment(name).settings:
        if one.kind == "float":
            for value in filter(None, (one.default, one.brief)):
                assert one.step and (value - one.low) / one.step == pytest.approx(round((value - one.low) / one.step))


def test_what_was_measured_is_shown_where_a_slider_is_off_by_the_last_bit(model, runs):
    panel = shown("knee", **{"model": model, **SMALL["server.knee"]})
    panel.measurements = runs["server.knee"]
    assert 0.05 + 2 * 0.05 != 0.15 == panel.settings["ttft_slo"]
    assert panel.view({**panel.settings, "ttft_slo": 0.05 + 2 * 0.05}).rows


# -- one request ---------------------------------------------------------------------------------------------------


def test_parts_of_a_request_and_what_is_not_explained_are_the_clients_whole_time(runs):
    parts = by(runs["server.breakdown"], "measured", "part")
    assert len(parts) == len(KINDS) * (len(PARTS) + 3)
    for kind in KINDS:
        whole = parts[kind, "all"].samples
        for at, seconds in enumerate(whole):
            assert sum(parts[kind, part].samples[at] for part in (*PARTS, REST)) == pytest.approx(seconds, abs=1e-9)
        outside = [(a - b - c) / 6 for a, b, c in zip(whole, *(parts[kind, p].samples for p in ("prefill", "decode")))]
        assert parts[kind, TOKEN].samples == pytest.approx(outside)
        assert parts[kind, "all"].counts["tokens"] == parts[kind, "all"].counts["steps"] == 6
        assert all(min(parts[kind, part].samples) > 0 for part in PARTS)
        assert parts[kind, "prefill"].predicted > 0 and parts[kind, "decode"].predicted > 0


def test_a_stream_a_whole_answer_and_the_engine_write_the_same_text(model):
    engine = Engine(model, SchedulerSettings(max_running=2, remember=False), num_blocks=32, prefix=None)
    prompt = tuple(range(5, 15))
    [alone] = Engine(model, num_blocks=32).run([Request(0, prompt, 9, stop_token_ids=())])
    bench = DataSheetBench()
    with loopback(engine) as server:
        answers = [
            on_a_loop(bench, lambda stream=stream: ask(server, body_for(prompt, 9, stream=stream)))
            for stream in (True, False)
        ]
        with pytest.raises(WorkbenchError, match="status 400"):
            on_a_loop(bench, lambda: ask(server, {"prompt": "x", "tempratur": 1})).text()
    assert {one.text() for one in answers} == {text_of(alone.token_ids, prompt, model.tokenizer)}
    assert [one.tokens() for one in answers] == [9, 9] and len(answers[0].objects()) > len(answers[1].objects()) == 1


def test_a_server_that_cannot_start_says_why():
    def broken():
        raise WorkbenchError("there is no such engine")

    with pytest.raises(WorkbenchError, match="no such engine"), loopback(broken):
        raise AssertionError("it started")


def test_an_answer_of_another_length_is_no_answer(model):
    arrivals = loads.requests_at(None, 2, 0)
    bench, engine = DataSheetBench(), loads.engine_for(model, max_running=2)
    with loopback(engine) as server:
        recording = loads.send(bench, server, arrivals)
    assert loads.served_tokens(recording, arrivals) == sum(one.new_tokens for one in arrivals)
    with pytest.raises(WorkbenchError, match="were asked for"):
        loads.served_tokens(recording, arrivals[::-1])


# -- the server beside the engine -------------------------------------------------------------------------------


def test_every_way_writes_the_texts_of_the_engine(runs):
    made = by(runs["server.overhead"], "measured")
    assert list(made) == ["Engine.run", "whole", "streamed"]
    assert {m.counts["texts_equal"] for m in made.values()} == {4} and len(
        {m.counts["tokens"] for m in made.values()}
    ) == 1
    assert made["Engine.run"].counts["as_fast_as_engine"] == 1


def test_the_process_of_the_engine_wants_a_model_by_name(model):
    with pytest.raises(WorkbenchError, match="by name"):
        run_experiment("server.overhead", {"model": model, **SMALL["server.overhead"], "engine": "thread and process"})


# -- words -------------------------------------------------------------------------------------------------------


def test_one_run_is_described_by_six_tools_and_failures_are_left_out_by_five(runs):
    made = by(runs["server.definitions"], "measured")
    assert list(made) == [*TOOLS, DUE, SENT]
    ours, others = made["ours"].counts, [made[tool].counts for tool in TOOLS[1:]]
    assert ours["requests"] == 24 and {c["requests"] + c["failed"] for c in others} == {24}
    assert ("ttft_s" in ours) == (ours["failed"] == 0) and all("ttft_s" in c for c in others)
    assert made[DUE].counts["requests"] == made[SENT].counts["requests"] == 24
    assert all(due >= sent for due, sent in zip(made[DUE].samples, made[SENT].samples))


# -- under load --------------------------------------------------------------------------------------------------


def test_all_requests_of_every_rate_are_answered(runs):
    made = runs["server.knee"]
    assert [m.settings["share"] for m in made] == [*SHARES]
    for m in made:
        assert m.counts["answered"] == len(m.samples) == 8 and 0 <= m.counts["good"] <= 8
        assert m.counts["simulated_ttft_p50_s"] == pytest.approx(m.predicted) and m.predicted > 0


def test_who_is_let_in_is_answered_and_who_is_not_is_refused(runs):
    made = by(runs["server.overload"], "measured")
    assert list(made) == [*overload.MODES]
    for mode, m in made.items():
        c, rows = m.counts, m.settings["requests"]
        assert c["answered"] + c["refused"] == c["requests"] == len(rows)
        assert c["answered"] == len(m.samples) == sum(ttft >= 0 for _, ttft, _ in rows)
        assert c["good"] == sum(good for *_, good in rows) and (mode == overload.ADMITTED or not c["refused"])
        last = max(due for due, *_ in rows)
        assert sum(n for _, n in bins(m, last)) * last / 8 == pytest.approx(c["good"])


def test_the_order_changes_hits_and_not_texts(runs):
    made = by(runs["server.ordering"], "measured")
    assert list(made) == [*ORDERS]
    first, match = (made[order].counts for order in ORDERS)
    assert first["requests"] == 36 and first["prompt_tokens"] == 36 * (64 + QUESTION)
    assert (first["hit_tokens"], match["hit_tokens"]) == (0, 1536)
    for c in (first, match):
        assert c["rows"] == c["prompt_tokens"] - c["hit_tokens"] + 36 * (NEW_TOKENS - 1)


def test_questions_go_round_the_documents_and_the_pool_is_small_beside_them():
    asked = questions(3, 2, 32)
    assert [one.texts[0][0] for one in asked] == ["document 0", "document 1", "document 2"] * 2
    assert len({one.name for one in asked}) == 6 and pool(256) * loads.BLOCK < 8 * 256


# -- tiers --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_comes_again_is_found_whole_in_every_tier_with_the_same_answer(runs):
    made = by(runs["server.tiers"], "measured", "tokens")
    assert list(made) == [(source, tokens) for tokens in (32, 128) for source in SOURCES]
    for (source, tokens), m in made.items():
        assert m.counts["found"] == (0 if source == "computed" else tokens)
        assert m.counts["bytes"] == m.counts["found"] * 2 * 2 * 2 * 8 * 4  # layers, key and value, heads, size, bytes
        assert (m.counts["load_s"] > 0) == (source != "computed") and m.check.startswith("all 4 answers")
    for tokens in (32, 128):
        assert made["link", tokens].counts["load_s"] >= 2e-3 + made["link", tokens].counts["bytes"] / 1e8


def curves(prefill_s: float, load_s: float, once_s: float) -> Predicted:
    return Predicted(lambda n: n * prefill_s, lambda n: 0.0, {"link": lambda n: once_s + n * load_s})


def test_loading_pays_from_the_first_block_where_it_is_predicted_to_be_faster():
    assert curves(1e-3, 1e-4, 0.0).break_even("link", 256) == 16
    assert curves(1e-3, 5e-4, 0.02).break_even("link", 256) == 48  # equal at 40
    assert curves(1e-3, 5e-4, 0.02).break_even("link", 32) is None
    assert curves(1e-3, 2e-3, 0.0).break_even("link", 256) is None


@pytest.mark.parametrize(
    ("longest", "points", "lengths"), [(960, 6, [32, 64, 128, 240, 480, 960]), (32, 8, [32]), (48, 2, [32, 48])]
)
def test_the_lengths_are_whole_blocks(longest, points, lengths):
    assert lengths_of(longest, points) == lengths


# -- choosing -----------------------------------------------------------------------------------------------------


def test_the_twin_ranks_all_and_the_machine_checks_the_best_and_the_default(runs):
    made = runs["server.choose"]
    twin = [m for m in made if m.settings["measured"] == "twin"]
    machine = [m for m in made if m.settings["measured"] == "machine"]
    every = grid([one for one in ARRANGEMENTS if one[0] == "as they are"])
    assert {m.settings["configuration"] for m in twin} == {str(one) for one in every} and len(twin) == len(every)
    assert [m.median for m in twin] == sorted((m.median for m in twin), reverse=True)
    assert [m.settings["configuration"] for m in machine[:2]] == [m.settings["configuration"] for m in twin[:2]]
    assert str(DEFAULT) in {m.settings["configuration"] for m in machine}
    assert min(m.counts["worse_than_best"] for m in machine) == 0
    predicted = {m.settings["configuration"]: m.median for m in twin}
    assert all(m.predicted == predicted[m.settings["configuration"]] for m in machine)


def test_scores_are_in_the_goals_units():
    served = Served(seconds=2.0, latency_s=0.5, tokens=400)
    assert served.score("latency", 1e9) == 0.5 and served.score("throughput", 1e9) == 200
    assert served.score("cost", 3e9) == pytest.approx(3 * 2 / 0.4)
    assert better("throughput", 2) < better("throughput", 1) and better("cost", 1) < better("cost", 2)
    assert str(Configuration(4, 32, "int8", "int8", "none")) == "4 running, budget 32, weights int8, kv int8"


def test_the_command_prints_how_to_start_the_best_that_was_measured(runs, monkeypatch, capsys):
    monkeypatch.setattr("workbench.experiments.run_experiment", lambda name, settings, bench: runs[name])
    assert main(["choose", "stdlib-1m", "--for", "throughput"]) == 0
    machine = [m for m in runs["server.choose"] if m.settings["measured"] == "machine"]
    best = next(m for m in machine if not m.counts["worse_than_best"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"workbench serve stdlib-1m {best.settings['options']}" and len(lines) == len(machine) + 2
    assert Configuration(4, 32, "int8", "int8", "none").options == (
        "--max-running 4 --token-budget 32 --weights int8 --kv int8"
    )


# -- a model larger than its device ---------------------------------------------------------------------------------


def test_flexgens_table_stands_beside_its_cost_model_first(runs):
    lines = by([m for m in runs["server.offload"] if m.settings["measured"] == "published"], "shape")
    assert [m.settings["measured"] for m in runs["server.offload"][:3]] == ["published"] * 3
    ratios = {name: m.counts["by_model"] / m.median for name, m in lines.items()}
    within = [name for name, ratio in ratios.items() if abs(ratio - 1) < 0.15]
    assert within == ["opt-30b"] and ratios["opt-6.7b"] > 2 and ratios["opt-175b"] < 0.25
    assert lines["opt-6.7b"].counts["with_bandwidth"] / lines["opt-6.7b"].median == pytest.approx(1.198, abs=0.002)
    for m in lines.values():
        assert m.counts["by_program"] >= 0.98 * m.counts["by_model"], "one that fits, by the model, and is as good"


def test_every_plan_of_every_block_writes_the_plain_models_tokens_within_the_limit(runs):
    made = by([m for m in runs["server.offload"] if m.settings["measured"] == "run"], "plan", "batches")
    assert set(made) == {(plan, batches) for plan in offload.PLANS for batches in offload.BATCHES}
    layers = sum(p.nbytes for layer in DEEP.layers for p in layer.parameters() if p.dim() > 1)
    for (plan, batches), m in made.items():
        c = m.counts
        assert c["block"] == 2 * batches and len(m.samples) == 2 and m.predicted > 0
        assert c["peak_bytes"] == c["needed_bytes"] <= c["limit_bytes"]
        assert sum(c[f"weights_{tier}"] for tier in ("device", "host", "disk")) == pytest.approx(1)
        if plan == "all on disk":
            assert c["read_bytes"] == 3 * layers and c["up_bytes"] == 3 * layers
        if plan == "all in the host":
            assert c["read_bytes"] == 0 and c["up_bytes"] == 3 * layers
        assert c["least_ratio"] <= c["predicted_over_measured"] <= c["largest_ratio"]
    names = {m.settings["constant"] for m in runs["server.offload"] if m.settings["measured"] == "constant"}
    assert names == set(offload.CONSTANTS)


def test_the_program_may_put_the_cache_on_disk(monkeypatch):
    """Where the host has no room left it does."""
    shares = offload.Shares(offload.IN_HOST, (0.5, 0.0, 0.5))
    monkeypatch.setattr(offload, "PLANS", {"with a cache on disk": shares})
    made = run_experiment("server.offload", {**SMALL["server.offload"], "repeats": 1}, DataSheetBench())
    assert all(m.counts["written_bytes"] > 0 for m in made if m.settings["measured"] == "run")


def test_a_run_with_other_tokens_or_bytes_is_not_reported(monkeypatch):
    settings = {**SMALL["server.offload"], "repeats": 1}
    real = offload.Offloaded.formula
    monkeypatch.setattr(offload.Offloaded, "formula", lambda self: {**real(self), "disk → host": -1})
    with pytest.raises(WorkbenchError, match="bytes were moved where the formula has"):
        run_experiment("server.offload", settings, DataSheetBench())
    monkeypatch.setattr(offload, "_plain_tokens", lambda *_: [[0, 0, 0]] * 16)
    with pytest.raises(WorkbenchError, match="other tokens than the plain model's"):
        run_experiment("server.offload", settings, DataSheetBench())


# -- live -----------------------------------------------------------------------------------------------------------


def test_the_last_look_has_every_request_done_and_every_token(runs):
    made = runs["server.live"]
    last = made[-1]
    assert last.counts["came"] == last.counts["done"] == last.counts["requests"] and last.counts["waiting"] == 0
    assert f"{last.counts['tokens']:,.0f} tokens" in last.check
    for m in made:
        for came, begun, first, latest, gap, done in m.settings["rows"]:
            assert (begun < 0 or came <= begun) and (first < 0 or begun <= first <= latest) and gap >= 0
            assert not done or latest >= 0


def test_a_burst_lies_between_two_quieter_thirds():
    asked = phases(30.0, 9.0, 3.0)
    counts = [sum(3 * third <= one.at_s < 3 * (third + 1) for one in asked) for third in range(3)]
    assert counts[1] > 2 * max(counts[0], counts[2]) and len({one.name for one in asked}) == len(asked)
    assert [one.at_s for one in asked] == sorted(one.at_s for one in asked)
