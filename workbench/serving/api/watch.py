"""One timer for a whole stream, where a timer for each chunk would cost as much as the chunk's JSON."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType


class StreamWatch:
    """Around a stream: `quiet` is called where nothing was sent for ping_seconds, and TimeoutError is raised where
    one `sending` takes longer than send_seconds.

    The timer looks at most send_seconds and ping_seconds ahead, and at what was sent meanwhile.
    """

    def __init__(self, ping_seconds: float, send_seconds: float, quiet: Callable[[], None]) -> None:
        self._ping_s, self._send_s, self._quiet = ping_seconds, send_seconds, quiet
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._since_s, self._sends = self._loop.time(), False  # when the last sending began or ended
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> StreamWatch:
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Around each sending."""
        self._since_s, self._sends = self._loop.time(), True
        try:
            yield
        finally:
            self._since_s, self._sends = self._loop.time(), False

    def _look(self) -> None:
        now = self._loop.time()
        if self._sends and now >= self._since_s + self._send_s:
            self._limit.reschedule(now)
            return
        if not self._sends and now >= self._since_s + self._ping_s:
            self._since_s = now
            self._quiet()
        next_s = self._since_s + (self._send_s if self._sends else self._ping_s)
        self._timer = self._loop.call_at(min(next_s, now + self._send_s), self._look)
