"""Start Voilà on a folder of notebooks: pages of their outputs, live, without their sources.

Voilà starts a kernel for each page that a reader opens, and ends it when the page is closed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from urllib.parse import quote

from workbench.errors import WorkbenchError
from workbench.lab_server import HOST, port_for, run_server

USUAL_PORT = 8866
CULL_S = 120  # a kernel that no page is connected to, and that does nothing, is ended after so long
SETTINGS = {  # of its web server
    # Voilà's pages ask another machine for a font of icons, which they have already: no page may ask any
    "headers": {"Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"},
    # a page that is closed says so without the cookie against forged requests; kernels have names that nobody guesses
    "disable_check_xsrf": True,
}


def check_packages(otherwise: str = "") -> None:
    """Raises WorkbenchError where Voilà is not installed, with how to install it, and what to do `otherwise`."""
    if importlib.util.find_spec("voila") is None:
        words = "Voilà is not installed here; run `make setup`, or pip install -e '.[voila]' -c constraints.txt"
        raise WorkbenchError(f"{words}; {otherwise}" if otherwise else words)


def serve(
    folder: Path,
    *,
    page: str = "",
    port: int | None = None,
    host: str = HOST,
    open_browser: bool = True,
    options: tuple[str, ...] = (),
    templates: Path | None = None,
) -> int:
    """Serve the notebooks of `folder` until it is stopped (Ctrl-C, SIGTERM); prints the URL of `page`, one line.

    page: a notebook in `folder`; "" is Voilà's own list of them. port: default 8866, or any free one when that is
    taken. host: where it listens; by default this machine alone. options: more words for Voilà's command line.
    templates: a folder with `voila/templates/NAME` of our own. It asks for a token, made anew at every start, and ends
    kernels whose page is closed. Raises WorkbenchError for Voilà missing, a port that was asked for and is taken, and a
    server that does not come up.
    """
    check_packages()
    port = port_for(port, USUAL_PORT, host)
    command = [sys.executable, "-m", "voila", str(folder), "--no-browser", f"--port={port}", f"--Voila.ip={host}"]
    command += ["--Voila.port_retries=0", "--Voila.auto_token=True", "--VoilaConfiguration.strip_sources=True"]
    command += [f"--MappingKernelManager.cull_idle_timeout={CULL_S}", "--MappingKernelManager.cull_interval=30"]
    command += [f"--Voila.tornado_settings={SETTINGS!r}", *options]
    at = f"http://{host}:{port}"
    url = f"{at}/voila/render/{quote(page)}" if page else f"{at}/"
    paths = [str(templates)] if templates else []
    paths += [os.environ["JUPYTER_PATH"]] if os.environ.get("JUPYTER_PATH") else []
    return run_server(
        "Voilà",
        command,
        url=url,
        alive=f"{at}/login",
        browser=open_browser,
        environment={"JUPYTER_PATH": os.pathsep.join(paths)} if paths else None,
    )
