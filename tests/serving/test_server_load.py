"""Under pressure: clients that leave or send nonsense, a full queue, a shutdown. Other requests are unaffected, and
nothing is left: no block, no sequence, no task."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from serving_claims import engine_of, events, is_error, serving

from workbench.errors import WorkbenchError
from workbench.serving.api import calls, completing
from workbench.serving.api.app import build_app
from workbench.serving.api.serve import listening
from workbench.serving.api.settings import ServerSettings

MODEL = "stdlib-1m"
LONG = {"model": MODEL, "prompt": "import os\n", "max_tokens": 900, "temperature": 1.0, "ignore_eos": True}
SHORT = {"model": MODEL, "prompt": "import os\n", "max_tokens": 4, "temperature": 0}


def head(body: bytes, path: str = "/v1/completions", more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


def wait_for(condition, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.002)


# -- clients that leave ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_blocks_back_within_a_step(server, stream):
    with socket.create_connection(server.address) as connection:
        connection.sendall(head(json.dumps(LONG | {"stream": stream}).encode()))
        wait_for(server.blocks_used)
        if stream:
            assert connection.recv(100)
    left_at = server.engine.scheduler.steps
    server.wait_until_empty()
    assert counted(server)["workbench:http_requests_total499"] >= 1
    # the event loop hears of it between two steps, and the engine takes the abort before the next: one may be under way
    assert server.engine.scheduler.steps - left_at < 200
    assert server.post("/v1/completions", SHORT).status_code == 200


def test_a_sample_that_a_stop_string_ended_is_computed_no_further(small_model):
    """The others go on: rows of decodes are about as many as tokens, and not n times the longest."""
    decodes = []
    with serving(engine_of(small_model), name=MODEL, watch=[lambda news: decodes.append(news.decodes)]) as running:
        body = LONG | {"n": 4, "max_tokens": 300, "seed": 5, "stop": ["return"], "prompt": "class A:\n    def f("}
        answer = running.post("/v1/completions", body).json()
        tokens, reasons = answer["usage"]["completion_tokens"], [one["finish_reason"] for one in answer["choices"]]
        running.wait_until_empty()
    assert reasons.count("stop") >= 1 and tokens < 900
    assert sum(decodes) <= tokens + 200 < 4 * 300  # some steps are under way when the abort comes


def test_one_that_leaves_in_the_queue_takes_its_place_with_it(small_model):
    engine = engine_of(small_model, settings={"max_running": 1})
    with serving(engine, name=MODEL) as running:
        with socket.create_connection(running.address) as first, socket.create_connection(running.address) as second:
            first.sendall(head(json.dumps(LONG).encode()))
            wait_for(running.blocks_used)
            second.sendall(head(json.dumps(LONG).encode()))
            wait_for(lambda: running.front.admission.queued_requests == 1)
            second.close()
            wait_for(lambda: running.front.admission.queued_requests == 0)
        running.wait_until_empty()


def test_a_client_that_stops_reading_is_cut(small_model):
    """Its answer does not fit the buffers between us: after send_seconds the connection is dropped."""
    settings = ServerSettings(send_seconds=0.2)
    engine = engine_of(small_model, settings={"max_running": 16})
    with serving(engine, settings, name=MODEL) as running:
        body = json.dumps(LONG | {"stream": True, "n": 16, "logprobs": 20, "max_tokens": 1000}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(running.address)
            connection.sendall(head(body))
            wait_for(running.blocks_used)
            running.wait_until_empty(60)  # though it never reads


# -- bytes that are no request ----------------------------------------------------------------------

GOOD = head(json.dumps(SHORT).encode())


@pytest.mark.parametrize(
    "data, status",
    [
        (b"hello\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no host
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5, 6\r\n\r\nabcdef", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n", 400),
        (b"GET /health\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\nZZ\r\nabc\r\n",
            None,
        ),
        (b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n", 200),
        (GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
        (GOOD + GOOD, 200),  # pipelined
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_http_is_an_error_or_a_closed_connection(server, data, status):
    """None: the connection is closed, with or without an answer."""
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(data)
        answer = b""
        try:
            while not re.search(rb"\r\n\r\n.*[}\n]", answer, re.S) or (
                data == GOOD + GOOD and answer.count(b"HTTP/") < 2
            ):
                part = connection.recv(65_536)
                if not part:
                    break
                answer += part
        except ConnectionResetError:
            assert status is None
    if status is not None:
        assert answer.split(b" ", 2)[1] == str(status).encode(), answer[:300]
        if status >= 400:
            assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"error"}
        assert answer.count(b"HTTP/1.1 200") == (2 if data == GOOD + GOOD else status == 200)
    assert server.post("/v1/completions", SHORT).status_code == 200


def test_headers_that_drip_and_bodies_that_never_end_are_cut(small_model):
    settings = ServerSettings(header_seconds=0.3, body_seconds=0.3)
    with serving(engine_of(small_model), settings, name=MODEL) as running:
        assert b" 408 " in running.raw(b"GET /health HT", more=True)
        assert b" 408 " in running.raw(b"", more=True)
        body = head(b"").replace(b"content-length: 0", b"content-length: 100") + b'{"model"'
        assert b" 408 " in running.raw(body, more=True)
        with socket.create_connection(running.address, timeout=20) as connection:  # a second request on one connection
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b""
            while b"ok" not in answer:
                answer += connection.recv(65_536)
            connection.sendall(b"GET /hea")
            assert b" 408 " in connection.recv(65_536)
        assert httpx.get(running.url + "/health").status_code == 200


def test_a_chunked_body_without_an_end_is_cut_at_the_limit(small_model):
    with serving(engine_of(small_model), ServerSettings(max_body_bytes=10_000), name=MODEL) as running:
        start = head(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        answer = running.raw(
            start + b"1000\r\n" + b"x" * 4096 + b"\r\n" + (b"1000\r\n" + b"x" * 4096 + b"\r\n") * 4, more=True
        )
        assert b" 413 " in answer


def test_more_connections_than_allowed_are_refused_and_later_ones_are_served(small_model):
    with serving(engine_of(small_model), ServerSettings(max_connections=3), name=MODEL) as running:
        held = [socket.create_connection(running.address) for _ in range(3)]
        time.sleep(0.05)
        assert b" 503 " in running.raw(b"", more=True)
        for connection in held:
            connection.close()
        wait_for(lambda: httpx.get(running.url + "/health").status_code == 200)


# -- who may ask ----------------------------------------------------------------------


def test_keys_are_asked_for_everywhere_but_at_health(small_model):
    with serving(engine_of(small_model), name=MODEL, keys=["secret-key-1", "secret-key-2"], hosts=None) as running:
        for key in ("", "secret-key", "secret-key-11", "Secret-key-1", "\x7f" * 3):
            with pytest.raises(openai.AuthenticationError) as error:
                running.client(key=key or "-").models.list()
            assert error.value.code == "invalid_api_key"
        for key in ("secret-key-1", "secret-key-2"):
            assert running.client(key=key).completions.create(model=MODEL, prompt="a", max_tokens=1).choices
        is_error(httpx.get(running.url + "/metrics"), 401)
        is_error(httpx.get(running.url + "/metrics", headers={"authorization": "Basic secret-key-1"}), 401)
        assert httpx.get(running.url + "/health").status_code == httpx.get(running.url + "/ready").status_code == 200


@pytest.mark.parametrize("keys", [[], ["short"], ["long-enough", "x"]])
def test_keys_that_are_no_keys_are_refused(small_model, keys):
    with pytest.raises(WorkbenchError, match="API keys"):
        build_app(engine_of(small_model), keys=keys)


def test_a_server_on_loopback_answers_to_loopbacks_names_alone(server):
    is_error(httpx.get(server.url + "/v1/models", headers={"host": "evil.example:80"}), 403)
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert httpx.get(server.url + "/v1/models", headers={"host": host}).status_code == 200


# -- who is let in ----------------------------------------------------------------------


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(small_model):
    engine = engine_of(small_model, settings={"max_running": 2})
    with serving(engine, ServerSettings(max_queued_requests=3), name=MODEL) as running, ThreadPoolExecutor(8) as pool:
        with engine._turn:  # no step begins
            asked = [pool.submit(running.post, "/v1/completions", LONG | {"max_tokens": 30}) for _ in range(3)]
            wait_for(lambda: running.front.admission.queued_requests == 3)
            refused = running.post("/v1/completions", SHORT)
            assert is_error(refused, 429)["code"] == "queued_requests"
            assert 1 <= int(refused.headers["retry-after"]) < 600
            with pytest.raises(openai.RateLimitError):
                running.openai.completions.create(**SHORT)
            is_error(running.post("/v1/completions", SHORT | {"prompt": ["a", "b"]}), 429)
        assert all(one.result().status_code == 200 for one in asked)
        assert running.post("/v1/completions", SHORT).status_code == 200
        assert counted(running)["workbench:requests_refused_totalqueued_requests"] == 3


def test_queued_tokens_are_limited_too(small_model):
    engine = engine_of(small_model, settings={"max_running": 1})
    with serving(engine, ServerSettings(max_queued_tokens=600), name=MODEL) as running, ThreadPoolExecutor(4) as pool:
        with engine._turn:
            asked = pool.submit(running.post, "/v1/completions", SHORT | {"prompt": [5] * 500})
            wait_for(lambda: running.front.admission.queued_tokens == 500)
            refused = running.post("/v1/completions", SHORT | {"prompt": [5] * 200})
            assert is_error(refused, 429)["code"] == "queued_tokens"
            assert is_error(running.post("/v1/completions", SHORT | {"prompt": [5] * 700}), 400)["param"] == "prompt"
        assert asked.result().status_code == 200


def test_the_predicted_wait_grows_with_the_queue(small_model):
    with serving(engine_of(small_model, settings={"max_running": 2}), name=MODEL) as running:
        running.post("/v1/completions", LONG | {"max_tokens": 60})
        forecast = running.front.forecast
        waits = [forecast.first_token_s([(200, 100)] * count) for count in (1, 2, 3, 6, 12)]
        assert waits == sorted(waits) and waits[0] > 0 and waits[-1] > 3 * waits[1]
        forecast._running = ((100, 500), (100, 500))  # both places are taken for 500 steps more
        assert forecast.first_token_s([(10, 1)]) > waits[0]


def test_a_deadline_that_cannot_be_kept_is_refused_at_the_door(small_model):
    engine = engine_of(small_model, settings={"max_running": 1})
    with serving(engine, name=MODEL) as running, ThreadPoolExecutor(4) as pool:
        running.post("/v1/completions", LONG | {"max_tokens": 60})  # steps are timed
        assert running.front.forecast.calibration is not None
        assert running.post("/v1/completions", SHORT | {"deadline_ms": 60_000}).status_code == 200
        first = pool.submit(running.post, "/v1/completions", LONG)
        wait_for(running.blocks_used)
        refused = running.post("/v1/completions", SHORT | {"deadline_ms": 1})
        assert is_error(refused, 429)["code"] == "deadline_unreachable" and "retry-after" in refused.headers
        assert first.result().status_code == 200


def test_limits_of_one_request_are_told_with_their_numbers(small_model):
    settings = ServerSettings(max_tokens=20, max_total_tokens=50, max_prompts=3)
    with serving(engine_of(small_model), settings, name=MODEL) as running:
        assert "at most 20" in is_error(running.post("/v1/completions", SHORT | {"max_tokens": 21}), 400)["message"]
        assert "60" in is_error(running.post("/v1/completions", SHORT | {"max_tokens": 20, "n": 3}), 400)["message"]
        assert is_error(running.post("/v1/completions", SHORT | {"prompt": ["a"] * 4}), 400)["param"] == "prompt"
        assert running.post("/v1/completions", SHORT | {"max_tokens": 20, "n": 2}).status_code == 200


# -- when the engine fails ----------------------------------------------------------------------


def test_a_step_that_fails_once_is_tried_again(small_model):
    engine = engine_of(small_model)
    with serving(engine, name=MODEL) as running:
        text = running.post("/v1/completions", SHORT).json()["choices"][0]["text"]
        forward, failed = engine._step.forward, []

        def once(batch):
            if not failed:
                failed.append(1)
                raise RuntimeError("a moment's trouble")
            return forward(batch)

        engine._step.forward = once
        assert running.post("/v1/completions", SHORT).json()["choices"][0]["text"] == text and failed
        assert counted(running)["workbench:step_failures_total"] == 1
        running.wait_until_empty()


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_has_stopped_is_said_everywhere(small_model, stream):
    engine = engine_of(small_model)
    with serving(engine, name=MODEL) as running, ThreadPoolExecutor(2) as pool:
        asked = pool.submit(running.post, "/v1/completions", LONG | {"stream": stream})
        wait_for(running.blocks_used)

        def broken(batch):
            raise RuntimeError("out of order")

        engine._step.forward = broken
        answer = asked.result()
        if stream and answer.status_code == 200:
            *_, last = events(answer.text)
            assert last["error"]["code"] == "engine_dead" and "[DONE]" not in answer.text
        else:
            assert is_error(answer, 500)["code"] == "engine_dead"
        assert is_error(running.post("/v1/completions", SHORT), 503)["code"] == "engine_dead"
        assert httpx.get(running.url + "/health").status_code == httpx.get(running.url + "/ready").status_code == 503


# -- counted ----------------------------------------------------------------------


def counted(running) -> dict[str, float]:
    """Samples of /metrics by name, those of one name added."""
    values: dict[str, float] = {}
    for line in httpx.get(running.url + "/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = (
                name.split("{")[0] + (re.search(r'\{.*?(finished_reason|status|reason)="(\w+)"', name) or [""] * 3)[2]
            )
            values[name] = values.get(name, 0) + float(value)
    return values


def test_counters_equal_the_clients_own(small_model):
    with serving(engine_of(small_model), name=MODEL) as running:

        async def ask():
            async with running.async_client() as client:
                options = {"model": MODEL, "temperature": 0.9}
                whole = [
                    client.completions.create(prompt=f"def f{at}(", max_tokens=5 + at, n=1 + at % 2, seed=at, **options)
                    for at in range(10)
                ]
                stopped = [
                    client.completions.create(prompt="a = ", max_tokens=30, stop=["e"], seed=at, **options)
                    for at in range(6)
                ]
                return await asyncio.gather(*whole, *stopped)

        answers = asyncio.run(ask())
        now = counted(running)
        texts = [choice for answer in answers for choice in answer.choices]
        assert now["vllm:generation_tokens_total"] == sum(answer.usage.completion_tokens for answer in answers)
        assert now["vllm:prompt_tokens_total"] == sum(answer.usage.prompt_tokens for answer in answers)
        for reason in ("stop", "length"):
            assert now.get(f"vllm:request_success_total{reason}", 0) == sum(t.finish_reason == reason for t in texts)
        assert (
            now["vllm:time_to_first_token_seconds_count"] == len(texts) == now["vllm:e2e_request_latency_seconds_count"]
        )
        assert now["vllm:request_generation_tokens_sum"] == now["vllm:generation_tokens_total"]
        assert now["workbench:http_requests_total200"] == len(answers)
        cached = sum(answer.usage.prompt_tokens_details.cached_tokens for answer in answers)
        assert now["vllm:prefix_cache_hits_total"] == cached
        assert (
            now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == now["vllm:kv_cache_usage_perc"] == 0
        )


# -- the command, and its end ----------------------------------------------------------------------


def asgi(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def test_while_the_model_is_loaded_requests_are_refused_and_the_process_is_well(small_model):
    may_load = threading.Event()

    def make():
        may_load.wait(20)
        return engine_of(small_model)

    async def ask():
        app = build_app(make, name=MODEL)
        async with asgi(app) as client:
            refused = is_error(await client.post("/v1/completions", json=SHORT), 503)
            statuses = [(await client.get(path)).status_code for path in ("/health", "/ready", "/metrics")]
            may_load.set()
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
            answer = await client.post("/v1/completions", json=SHORT)
        await app.close()
        return refused["code"], statuses, answer.status_code

    assert asyncio.run(ask()) == ("loading", [200, 503, 503], 200)


def test_a_model_that_cannot_be_loaded_is_said():
    async def ask():
        app = build_app(lambda: (_ for _ in ()).throw(WorkbenchError("no such model")))
        async with asgi(app) as client:
            while app.why_not_loaded is None:
                await client.get("/health")
                await asyncio.sleep(0.01)
            refused = is_error(await client.post("/v1/completions", json=SHORT), 503)
            return refused["code"], "no such model" in refused["message"], (await client.get("/health")).status_code

    assert asyncio.run(ask()) == ("not_loaded", True, 503)


class Command:
    """`workbench serve`, in a process of its own."""

    def __init__(self, *options: str) -> None:
        workbench = Path(sys.executable).with_name("workbench")
        self.process = subprocess.Popen(
            [str(workbench), "serve", MODEL, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        line = self.process.stdout.readline()
        self.url = re.match(r"(http://[\d.:]+)/v1", line)[1]

    def wait_until_ready(self) -> None:
        wait_for(lambda: httpx.get(self.url + "/ready").status_code == 200, 60)


@pytest.fixture(scope="module")
def command():
    made = Command("--drain-seconds", "20", "--max-running", "8", "--draft", "prompt_lookup", "--kv", "int8")
    yield made
    made.process.kill()


@pytest.mark.slow
def test_a_signal_drains_and_the_process_ends_well(command):
    """SIGTERM in the middle of work: what was accepted is completed, new work is refused."""
    command.wait_until_ready()
    body = LONG | {"max_tokens": 400}
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(httpx.post, command.url + "/v1/completions", json=body | {"stream": at % 2 == 0}, timeout=60)
            for at in range(6)
        ]
        wait_for(
            lambda: (
                b'vllm:num_requests_running{model_name="stdlib-1m"} 6.0' in httpx.get(command.url + "/metrics").content
            )
        )
        command.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(command.url + "/ready").json() == {"status": "draining"})
        assert is_error(httpx.post(command.url + "/v1/completions", json=SHORT), 503)["code"] == "draining"
        answers = [one.result() for one in asked]
    assert all(answer.status_code == 200 for answer in answers)
    for at, answer in enumerate(answers):
        if at % 2:
            assert answer.json()["usage"]["completion_tokens"] == 400
        else:
            assert events(answer.text)[-1] == "[DONE]"
    assert command.process.wait(20) == 0, command.process.stderr.read()


def test_a_request_whose_prompt_is_being_tokenized_is_waited_for(small_model, monkeypatch):
    tokenized = threading.Event()
    right = calls.Call.requests

    def slow(self, *given):
        assert tokenized.wait(20)
        return right(self, *given)

    monkeypatch.setattr(calls.Call, "requests", slow)
    monkeypatch.setattr(completing, "SHORT", 0)  # beside the event loop
    with serving(engine_of(small_model), name=MODEL) as running, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.post, "/v1/completions", SHORT)
        wait_for(lambda: running.front.admission.queued_requests == 1)
        drained = asyncio.run_coroutine_threadsafe(running.app.drain(20), running.front._loop)
        wait_for(lambda: running.front.admission.draining)
        assert not drained.done() and not asked.done()
        tokenized.set()
        assert asked.result().status_code == 200
        drained.result(20)


@pytest.mark.slow
def test_what_is_not_done_in_time_ends_with_an_error(small_model):
    with serving(engine_of(small_model), name=MODEL) as running, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(running.post, "/v1/completions", LONG | {"stream": at == 0}) for at in range(3)]
        wait_for(lambda: len(running.engine.scheduler.running) == 3)
        wait_for(lambda: counted(running)["vllm:generation_tokens_total"] > 10)  # the stream has begun
        loop = running.front._loop
        asyncio.run_coroutine_threadsafe(running.app.drain(0.01), loop).result(20)
        answers = [one.result() for one in asked]
        *_, last = events(answers[0].text)
        assert last["error"]["code"] == "shut_down" and "[DONE]" not in answers[0].text
        assert all(is_error(answer, 503)["code"] == "shut_down" for answer in answers[1:])
        running.wait_until_empty()


@pytest.mark.parametrize(
    "options, words",
    [
        (["no-such-model", "--port", "0"], "no-such-model"),
        ([MODEL, "--port", "99999"], "65,535"),
        ([MODEL, "--port", "0", "--host", "0.0.0.0"], "--api-key-file"),
        ([MODEL, "--port", "0", "--host", "192.0.2.1"], "--api-key-file"),
        ([MODEL, "--port", "0", "--max-running", "0"], "max_running"),
        ([MODEL, "--port", "0", "--kv", "int9"], "int9"),
        ([MODEL, "--port", "0", "--policy", "luck"], "luck"),
        ([MODEL, "--port", "0", "--api-key-file", "/no/such/file"], "/no/such/file"),
        ([MODEL, "--port", "0", "--drain-seconds", "-1"], "drain_seconds"),
        ([MODEL, "--port", "0", "--draft", "nothing"], "nothing"),
    ],
    ids=str,
)
def test_wrong_options_end_with_a_clear_error(options, words, capsys):
    from workbench.cli import main

    ended = []
    thread = threading.Thread(target=lambda: ended.append(main(["serve", *options])))
    thread.start()
    thread.join(60)
    assert ended and ended[0] in (1, 2)
    assert words in capsys.readouterr().err


def test_an_address_that_cannot_be_had_is_said():
    taken = listening("127.0.0.1", 0)
    for host, port in (("not a host", 0), ("127.0.0.1", taken.getsockname()[1]), ("192.0.2.1", 8000)):
        with pytest.raises(WorkbenchError, match="cannot listen"):
            listening(host, port)


GRAFANA = """e2e_request_latency_seconds_bucket e2e_request_latency_seconds_count e2e_request_latency_seconds_sum
    prompt_tokens_total generation_tokens_total inter_token_latency_seconds_bucket inter_token_latency_seconds_count
    inter_token_latency_seconds_sum num_requests_running num_requests_waiting time_to_first_token_seconds_bucket
    time_to_first_token_seconds_count time_to_first_token_seconds_sum kv_cache_usage_perc request_prompt_tokens_bucket
    request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum
    request_prefill_time_seconds_sum request_decode_time_seconds_sum request_params_max_tokens_bucket
    request_params_n_bucket request_inference_time_seconds_bucket request_time_per_output_token_seconds_bucket
    iteration_tokens_total_bucket num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total
    cache_config_info spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
    spec_decode_num_accepted_tokens_total"""


def test_the_names_that_vllms_dashboard_asks_for_are_there(server):
    """Of vLLM's example, prometheus_grafana/grafana.json, and of its design page those that we can give."""
    server.post("/v1/completions", SHORT)
    now = httpx.get(server.url + "/metrics").text
    missing = [name for name in GRAFANA.split() if not re.search(rf"^vllm:{name}[{{ ]", now, re.M)]
    assert missing == []
    assert not re.search(r"^vllm:\w+(?!.*model_name)", now, re.M)  # each with the model's name
