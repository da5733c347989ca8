"""Claims about one request: every ending is an outcome with a reason, and times are those at which bytes came.

All on virtual time: a test that waits 600 s takes none, and no claim depends on a clock.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_openai import ABORT, DONE, LAST, OK, FakeServer, delta, event, piece, plain, stream, token, usage
from virtual_time import connect_to, run

from workbench.errors import WorkbenchError
from workbench.serving.bench.client import TRIED, Client, Target, accepted_fields, body_of, served_models
from workbench.serving.bench.recording import Planned

TARGET = Target("http", "fake", 80)


def ask(script=None, *, chat=False, max_tokens=3, fake=None, fields=None, **settings):
    """The result of one request, due at 0."""
    server = fake or FakeServer(script=lambda number, body: script)
    client = Client(TARGET, chat=chat, connect=connect_to(server.handle), **settings)
    body = body_of("fake", [1, 2], max_tokens, chat=chat, fields=fields or {})
    return run(client.ask(Planned(0, 0.0, 2, max_tokens), body))


# -- endings -----------------------------------------------------------------------------------------------------

ONE = piece(token(" a"))
WHOLE = [token(" a"), token(" b", "length"), DONE]
HTML = b"<html>\n<h1>Internal Server Error</h1></html>"
ERROR = json.dumps({"error": {"message": "the engine died", "type": "internal", "code": 500}}).encode()


def endless():
    yield OK
    while True:
        yield piece(token(" a"))
        yield 1.0


ENDINGS = {
    "whole": ([stream(*WHOLE)], "ok", ""),
    "no [DONE]": ([stream(*WHOLE[:2])], "ok", "without [DONE]"),
    "no finish reason": ([stream(token(" a"), DONE)], "ok", "without finish reason"),
    "closes in the middle": ([OK + ONE], "broken", "closed in the middle"),
    "reset in the middle": ([OK + ONE, 1.0, ABORT], "broken", "Connection reset"),
    "reset at once": ([ABORT], "connection", "Connection reset"),
    "closes without an answer": ([b""], "broken", "before an answer"),
    "ends early": ([stream(token(" a"))], "incomplete", "no finish reason and no [DONE] after 1 chunks"),
    "ends in an event": ([stream(token(" a"), b'data: {"cho')], "broken", "within an event"),
    "garbage events": ([stream(b"data: {nonsense}\n\n")], "broken", "not JSON"),
    "an event that is no object": ([stream(b"data: 3\n\n")], "broken", "not a JSON object"),
    "choices that are none": ([stream(event({"choices": 3}))], "broken", "choices must be"),
    "text that is none": ([stream(event({"choices": [{"text": 3}]}))], "broken", "must be a text"),
    "usage that is none": ([stream(event({"choices": [], "usage": {"prompt_tokens": "x"}}))], "broken", "usage must"),
    "no HTTP": ([b"220 mail.example.org ESMTP\r\n"], "broken", "no HTTP/1.1"),
    "error event": ([stream(token(" a"), event({"error": {"message": "no memory"}}))], "error_event", "no memory"),
    "nothing but [DONE]": ([stream(DONE)], "empty", "no chunk"),
    "refused": ([plain("429 Too Many Requests", ERROR, "Retry-After: 7")], "refused", "status 429: the engine died"),
    "overloaded": ([plain("503 Service Unavailable", b"")], "refused", "an empty body"),
    "500 as HTML": ([plain("500 Oops", HTML, kind="text/html")], "http_error", "status 500: <html> <h1>Internal"),
    "redirect": ([plain("307 Moved", b"", "Location: http://other/v1")], "redirect", "to http://other/v1"),
    "wrong type": ([plain("200 OK", b'{"choices": []}')], "wrong_type", "content-type application/json"),
    "endless": (endless(), "timeout", "no end after 30 s; 30 chunks had come"),
    "silent": ([OK, 100.0], "timeout", "no end after 30 s; 0 chunks"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_every_ending_is_an_outcome_with_a_reason(name):
    script, outcome, reason = ENDINGS[name]
    result = ask(script, timeout_s=30.0)
    assert result.outcome == outcome and reason in result.reason, result
    assert result.end_s <= 30.0 and (result.ok or result.reason)


def test_what_came_before_a_break_is_kept():
    result = ask([OK + ONE, 1.0, ABORT])
    assert result.text == " a" and result.status == 200 and result.end_s == 1.0


def test_a_server_that_drips_bytes_is_read_as_any_other():
    script = [part for byte in stream(*WHOLE) for part in (bytes([byte]), 0.125)]
    result = ask(script)
    assert (result.outcome, result.text) == ("ok", " a b")


def test_an_answer_without_end_is_cut_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr("workbench.serving.bench.client.MAX_ANSWER_BYTES", 10_000)
    result = ask([OK, *[piece(token("a" * 900))] * 100], timeout_s=1e6)
    assert result.outcome == "broken" and "longer than 10,000 bytes" in result.reason


def test_no_connection_is_an_outcome():
    async def refused(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    async def nowhere(*_, **__):
        await asyncio.sleep(1e9)

    for connect, outcome, reason in (
        (refused, "connection", "ConnectionRefusedError: Connection refused"),
        (nowhere, "timeout", "no connection after 10 s"),
    ):
        result = run(Client(TARGET, connect=connect).ask(Planned(0, 0.0, 1, 1), b"{}"))
        assert (result.outcome, result.reason, result.connected_s) == (outcome, reason, None)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("Retry-After: 7", 7.0),
        ("Date: Wed, 25 Nov 2026 09:00:00 GMT\r\nRetry-After: Wed, 25 Nov 2026 09:00:30 GMT", 30.0),
        ("Retry-After: Wed, 25 Nov 2026 09:00:30 GMT", None),
        ("Retry-After: soon", None),
        ("X: 1", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_against_the_servers_own(header, seconds):
    assert ask([plain("429 Too Many Requests", b"{}", header)]).retry_after_s == seconds


def test_a_cancelled_request_is_kept_with_what_had_come():
    kept = []
    client = Client(TARGET, connect=connect_to(FakeServer(ttft_s=1.0, gap_s=1.0).handle))

    async def main():
        asked = client.ask(Planned(0, 0.0, 1, 9), body_of("m", [1], 9, chat=False, fields={}), keep=kept.append)
        task = asyncio.get_running_loop().create_task(asked)
        await asyncio.sleep(2.5)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert run(main()) and [(r.outcome, r.text, r.end_s) for r in kept] == [("cancelled", " 1 2", 2.5)]


# -- times and tokens --------------------------------------------------------------------------------------------


def test_times_are_those_at_which_the_bytes_came():
    server = FakeServer(ttft_s=0.25, gap_s=0.125)
    client = Client(TARGET, connect=connect_to(server.handle, after_s=0.5))
    body = body_of("fake", [1, 2], 3, chat=False, fields={"stream_options": {"include_usage": True}})
    result = run(client.ask(Planned(0, 0.0, 2, 3), body))
    assert (result.send_s, result.connected_s, result.headers_s) == (0.0, 0.5, 0.5)
    assert [chunk.at_s for chunk in result.chunks] == [0.75, 0.875, 1.0] and result.end_s == 1.0
    assert (result.prompt_tokens, result.completion_tokens, result.finish_reason, result.done) == (2, 3, "length", True)
    assert result.text == " 1 2 3" and [chunk.tokens for chunk in result.chunks] == [None] * 3


def test_the_tokens_of_a_chunk_are_known_from_ids_logprobs_or_running_usage():
    script = [
        stream(
            event({"choices": [{"text": " a b", "token_ids": [5, 6]}]}),
            event({"choices": [{"text": " c d e", "logprobs": {"tokens": [" c", " d", " e"]}}]}),
            event({"choices": [{"text": " f"}], "usage": usage(2, 9)}),
            event({"choices": [{"text": ""}], "usage": usage(2, 9)}),
            event({"choices": [{"text": " g", "finish_reason": "stop"}]}),
            DONE,
        )
    ]
    assert [chunk.tokens for chunk in ask(script).chunks] == [2, 3, 9, 0, None]


def test_a_chats_role_carries_no_token_and_its_reasoning_is_text():
    script = [
        stream(
            delta({"role": "assistant", "content": ""}),
            delta({"reasoning_content": "Hm."}),
            delta({"content": " a"}),
            delta({}, "stop"),
            DONE,
        )
    ]
    result = ask(script, chat=True)
    assert [(chunk.text, chunk.tokens) for chunk in result.chunks] == [("", 0), ("Hm.", None), (" a", None), ("", None)]


def test_every_read_is_timed_though_many_events_come_at_once():
    result = ask([OK, 1.0, piece(token(" a") + token(" b")) + piece(token(" c", "stop")), 1.0, piece(DONE) + LAST])
    assert [chunk.at_s for chunk in result.chunks] == [1.0, 1.0, 1.0] and result.end_s == 2.0


# -- what is sent ------------------------------------------------------------------------------------------------


def test_a_request_says_what_was_asked_for():
    fake = FakeServer()
    ask(fake=fake, api_key="sk-1", fields={"ignore_eos": True})
    assert fake.asked == [
        {
            "model": "fake", "prompt": [1, 2], "max_tokens": 3, "temperature": 0.0, "stream": True, "ignore_eos": True,
        }
    ]  # fmt: skip
    first, *lines = fake.heads[0].split("\r\n")
    assert (
        first == "POST /v1/completions HTTP/1.1" and "Host: fake:80" in lines and "Authorization: Bearer sk-1" in lines
    )
    ask(fake=fake, chat=True)
    assert fake.asked[1]["messages"] == [{"role": "user", "content": [1, 2]}] and "prompt" not in fake.asked[1]
    assert fake.heads[1].startswith("POST /v1/chat/completions") and "Authorization" not in fake.heads[1]


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("http", "127.0.0.1", 8000)),
        ("https://api.example.org/v1/", Target("https", "api.example.org", 443)),
        ("http://host/team/v1", Target("http", "host", 80, "/team")),
        ("http://[::1]:9/", Target("http", "::1", 9)),
    ],
)
def test_a_url_is_taken_with_or_without_v1(url, target):
    assert Target.of(url) == target


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://me:pw@host",
     "http://host/v1?x=1", "http://host/a b", "http://ho\nst", "http://a..b", "http://host/\u00e4", "file:///etc"],
)  # fmt: skip
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(WorkbenchError, match=r"URL|host"):
        Target.of(url)


def test_https_is_asked_for_with_tls_and_a_name_is_looked_up_once():
    given: list = []
    client = Client(Target.of("https://b\u00fccher.example"), connect=connect_to(FakeServer().handle, given=given))
    for _ in range(2):
        assert run(client.ask(Planned(0, 0.0, 1, 1), body_of("m", [1], 1, chat=False, fields={}))).ok
    assert given == [(host, 443, "b\u00fccher.example") for host in ("b\u00fccher.example", "10.0.0.1")]
    assert client.target.authority == "xn--bcher-kva.example:443"


def test_a_key_that_would_make_another_header_is_refused():
    with pytest.raises(WorkbenchError, match="API key"):
        Client(TARGET, api_key="a\r\nX: 1")


# -- what the server accepts -------------------------------------------------------------------------------------


def accepted(fake):
    client = Client(TARGET, connect=connect_to(fake.handle))
    return run(accepted_fields(client, lambda fields: body_of("m", [1], 1, chat=False, fields=fields)))


@pytest.mark.parametrize(
    ("refuses", "place"),
    [
        ((), 0),
        (("continuous_usage_stats",), 1),
        (("ignore_eos",), 2),
        (("ignore_eos", "stream_options"), 3),
        (("max_tokens",), 4),
    ],
)
def test_only_fields_that_the_server_takes_are_sent(refuses, place):
    assert accepted(FakeServer(refuses=refuses)) == TRIED[place]


def test_a_newer_model_is_asked_with_its_own_limit_and_without_a_temperature():
    newer = json.loads(body_of("m", "a b", 7, chat=True, fields=TRIED[4]))
    assert newer["max_completion_tokens"] == 7 and "max_tokens" not in newer and "temperature" not in newer


def test_a_server_that_refuses_the_plainest_request_is_wrong_use():
    with pytest.raises(WorkbenchError, match="refuses a request of one token: status 400: unknown field prompt"):
        accepted(FakeServer(refuses=("prompt",)))
    with pytest.raises(WorkbenchError, match="status 400: unknown field max_tokens"):
        accepted(FakeServer(refuses=("max_tokens", "max_completion_tokens")))
    with pytest.raises(WorkbenchError, match="status 401"):
        accepted(FakeServer(script=lambda n, body: [plain("401 Unauthorized", b'{"error":"Unauthorized"}')]))
    with pytest.raises(WorkbenchError, match="no connection"):
        accepted(FakeServer(script=lambda n, body: [ABORT]))


def test_models_are_listed_with_their_longest_sequence():
    fake = FakeServer(model="m", max_model_len=512)
    assert run(served_models(Client(TARGET, connect=connect_to(fake.handle)))) == {"m": 512}

    async def nonsense(reader, outgoing):
        await reader.readuntil(b"\r\n\r\n")
        outgoing.write(plain("200 OK", b"[]"))

    with pytest.raises(WorkbenchError, match="lists no models"):
        run(served_models(Client(TARGET, connect=connect_to(nonsense))))
