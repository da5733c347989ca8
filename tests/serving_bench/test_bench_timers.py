"""Claims about timers: they are waited for as they are, and what is ready is not waited for."""

from __future__ import annotations

import asyncio
import select
import socket

import pytest

from workbench.serving.bench import timers

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="epoll is Linux's")


@pytest.fixture
def pair():
    with timers.FineSelector() as selector:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            selector.register(ours, select.EPOLLIN)
            yield selector, ours, theirs


def test_a_timeout_is_not_rounded_to_milliseconds(pair, monkeypatch):
    waited = []
    monkeypatch.setattr(timers.select, "select", lambda r, w, x, timeout: waited.append((r, timeout)))
    selector, _, _ = pair
    assert selector.select(0.0021) == [] and waited == [([selector.fileno()], 0.0021)]
    assert selector.select(0) == [] and len(waited) == 1


@pytest.mark.parametrize("timeout", (None, 0, 1000.0))
def test_what_is_ready_is_returned_at_once(pair, timeout):
    selector, ours, theirs = pair
    theirs.send(b"a")
    assert [key.fileobj for key, _ in selector.select(timeout)] == [ours]


def test_the_loop_runs():
    async def main():
        await asyncio.sleep(0.001)
        return 3

    with asyncio.Runner(loop_factory=timers.new_loop) as runner:
        assert runner.run(main()) == 3
