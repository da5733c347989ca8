"""Child processes that report line by line and can be killed with all they started: for work that may hang or crash.

A child writes JSON lines to the pipe whose number it finds in the environment (`report`); what it prints goes to its
log. Nothing here waits for the end of a pipe: a process that the child left behind would hold it open.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPORTS = "WORKBENCH_REPORTS"  # environment: the number of the pipe
KILL_S = 5.0  # for a killed process to be gone
TAIL_BYTES = 4_000
SPOILED = ("CUDA error", "illegal memory access", "device-side assert", "unspecified launch failure")
LONGEST_LINE = 64 << 20  # bytes of one report


def report(**event: Any) -> None:
    """Write one report, in the child. Nothing is written where nobody listens."""
    if REPORTS not in os.environ:
        return
    line = (json.dumps(event) + "\n").encode()
    while line:
        line = line[os.write(int(os.environ[REPORTS]), line) :]


def spoils_the_device(text: str) -> bool:
    """Whether an error of this text leaves the process without a CUDA context that works."""
    return any(words in text for words in SPOILED)


class Child:
    """One child process. Its standard input is a pipe; output and errors are appended to `log` as far as that can be
    written, and their end is kept."""

    def __init__(self, command: Sequence[str], *, folder: Path, log: Path, environment: Mapping[str, str]) -> None:
        self.began, self.heard, self.log, self.tail = time.monotonic(), time.monotonic(), log, ""
        self._reports, theirs = os.pipe()
        self._buffer = b""
        self._process = subprocess.Popen(
            list(command),
            cwd=folder,
            env={**os.environ, **environment, REPORTS: str(theirs), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            process_group=0,
        )
        os.close(theirs)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        for pipe in (self._reports, self._output):
            os.set_blocking(pipe, False)

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def read(self) -> list[dict[str, Any]]:
        """The reports that came since, without waiting."""
        self._read_output()
        self._buffer += _read(self._reports)
        *lines, self._buffer = self._buffer.split(b"\n")
        if lines:
            self.heard = time.monotonic()
        if len(self._buffer) > LONGEST_LINE:
            self.kill()
        return [event for event in map(_event, lines) if event is not None]

    def answer(self, line: str) -> None:
        """Write a line to its standard input; a child that is gone does not mind."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        """How it ended, in words; "" where it ended as it should."""
        code = self._process.poll()
        if code is None or code >= 0:
            return f"ended with exit code {code}" if code else ""
        with contextlib.suppress(ValueError):
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"was killed by signal {-code}"

    def kill(self) -> None:
        """It, and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver: it cannot be waited for
            self._process.wait(KILL_S)

    def close(self) -> None:
        """Kill what is left of it, and let go of its pipes."""
        self.kill()
        self._read_output()
        os.close(self._reports)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _read_output(self) -> None:
        text = _read(self._output)
        if text:
            self.tail = (self.tail + text.decode(errors="replace"))[-TAIL_BYTES:]
            with contextlib.suppress(OSError), self.log.open("ab") as file:  # a full disk costs the log, not the work
                file.write(text)

    @property
    def pipes(self) -> tuple[int, int]:
        return self._reports, self._output


def wait(children: Iterable[Child], seconds: float) -> None:
    """Until one of them says something, or so long."""
    pipes = [pipe for child in children if child.running for pipe in child.pipes]
    select.select(pipes, [], [], max(0.0, seconds))
    time.sleep(0.002)  # a pipe that was closed is ready at once, again and again


def follow(child: Child, hear: Callable[[dict[str, Any]], None], within_s: float) -> str:
    """Hear a child to its end: why it did not come to a good one, "" where it did. It is killed after `within_s`."""
    try:
        while child.running and child.seconds < within_s:
            wait([child], min(0.2, within_s - child.seconds))
            for event in child.read():
                hear(event)
        late = child.running
        if late:
            child.kill()
        for event in child.read():
            hear(event)
        return f"stopped after {within_s:.0f} s, its share of the time" if late else child.ending
    finally:
        child.close()


class Budget:
    """Seconds for a number of runs, of which `abreast` go at a time."""

    def __init__(
        self,
        seconds: float,
        runs: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        abreast: int = 1,
        least_s: float = 20.0,
        shares: float = 3.0,
    ) -> None:
        """A run may take as long as so many shares of what is left, if it must, and at least `least_s`."""
        self._ends, self._left, self._clock = clock() + seconds, runs, clock
        self._abreast, self._least_s, self._shares = abreast, least_s, shares

    @property
    def remaining(self) -> float:
        return max(0.0, self._ends - self._clock())

    def more(self, runs: int) -> None:
        """So many runs came along."""
        self._left += runs

    def share(self) -> float:
        """Seconds that the next run may take; 0 where none are left. Counts that run as begun."""
        share = max(self._least_s, self._shares * self._abreast * self.remaining / max(1, self._left))
        self._left -= 1
        return min(share, self.remaining)


def _read(pipe: int) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError, OSError):
        while piece := os.read(pipe, 1 << 16):
            data += piece
    return data


def _event(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        return event if isinstance(event, dict) else None
    return None
