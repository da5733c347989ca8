"""What one client sends, asks or leaves unread costs the others nothing: the event loop goes on, connections come
back, and every answer is an answer."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from serving_claims import engine_of, is_error, serving

from workbench.cli_serving import names_of, read_keys
from workbench.errors import WorkbenchError, nearest, shown
from workbench.serving.api.admission import Admission
from workbench.serving.api.errors import ApiError
from workbench.serving.api.forecast import Forecast
from workbench.serving.api.http import Guard, Keys
from workbench.serving.api.link import StepNews
from workbench.serving.api.settings import ServerSettings
from workbench.serving.api.trace import Trace, trace_to

MODEL = "stdlib-1m"
BODY = {"model": MODEL, "prompt": "import os\n", "max_tokens": 4, "temperature": 0}


# -- the event loop ----------------------------------------------------------------------------------------------------


def on_loop(server, body: bytes) -> list[str]:
    """The functions that ran on the event loop's thread for this body, of those that may be long."""
    from workbench.serving.api import calls, events, http

    loop_thread = next(one.ident for one in threading.enumerate() if one.name == "server")
    seen: list[str] = []
    watched = [(http.json, "loads"), (calls, "read_prompts"), (events.Events, "pieces")]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in watched:
            was = getattr(owner, name)

            def spied(*given, was=was, name=name, **more):
                if threading.get_ident() == loop_thread:
                    seen.append(name)
                return was(*given, **more)

            patch.setattr(owner, name, spied)
        headers = {"content-type": "application/json"}
        httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=60)
    return seen


def test_a_long_body_is_parsed_and_read_beside_the_event_loop(server):
    assert on_loop(server, json.dumps(BODY).encode()) == ["loads", "read_prompts"]
    assert on_loop(server, json.dumps(BODY | {"prompt": [[5] * 1_000] * 20, "max_tokens": 1}).encode()) == []


def test_many_log_probs_are_written_beside_the_event_loop(server):
    asked = BODY | {"prompt": [5] * 200, "echo": True, "logprobs": 2, "stream": True, "max_tokens": 1}
    assert on_loop(server, json.dumps(asked).encode()) == ["loads", "read_prompts"]


def test_a_message_reads_no_more_of_a_value_than_it_shows():
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("nobody sees this one")

    assert shown([*range(40), Loud()]) == repr([*range(40)])[:80]
    assert shown({"a": [1, "x"], "b": {}}) == repr({"a": [1, "x"], "b": {}})
    assert shown("x" * 200) == repr("x" * 200)[:80] and shown([[[1], []], ()]) == "[[[1], []], ()]"
    begun = time.perf_counter()
    assert nearest("a" * 4_000_000, ["prompt"] * 40) is None
    assert time.perf_counter() - begun < 0.1


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(server, monkeypatch):
    served = server.front.served
    longest = int(served.longest_token)
    monkeypatch.setattr(type(served.tokenizer), "encode_prompt", lambda *_: pytest.fail("it was tokenized"))
    error = is_error(server.post("/v1/completions", BODY | {"prompt": "a" * longest * served.context}), 400)
    assert error["code"] == "context_length_exceeded" and "at least 1,024" in error["message"]
    is_error(server.post("/v1/completions", BODY | {"prompt": ["x"] * served.context + [1]}), 400)


def test_token_ids_beyond_the_context_are_counted_alone(server):
    error = is_error(server.post("/v1/completions", BODY | {"prompt": [1] * 5_000 + ["x"]}), 400)
    assert error["code"] == "context_length_exceeded" and "5,001" in error["message"]


# -- connections -------------------------------------------------------------------------------------------------------


def test_a_client_that_reads_no_answer_at_all_is_cut(small_model):
    """Whatever it asked for: here a page again and again, which no stream's own limit concerns."""
    asked = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1_500
    settings = ServerSettings(max_connections=1, send_seconds=0.2, drain_seconds=1)
    with serving(engine_of(small_model), settings, name=MODEL) as running, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(running.address)
        connection.sendall(asked)
        time.sleep(0.05)
        until = time.monotonic() + 10
        while httpx.get(running.url + "/health").status_code != 200:
            assert time.monotonic() < until, "it still has its connection"
            time.sleep(0.02)


@pytest.mark.parametrize("given", ["a" * 127 + " b", "", "a" * 127 + "\tb"])
def test_a_request_id_of_any_form_is_no_error(server, given):
    got = httpx.get(server.url + "/health", headers={"x-request-id": given})
    assert got.status_code == 200 and got.headers["x-request-id"] == (
        given[:128].strip() or got.headers["x-request-id"]
    )


def test_a_server_answers_to_the_loopback_address_it_was_started_with():
    async def ask(host: str) -> int:
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})

        sent = []

        async def send(message):
            sent.append(message)

        guard = Guard(app, Keys(None), names_of("127.0.0.2"), lambda path, status: None, lambda: "id")
        await guard({"type": "http", "path": "/", "headers": [(b"host", host.encode())]}, None, send)
        return sent[0]["status"]

    assert [asyncio.run(ask(host)) for host in ("127.0.0.2:8000", "localhost", "evil.example")] == [200, 200, 403]
    assert "[::1]" in names_of("::1")


# -- an operator's files -----------------------------------------------------------------------------------------------


