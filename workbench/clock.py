"""One measurement at a time in a process: the lock that is held by whoever times something."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The one piece of state that belongs to the process: two panels never time at once. A thread may take it again.
MEASUREMENT_LOCK = threading.RLock()
LOCK_POLL_S = 0.05

CheckStop = Callable[[], None]


@contextmanager
def exclusive(check_stop: CheckStop | None = None) -> Iterator[None]:
    """Hold MEASUREMENT_LOCK. While another thread measures, wait; `check_stop` may end the waiting by raising."""
    while not MEASUREMENT_LOCK.acquire(timeout=LOCK_POLL_S):
        if check_stop is not None:
            check_stop()
    try:
        yield
    finally:
        MEASUREMENT_LOCK.release()


@contextmanager
def exclusive_within(seconds: float) -> Iterator[bool]:
    """The same, but no longer waited for than so many seconds: whether it is held. For who can do without measuring,
    and may be called by a thread that another one, which measures, waits for."""
    held = MEASUREMENT_LOCK.acquire(timeout=seconds)
    try:
        yield held
    finally:
        if held:
            MEASUREMENT_LOCK.release()
