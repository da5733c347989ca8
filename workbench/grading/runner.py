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
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.grading import child, confine, warm
from workbench.grading.check import (
    COUNTS_FIRST,
    Check,
    CheckResult,
    Exercise,
    ExerciseSet,
    Result,
    cases_of,
    conclude,
    judge_check,
    race,
)
from workbench.grading.confine import Limits
from workbench.grading.reference import uses
from workbench.grading.session import START_SECONDS, Session, SessionEnded, remove_tree

MISSING = "the answer's cell is missing from the notebook"
UNTOUCHED = "the answer's cell is as it was handed out"


def preload_of(*sets: ExerciseSet) -> tuple[str, ...]:
    """The modules that hold the probes of these sets, after torch: what the server imports once."""
    modules = {c.probe.__module__: None for s in sets for e in s.exercises for c in e.checks}
    return ("torch", *modules)


class Runner:
    """The parent of all sessions; a context manager. `confinement` tells what this system allows, by name:

    "network" (off), "processes" (nothing outlives a session), "files" (nothing else can be read), "calls" (system calls that no exercise needs are refused). Limits always hold.

    bubblewrap: use it where it is installed even if Landlock keeps answers from our files, as it does when there is none.
    cores: on which answers run; default all of this process's.
    """

    def __init__(
        self,
        preload: Sequence[str] = ("torch",),
        import_paths: Sequence[str | Path] = (),
        limits: Limits | None = None,
        *,
        bubblewrap: bool = False,
        cores: Sequence[int] = (),
    ) -> None:
        if not hasattr(os, "fork"):
            raise WorkbenchError("checking a notebook needs Linux or macOS; on Windows, use WSL")
        self.limits = limits or Limits()
        self.confinement: dict[str, bool] = {}
        self.bubblewrap = bubblewrap
        self.cores = list(cores)
        self.folder = None  # where sessions work, if not where all temporary files are
        self.answer_seconds = 0.0  # spent in answers and probes so far, on the wall
        self._beside: Runner | None = None  # runs what answers are timed against
        self._settings = {
            "preload": list(preload),
            "import_paths": [*map(str, import_paths)],
        }
        self._server: subprocess.Popen | warm.Forked | None = None

    def __enter__(self) -> Runner:
        return self

    def start(self) -> None:
        """Start the server now rather than for the first answer; WorkbenchError when it does not come up."""
        if self._server is None:
            self._start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        self._stop()
        if self.folder is not None:
            remove_tree(self.folder)
            self.folder = None

    def _stop(self) -> None:
        if self._server is not None:
            self.control.close()
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
        session: Session | None = None
        load_error: dict | None = None
        starter = exercises.starters.get(exercise.grade_id)
        if source is None:
            load_error = {"not_attempted": MISSING}
        elif starter is not None and source.strip() == starter.strip():
            load_error = {"not_attempted": UNTOUCHED}
        elif used := uses(source, exercises.prelude, exercise.forbidden):
            load_error = {"reason": f"the answer uses {', '.join(used)}; this exercise is to write it"}
        passed, only_stubs = True, True
        try:
            for check in exercise.checks:
                cases, observations, output, mark = cases_of(exercise, check, seed), [], "", None
                if load_error is None and deadline is not None and time.monotonic() >= deadline:
                    observations = [{"reason": "not run: the time for the whole submission was used up"}]
                elif load_error is None and check.speedup is not None and not passed:
                    observations = [{"not_attempted" if only_stubs else "reason": COUNTS_FIRST}]
                elif load_error is None:
                    raced = check.speedup is not None
                    if raced and session is not None:
                        session.end()
                        session = None
                    if session is None:
                        self.start()
                        session = Session(self, exercises, exercise, source, single=raced)
                        session.prepare()
                    until = min(time.monotonic() + self.limits.check_seconds, deadline or float("inf"))
                    if not raced:
                        observations, load_error = _observe_all(session, check, cases, until)
                    else:
                        observations, load_error, mark = self._race(session, check, cases, until)
                    output = session.take_output()
                    if session.over or load_error or raced or check is exercise.checks[-1]:
                        session.end()
                        session = None
                if load_error:
                    observations = [load_error]
                result, stub = _result(check, cases, observations, output, mark)
                passed, only_stubs = passed and result.passed, only_stubs and stub
                yield result, stub
        finally:
            if session is not None:
                session.end()

    def _race(
        self, session: Session, check: Check, cases: list[dict], until: float
    ) -> tuple[list[dict], dict | None, str | None]:
        """(what was seen if the answer is not right and fast enough, what stands for every check, the mark if it is).

        What it is timed against runs in a process of ours that no answer shares, and in which the answer cannot reach.
        """
        if self._beside is None:
            paths = self._settings["import_paths"]
            self._beside = Runner(self._settings["preload"], paths, self.limits, cores=self.cores)
        exercise = replace(session.exercise, forbidden=())
        self._beside.start()
        beside = Session(self._beside, session.exercises, exercise, check.speedup.baseline, single=True)
        try:
            beside.prepare()
            if failed := beside.load(time.monotonic() + START_SECONDS):
                raise WorkbenchError(f"check {check.name!r}: what answers are timed against failed: {failed}")
            if not session.loaded and (failed := session.load(until)):
                return [], failed, None
            message, mark = race(
                check,
                cases,
                lambda case: session.timed(check, case, until),
                lambda case: beside.timed(check, case, time.monotonic() + self.limits.check_seconds),
            )
        except SessionEnded as ended:
            if beside.over:
                raise WorkbenchError(
                    f"check {check.name!r}: what answers are timed against: {ended}"
                ) from ended
            if not session.loaded:
                return [], {"reason": str(ended)}, None
            return [{"error": str(ended)}], None, None
        finally:
            beside.end()
        return ([], None, mark) if message is None else ([{"reason": message}], None, None)

    # --- The server ---

    def _start(self) -> None:
        """Fork the server from a warm process where there is one, else start it from nothing."""
        told = "no message"
        for start in (self._in_bubblewrap, self._forked, self._from_nothing):
            ours, theirs = socket.socketpair()
            self._server = start(theirs)
            theirs.close()
            if self._server is None:
                ours.close()
                continue
            self.control, self._received = ours, b""
            ours.settimeout(START_SECONDS)
            try:
                hello = self.hear()
            except (OSError, EOFError):
                told = self._last_words() or told
                self._stop()
                continue
            if self._server.stderr is not None:
                self._server.stderr.close()
            self.confinement = hello["ready"]
            self.server_resident_bytes = hello["resident_bytes"]
            return
        raise WorkbenchError(f"the process that runs answers did not start: {told}")

    def _last_words(self) -> str:
        self._server.kill()
        if self._server.stderr is None:
            return ""
        return self._server.communicate()[1].decode(errors="replace").strip()[-1500:]

    def _forked(self, control: socket.socket) -> warm.Forked | None:
        orders = warm.orders()
        if orders is None:
            return None
        try:
            with orders:
                return warm.order(orders, "server", self._settings, [control.fileno()])
        except OSError:
            return None

    def _in_bubblewrap(self, control: socket.socket) -> subprocess.Popen | None:
        """Where Landlock is missing and bubblewrap is not: a view of the file system with nothing of ours in it."""
        program = shutil.which("bwrap")
        if program is None or (confine.landlock_version() and not self.bubblewrap):
            return None
        if self.folder is None:
            self.folder = tempfile.mkdtemp(prefix="sessions-")
            os.chmod(self.folder, 0o711)
        binds: list[str] = []
        for path in sorted(confine.readable_paths(self._settings["import_paths"])):
            inside = any(Path(path).is_relative_to(other) for other in ("/proc", "/dev", *binds[1::3]))
            binds += [] if inside else ["--ro-bind-try", path, path]
        command = [program, "--die-with-parent", *binds, "--ro-bind", "/proc", "/proc", "--dev", "/dev"]
        command += [
            "--bind",
            self.folder,
            self.folder,
            "--chdir",
            "/",
            "--setenv",
            child.WITHIN,
            "bubblewrap",
        ]
        command += ["--cap-add", "ALL"] if os.getuid() == 0 else []
        return self._from_nothing(control, command)

    def _from_nothing(self, control: socket.socket, within: Sequence[str] = ()) -> subprocess.Popen:
        script = str(Path(child.__file__).resolve())
        command = [sys.executable, "-s", "-P", script, str(control.fileno()), json.dumps(self._settings)]
        return subprocess.Popen(
            [*within, *command],
            env=scrubbed_environment(),
            cwd=tempfile.gettempdir(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(control.fileno(),),
        )

    @property
    def heard(self) -> bool:
        """Whether a message of the server's has arrived that `hear` has not given yet."""
        return b"\n" in self._received

    def hear(self) -> dict:
        """The server's next message; EOFError when it is gone."""
        while not self.heard:
            data = self.control.recv(1 << 16)
            if not data:
                raise EOFError
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        return json.loads(line)

    def fork(self, request: dict, fds: list[int]) -> int:
        """Have the server fork a session; its process id. A server that is gone is started again, once."""
        for attempt in (1, 2):
            try:
                if self._server is None or self._server.poll() is not None:
                    self._stop()
                    self._start()
                socket.send_fds(self.control, [json.dumps(request).encode()], fds)
                return self.hear()["pid"]
            except (OSError, EOFError) as error:
                self._stop()
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


def _observe_all(
    session: Session, check: Check, cases: list[dict], until: float
) -> tuple[list[dict], dict | None]:
    """What was seen, case by case, until the session ended; and what stands for every check, when loading failed."""
    observations: list[dict] = []
    try:
        if not session.loaded and (failed := session.load(until)):
            return [], failed
        for case in cases:
            observations.append(session.observe(check, case, until))
    except SessionEnded as ended:
        if not session.loaded:
            return [], {"reason": str(ended)}
        observations.append({"error": str(ended)})
    return observations, None


def _result(
    check: Check, cases: list[dict], observations: list[dict], output: str, mark: str | None
) -> tuple[CheckResult, bool]:
    """mark: not None where a race has judged already, and the answer has won it."""
    message = None if mark is not None else judge_check(check, cases, observations)
    passed = message is None
    stub = bool(observations) and "not_attempted" in observations[0]
    result = CheckResult(
        check.name,
        passed,
        check.points * passed,
        check.points,
        message or "",
        check.hidden,
        output,
        mark or "",
    )
    return result, stub
