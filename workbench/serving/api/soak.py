"""A soak of the server: a real process, and clients of all kinds over sockets.

    good request     its text is that of the first time the same was asked, whole or streamed
    leaves           hangs up after some milliseconds, or in the middle of its answer
    reads slowly     some bytes now and then, then hangs up
    nonsense         no JSON, wrong fields, a body that ends early, bytes that are no HTTP: an error, or closed
    at the end       no sequence, no block, no client and no task is left, and memory has not grown
    then SIGTERM     in the middle of work: every answer is whole, or an error; exit code 0

`workbench soak server` goes on as long as one likes; the tests run a short one.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from workbench.errors import WorkbenchError, check_whole
from workbench.serving.bench.wire import EventStream, HttpAnswer, WireError

MODEL, OPTIONS = "stdlib-1m", ("--max-running", "16", "--max-queued-requests", "64", "--drain-seconds", "10")
AT_A_TIME, LEAVE_SHARE, NONSENSE_SHARE, SLOW_SHARE = 24, 0.3, 0.12, 0.05
PROMPTS = ("import os\n", "def read(path):\n", "class A:\n    def __init__(self", "# ", "x = [1, 2,")
READ_BYTES = 2**20
SECONDS = 60  # for any one request
GROWTH, WARM_REQUESTS = 1.10, 1_000  # of the process's memory from half of the requests to the end, if it is warm then
AT_THE_END = 40  # requests under way when the signal comes
ERRORS = {400, 404, 405, 408, 413, 415, 429, 431, 503}


@dataclass
class Soaked:
    counts: Counter[str] = field(default_factory=Counter)
    failure: str = ""  # "" when all went well
    memory_bytes: tuple[int, int] = (0, 0)  # of the server, after half of the requests and at the end


class Failed(Exception):
    """What should not have happened."""


class Soak:
    """Clients of one server. texts: what was answered to each body, whole."""

    def __init__(self, port: int, seed: int, counts: Counter[str]) -> None:
        self._port, self._rng, self.counts = port, random.Random(seed), counts
        self.texts: dict[str, Any] = {}

    async def one(self) -> None:
        """One random client, from connection to end."""
        rng = self._rng
        kind = rng.random()
        try:
            async with asyncio.timeout(SECONDS):
                if kind < LEAVE_SHARE:
                    await self._leave()
                elif kind < LEAVE_SHARE + NONSENSE_SHARE:
                    await self._nonsense()
                elif kind < LEAVE_SHARE + NONSENSE_SHARE + SLOW_SHARE:
                    await self._read_slowly()
                else:
                    await self.good()
        except TimeoutError:
            raise Failed(f"a request was not done after {SECONDS} s") from None

    def body(self) -> dict[str, Any]:
        """A request whose answer is the same each time."""
        rng = self._rng
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": rng.choice(PROMPTS),
            "max_tokens": rng.choice((1, 8, 40, 120)),
        }
        body |= rng.choice(({"temperature": 0}, {"temperature": 1.0, "seed": rng.randrange(3)}))
        body |= rng.choice(({}, {}, {"n": 3}, {"stop": ["\n"]}, {"logprobs": 2}, {"ignore_eos": True}, {"echo": True}))
        return body

    async def good(self, *, ending: bool = False) -> None:
        """ending: the server is ending, so that an error or a closed connection is right, too."""
        body = self.body()
        key, stream = json.dumps(body, sort_keys=True), self._rng.random() < 0.5
        try:
            status, data = await self._ask(json.dumps(body | {"stream": stream}).encode())
        except (ConnectionError, WireError):
            if not ending:
                raise
            self.counts["not accepted"] += 1
            return
        if status in (429, 503):
            self.counts[f"refused with {status}"] += 1
            _check_error(data)
            return
        if status != 200:
            raise Failed(f"{status} for {key}: {data[:300]!r}")
        shown = _streamed(data) if stream else _whole(json.loads(data))
        if shown is None:
            if not ending:
                raise Failed(f"a stream ended without [DONE]: {data[-300:]!r}")
            self.counts["cut with an error"] += 1
            return
        self.counts["streams" if stream else "whole answers"] += 1
        if self.texts.setdefault(key, shown) != shown:
            raise Failed(f"{key}: {shown} after {self.texts[key]}")

    async def _leave(self) -> None:
        body = json.dumps(self.body() | {"max_tokens": 400, "stream": self._rng.random() < 0.5}).encode()
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            to_server.write(_head(body))
            await asyncio.sleep(self._rng.choice((0, 0.001, 0.02, 0.1)))
            if self._rng.random() < 0.5:
                await asyncio.wait_for(from_server.read(self._rng.randrange(1, 2_000)), SECONDS)
        finally:
            to_server.transport.abort() if self._rng.random() < 0.5 else to_server.close()
        self.counts["left"] += 1

    async def _read_slowly(self) -> None:
        body = json.dumps(self.body() | {"max_tokens": 400, "stream": True}).encode()
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port, limit=2_000)
        try:
            to_server.write(_head(body))
            for _ in range(10):
                await asyncio.sleep(0.05)
                if not await from_server.read(100):
                    break
        finally:
            to_server.close()
        self.counts["read slowly"] += 1

    async def _nonsense(self) -> None:
        rng, good = self._rng, json.dumps(self.body()).encode()
        wrong: Sequence[bytes] = (
            _head(b"{"),
            _head(b"[1, 2]"),
            _head(good.replace(b'"max_tokens"', b'"maxtokens"')),
            _head(good.replace(b'"model"', b'"modl"')),
            _head(b'{"model": "stdlib-1m", "prompt": "a", "max_tokens": NaN}'),
            _head(b'{"model": "stdlib-1m", "prompt": "a", "temperature": -1}'),
            _head(good)[: -rng.randrange(1, len(good))],
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET / HTTP/1.1\r\n\r\n",
            b"",
            _head(good, path="/v1/nothing"),
            _head(good).replace(b"content-length", b"x-length"),
        )
        chosen = rng.randrange(len(wrong))
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            to_server.write(wrong[chosen])
            if chosen in (6, 9):  # what is missing never comes
                await asyncio.sleep(0.02)
                return
            try:
                status, data = await _response(from_server)
            except (ConnectionError, WireError):
                self.counts["nonsense, closed"] += 1
                return
            if status not in ERRORS:
                raise Failed(f"{status} for nonsense {wrong[chosen][:200]!r}")
            _check_error(data)
            self.counts["nonsense, refused"] += 1
        finally:
            to_server.close()

    async def _ask(self, body: bytes) -> tuple[int, bytes]:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        try:
            to_server.write(_head(body))
            return await _response(from_server)
        finally:
            to_server.close()

    async def metrics(self) -> dict[str, float]:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        to_server.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        _, data = await _response(from_server)
        to_server.close()
        values = {}
        for line in data.decode().splitlines():
            if match := re.match(r"([\w:]+)\{[^}]*\} (\S+)$", line):
                values[match[1]] = float(match[2])
        return values

    async def wait_until_empty(self) -> None:
        """Raises Failed where something is left."""
        until, left = time.monotonic() + SECONDS, {"?": 1.0}
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while left:
            now = await self.metrics()
            left = {name: now[name] for name in (*names, "workbench:open_requests") if now[name]}
            if left and time.monotonic() > until:
                raise Failed(f"left after all clients had gone: {left}")
            await asyncio.sleep(0.05)


def _head(body: bytes, path: str = "/v1/completions") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close")
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body


async def _response(from_server: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body, until the server closes. Raises WireError for an answer that is none, or not whole."""
    answer, body = HttpAnswer(), bytearray()
    while data := await from_server.read(READ_BYTES):
        body += answer.feed(data)
    answer.feed_end()
    assert answer.status is not None, "the head is complete where feed_end does not raise"
    return answer.status, bytes(body)


