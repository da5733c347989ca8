"""A server of tests: an engine on a tiny model behind a real socket, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from workbench.serving import Engine, SchedulerSettings
from workbench.serving.api.app import Server, build_app
from workbench.serving.api.serve import Serving, listening
from workbench.serving.api.settings import ServerSettings


@dataclass
class Running:
    """A server that listens."""

    app: Server
    url: str
    address: tuple[str, int]
    engine: Engine

    @functools.cached_property
    def openai(self) -> openai.OpenAI:
        return self.client()

    @property
    def front(self) -> Any:
        return self.app.front

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=options.pop("key", "none"), max_retries=0, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def blocks_used(self) -> int:
        tables = self.engine.kv.tables
        return tables.num_blocks - tables.num_available

    def wait_until_empty(self, seconds: float = 20.0) -> None:
        """No stream, no sequence, no block is held."""
        until = time.monotonic() + seconds
        while self.front.open_streams or not self.engine.idle or self.blocks_used():
            assert time.monotonic() < until, (self.front.open_streams, self.engine.idle, self.blocks_used())
            time.sleep(0.005)

    def raw(self, data: bytes, *, more: bool = False, timeout: float = 20) -> bytes:
        """What comes back for these bytes, until the server closes. more: and the connection stays open for reading."""
        with socket.create_connection(self.address, timeout=timeout) as connection:
            connection.sendall(data)
            if not more:
                connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(65_536):
                parts.append(part)
        return b"".join(parts)


@contextlib.contextmanager
def serving(
    engine: Engine, settings: ServerSettings | None = None, *, name: str = "tiny", **options: Any
) -> Iterator[Running]:
    """A server for this engine, until the block ends."""
    settings = settings or ServerSettings(drain_seconds=5)
    app = build_app(engine, name=name, settings=settings, **options)
    at = listening("127.0.0.1", 0)
    server = Serving(app, settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([at])), name="server", daemon=True)
    thread.start()
    host, port = at.getsockname()
    running = Running(app, f"http://{host}:{port}", (host, port), engine)
    try:
        until = time.monotonic() + 30
        while not server.started or app.front is None:
            assert time.monotonic() < until and app.why_not_loaded is None, app.why_not_loaded
            time.sleep(0.005)
        yield running
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def engine_of(model: Any, **options: Any) -> Engine:
    settings = {"max_running": 16, "token_budget": 64} | options.pop("settings", {})
    return Engine(model, SchedulerSettings(**settings), **options)


def events(body: bytes | str) -> list[Any]:
    """The data of server-sent events, parsed; "[DONE]" as it is. Comments are left out."""
    text = body.decode() if isinstance(body, bytes) else body
    data_of = []
    for block in text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line[len("data: ") :]
                data_of.append(data if data == "[DONE]" else json.loads(data))
    return data_of


def is_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response, which has OpenAI's shape and nothing else."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    return body["error"]
