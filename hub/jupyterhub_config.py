"""JupyterHub on one machine, to try the course with a class: a shared password, servers as processes of the hub's user.

    make setup && .venv/bin/python -m pip install jupyterhub && npm install -g configurable-http-proxy
    HUB_PASSWORD=... .venv/bin/jupyterhub -f hub/jupyterhub_config.py

Every user gets a copy of the course of their own (`workbench copy`) under HUB_ROOMS, default ./hub-rooms. All of them
are the same user of the system, who can read each other's files: for a class that is graded, take another
authenticator and a spawner that separates users (containers, systemd), and keep `pre_spawn_hook`.
"""

import os
import subprocess
import sys
from pathlib import Path

c = get_config()  # noqa: F821  made by JupyterHub

BIN = Path(sys.executable).parent
ROOMS = Path(os.environ.get("HUB_ROOMS", "hub-rooms")).resolve()


def copy_course(spawner) -> None:
    """Before a user's server starts for the first time: a copy of the course in their folder."""
    course = ROOMS / spawner.user.name / "course"
    if not course.exists():
        course.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([BIN / "workbench", "copy", course], check=True)


c.JupyterHub.bind_url = os.environ.get("HUB_URL", "http://127.0.0.1:8000")
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = os.environ["HUB_PASSWORD"]
c.Authenticator.allow_all = True
c.Authenticator.username_pattern = r"[a-z0-9][a-z0-9_-]*"  # it names a folder
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(ROOMS / "{username}")
c.Spawner.pre_spawn_hook = copy_course
c.Spawner.cmd = [str(BIN / "jupyterhub-singleuser")]
c.Spawner.notebook_dir = "~/course"
c.Spawner.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
c.Spawner.start_timeout = 120
c.Spawner.environment = {"WORKBENCH_CACHE": str(ROOMS / ".ceilings"), "HF_HUB_OFFLINE": "1"}
