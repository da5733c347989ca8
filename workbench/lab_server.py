"""`workbench lab`: start JupyterLab on the course's folder, say where it is, and take it down with us.

The server listens on this machine only (127.0.0.1) and asks for a token, made anew at every start. The token
reaches it through the environment, where other users cannot see it, unlike a command line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from workbench.errors import WorkbenchError
from workbench.files import home, resolved

HOST = "127.0.0.1"
USUAL_PORT = 8888
START_S = 120  # a cold start on a slow disk
STOP_S = 10  # to end kernels in order; killed afterwards


def serve(course: Path, notebook: str, *, port: int | None = None, browser: bool = True) -> int:
    """Run JupyterLab until it is told to stop (Ctrl-C, SIGTERM); prints its URL, one line, on standard output.

    course: the folder it shows. notebook: what it opens, relative to `course`.
    port: default 8888, or any free one when that is taken. Raises WorkbenchError for a port that was asked for
    and is taken, a notebook that is not in the course, JupyterLab missing, and a server that does not come up.
    """
    place = _inside(course, notebook)
    if importlib.util.find_spec("jupyterlab") is None:
        raise WorkbenchError("JupyterLab is not installed here; run `make setup`, or pip install jupyterlab")
    port = chosen_port(port)
    token = secrets.token_urlsafe(24)
    page = f"/lab/tree/{quote(place)}"
    url = f"http://{HOST}:{port}{page}?token={token}"
    with stoppable(), _server(course, port, page, token) as server:
        _wait_until_up(server, port)
        print(url, flush=True)
        if browser:
            import webbrowser

            webbrowser.open(url)
        try:
            return 1 if server.wait() else 0
        except KeyboardInterrupt:  # the usual way to end it
            return 0


def _inside(course: Path, notebook: str) -> str:
    path = resolved(course / notebook)
    if not path.is_file():
        raise WorkbenchError(f"there is no notebook {notebook} in {course}")
    if not path.is_relative_to(course.resolve()):
        raise WorkbenchError(f"{notebook} lies outside the course's folder {course}; only what is inside is served")
    return path.relative_to(course.resolve()).as_posix()


def chosen_port(wanted: int | None, usual: int | None = None) -> int:
    """The port that was asked for, else the usual one, else a free one. Raises WorkbenchError for one that is taken."""
    usual = usual or USUAL_PORT
    if wanted is not None and not 1 <= wanted <= 65535:
        raise WorkbenchError(f"a port is a number from 1 to 65535, got {wanted}")
    if _free(wanted or usual):
        return wanted or usual
    if wanted is not None:
        raise WorkbenchError(f"port {wanted} is in use; name another with --port, or none to have one chosen")
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # one just left behind is free, as for the server
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _server(course: Path, port: int, page: str, token: str) -> Iterator[subprocess.Popen]:
    """A running JupyterLab, whose log goes to our standard error; ended with the block, whatever ends the block."""
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--ip={HOST}", f"--port={port}"]
    command += [
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={course}",
        f"--LabApp.default_url={page}",
        "--LabApp.extension_manager=readonly",  # the other one asks the network
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    with (
        writable_home() as variables,
        ended(
            subprocess.Popen(
                command,
                env={**os.environ, "JUPYTER_TOKEN": token, **variables},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                start_new_session=True,  # or Ctrl-C would reach it too, and it would stop to ask whether we are sure
            )
        ) as server,
    ):
        yield server


@contextlib.contextmanager
def writable_home() -> Iterator[dict[str, str]]:
    """JupyterLab keeps files in its user's home. For one who has none that can be written to: HOME, a folder that goes
    with the server."""
    if os.access(home(), os.W_OK):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="jupyter-home-") as folder:
        yield {"HOME": folder}


@contextlib.contextmanager
def ended(server: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """The server, ended with the block."""
    try:
        yield server
    finally:
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Being told to end, or losing the terminal, counts as Ctrl-C: the server must not outlive us."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {getattr(signal, name): signal.signal(getattr(signal, name), interrupt) for name in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_until_up(server: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise WorkbenchError(f"JupyterLab ended at its start (exit code {server.returncode}); its log is above")
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}/api", timeout=5).close()  # its version, without a token
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise WorkbenchError(f"JupyterLab did not answer within {START_S} seconds; its log is above")
