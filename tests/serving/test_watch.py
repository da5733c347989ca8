"""Claims about the timer of a stream and the reading of bodies, without a socket."""

from __future__ import annotations

import asyncio

import pytest

from workbench.serving.api import http
from workbench.serving.api.errors import ApiError
from workbench.serving.api.settings import ServerSettings
from workbench.serving.api.watch import StreamWatch

LONG = 60.0  # seconds that no test takes


def watched(ping_s: float, send_s: float, work) -> int:
    """How often the stream was quiet while `work(watch)` ran."""
    quiet: list[None] = []

    async def main() -> None:
        async with StreamWatch(ping_s, send_s, lambda: quiet.append(None)) as watch:
            await work(watch)

    asyncio.run(asyncio.wait_for(main(), LONG))
    return len(quiet)


@pytest.mark.parametrize("ping_s", [0.01, LONG])
def test_a_sending_that_takes_too_long_is_a_timeout(ping_s):
    async def hangs(watch):
        await asyncio.sleep(0.02)  # the timer has looked before
        with watch.sending():
            await asyncio.sleep(1.0)
        raise AssertionError("it was not cut")

    with pytest.raises(TimeoutError):
        watched(ping_s, 0.05, hangs)


def test_short_sendings_are_none_however_many_they_are():
    async def sends(watch):
        for _ in range(20):
            with watch.sending():
                await asyncio.sleep(0.01)

    assert watched(LONG, 0.1, sends) == 0


def test_a_stream_is_quiet_once_for_each_time_that_nothing_was_sent():
    async def waits(watch):
        await asyncio.sleep(0.25)

    assert 1 <= watched(0.1, LONG, waits) <= 2


@pytest.mark.parametrize("announced", [b"1000", b"10"])
def test_what_is_too_long_is_read_to_its_end_before_it_is_refused(announced):
    """A connection that is closed with bytes unread is reset, and the refusal may be lost."""
    settings, left = ServerSettings(max_body_bytes=100), [{"body": b"x" * 60, "more_body": at < 9} for at in range(10)]

    async def receive():
        return {"type": "http.request", **left.pop(0)}

    scope = {"type": "http", "headers": [(b"content-length", announced)]}
    with pytest.raises(ApiError, match="longer than 100 bytes"):
        asyncio.run(http.read_body(scope, receive, settings))
    assert not left


def test_a_body_that_never_ends_is_refused_all_the_same(monkeypatch):
    monkeypatch.setattr(http, "LET_SEND_S", 0.05)

    async def receive():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * 60, "more_body": True}

    with pytest.raises(ApiError, match="longer than 100 bytes"):
        asyncio.run(http.read_body({"type": "http", "headers": []}, receive, ServerSettings(max_body_bytes=100)))


def test_who_asks_before_sending_is_refused_at_once():
    async def receive():
        raise AssertionError("that would invite the body")

    scope = {"type": "http", "headers": [(b"content-length", b"1000"), (b"expect", b"100-continue")]}
    with pytest.raises(ApiError, match="longer than 100 bytes"):
        asyncio.run(http.read_body(scope, receive, ServerSettings(max_body_bytes=100)))
