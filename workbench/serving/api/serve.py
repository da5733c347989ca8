"""The server under uvicorn: connections with limits, and an end in order.

    SIGTERM, SIGINT   not ready; no new work; running requests are completed, or cut after drain_seconds; exit 0
    a second one      cuts at once

uvicorn closes its listening sockets at the first signal; here they stay open while draining, so that /ready and
refusals are still answers and no broken connections.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from workbench.errors import WorkbenchError, check_whole
from workbench.serving.api.app import Server
from workbench.serving.api.errors import ApiError, as_json
from workbench.serving.api.http import MAX_HEADER_BYTES
from workbench.serving.api.settings import ServerSettings

KEEP_ALIVE_SECONDS = 30
BACKLOG = 2_048  # connections that wait to be accepted


def connection_class(settings: ServerSettings) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1 connection, with what it lacks: a time for headers, a number of connections, errors in our
    shape, and a way to cut a client that reads no more."""

    class Connection(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _reading: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                words = f"this server takes {settings.max_connections} connections at a time"
                self._refuse(ApiError(words, status=503, code="connections"))
                return
            self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            super().connection_lost(exc)  # which resumes writing
            self._was_read()

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._expect_headers()  # of the next request on this connection
            super().data_received(data)

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before:
                self._headers_came()
                scope: Any = self.cycle.scope
                scope.setdefault("extensions", {})["workbench.cut"] = self.transport.abort

        def pause_writing(self) -> None:
            super().pause_writing()
            self._expect_reading()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._was_read()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._expect_reading()

        def _expect_reading(self) -> None:
            """Whatever is being sent, also an answer that is complete: a client that reads nothing of it is cut."""
            self._was_read()
            if unread := self.transport.get_write_buffer_size():
                self._reading = self.loop.call_later(settings.send_seconds, self._look_at_reading, unread)

        def _look_at_reading(self, unread: int) -> None:
            if self.transport.get_write_buffer_size() < unread:
                self._expect_reading()
            else:
                self.transport.abort()

        def _was_read(self) -> None:
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(msg, code="invalid_http"))

        def _refuse(self, error: ApiError) -> None:
            """Answer without a request that could be understood, and close."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = as_json(error.body())
                headers = [
                    ("content-type", "application/json"),
                    ("content-length", str(len(body))),
                    ("connection", "close"),
                ]
                for event in (
                    h11.Response(status_code=error.status, headers=headers),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event))
            self.transport.close()
            self._expect_reading()

        def _expect_headers(self) -> None:
            self._deadline = self.loop.call_later(settings.header_seconds, self._too_slow)

        def _headers_came(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_slow(self) -> None:
            self._deadline = None
            words = f"the request's headers were not complete after {settings.header_seconds:g} s"
            self._refuse(ApiError(words, status=408, code="slow_headers"))

    return Connection


class Serving(uvicorn.Server):
    """Drains at the first signal, cuts at the second. freeze: the process is the server's alone, and its garbage
    collector leaves alone what was made before the engine was there."""

    def __init__(self, app: Server, settings: ServerSettings, *, freeze: bool = False, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(settings),
                ws="none",
                loop="asyncio",
                lifespan="on",
                access_log=False,
                log_level="warning",
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=5,
                server_header=False,
                proxy_headers=False,  # nobody here asks where a client is
                **options,
            )
        )
        self._app, self._drain_seconds = app, settings.drain_seconds
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0
        self._frozen = not freeze

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        loop = self._loop
        loop.call_soon_threadsafe(self._drain if self._signals == 1 else self._cut)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        if not self._frozen and self._app.front is not None:
            # what was made until now stays to the end: the collector need not walk the model in the middle of a stream
            self._frozen = True
            gc.collect()
            gc.freeze()
        return self._app.why_not_loaded is not None or await super().on_tick(counter)

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        try:
            await self._app.drain(self._drain_seconds)
        finally:
            self.should_exit = True

    def _cut(self) -> None:
        if self._app.front is not None:
            self._app.front.cut()
        self.should_exit = True


def listening(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises WorkbenchError where there can be none."""
    if check_whole("port", port, 0) > 65_535:
        raise WorkbenchError(f"port must be at most 65,535, got {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)  # from now on clients wait, and are not refused
    except (OSError, UnicodeError) as error:
        raise WorkbenchError(
            f"cannot listen on {host}, port {port}: {error}; choose another --host or --port"
        ) from error
    return made


def serve(app: Server, settings: ServerSettings, at: socket.socket) -> int:
    """Serve until a signal ends it; returns the exit code."""
    server = Serving(app, settings, freeze=True)
    asyncio.run(server.serve([at]))
    return 0 if app.why_not_loaded is None and (app.front is None or app.front.dead is None) else 1
