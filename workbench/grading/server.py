"""The process that runs answers (`child`), as seen from ours: started, asked to fork a session, heard, ended."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from workbench.errors import WorkbenchError
from workbench.grading import child, confine, warm
from workbench.grading.confine import Limits

START_SECONDS = 120.0


class Server:
    """The parent of all sessions, started with the first of them; a context manager. `confinement` tells what this
    system allows, by name:

    "network" (off), "processes" (nothing outlives a session), "files" (nothing else can be read), "calls" (system calls
    that no exercise needs are refused). Limits always hold.

    bubblewrap: use it where it is installed even if Landlock keeps answers from our files, as it does when there is
    none.
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
        self.folder: str | None = None  # where sessions work, if not where all temporary files are
        self.answer_seconds = 0.0  # spent in answers and probes so far, on the wall
        self._settings = {"preload": list(preload), "hidden": [*hidden_folders(), *map(str, import_paths)]}
        self._server: subprocess.Popen | warm.Forked | None = None

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """Start the server now rather than for the first answer; WorkbenchError when it does not come up."""
        if self._server is None:
            self._start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
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

    def _start(self) -> None:
        """Fork the server from a warm process where there is one, else start it from nothing."""
        message = "no message"
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
                message = self._last_words() or message
                self._stop()
                continue
            if self._server.stderr is not None:
                self._server.stderr.close()
            self.confinement = hello["ready"]
            self.server_resident_bytes = hello["resident_bytes"]
            return
        raise WorkbenchError(f"the process that runs answers did not start: {message}")

    def _last_words(self) -> str:
        server = self._server
        if server is not None:
            server.kill()
        if not isinstance(server, subprocess.Popen) or server.stderr is None:
            return ""
        return server.communicate()[1].decode(errors="replace").strip()[-1500:]

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
        readable, _ = confine.without(confine.readable_paths(), self._settings["hidden"])
        own = [str(Path(module.__file__ or "").resolve()) for module in (child, confine)]
        for path in sorted([*readable, *own]):
            inside = any(Path(path).is_relative_to(other) for other in ("/proc", "/dev", *binds[1::3]))
            binds += [] if inside else ["--ro-bind-try", path, path]
        command = [program, "--die-with-parent", *binds, "--ro-bind", "/proc", "/proc", "--dev", "/dev"]
        command += ["--bind", self.folder, self.folder, "--chdir", "/", "--setenv", child.WITHIN, "bubblewrap"]
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


def hidden_folders() -> list[str]:
    """Ours, which no answer may read, wherever the package is installed: its source, its kernels, and in a clone all
    that lies beside them."""
    package = Path(__file__).resolve().parents[1]
    ours = [package]
    kernels = importlib.util.find_spec("workbench.kernels")
    if kernels is not None and kernels.origin:
        ours.append(Path(kernels.origin).resolve().parent)
    if (package.parent / "pyproject.toml").is_file():
        ours += [package.parent / name for name in ("solutions", "exercises", "notebooks", "tests", "docs", "build")]
    return [str(folder) for folder in ours]


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
        "WORKBENCH_NO_COMPILER": "1",  # an answer is graded the same on every machine
        "WORKBENCH_MEASURE": "off",
    }


def remove_tree(folder: str) -> None:
    """Remove a folder an answer may have made hard to remove. Changes nothing outside it; it may be gone already.

    It goes down and up one step at a time, by open folders and not by paths: neither length nor depth matters.
    """
    here = _opened(folder)
    if here is None:
        return
    names: list[str] = []
    below = [_unlink_files(here)]
    while below:
        if below[-1]:
            name = below[-1].pop()
            if (deeper := _opened(name, here)) is not None:
                os.close(here)
                here = deeper
                names.append(name)
                below.append(_unlink_files(here))
            continue
        below.pop()
        if names:
            above = os.open("..", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = above
            with contextlib.suppress(OSError):
                os.rmdir(names.pop(), dir_fd=here)
    os.close(here)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _opened(name: str, within: int | None = None) -> int | None:
    """A folder, opened to its owner where need be; None for what is none, or is a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    for _ in range(2):
        try:
            return os.open(name, flags, dir_fd=within)
        except PermissionError:
            with contextlib.suppress(OSError):
                os.chmod(name, 0o700, dir_fd=within)
        except OSError:
            break
    return None


def _unlink_files(folder: int) -> list[str]:
    """Unlink what is no folder in an open folder; the names of those that are."""
    folders = []
    with contextlib.suppress(OSError):
        os.fchmod(folder, 0o700)
        with os.scandir(folder) as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.name, dir_fd=folder)
    return folders
