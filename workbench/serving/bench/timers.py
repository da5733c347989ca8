"""An event loop whose timers are not rounded up to whole milliseconds. No torch.

asyncio waits with epoll, which counts in milliseconds: Python rounds up, and a request due in 2.1 ms is sent after 3.
`select` counts in microseconds. Waiting for the epoll object itself with `select`, which is one descriptor however many
connections there are, gives both.
"""

from __future__ import annotations

import asyncio
import select
import selectors
from typing import Any

if hasattr(selectors, "EpollSelector"):

    class FineSelector(selectors.EpollSelector):
        """Epoll, with timeouts in microseconds."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

    def new_loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(FineSelector())

else:

    def new_loop() -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()
