"""The engine in a process of its own answers as the one in a thread does, and is gone when the server is."""

from __future__ import annotations

import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from serving_claims import events, is_error
from test_server_load import LONG, SHORT, Command, wait_for

from workbench.decoding.guide import Guide
from workbench.decoding.sampling import SamplingSettings
from workbench.decoding.sequence import LogProb, NewToken, Request
from workbench.errors import WorkbenchError
from workbench.serving.api.guides import Guides
from workbench.serving.api.link import StepNews, Update
from workbench.serving.api.process import (
    EngineProcess,
    news_from_json,
    news_to_json,
    request_from_json,
    request_to_json,
)
from workbench.serving.offloading import MoveTotals, OffloadTotals, TierTotals

ASKED = [
    SHORT,
    SHORT | {"prompt": "def f(x):\n", "max_tokens": 20, "temperature": 0.9, "seed": 3, "n": 2, "stop": ["e"]},
    SHORT | {"prompt": [5, 6, 7], "logprobs": 2, "echo": True},
    SHORT | {"structured_outputs": {"regex": "[ab]{4}"}, "max_tokens": 30, "temperature": 1, "seed": 1},
]


def test_requests_and_news_are_the_same_after_the_way(small_model):
    tokenizer, vocab_size = small_model.tokenizer, small_model.config.vocab_size
    request = Request(
        (3, 0),
        (1, 2),
        5,
        sampling=SamplingSettings(temperature=0.5, top_k=3, logit_bias={3: -1.5}),
        seed=2**62,
        n=2,
        deadline_s=0.25,
        guide=Guide.regex("[ab]+", tokenizer, vocab_size=vocab_size),
        log_probs=2,
        prompt_log_probs=1,
    )
    again = request_from_json(json.loads(json.dumps(request_to_json(request))), Guides(tokenizer, vocab_size))
    assert again.guide.source == request.guide.source
    assert {**vars(again), "guide": None} == {**vars(request), "guide": None}
    token = NewToken(7, -0.5, "target", "plain", ((7, -0.5), (1, -2.0)))
    update = Update((3, 0), 1, (token,), "stop", None, (None, LogProb(2, -1.0, ((2, -1.0),))))
    news = StepNews(
        (update,),
        (((3, 0), 16),),
        4,
        0.1,
        0.2,
        0.01,
        0.005,
        (2, 1),
        (0, 9),
        1,
        ((4, 2),),
        0,
        ((3, 7),),
        1,
        5,
        40,
        16,
        ((3, 0),),
        (),
        0.003,
        OffloadTotals(30, 16, (TierTotals("host", 3, 8, 2, 1, 0, 0),), (MoveTotals("pool", "host", 4096, 0.001),)),
    )
    assert news_from_json(json.loads(json.dumps(news_to_json(news)))) == news


@pytest.fixture(scope="module")
def apart():
    command = Command("--engine-process", "--max-running", "8", "--drain-seconds", "5")
    command.wait_until_ready()
    yield command
    command.process.kill()


@pytest.mark.slow
def test_answers_are_those_of_an_engine_in_a_thread(server, apart):
    for body in ASKED:
        here = server.post("/v1/completions", body).json()
        there = httpx.post(apart.url + "/v1/completions", json=body, timeout=60).json()
        assert there["choices"] == here["choices"]
        streamed = httpx.post(apart.url + "/v1/completions", json=body | {"stream": True}, timeout=60)
        *chunks, done = events(streamed.text)
        assert done == "[DONE]"
        for choice in here["choices"]:
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            assert "".join(one["text"] for one in mine) == choice["text"]


@pytest.mark.slow
def test_what_is_wrong_is_refused_alike(server, apart):
    for change in ({"temperature": -1}, {"max_tokens": 9_999}, {"foo": 1}, {"structured_outputs": {"regex": "("}}):
        here = is_error(server.post("/v1/completions", SHORT | change), 400)
        assert is_error(httpx.post(apart.url + "/v1/completions", json=SHORT | change), 400) == here


@pytest.mark.slow
def test_it_ends_with_the_server_and_its_death_is_said(apart):
    [child] = psutil.Process(apart.process.pid).children()
    child.kill()
    wait_for(lambda: httpx.get(apart.url + "/health").status_code == 503)
    assert is_error(httpx.post(apart.url + "/v1/completions", json=LONG), 503)["code"] == "engine_dead"
    apart.process.send_signal(signal.SIGTERM)
    assert apart.process.wait(20) == 1  # it could not do its work


@pytest.mark.slow
def test_a_signal_to_both_processes_drains():
    """As a terminal and systemd send it: the engine goes on until the server has drained."""
    command = Command("--engine-process", "--max-running", "8", "--drain-seconds", "20")
    command.wait_until_ready()
    [child] = psutil.Process(command.process.pid).children()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, command.url + "/v1/completions", json=LONG | {"max_tokens": 400}, timeout=60)
        wait_for(lambda: b'running{model_name="stdlib-1m"} 1.0' in httpx.get(command.url + "/metrics").content)
        for process in (child, command.process):
            process.send_signal(signal.SIGTERM)
        assert asked.result().json()["usage"]["completion_tokens"] == 400
    assert command.process.wait(20) == 0, command.process.stderr.read()


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_engine():
    command = Command("--engine-process")
    command.wait_until_ready()
    [child] = psutil.Process(command.process.pid).children()
    command.process.kill()
    command.process.wait()
    until = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_process_that_ends_before_it_is_ready_says_why():
    words = "import sys; sys.stderr.write('workbench: error: no such model\\n'); sys.exit(2)"
    with pytest.raises(WorkbenchError, match=r"^no such model$"):
        EngineProcess([sys.executable, "-c", words])
    with pytest.raises(WorkbenchError, match="process ended"):
        EngineProcess([sys.executable, "-c", "pass"])
