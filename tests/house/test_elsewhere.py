"""Claims about the files for other hosts: dev container, Binder, JupyterHub. None of the hosts is started here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
HUB = ROOT / "hub" / "jupyterhub_config.py"
SUPPORTED = SpecifierSet(">=3.11,<3.15")
KNOWN = {"name", "image", "onCreateCommand", "forwardPorts", "portsAttributes", "hostRequirements", "customizations"}


def test_the_dev_container_installs_what_continuous_integration_installs():
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert settings.keys() <= KNOWN, "a misspelt key is ignored there without a word"
    assert Version(re.search(r"python:(3\.\d+)", settings["image"])[1]) in SUPPORTED
    (packages,) = re.findall(r"--no-install-recommends (.+)", (ROOT / ".ci" / "run").read_text())
    assert packages in settings["onCreateCommand"] and settings["onCreateCommand"].endswith("make setup")
    assert all(isinstance(port, int) for port in settings["forwardPorts"])
    assert set(map(int, settings["portsAttributes"])) <= set(settings["forwardPorts"])
    assert subprocess.run(["bash", "-nc", settings["onCreateCommand"]], check=False).returncode == 0


def test_binder_installs_the_pins_the_kernel_and_a_python_that_is_supported():
    binder = ROOT / "binder"
    assert Version((binder / "runtime.txt").read_text().strip().removeprefix("python-")) in SUPPORTED
    pins = re.search(r"^-c (\S+)$", (binder / "requirements.txt").read_text(), re.M)[1]
    assert (binder / pins).resolve() == ROOT / "constraints.txt"
    script = binder / "postBuild"
    assert os.access(script, os.X_OK) and subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert "-e . -c constraints.txt" in script.read_text() and "workbench.jupyter" in script.read_text()


class Settings(SimpleNamespace):
    """As JupyterHub's `c`: any part of it is there when it is asked for."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        setattr(self, name, Settings())
        return getattr(self, name)


def hub_settings(monkeypatch, tmp_path) -> Settings:
    monkeypatch.setenv("HUB_ROOMS", str(tmp_path / "rooms"))
    made = Settings()
    exec(compile(HUB.read_text(), str(HUB), "exec"), {"get_config": lambda: made})
    return made


def test_the_hub_listens_here_alone_and_asks_for_a_password(monkeypatch, tmp_path):
    monkeypatch.delenv("HUB_PASSWORD", raising=False)
    with pytest.raises(KeyError, match="HUB_PASSWORD"):
        hub_settings(monkeypatch, tmp_path)
    monkeypatch.setenv("HUB_PASSWORD", "a word for a test")
    monkeypatch.delenv("HUB_URL", raising=False)
    made = hub_settings(monkeypatch, tmp_path)
    assert made.JupyterHub.bind_url == "http://127.0.0.1:8000"
    assert made.DummyAuthenticator.password == "a word for a test"
    allowed = made.Authenticator.username_pattern
    assert re.fullmatch(allowed, "ana-2") and not any(re.fullmatch(allowed, name) for name in ("..", "a/b", ".ana"))


def test_the_hub_gives_each_user_a_copy_once(monkeypatch, tmp_path):
    monkeypatch.setenv("HUB_PASSWORD", "a word for a test")
    monkeypatch.chdir(ROOT)
    spawner = SimpleNamespace(user=SimpleNamespace(name="ana"))
    made = hub_settings(monkeypatch, tmp_path)
    made.Spawner.pre_spawn_hook(spawner)
    first = tmp_path / "rooms" / "ana" / "course" / made.Spawner.default_url.removeprefix("/lab/tree/")
    assert first.is_file()
    first.write_text("mine")
    made.Spawner.pre_spawn_hook(spawner)
    assert first.read_text() == "mine", "what a user changed is kept"
