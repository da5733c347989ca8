"""Claims about serving.peers: all serve the same requests on the same weights, texts are held against ours, nobody
polls."""

from __future__ import annotations

import importlib.util
import threading
import time

import pytest
import torch
from conftest import random_decoder, tiny_config

from workbench.errors import WorkbenchError
from workbench.experiments import run_experiment
from workbench.generation import generate
from workbench.labs.lab08_continuous_batching.contenders import (
    OURS,
    OURS_ALONE,
    OURS_STATIC,
    THEIR_STATIC,
    Asked,
    Contender,
    lone_thread,
    serve_continuously,
)
from workbench.labs.lab08_continuous_batching.peers import check_texts, of_lengths, ratios, requests_for
from workbench.models.checkpoints import save_checkpoint
from workbench.serving.bounds import gain_bound, static_batches
from workbench.serving.engine import Engine
from workbench.serving.load import requests_of
from workbench.serving.settings import SchedulerSettings

LLAMA_CPP = bool(importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf"))


@pytest.fixture(scope="module")
def model():
    """A small plain Llama: llama.cpp wants heads of 32 values or more."""
    shape = {"vocab_size": 96, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    return random_decoder(tiny_config(**shape, num_layers=1, intermediate_size=64))


@pytest.fixture(scope="module")
def asked(model) -> Asked:
    return requests_for(model, 6, 12, seed=1)


def alone(model, asked: Asked) -> list[list[int]]:
    return [
        generate(model, prompt, max_new_tokens=count, stop_token_ids=()).tokens
        for prompt, count in zip(asked.prompts, asked.new_tokens)
    ]


def test_requests_are_ragged_heavy_tailed_and_the_same_every_time(model):
    asked = requests_for(model, 64, 128, seed=5)
    assert asked == requests_for(model, 64, 128, seed=5) != requests_for(model, 64, 128, seed=6)
    assert [len(prompt) for prompt in asked.prompts] == [one.prompt_tokens for one in asked.arrivals]
    lengths = {len(prompt) for prompt in asked.prompts}
    assert min(lengths) >= 16 and max(lengths) <= 64 and len(lengths) > 20
    outputs = sorted(asked.new_tokens)
    assert outputs[0] >= 8 and outputs[-1] <= 128
    assert outputs[32] < 24 and outputs[-1] > 96, "half of them are short, a few are long"
    with pytest.raises(WorkbenchError, match="the context is 256"):
        requests_for(model, 64, 256, seed=5)


def test_prompts_are_held_out_text_where_there_is_a_tokenizer(tiny_model):
    asked = requests_for(tiny_model, 8, 16, seed=0)
    texts = [tiny_model.tokenizer.decode(prompt) for prompt in asked.prompts]
    assert len(set(texts)) == 8 and any("self" in text or "def " in text for text in texts)


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    save_checkpoint(model, folder)
    before = set(threading.enumerate())
    settings = {"model": str(folder), "requests": 6, "slots": 3, "most_new_tokens": 12, "seed": 1, "repeats": 2}
    measurements = run_experiment("serving.peers", settings)
    left = set(threading.enumerate()) - before
    assert all(type(thread).__name__ == "TMonitor" for thread in left), f"besides tqdm's own: {left}"
    return {m.settings["engine"]: m for m in measurements}


def test_all_engines_write_the_same_texts_on_the_same_weights(found):
    names = [OURS_ALONE, OURS_STATIC, OURS, "transformers, one by one", THEIR_STATIC, "transformers, continuous"]
    names += [f"llama.cpp, 3 slots, {how}" for how in ("float32 cache, no flash attention", "its defaults")] * LLAMA_CPP
    assert list(found) == names
    for name, m in found.items():
        assert m.unit == "s" and len(m.samples) == 2 and min(m.samples) > 0
        if name != "llama.cpp, 3 slots, its defaults":
            assert m.counts["texts_equal"] == 6, (name, m.check)
    assert "oracle" in found[OURS_ALONE].check and "token for token" in found[OURS].check


def test_its_counts_are_those_of_the_lengths(found, asked):
    static = static_batches(asked.arrivals, 3)
    for name in (OURS_STATIC, THEIR_STATIC):
        assert found[name].counts["padding_share"] == static.padding_share > 0
        assert found[name].counts["steps"] == static.steps
    assert found[OURS_ALONE].counts["steps"] == sum(asked.new_tokens) > static.steps
    counts = found[OURS].counts
    assert counts["padding_share"] == 0 and counts["rows"] == static.rows * (1 - static.padding_share)
    assert counts["bound"] >= gain_bound(asked.arrivals, 3)
    gain = counts["times_as_fast_as_our_static"]
    assert counts["share_of_bound"] == pytest.approx(gain / counts["bound"])
    assert found[THEIR_STATIC].counts["times_as_fast_as_transformers_static"] == 1.0


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_the_engine_computes_the_steps_and_rows_that_the_lengths_say(model, asked, batching):
    engine = Engine(model, SchedulerSettings(max_running=3, batching=batching), num_blocks=30)
    reports = []
    engine.run(requests_of(asked.prompts, asked.new_tokens), watch=reports.append)
    said = of_lengths(f"ours, {batching}", asked, 3, [1.0], [1.0])
    assert sum(report.rows for report in reports) == said["rows"]
    assert sum(report.rows > 0 for report in reports) == said["steps"]
    padding = sum(report.padding_rows for report in reports) / said["rows"]
    assert padding == pytest.approx(said["padding_share"])


def test_ratios_are_medians_over_the_turns_not_ratios_of_medians(asked):
    def ran(name, *samples):
        return Contender(name, run=None, samples=list(samples))

    ours, static = ran(OURS, 1.0, 1.0, 4.0), ran(OURS_STATIC, 2.0, 9.0, 12.0)
    found = ratios(ours, {OURS: ours, OURS_STATIC: static})
    assert found == {"times_as_fast_as_our_static": 3.0}  # of 2, 9 and 3; of the medians it would be 9
    assert of_lengths(OURS, asked, 3, ours.samples, static.samples)["share_of_bound"] == pytest.approx(
        3 / of_lengths(OURS, asked, 3, ours.samples, static.samples)["bound"]
    )


def test_a_text_that_is_not_greedy_is_refused_and_a_tie_is_counted(model, asked):
    texts = alone(model, asked)
    assert check_texts(model, asked, texts, None, exact=True)[0] == 6
    assert check_texts(model, asked, texts, texts, exact=True)[1].startswith("6 of 6")
    wrong = [list(text) for text in texts]
    wrong[2][1] = (wrong[2][1] + 1) % 96
    with pytest.raises(WorkbenchError, match="not greedy"):
        check_texts(model, asked, wrong, texts, exact=True)
    equal, said = check_texts(model, asked, wrong, texts, exact=False)
    assert equal == 5 and "not float32" in said
    # texts that are greedy and not equal to the others': what those would be after a tie
    assert check_texts(model, asked, texts, wrong, exact=True) == (
        5,
        "5 of 6 texts are ours one by one, token for token; the others are greedy up to 1e-4 of the largest logit",
    )
    for exact in (True, False):
        with pytest.raises(WorkbenchError, match="tokens where"):
            check_texts(model, asked, [texts[0][:-1], *texts[1:]], texts, exact=exact)


def test_a_thread_that_stays_is_an_error_and_one_that_ends_is_none():
    with lone_thread():
        thread = threading.Thread(target=time.sleep, args=(0,))
        thread.start()
        thread.join()
    done = threading.Event()
    with pytest.raises(WorkbenchError, match=r"1 threads behind \(poller\)"), lone_thread():
        thread = threading.Thread(target=done.wait, name="poller")
        thread.start()
    done.set()
    thread.join()


def test_a_manager_that_fails_or_ends_is_an_error_not_a_wait_for_ever(asked):
    class Result:
        request_id, error, generated_tokens = "0", "out of blocks", []

        def is_finished(self) -> bool:
            return True

    class Manager:
        def __init__(self, *answers) -> None:
            self.answers = list(answers)

        def add_request(self, ids, request_id, max_new_tokens) -> None: ...

        def is_running(self) -> bool:
            return False

        def get_result(self, timeout):
            return self.answers.pop() if self.answers else None

    with pytest.raises(WorkbenchError, match="ended with 6 requests unanswered"):
        serve_continuously(Manager(), asked)
    with pytest.raises(WorkbenchError, match="gave up a request: out of blocks"):
        serve_continuously(Manager(Result()), asked)


def test_what_cannot_be_compared_is_refused(model):
    with pytest.raises(WorkbenchError, match="in float32"):
        run_experiment("serving.peers", {"model": random_decoder(tiny_config()).to(torch.float64), "peers": "ours"})
    with pytest.raises(WorkbenchError, match="the context is 256"):
        run_experiment("serving.peers", {"model": model, "peers": "ours"})