def test_keys_are_read_from_files_of_other_editors(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_bytes(b"\xef\xbb\xbfsecret-key-1\r\n\r\n  secret key 2 \r\n")
    assert read_keys(file, "0.0.0.0") == ["secret-key-1", "secret key 2"]


class Full:
    """A file on a disk with room for so many lines."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, line: str) -> None:
        self.room -= 1
        if self.room < 0:
            raise OSError(28, "No space left on device")

    def flush(self) -> None:
        pass


def test_a_full_disk_ends_the_trace_and_no_request(small_model):
    trace = Trace(Full(room=30))
    with serving(engine_of(small_model), name=MODEL, trace=trace) as running:
        for _ in range(3):
            assert running.post("/v1/completions", BODY).json()["usage"]["completion_tokens"] == 4
        assert "No space left" in trace.why_ended
        assert running.front.forecast._steps, "what comes after the trace is still done"
    trace.close()


def test_a_trace_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(WorkbenchError, match="choose another --trace"), trace_to(tmp_path / "none" / "trace.json"):
        pass


def test_an_error_of_the_link_leaves_no_stream_open(server, monkeypatch):
    def fails(request):
        raise OSError("the socket is closed")

    monkeypatch.setattr(server.front.link, "add", fails)
    is_error(server.post("/v1/completions", BODY), 500)
    assert server.front.open_streams == 0 and not server.front._streams and not server.front.admission.queued_requests


def test_a_target_may_name_the_server_and_then_counts_before_the_header(server):
    def asked(target: str, host: str) -> bytes:
        return server.raw(f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())

    assert b" 200 " in asked("http://localhost:8000/v1/models", "localhost")
    assert b" 403 " in asked("http://evil.example/v1/models", "localhost")
    for nowhere in ("http://localhost", "ftp://localhost/v1/models"):
        assert b" 404 " in asked(nowhere, "localhost")


# -- the forecast ------------------------------------------------------------------------------------------------------


def step(at_s: float, seconds: float, rows: int, running: int = 1) -> StepNews:
    """The news of a step of so many rows, each of a text of its own."""
    nothing = dict.fromkeys(("updates", "begun", "drafts", "names"), ())
    zeros = dict.fromkeys(("preempted", "waiting", "blocks_used", "prefix_queries", "prefix_hits", "step"), 0)
    times = {"at_s": at_s, "seconds": seconds, "schedule_s": 0.0, "planned_s": 0.0}
    sizes = {"new_tokens": (1,) * rows, "contexts": (100,) * rows, "decodes": rows, "running": ((100, 9),) * running}
    return StepNews(**nothing, **zeros, **times, **sizes)


def forecast_after(*phases: tuple[int, float, float]) -> Forecast:
    """phases: steps, seconds of each, and seconds between them."""
    forecast, at_s = Forecast(max_running=4, token_budget=64), 0.0
    for count, seconds, between_s in phases:
        for number in range(count):
            forecast.note(step(at_s, seconds, 1 + number % 2))
            at_s += seconds + between_s
    forecast.note(step(at_s, 0.0, 0, running=0))
    return forecast


def test_the_forecast_follows_load_that_comes_suddenly():
    """One fit is of 64 steps; what a loaded machine takes is known after half of them."""
    calm = forecast_after((80, 0.001, 0.0)).first_token_s([(640, 1)])
    assert calm == pytest.approx(0.01, rel=0.1)
    loaded = forecast_after((80, 0.001, 0.0), (32, 0.010, 0.0)).first_token_s([(640, 1)])
    assert 5 * calm < loaded < 20 * calm  # a factor of 2 from what it will be


def test_the_forecast_counts_the_time_between_steps_and_not_idle_time():
    calm = forecast_after((80, 0.001, 0.0)).first_token_s([(640, 1)])
    assert forecast_after((80, 0.001, 0.003)).first_token_s([(640, 1)]) == pytest.approx(2 * calm, rel=0.1)
    forecast = forecast_after((80, 0.001, 0.0))
    forecast.note(step(1_000.0, 0.001, 1, running=0))
    assert forecast.first_token_s([(640, 1)]) == pytest.approx(calm, rel=0.1)


def test_the_forecast_knows_what_drafts_cost_and_bring():
    """Four texts of 100 tokens run. Plain steps of 4 rows took 2 ms; now each has 16 rows, takes 5 ms and brings each
    text 2 tokens: 50 steps to go."""
    forecast, at_s = Forecast(max_running=4, token_budget=64), 0.0
    drafted = {"new_tokens": (4,) * 4, "contexts": (100,) * 4, "decodes": 4, "drafts": ((3, 1),) * 4}
    for number in range(160):
        seconds, more = (0.002, {}) if number < 80 else (0.005, drafted)
        forecast.note(step(at_s, seconds, 4)._replace(**more, running=((100, 100),) * 4))
        at_s += seconds
    assert forecast.first_token_s([(10, 10)]) == pytest.approx(0.250, rel=0.1)


def test_a_burst_of_refusals_is_one_simulation():
    simulated = []

    def simulate(queue, running, step_s, max_running, token_budget) -> float:
        simulated.append(len(queue))
        return 7.0

    forecast = Forecast(4, 64, simulate=simulate)
    for number in range(16):
        forecast.note(step(number * 0.001, 0.001, 1))
    admission = Admission(ServerSettings(max_queued_requests=1), forecast, lambda reason: None)
    with admission.place(1):
        for _ in range(50):
            with pytest.raises(ApiError) as refused, admission.place(1):
                pass
            assert int(refused.value.headers["retry-after"]) == 7
    assert len(simulated) == 1
    assert not admission.queued_requests
