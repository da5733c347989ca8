"""Who runs a cell: a person at a page, or a program; and whether a click is heard while a cell is running.

Nobody is asked. A page sends a cell's id with each request to run it and offers to ask for input; nbclient (with it
nbconvert and `workbench build`), nbval and plain Python do not. Everything unknown counts as a program: then an example
stands in, where waiting could last for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

UNATTENDED = "WORKBENCH_UNATTENDED"  # =1: nobody is there, whatever a page says
TOGETHER_S = 0.5  # two cells that start within this were started by "Run All"
SUBSHELL_WITHIN_S = 3.0  # how long a page may take to start the thread that hears its clicks


@dataclass(frozen=True)
class Moment:
    """When a cell showed something: on the kernel's clock, and when the page asked for that cell, on the page's."""

    shown_s: float  # time.monotonic()
    requested: datetime | None


class Frontend:
    """What runs the cells of this kernel. `shell` is IPython's, or None in plain Python."""

    def __init__(self, shell: Any, environment: Mapping[str, str] = os.environ) -> None:
        self._kernel = getattr(shell, "kernel", None)
        self._environment = environment

    def is_attended(self) -> bool:
        """Whether a page, and so perhaps a person, runs the present cell."""
        if self._environment.get(UNATTENDED, "") not in ("", "0") or self._kernel is None:
            return False
        request = self._request()
        asks = bool(request.get("content", {}).get("allow_stdin"))
        return asks and ("cellId" in request.get("metadata", {}) or self.hears_clicks())

    def hears_clicks(self) -> bool:
        """Whether messages of widgets are handled now, by a thread beside the running cell."""
        if not getattr(self._kernel, "_supports_kernel_subshells", False):
            return False
        manager = getattr(getattr(self._kernel, "shell_channel_thread", None), "manager", None)
        return manager is not None and bool(manager.list_subshell())

    def will_hear_clicks(self) -> bool:
        """`hears_clicks`, with some patience: the page starts that thread when it first shows a widget."""
        until = time.monotonic() + SUBSHELL_WITHIN_S
        while not self.hears_clicks():
            if not getattr(self._kernel, "_supports_kernel_subshells", False) or time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def now(self) -> Moment:
        return Moment(time.monotonic(), self._sent())

    def runs_on_from(self, shown: Moment) -> bool:
        """Whether this cell and the one that showed something were started together, as "Run All" does: this one
        followed at once, or the page asked for both at the same time."""
        if time.monotonic() - shown.shown_s < TOGETHER_S:
            return True
        sent = self._sent()
        return (
            sent is not None
            and shown.requested is not None
            and abs((sent - shown.requested).total_seconds()) < TOGETHER_S
        )

    def _request(self) -> dict[str, Any]:
        """The page's request to run the present cell."""
        return self._kernel.get_parent("shell") or {} if self._kernel is not None else {}

    def _sent(self) -> datetime | None:
        """When the page sent it."""
        date = self._request().get("header", {}).get("date")
        return date if isinstance(date, datetime) else None
