"""The engine's end of own.py: calls its functions in their process, each within a time, and says what went wrong."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workbench.capstone.rules import PUBLIC, REFUSED_NAMES, broken_rules
from workbench.errors import WorkbenchError, in_one_line
from workbench.grading import confine

MEMORY_BYTES = 256 << 20  # that own.py may take
CALL_SECONDS = 2.0  # that one call may take
TOTAL_SECONDS = 120.0  # of processor time, in one run
START_SECONDS = 20.0
MAX_LINE_BYTES = 4 << 20
MAX_NESTING = 32  # lists and dicts in one another, the answer's own line among them; a plan needs 3
FLAGS = ("-P", "-s", "-S")  # nothing of the folder, of the user or of site-packages; -I would drop PYTHONHASHSEED


class OwnPartFailed(WorkbenchError):
    """own.py gave no usable advice. `gate`: "start"; "conduct", it reached out of its process; "budget", it took more
    memory than it may; "advice", an error, a wrong answer or none in time, after which the run ends where it is."""

    def __init__(self, gate: str, words: str) -> None:
        super().__init__(in_one_line(words))
        self.gate = gate


def nested_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dicts lie in one another more than `levels` deep. How deep Python's own reader goes depends on
    its version and on who called it, so that it is no limit to rely on."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for one in layer
            if isinstance(one, (list, dict))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not layer:
            return False
    return any(isinstance(one, (list, dict)) for one in layer)


class OwnParts:
    """own.py in its process. `call` a function of it; `close` at the end.

    Raises OwnPartFailed where the source breaks the rules or does not start.
    """

    def __init__(self, source: str) -> None:
        if wrong := broken_rules(source):
            raise OwnPartFailed("conduct", f"own.py breaks the rules: {'; '.join(wrong[:3])}")
        self.calls, self.seconds, self._buffer = 0, 0.0, b""
        self._closed = False
        self.failure: OwnPartFailed | None = None  # the first; an engine goes on without a draft or a policy that fails
        theirs_in, self._commands = os.pipe()
        self._results, theirs_out = os.pipe()
        environment = {"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, *FLAGS, str(Path(__file__).with_name("own_child.py")), str(theirs_in), str(theirs_out)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs_in, theirs_out],
            env=environment,
            process_group=0,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        for pipe in (self._results, self._commands):
            os.set_blocking(pipe, False)
        setup = {
            "source": source,
            "confine": confine.__file__,
            "public": PUBLIC,
            "refused": sorted(REFUSED_NAMES),
            "memory_bytes": MEMORY_BYTES,
            "cpu_seconds": TOTAL_SECONDS,
            "user": 65_000 + secrets.randbelow(500),
        }
        try:
            self.held = self._ask(setup, START_SECONDS, "start")["ready"]
            loaded = self._ask(None, CALL_SECONDS, "own.py")
            if "error" in loaded:
                gate = "budget" if "MemoryError" in loaded["error"] else "start"
                raise OwnPartFailed(gate, f"own.py does not start: {loaded['error']}{self._memory_words(gate)}")
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any) -> Any:
        """What the function gives. Raises OwnPartFailed for an error, a call that is too long, and an end."""
        if self.failure is not None:
            raise self.failure
        began = time.monotonic()
        try:
            answer = self._ask([name, arguments], CALL_SECONDS, name)
            self.calls += 1
            self.seconds += time.monotonic() - began
            if "error" in answer:
                gate = "budget" if "MemoryError" in answer["error"] else "advice"
                words = f"{name} failed in call {self.calls}: {answer['error']}"
                raise OwnPartFailed(gate, words + self._memory_words(gate))
        except OwnPartFailed as failed:
            raise self.refuse(failed) from None
        return answer.get("result")

    def refuse(self, failed: OwnPartFailed) -> OwnPartFailed:
        """Note that what own.py said is of no use; the run ends."""
        self.failure = self.failure or failed
        return failed

    @staticmethod
    def _memory_words(gate: str) -> str:
        return f"; own.py may take {MEMORY_BYTES >> 20} MiB" if gate == "budget" else ""

    def _ask(self, message: Any, seconds: float, what: str) -> dict[str, Any]:
        line = json.dumps(message).encode() + b"\n"
        until = time.monotonic() + seconds
        try:
            while line:
                self._wait(until, what, seconds, writes=True)
                line = line[os.write(self._commands, line) :]
            answer = self._line(until, what, seconds)
        except BrokenPipeError:
            raise self._ended(what) from None
        if "conduct" in answer:
            raise OwnPartFailed("conduct", f"own.py reached out of its process: {answer['conduct']}")
        return answer

    def _wait(self, until: float, what: str, seconds: float, *, writes: bool = False) -> None:
        """For its pipe. Raises OwnPartFailed when the time is over."""
        pipes = ([], [self._commands]) if writes else ([self._results], [])
        if not any(select.select(*pipes, [], max(0.0, until - time.monotonic()))):
            self.close()
            gate = "start" if what in ("start", "own.py") else "advice"
            raise OwnPartFailed(gate, f"{what} took longer than {seconds:g} s in call {self.calls + 1}")

    def _line(self, until: float, what: str, seconds: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._wait(until, what, seconds)
            piece = os.read(self._results, 1 << 16)
            if not piece:
                raise self._ended(what)
            self._buffer += piece
            if len(self._buffer) > MAX_LINE_BYTES:
                self.close()
                raise OwnPartFailed("advice", f"{what} gave more than {MAX_LINE_BYTES >> 20} MiB in one answer")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            return {"error": f"an answer that is no JSON, or is nested too deeply: {error}"}
        if nested_deeper(answer, MAX_NESTING):
            return {"error": f"lists in one another more than {MAX_NESTING} deep are no JSON that is read here"}
        return answer if isinstance(answer, dict) else {"error": "no answer that can be read"}

    def _ended(self, what: str) -> OwnPartFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        if code == -signal.SIGXCPU:
            return OwnPartFailed("advice", f"own.py used more than {TOTAL_SECONDS:g} s of processor time")
        if code in (-signal.SIGKILL, -signal.SIGSEGV):
            words = f"its process was ended by signal {-code}, as happens beyond {MEMORY_BYTES >> 20} MiB of memory"
            return OwnPartFailed("budget", f"own.py ended in {what}: {words}")
        return OwnPartFailed("conduct", f"own.py ended its process in {what} (exit code {code})")

    def close(self) -> None:
        """End the process. May be called twice."""
        if self._closed:  # the numbers of its pipes may be another's by now
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        for fd in (self._commands, self._results):
            os.close(fd)
