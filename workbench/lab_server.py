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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from workbench.errors import WorkbenchError
from workbench.files import home, resolved

HOST = "127.0.0.1"
USUAL_PORT = 8888
START_S = 120  # a cold start on a slow disk
MEANWHILE_S = 2.0
STOP_S = 10  # to end kernels in order; killed afterwards


def serve(
    course: Path,
    notebook: str,
    *,
    port: int | None = None,
    browser: bool = True,
    meanwhile: Callable[[], None] | None = None,
) -> int:
    """Run JupyterLab until it is told to stop (Ctrl-C, SIGTERM); prints its URL, one line, on standard output.

    course: the folder it shows. notebook: what it opens, relative to `course`. meanwhile: called every two seconds.
    port: default 8888, or any free one when that is taken. Raises WorkbenchError for a port that was asked for
    and is taken, a notebook that is not in the course, JupyterLab missing, and a server that does not come up.
    """
    place = _inside(course, notebook)
    if importlib.util.find_spec("jupyterlab") is None:
        raise WorkbenchError("JupyterLab is not installed here; run `make setup`, or pip install jupyterlab")
    port = port_for(port)
    page = f"/lab/tree/{quote(place)}"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--ip={HOST}", f"--port={port}"]
    command += [
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={course}",
        f"--LabApp.default_url={page}",
        "--LabApp.extension_manager=readonly",  # the other one asks the network
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    at = f"http://{HOST}:{port}"
    return run_server("JupyterLab", command, url=at + page, alive=f"{at}/api", browser=browser, meanwhile=meanwhile)


def run_server(
    called: str,
    command: list[str],
    *,
    url: str,
    alive: str,
    browser: bool,
    meanwhile: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run a server of Jupyter's family until it is stopped; print `url` with its token, one line, when it is up.

    called: its name in errors. alive: an address that it answers without a token. meanwhile: called every two seconds.
    environment: variables more than ours. Its log goes to our standard error.
    """
    token = secrets.token_urlsafe(24)
    with _stoppable(), _server(command, {"JUPYTER_TOKEN": token, **(environment or {})}) as server:
        _wait_until_up(server, called, alive)
        print(f"{url}?token={token}", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(f"{url}?token={token}")
        try:
            while True:
                try:
                    return 1 if server.wait(None if meanwhile is None else MEANWHILE_S) else 0
                except subprocess.TimeoutExpired:
                    assert meanwhile is not None
                    meanwhile()
        except KeyboardInterrupt:  # the usual way to end it
            return 0


def _inside(course: Path, notebook: str) -> str:
    path = resolved(course / notebook)
    if not path.is_file():
        raise WorkbenchError(f"there is no notebook {notebook} in {course}")
    if not path.is_relative_to(course.resolve()):
        raise WorkbenchError(f"{notebook} lies outside the course's folder {course}; only what is inside is served")
    return path.relative_to(course.resolve()).as_posix()


def port_for(wanted: int | None, usual: int = USUAL_PORT, host: str = HOST) -> int:
    """The port that was asked for, else the usual one, or any free one when that is taken.

    Raises WorkbenchError for one that was asked for and is taken, and for a host that is no address of this machine.
    """
    if wanted is not None and not 1 <= wanted <= 65535:
        raise WorkbenchError(f"a port is a number from 1 to 65535, got {wanted}")
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise WorkbenchError(f"cannot listen on {host!r}: {error}; name an address of this machine") from error
        unused = probe.getsockname()[1]
    if _free(wanted or usual, host):
        return wanted or usual
    if wanted is not None:
        raise WorkbenchError(f"port {wanted} is in use; name another with --port, or none to have one chosen")
    return unused


def _free(port: int, host: str) -> bool:
    with socket.socket() as probe:
        # one just left behind is free, as for the server
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _server(command: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """A running server, whose log goes to our standard error; ended with the block, whatever ends the block."""
    with (
        _writable_home() as variables,
        _ended(
            subprocess.Popen(
                command,
                env={**os.environ, **variables, **environment},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                start_new_session=True,  # or Ctrl-C would reach it too, and it would stop to ask whether we are sure
            )
        ) as server,
    ):
        yield server


@contextlib.contextmanager
def _writable_home() -> Iterator[dict[str, str]]:
    """JupyterLab keeps files in its user's home. For one who has none that can be written to: HOME, a folder that goes
    with the server."""
    if os.access(home(), os.W_OK):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="jupyter-home-") as folder:
        yield {"HOME": folder}


@contextlib.contextmanager
def _ended(server: subprocess.Popen) -> Iterator[subprocess.Popen]:
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
def _stoppable() -> Iterator[None]:
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


def _wait_until_up(server: subprocess.Popen, called: str, alive: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise WorkbenchError(f"{called} ended at its start (exit code {server.returncode}); its log is above")
        try:
            urllib.request.urlopen(alive, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise WorkbenchError(f"{called} did not answer within {START_S} seconds; its log is above")
