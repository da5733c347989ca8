"""Run answers in limited child processes and judge, here, what their probes saw.

    with Runner(preload=preload_of(exercises)) as runner:
        result = runner.run(exercises, exercise, source)

One `Runner` starts one server (`child`), which imports torch and the probes once and forks a session for every answer.
A session runs the checks of one exercise in order; when the answer kills it or runs out of time, that check fails with
the reason and the next check gets a fresh session. Cases, judges and expected values stay in this process; a case
crosses when its turn comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.grading import child
from workbench.grading.check import (
    MAX_JSON_BYTES,
    Check,
    CheckResult,
    Exercise,
    ExerciseSet,
    Result,
    cases_of,
    conclude,
    encode,
    judge_check,
    pack,
)
from workbench.grading.confine import Limits

MISSING = "the answer's cell is missing from the notebook"
UNTOUCHED = "the answer's cell is as it was handed out"
START_SECONDS = 120.0
SHOWN_OUTPUT_CHARS = 4_000
MAX_WORK_FILES = 10_000


def preload_of(*sets: ExerciseSet) -> tuple[str, ...]:
    """The modules that hold the probes of these sets, after torch: what the server imports once."""
    modules = {c.probe.__module__: None for s in sets for e in s.exercises for c in e.checks}
    return ("torch", *modules)


class SessionEnded(Exception):
    """The session is over; the text says why, in words for the student."""


class Runner:
    """The parent of all sessions; a context manager. `confinement` tells what this system allows, by name:

    "network" (off), "processes" (nothing outlives a session), "files" (nothing else can be read). Limits always hold.
    """

    def __init__(
        self,
        preload: Sequence[str] = ("torch",),
        import_paths: Sequence[str | Path] = (),
        limits: Limits | None = None,
    ) -> None:
        if not hasattr(os, "fork"):
            raise WorkbenchError("checking a notebook needs Linux or macOS; on Windows, use WSL")
        self.limits = limits or Limits()
        self.confinement: dict[str, bool] = {}
        self._settings = {
            "preload": list(preload),
            "import_paths": [*map(str, import_paths)],
        }
        self._server: subprocess.Popen | None = None

    def __enter__(self) -> Runner:
        return self

    def start(self) -> None:
        """Start the server now rather than for the first answer; WorkbenchError when it does not come up."""
        if self._server is None:
            self._start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._server is not None:
            self._control.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(5)
            self._server.kill()
            self._server.wait()
            self._server = None

    def run(
        self,
        exercises: ExerciseSet,
        exercise: Exercise,
        source: str | None,
        *,
        seed: int = 0,
        deadline: float | None = None,
    ) -> Result:
        """Run all checks of `exercise` on the answer `source` (None: its cell is missing) and conclude."""
        seen = list(self.stream(exercises, exercise, source, seed=seed, deadline=deadline))
        return conclude(exercise, [result for result, _ in seen], untouched=all(stub for _, stub in seen))

    def stream(
        self,
        exercises: ExerciseSet,
        exercise: Exercise,
        source: str | None,
        *,
        seed: int = 0,
        deadline: float | None = None,
    ) -> Iterator[tuple[CheckResult, bool]]:
        """Each check's result as it arrives, and whether the check met only the untouched stub.

        deadline: on time.monotonic's clock; checks after it fail unrun. Raises WorkbenchError when our own side fails.
        """
        session: _Session | None = None
        load_error: dict | None = None
        starter = exercises.starters.get(exercise.grade_id)
        if source is None:
            load_error = {"not_attempted": MISSING}
        elif starter is not None and source.strip() == starter.strip():
            load_error = {"not_attempted": UNTOUCHED}
        try:
            for check in exercise.checks:
                cases, output = cases_of(exercise, check, seed), ""
                observations: list[dict] = []
                until = min(time.monotonic() + self.limits.check_seconds, deadline or float("inf"))
                if load_error is None and until <= time.monotonic():
                    observations = [{"reason": "not run: the time for the whole submission was used up"}]
                elif load_error is None:
                    try:
                        if session is None:
                            session = _Session(self, exercises, exercise)
                            load_error = session.load(source, until)
                            if load_error:
                                raise SessionEnded
                        for number, case in enumerate(cases, 1):
                            observations.append(session.observe(check, number, case, until))
                    except SessionEnded as ended:
                        if session is None or not session.loaded:
                            load_error = load_error or {"reason": str(ended)}
                        else:
                            observations.append({"error": str(ended)})
                    if session is not None:
                        output = session.take_output()
                        if session.over or load_error:
                            session.end()
                            session = None
                if load_error:
                    observations = [load_error]
                    cases = cases[:1]
                yield _result(check, cases, observations, output)
        finally:
            if session is not None:
                session.end()

    # --- The server ---

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        script = str(Path(child.__file__).resolve())
        arguments = [sys.executable, "-s", "-P", script, str(theirs.fileno()), json.dumps(self._settings)]
        self._server = subprocess.Popen(
            arguments,
            env=scrubbed_environment(),
            cwd=tempfile.gettempdir(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self._control, self._received = ours, b""
        ours.settimeout(START_SECONDS)
        try:
            hello = self._hear()
        except (OSError, EOFError):
            self._server.kill()
            told = self._server.communicate()[1].decode(errors="replace").strip()
            self.close()
            raise WorkbenchError(
                f"the process that runs answers did not start: {told[-1500:] or 'no message'}"
            ) from None
        finally:
            if self._server is not None:
                self._server.stderr.close()
        self.confinement = hello["ready"]
        self.server_resident_bytes = hello["resident_bytes"]

    def _hear(self) -> dict:
        """The server's next message; EOFError when it is gone."""
        while b"\n" not in self._received:
            data = self._control.recv(1 << 16)
            if not data:
                raise EOFError
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        return json.loads(line)

    def _fork(self, request: dict, fds: list[int]) -> int:
        """Have the server fork a session; its process id. A server that is gone is started again, once."""
        for attempt in (1, 2):
            try:
                if self._server is None or self._server.poll() is not None:
                    self.close()
                    self._start()
                socket.send_fds(self._control, [json.dumps(request).encode()], fds)
                return self._hear()["pid"]
            except (OSError, EOFError) as error:
                self.close()
                if attempt == 2:
                    raise WorkbenchError(f"the process that runs answers stopped: {error}") from error
        raise AssertionError


