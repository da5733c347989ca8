"""Claims about bytes: however they are cut into pieces, the same answer and the same events come out."""

from __future__ import annotations

import pytest

from workbench.serving.bench.wire import ChunkedBody, EventStream, HttpAnswer, WireError

EVENTS = (
    "\ufeff: a comment\r\ndata: one\r\n\r\nevent: x\ndata: two\r\ndata:three\r\n\nid: 4\n\n: ping\n\n"
    "data: vi\u00e9r \U0001f600\r\r"
    "data: [DONE]\n\n"
).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def everywhere(data: bytes) -> list[list[bytes]]:
    """Cut once, at each place, and into single bytes."""
    return [*([data[:place], data[place:]] for place in range(len(data) + 1)), [bytes([byte]) for byte in data]]


def test_events_do_not_depend_on_where_the_bytes_are_cut():
    for pieces in everywhere(EVENTS):
        stream = EventStream()
        events = [event for piece in pieces for event in stream.feed(piece)]
        assert events == ["one", "two\nthree", "vi\u00e9r \U0001f600", "[DONE]"] and stream.rest == b""


def test_an_answer_does_not_depend_on_where_the_bytes_are_cut():
    chunked = b"5;x=1\r\nhello\r\n1\r\n \r\n0a\r\nworldagain\r\n0\r\nTrailer: 1\r\n\r\n"
    for pieces in everywhere(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunked):
        answer = HttpAnswer()
        body = b"".join(answer.feed(piece) for piece in pieces)
        assert (answer.status, body, answer.finished) == (200, b"hello worldagain", True)
        assert answer.headers["content-type"] == "text/event-stream"


def test_a_body_ends_with_its_length_or_with_the_connection():
    sized, open_ended = HttpAnswer(), HttpAnswer()
    assert sized.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcdef") == b"abc" and sized.finished
    assert open_ended.feed(b"HTTP/1.0 200 OK\r\n\r\nab") == b"ab" and not open_ended.finished
    open_ended.feed_end()
    half = HttpAnswer()
    half.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab")
    with pytest.raises(WireError, match="in the middle"):
        half.feed_end()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP/1.1"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "no HTTP/1.1"),
        (b"HTTP/2 200\r\n\r\n", "no HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "NAME: VALUE"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n", "must be a number"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "no HTTP/1.1"),
        (HEAD + b"xyz\r\n", "hexadecimal"),
        (HEAD + b"-1\r\n", "hexadecimal"),
        (HEAD + b"2\r\nabc\r\n", "longer than its size"),
        (HEAD + b"1" * 70_000, "no end"),
    ],
)
def test_what_is_not_http_is_refused_with_what_came(data, words):
    with pytest.raises(WireError, match=words):
        HttpAnswer().feed(data)


def test_events_that_are_not_utf8_or_do_not_end_are_refused():
    with pytest.raises(WireError, match="not UTF-8"):
        EventStream().feed(b"data: \xff\xfe\n\n")
    with pytest.raises(WireError, match="longer than"):
        EventStream().feed(b"data: " + b"a" * (8 * 2**20))
    stream = EventStream()
    assert stream.feed(b"data: half") == [] and stream.rest == b"data: half"


def test_a_large_chunk_is_handed_on_as_it_comes():
    """Nothing waits for a buffer to fill or a chunk to be whole."""
    body = ChunkedBody()
    assert body.feed(b"100000\r\nabc") == b"abc" and body.feed(b"def") == b"def"
