"""One session: a forked child with one answer loaded, its pipes, its folder, its limits and its end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import stat
import sys
import tempfile
import time
from dataclasses import asdict

from workbench.errors import WorkbenchError
from workbench.grading import child
from workbench.grading.check import (
    MAX_JSON_BYTES,
    MAX_MESSAGE_CHARS,
    Check,
    Exercise,
    ExerciseSet,
    NotEncodable,
    decode,
    encode,
    pack,
)
from workbench.grading.handed import hand_over
from workbench.grading.server import START_SECONDS, Server, remove_tree

SHOWN_OUTPUT_CHARS = 4_000
MAX_WORK_FILES = 10_000
MAX_WORK_DEPTH = 100


class SessionEnded(Exception):
    """The session is over; the text says why, in words for the student."""


class Session:
    """One forked child with one answer loaded; its pipes, its folder, its limits, its end."""

    def __init__(
        self, server: Server, exercises: ExerciseSet, exercise: Exercise, source: str, *, single: bool = False
    ) -> None:
        """source: of the answer's cell. single: it can start no thread and no process, as long as it lives; for what is
        timed."""
        self.limits, self.server = server.limits, server
        self.exercises, self.exercise, self.source = exercises, exercise, source
        self.nonce = secrets.token_hex(16)
        self.loaded, self.over, self.suspect = False, False, ""
        self.exit_code: int | None = None
        self._results, self._output, self._output_bytes = b"", b"", 0
        self._watched, self._mapped, self._asked, self.wall_seconds = 0.0, 0.0, 0, 0.0
        self.folder: str | None = tempfile.mkdtemp(prefix="answer-", dir=server.folder)
        command_read, self._commands = os.pipe()
        self._result_read, result_write = os.pipe()
        self._output_read, output_write = os.pipe()
        theirs = [command_read, result_write, output_write]
        for fd in (self._commands, self._result_read, self._output_read):
            os.set_blocking(fd, False)
        request = {
            "folder": self.folder,
            "limits": asdict(self.limits) | ({"processes": 0} if single else {}),
            "cpu_seconds": self.limits.check_seconds * (len(exercise.checks) + 1),
            "cores": server.cores,
            "user": 60_000 + secrets.randbelow(5_000),  # a new one, so that nothing is left for the next
        }
        try:
            self.pid = server.fork(request, theirs)
        except WorkbenchError:
            self._close_pipes()
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    def prepare(self) -> None:
        """Wait until the prelude, which is ours, has run. WorkbenchError when our side fails: nothing that is seen up
        to here can be the answer's doing, which the process has not got yet."""
        handed = hand_over(self.exercises, self.exercise)
        setup = {
            "nonce": self.nonce,
            "grade_id": self.exercise.grade_id,
            "prelude": handed.prelude,
            "modules": handed.modules,
            "entry": self.exercise.entry,
        }
        try:
            self._ask(json.dumps(setup), child.HELLO, time.monotonic() + START_SECONDS)
        except SessionEnded as ended:  # before any of the student's code ran
            output = self.take_output()
            self.end()
            raise WorkbenchError(f"a limited process could not be started here: {ended}. {output}") from ended
        try:
            seen = self._ask("", child.READY, time.monotonic() + START_SECONDS)
        except SessionEnded as ended:
            seen = {"broken": str(ended)}
        if "broken" in seen:
            self.end()
            raise WorkbenchError(f"the setup cell of {self.exercises.name} failed: {seen['broken']}")

    def load(self, until: float) -> dict | None:
        """Execute the answer's cell. None, or the observation that stands for every check of this exercise."""
        seen = plain(self._ask(json.dumps(self.source), child.LOADED, until))
        self.loaded = "reason" not in seen and "not_attempted" not in seen
        if isinstance(seen.get("suspect"), str):
            self.suspect = seen["suspect"]
        return None if self.loaded else seen

    def observe(self, check: Check, case: dict, until: float) -> dict:
        """What the probe of `check` saw on `case`. Raises SessionEnded with the reason when there is no telling."""
        self._asked += 1  # never the same number twice: what is left of an earlier case answers nothing
        command = {"number": self._asked, "probe": check.probe_name, "case": encode(case)}
        return plain(self._ask(pack(command), self._asked, until))

    def timed(self, check: Check, case: dict, until: float) -> tuple[dict, float]:
        """What `observe` gives, and the seconds that it took on the system's clock of this process's processor time.

        All threads count, so more of them gain nothing, and waiting for a neighbour costs nothing. Where there is no
        such clock (macOS), or where processes of the answer could hide from it (no process namespace), it is the time
        on the wall. After its turn the process is stopped, so that it cannot slow down what runs beside it. Raises
        SessionEnded for one that has started others all the same.
        """
        self._signal(signal.SIGCONT)
        started = processor_seconds(self.pid)
        seen = self.observe(check, case, until)
        ended = processor_seconds(self.pid)
        seconds = self.wall_seconds
        if started is not None and ended is not None and self.server.confinement.get("processes"):
            seconds = ended - started
        self._signal(signal.SIGSTOP)
        if len(family_of(self.pid)) > 1:
            raise self._stop("stopped: the answer has started processes; what is timed works in one")
        return seen, seconds

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

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
                self.exit_code = self.server.hear().get("exit")
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
        """Send a line (unless empty) and wait for the reply with that number; `wall_seconds` is what that took."""
        started = time.monotonic()
        try:
            reply = self._hear(line, number, until)
        finally:
            self.wall_seconds = time.monotonic() - started
            if number >= child.LOADED:
                self.server.answer_seconds += self.wall_seconds
        if not self.over:
            self._look()  # an answer may be done with its flood before anybody looked
        return reply

    def _hear(self, line: str, number: int, until: float) -> dict:
        """Write the line, read output and results as they come, until the reply is there."""
        if self.over:
            raise SessionEnded(_reason(self.exit_code))
        unsent = memoryview(line.encode() + b"\n" if line else b"")
        received = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._result_read, selectors.EVENT_READ, "result")
            selector.register(self._output_read, selectors.EVENT_READ, "output")
            selector.register(self.server.control, selectors.EVENT_READ, "control")
            if unsent:
                selector.register(self._commands, selectors.EVENT_WRITE, "command")
            while (reply := self._reply(number)) is None:
                if time.monotonic() >= until:
                    raise self._stop(f"stopped after {self.limits.check_seconds:g} s: an infinite loop?")
                self._watch()
                wait = 0.0 if self.server.heard else min(0.2, max(0.0, until - time.monotonic()))
                ready = {key.data for key, _ in selector.select(wait)}
                if "command" in ready:
                    try:
                        unsent = unsent[os.write(self._commands, unsent) :]
                    except BrokenPipeError:
                        unsent = memoryview(b"")
                    if not unsent:
                        selector.unregister(self._commands)
                if "output" in ready and not self._read_output():
                    selector.unregister(self._output_read)
                ended = ("control" in ready or self.server.heard) and self._heard_exit()
                if "result" in ready or ended:
                    data = self._read_results()
                    received += len(data)
                    if not data and not ended:
                        selector.unregister(self._result_read)
                    if max(received, len(self._results)) > 2 * MAX_JSON_BYTES:
                        raise self._stop("the answer's process sent more than a result can be")
                if ended:
                    self.over = True
                    if (reply := self._reply(number)) is not None:
                        break
                    self._read_output()
                    raise SessionEnded(_reason(self.exit_code))
        return reply

    def _heard_exit(self) -> bool:
        try:
            self.exit_code = self.server.hear().get("exit")
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
        if time.monotonic() - self._watched >= 0.25:
            self._look()

    def _look(self) -> None:
        self._watched = time.monotonic()
        family = family_of(self.pid)
        grown = grown_bytes(family, self.server.server_resident_bytes)
        if grown > self.limits.memory_bytes:
            raise self._stop(f"stopped: more than {self.limits.memory_bytes / 2**30:.3g} GiB of memory")
        folder = self.folder if self._watched - self._mapped >= 0.25 else None
        try:
            held = held_bytes(family, folder)
        except PermissionError:
            raise self._stop("stopped: hides the files that it holds open") from None
        self._mapped = self._watched if folder else self._mapped
        written, files = held, 0
        if written > self.limits.file_bytes:
            raise self._stop(f"stopped: holds more than {self.limits.file_bytes / 1e6:g} MB of files without a name")
        folders = [(self.folder, 0)]
        while folders:
            folder, depth = folders.pop()
            if depth > MAX_WORK_DEPTH:
                raise self._stop(f"stopped: made folders more than {MAX_WORK_DEPTH} deep")
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    files += 1
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            folders.append((entry.path, depth + 1))
                            continue
                        status = entry.stat(follow_symlinks=False)
                        # blocks of a sparse file, size of one whose last block is half full
                        written += min(status.st_blocks * 512, status.st_size)
                    if written > self.limits.file_bytes:
                        raise self._stop(f"stopped: wrote more than {self.limits.file_bytes / 1e6:g} MB of files")
                    if files > MAX_WORK_FILES:
                        raise self._stop(f"stopped: made more than {MAX_WORK_FILES:,} files")


