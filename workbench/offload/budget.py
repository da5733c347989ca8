"""How many bytes lie on the device, by what they are, and a limit that nothing may pass.

On a GPU the limit is the card's memory. Here device, host and disk are regions of one machine, and the limit is a
number that we set: whatever the executor has on its device is entered first and allocated then, so that a peak above
the limit is an error and never a number in a report.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workbench.errors import WorkbenchError, check_whole


class DeviceBudget:
    """limit_bytes: the most that may be held at once. `peak` is the most that was."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = check_whole("limit_bytes", limit_bytes, 1)
        self.held: dict[str, int] = {}
        self.peak = 0

    @property
    def bytes_held(self) -> int:
        return sum(self.held.values())

    def take(self, name: str, num_bytes: int) -> None:
        """Enter what is about to be allocated. Raises WorkbenchError beyond the limit, with all that is held, and
        enters nothing then."""
        assert name not in self.held, name
        total = self.bytes_held + num_bytes
        if total > self.limit_bytes:
            every = ", ".join(f"{what} {size:,}" for what, size in [*self.held.items(), (name, num_bytes)])
            raise WorkbenchError(
                f"the device has {self.limit_bytes:,} bytes and would hold {total:,}: {every}; give a higher limit, put"
                " less on the device, or take a smaller batch"
            )
        self.held[name] = num_bytes
        self.peak = max(self.peak, total)

    def free(self, name: str) -> None:
        del self.held[name]

    @contextmanager
    def holding(self, name: str, num_bytes: int) -> Iterator[None]:
        """Held within the block."""
        self.take(name, num_bytes)
        try:
            yield
        finally:
            self.free(name)
