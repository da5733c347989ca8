"""An event loop on which time passes only when all have said what they wait for: no test depends on a clock.

`run(main())` runs a coroutine on such a loop, from time 0. Where everything waits and no timer is set, it raises.
`connect_to(handle)` stands for `asyncio.open_connection`, in memory: each connection runs `handle(reader, outgoing)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__()
        waits, loop = self._selector.select, self

        def select(timeout: float | None = None) -> Any:
            ready = waits(0)
            if ready or timeout == 0:
                return ready
            if timeout is None or not loop._scheduled:
                raise RuntimeError("everything waits, and nothing is due")
            loop.now_s = max(loop.now_s, loop._scheduled[0]._when)
            return ready

        self._selector.select = select

    def time(self) -> float:
        return self.now_s


def run(main: Awaitable[Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Pipe:
    """The writing end of a connection in memory."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._closed = reader, False
        self.other: Pipe | None = None

    def write(self, data: bytes) -> None:
        if self.other is not None and self.other._closed and self._closed:
            raise ConnectionResetError("the other side is gone")
        if not self._reader.at_eof() and not self._reader._eof:
            self._reader.feed_data(bytes(data))

    async def drain(self) -> None:
        if self.other is not None and self.other._closed:
            raise ConnectionResetError("the other side is gone")
        await asyncio.sleep(0)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._reader._eof:
                self._reader.feed_eof()

    def abort(self) -> None:
        """As a reset does: the other side's reads fail."""
        self._closed = True
        self._reader.set_exception(ConnectionResetError(104, "Connection reset by peer"))

    def get_extra_info(self, name: str) -> Any:
        return ("10.0.0.1", 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return self._closed

    async def wait_closed(self) -> None:
        return None


def connect_to(
    handle: Callable[[Any, Any], Awaitable[None]], *, after_s: float = 0.0, given: list | None = None
) -> Any:
    """given: gets (host, port, name for TLS) of each connection; the peer's address is 10.0.0.1."""
    running: set[asyncio.Task] = set()

    async def connect(host: str, port: int, *, ssl: Any, server_hostname: str | None, limit: int) -> Any:
        if given is not None:
            given.append((host, port, server_hostname if ssl else None))
        if after_s:
            await asyncio.sleep(after_s)
        to_client, to_server = asyncio.StreamReader(limit=limit), asyncio.StreamReader(limit=2**24)
        client_end, server_end = Pipe(to_server), Pipe(to_client)
        client_end.other, server_end.other = server_end, client_end

        async def serve() -> None:
            try:
                await handle(to_server, server_end)
            except (ConnectionError, asyncio.IncompleteReadError):
                return  # the client has gone
            finally:
                server_end.close()

        task = asyncio.get_running_loop().create_task(serve())
        running.add(task)
        task.add_done_callback(running.discard)
        return to_client, client_end

    return connect