def plain(reply: dict) -> dict:
    """A reply to `Session.observe` as `check.observe` makes them: an answer may have taken its child's place."""
    if "value" not in reply:
        return {name: text for name, text in reply.items() if isinstance(text, str)}
    try:
        noted = {"suspect": reply["suspect"][:MAX_MESSAGE_CHARS]} if isinstance(reply.get("suspect"), str) else {}
        return {"value": encode(decode(reply["value"]))} | noted
    except (NotEncodable, RecursionError, TypeError, KeyError):
        return {"error": "the answer's process sent what is no observation"}


def _reason(exit_code: int | None) -> str:
    assert exit_code is not None, "a session that is over has ended in some way"
    if exit_code >= 0:
        return f"the process ended with exit code {exit_code}: does the answer call exit?"
    if -exit_code == signal.SIGXCPU:
        return "stopped: all of its processor time was used up"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    hint = " (out of memory?)" if -exit_code == signal.SIGKILL else ""
    return f"the process was ended by {name}{hint}"


def grown_bytes(family: list, resident_at_fork: int) -> int:
    """Resident memory of these processes beyond what each shared with the server when it was forked."""
    import psutil

    total = 0
    for member in family:
        with contextlib.suppress(psutil.Error):
            total += max(0, member.memory_info().rss - resident_at_fork)
    return total


