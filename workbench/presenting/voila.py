"""Voilà on one notebook: started on this machine only, with a token, and ended with us.

The page that it serves is a template's; the cells of the notebook are executed in a kernel of this Python, one after
the other, while the page is already there. Give it a folder that holds nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

from workbench import lab_server
from workbench.errors import WorkbenchError

EXTENSIONS = ("@voila-dashboards/widgets-manager8", "@jupyter-widgets/jupyterlab-manager", "anywidget")
USUAL_PORT = 8866
START_S = 60


def check_voila() -> None:
    """Raise WorkbenchError where the packages of the extra `voila` are missing."""
    if importlib.util.find_spec("voila") is None:
        raise WorkbenchError(
            "Voilà, which shows panels on slides, is not installed here: pip install -e '.[voila]' -c constraints.txt; "
            "or write the slides with their recorded results: workbench present LAB --out FILE.html"
        )


def serve(
    notebook: Path,
    *,
    template: str,
    templates: Path | None = None,
    port: int | None = None,
    browser: bool = True,
    cwd: Path | None = None,
) -> int:
    """Run Voilà until Ctrl-C or SIGTERM; prints its URL, one line, on standard output.

    template: its name; templates: the folder that holds `voila/templates/NAME`, default Voilà's own.
    port: default 8866, or any free one when that is taken. Raises WorkbenchError for Voilà missing, a port that was
    asked for and is taken, and a server that does not come up.
    """
    check_voila()
    if not notebook.is_file():
        raise WorkbenchError(f"there is no notebook {notebook}")
    port = lab_server.chosen_port(port, USUAL_PORT)
    token = secrets.token_urlsafe(24)
    url = f"http://{lab_server.HOST}:{port}/?token={token}"
    command = [sys.executable, "-m", "voila", str(notebook), "--no-browser", f"--port={port}"]
    command += [
        f"--Voila.ip={lab_server.HOST}",
        "--Voila.auto_token=True",  # of the environment, where other users cannot see it
        "--Voila.port_retries=0",
        f"--VoilaConfiguration.template={template}",
        "--VoilaConfiguration.allow_template_override=NO",
        "--VoilaConfiguration.allow_theme_override=NO",
        "--VoilaConfiguration.progressive_rendering=True",  # the page first, then cell after cell
        *(f"--VoilaConfiguration.extension_allowlist={name}" for name in EXTENSIONS),
    ]
    paths = [str(templates)] if templates else []
    paths += [os.environ["JUPYTER_PATH"]] if os.environ.get("JUPYTER_PATH") else []
    with (
        lab_server.stoppable(),
        lab_server.writable_home() as variables,
        lab_server.ended(
            subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, "JUPYTER_TOKEN": token, "JUPYTER_PATH": os.pathsep.join(paths), **variables},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                start_new_session=True,  # Ctrl-C is ours
            )
        ) as server,
    ):
        _wait_until_up(server, port)
        print(url, flush=True)
        if browser:
            import webbrowser

            webbrowser.open(url)
        try:
            return 1 if server.wait() else 0
        except KeyboardInterrupt:  # the usual way to end it
            return 0


def _wait_until_up(server: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise WorkbenchError(f"Voilà ended at its start (exit code {server.returncode}); its log is above")
        with socket.socket() as probe:
            probe.settimeout(5)
            if probe.connect_ex((lab_server.HOST, port)) == 0:  # any page of it would start a kernel
                return
        time.sleep(0.1)
    raise WorkbenchError(f"Voilà did not answer within {START_S} seconds; its log is above")