def _whole(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


def _streamed(data: bytes) -> list[tuple[str, str]] | None:
    """Text and reason of each choice; None where the stream ended with an error."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    *lines, last = EventStream().feed(data) or [""]
    if last != "[DONE]":
        return None
    for line in lines:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return [(texts[index], reasons[index]) for index in sorted(texts)]


def _check_error(data: bytes) -> None:
    try:
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError, AssertionError) as wrong:
        raise Failed(f"an error without an error object: {data[:300]!r}") from wrong


def soak_server(
    requests: int = 2_000, seed: int = 0, *, options: Sequence[str] = (), report: Callable[[int], None] | None = None
) -> Soaked:
    """Start `workbench serve` and put so many random clients to it. options: more of the command's."""
    check_whole("requests", requests, 1)
    command = [sys.executable, "-m", "workbench.cli", "serve", MODEL, "--port", "0", *OPTIONS, *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    soaked = Soaked()
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if (match := re.match(r"http://[\d.]+:(\d+)/", line)) is None:
            raise WorkbenchError(f"the server did not start: {line!r}")
        asyncio.run(_soak(Soak(int(match[1]), seed, soaked.counts), requests, server, soaked, report))
    except Failed as failure:
        soaked.failure = str(failure)
    finally:
        server.kill()
        server.wait()
    return soaked


async def _soak(
    soak: Soak, requests: int, server: subprocess.Popen[str], soaked: Soaked, report: Callable[[int], None] | None
) -> None:
    await _ready(soak)
    process, half, done, limit = psutil.Process(server.pid), 0, 0, asyncio.Semaphore(AT_A_TIME)

    async def one() -> None:
        nonlocal done, half
        async with limit:
            await soak.one()
        done += 1
        if done == max(1, requests // 2):
            half = process.memory_info().rss
        if report is not None:
            report(done)

    await _all([one() for _ in range(requests)])
    await soak.wait_until_empty()
    soaked.memory_bytes = half, process.memory_info().rss
    if requests >= 2 * WARM_REQUESTS and soaked.memory_bytes[1] > GROWTH * soaked.memory_bytes[0]:
        raise Failed(f"the server's memory grew from {half:,} to {soaked.memory_bytes[1]:,} bytes")
    answers = [asyncio.create_task(soak.good(ending=True)) for _ in range(AT_THE_END)]
    await asyncio.sleep(0.1)
    server.send_signal(signal.SIGTERM)
    await _all(answers)
    try:
        code = await asyncio.to_thread(server.wait, SECONDS)
    except subprocess.TimeoutExpired:
        raise Failed(f"the server had not ended {SECONDS} s after SIGTERM") from None
    if code:
        raise Failed(f"the server ended with code {code}")
    soaked.counts["ended with code 0"] += 1


async def _all(work: Sequence[Any]) -> None:
    """The first failure ends the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(_awaited(one))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _awaited(one: Any) -> None:
    await one


async def _ready(soak: Soak) -> None:
    until = time.monotonic() + SECONDS
    while True:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", soak._port)
        to_server.write(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        status, data = await _response(from_server)
        to_server.close()
        if status == 200:
            return
        if time.monotonic() > until:
            raise Failed(f"the server was not ready after {SECONDS} s: {data!r}")
        await asyncio.sleep(0.1)