def held_bytes(family: list, folder: str | None) -> int:
    """Bytes of files that have no name any more but are held open by these processes, in memory (memfd) or on disk;
    Linux. folder: where it may write; then files that it holds by a mapping alone count, too.

    PermissionError where that cannot be looked at though the process is there.
    """
    if sys.platform != "linux":
        return 0
    found: dict[tuple[int, int], int] = {}
    for member in family:
        process = f"/proc/{member.pid}"
        try:
            names = os.listdir(f"{process}/fd")
        except (FileNotFoundError, ProcessLookupError):
            continue
        for name in names:
            with contextlib.suppress(OSError):
                status = os.stat(f"{process}/fd/{name}")
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
        if folder is not None:
            with contextlib.suppress(OSError), open(f"{process}/maps") as maps:
                for line in maps:
                    fields = line.split(maxsplit=5)
                    if len(fields) == 6 and fields[5].startswith(folder) and fields[5].endswith(" (deleted)\n"):
                        first, end = (int(one, 16) for one in fields[0].split("-"))
                        file = os.makedev(*(int(one, 16) for one in fields[3].split(":"))), int(fields[4])
                        found[file] = max(end - first, found.get(file, 0))
    return sum(found.values())


def family_of(pid: int) -> list:
    """A process and its descendants as psutil has them; none when it is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def processor_seconds(pid: int) -> float | None:
    """Processor time of all threads of a process so far, to the nanosecond; None where the system does not tell.

    Linux has such a clock for every process (clock_getcpuclockid(3)).
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        return time.clock_gettime(~pid << 3 | 2)
    return None