def scrubbed_environment() -> dict[str, str]:
    """What a child sees of our environment: where libraries are, nothing else. Same hash seed in every run."""
    kept = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "SYSTEMROOT")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "USER": "student",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _result(
    check: Check, cases: list[dict], observations: list[dict], output: str
) -> tuple[CheckResult, bool]:
    message = judge_check(check, cases, observations)
    passed = message is None
    stub = bool(observations) and "not_attempted" in observations[0]
    result = CheckResult(
        check.name, passed, check.points * passed, check.points, message or "", check.hidden, output
    )
    return result, stub


class _Session:
    """One forked child with one answer loaded; its pipes, its folder, its limits, its end."""

    def __init__(self, runner: Runner, exercises: ExerciseSet, exercise: Exercise) -> None:
        self.limits, self.runner = runner.limits, runner
        self.exercises, self.exercise = exercises, exercise
        self.nonce = secrets.token_hex(16)
        self.loaded, self.over, self.exit_code = False, False, None
        self._results, self._output, self._output_bytes = b"", b"", 0
        self._watched = 0.0
        self.folder = tempfile.mkdtemp(prefix="answer-")
        command_read, self._commands = os.pipe()
        self._result_read, result_write = os.pipe()
        self._output_read, output_write = os.pipe()
        theirs = [command_read, result_write, output_write]
        for fd in (self._commands, self._result_read, self._output_read):
            os.set_blocking(fd, False)
        request = {
            "folder": self.folder,
            "limits": asdict(self.limits),
            "cpu_seconds": self.limits.check_seconds * (len(exercise.checks) + 1),
            "user": 60_000 + os.getpid() % 5_000,
        }
        try:
            self.pid = runner._fork(request, theirs)
        except WorkbenchError:
            self._close_pipes()
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    def load(self, source: str, until: float) -> dict | None:
        """Execute prelude and answer. None, or the observation that stands for every check of this exercise."""
        setup = {
            "nonce": self.nonce,
            "grade_id": self.exercise.grade_id,
            "prelude": self.exercises.prelude,
            "source": source,
            "entry": self.exercise.entry,
        }
        try:
            self._ask(json.dumps(setup), child.HELLO, time.monotonic() + START_SECONDS)
        except SessionEnded as ended:  # before any of the student's code ran
            told = self.take_output()
            self.end()
            raise WorkbenchError(f"a limited process could not be started here: {ended}. {told}") from ended
        seen = self._ask("", child.LOADED, until)
        if "broken" in seen:
            self.end()
            raise WorkbenchError(f"the setup cell of {self.exercises.name} raised {seen['broken']}")
        self.loaded = "reason" not in seen and "not_attempted" not in seen
        return None if self.loaded else seen

    def observe(self, check: Check, number: int, case: dict, until: float) -> dict:
        """What the probe of `check` saw on `case`. Raises SessionEnded with the reason when there is no telling."""
        command = {"number": number, "probe": check.probe_name, "case": encode(case)}
        return self._ask(pack(command), number, until)

    def take_output(self) -> str:
        """What the answer printed since last asked, cut; bytes that are not UTF-8 are shown as such."""
        if self.over is False:
            self._read_output()
        text = self._output.decode(errors="backslashreplace")
        cut = self._output_bytes - len(text[:SHOWN_OUTPUT_CHARS].encode())
        self._output, self._output_bytes = b"", 0
        return (
            text
            if len(text) <= SHOWN_OUTPUT_CHARS and cut <= 0
            else (f"{text[:SHOWN_OUTPUT_CHARS]}\n… ({cut:,} more bytes cut)")
        )

    def end(self) -> None:
        """Kill everything of the session, hear its end from the server, remove its folder. May be called twice."""
        if self.folder is None:
            return
        self._kill()
        with contextlib.suppress(OSError, EOFError):
            while self.exit_code is None:
                self.exit_code = self.runner._hear().get("exit")
        self.over = True
        self._close_pipes()
        remove_tree(self.folder)
        self.folder = None

    def _close_pipes(self) -> None:
        for fd in (self._commands, self._result_read, self._output_read):
            os.close(fd)

    def _kill(self) -> None:
        if self.exit_code is None:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, signal.SIGKILL)

    def _stop(self, reason: str) -> SessionEnded:
        self._kill()
        self.over = True
        return SessionEnded(reason)

    def _ask(self, line: str, number: int, until: float) -> dict:
        """Send a line (unless empty), read output and results until the reply with that number is there."""
        unsent = memoryview(line.encode() + b"\n" if line else b"")
        received = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._result_read, selectors.EVENT_READ, "result")
            selector.register(self._output_read, selectors.EVENT_READ, "output")
            selector.register(self.runner._control, selectors.EVENT_READ, "control")
            if unsent:
                selector.register(self._commands, selectors.EVENT_WRITE, "command")
            while True:
                if time.monotonic() >= until:
                    raise self._stop(f"stopped after {self.limits.check_seconds:g} s: an infinite loop?")
                self._watch()
                ready = {key.data for key, _ in selector.select(min(0.2, max(0.0, until - time.monotonic())))}
                if "command" in ready:
                    try:
                        unsent = unsent[os.write(self._commands, unsent) :]
                    except BrokenPipeError:
                        unsent = memoryview(b"")
                    if not unsent:
                        selector.unregister(self._commands)
                if "output" in ready and not self._read_output():
                    selector.unregister(self._output_read)
                ended = "control" in ready and self._heard_exit()
                if "result" in ready or ended:
                    data = self._read_results()
                    received += len(data)
                    if not data and not ended:
                        selector.unregister(self._result_read)
                    reply = self._reply(number)
                    if reply is not None:
                        self.over = ended
                        return reply
                    if max(received, len(self._results)) > 2 * MAX_JSON_BYTES:
                        raise self._stop("the answer's process sent more than a result can be")
                if ended:
                    self.over = True
                    self._read_output()
                    raise SessionEnded(_reason(self.exit_code))

    def _heard_exit(self) -> bool:
        try:
            self.exit_code = self.runner._hear().get("exit")
        except (OSError, EOFError):
            self.exit_code = -signal.SIGKILL
        return True

    def _read_results(self) -> bytes:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while len(data) < 1 << 20:
                piece = os.read(self._result_read, 1 << 16)
                if not piece:
                    break
                data += piece
        self._results += data
        return data

    def _reply(self, number: int) -> dict | None:
        """The first complete line that carries our nonce and this number; lines that do not are dropped."""
        while b"\n" in self._results:
            line, self._results = self._results.split(b"\n", 1)
            if len(line) > MAX_JSON_BYTES + 4_096:
                continue
            try:
                reply = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(reply, dict) and reply.get("nonce") == self.nonce and reply.get("number") == number:
                return {key: value for key, value in reply.items() if key not in ("nonce", "number")}
        return None

    def _read_output(self) -> int:
        """Take what has been printed, keep the first `output_bytes` of it; 0 when nothing more can come."""
        total = 0
        with contextlib.suppress(BlockingIOError):
            while total < 1 << 20:
                piece = os.read(self._output_read, 1 << 16)
                if not piece:
                    return total
                total += len(piece)
                self._output += piece[: max(0, self.limits.output_bytes - len(self._output))]
                self._output_bytes += len(piece)
        return total or 1

    def _watch(self) -> None:
        """Stop a session whose processes together, or whose folder, grew over a limit. Looks four times a second."""
        if time.monotonic() - self._watched < 0.25:
            return
        self._watched = time.monotonic()
        grown = grown_bytes(self.pid, self.runner.server_resident_bytes)
        if grown > self.limits.memory_bytes:
            raise self._stop(f"stopped: more than {self.limits.memory_bytes / 2**30:.3g} GiB of memory")
        written, files = 0, 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(OSError):
                    written += os.lstat(os.path.join(folder, name)).st_blocks * 512
            files += len(names) + 1
            if written > self.limits.file_bytes or files > MAX_WORK_FILES:
                raise self._stop(f"stopped: wrote more than {self.limits.file_bytes / 1e6:g} MB of files")


def _reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"the process ended with exit code {exit_code}: does the answer call exit?"
    if -exit_code == signal.SIGXCPU:
        return "stopped: all of its processor time was used up"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    hint = " (out of memory?)" if -exit_code == signal.SIGKILL else ""
    return f"the process was ended by {name}{hint}"


def grown_bytes(pid: int, resident_at_fork: int) -> int:
    """Resident memory of a process and its descendants beyond what each shared with the server when it was forked."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for member in family:
        with contextlib.suppress(psutil.Error):
            total += max(0, member.memory_info().rss - resident_at_fork)
    return total


def remove_tree(folder: str) -> None:
    """Remove a folder an answer may have made hard to remove."""

    def force(function, path, _error):
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700, follow_symlinks=os.chmod not in os.supports_follow_symlinks)
            function(path)

    shutil.rmtree(folder, onerror=force)
