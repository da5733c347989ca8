"""Fixtures for the browser tests: one JupyterLab for all of them, on a copy of the course as a student gets it, and a
browser a test module.

A test module asks for them with `pytest_plugins = ["lab_fixtures"]`. (A conftest.py here would hide the one above, from
which other tests import. And the browser not for the session: while Playwright is running, nothing else in the process
can use asyncio.)
"""

import os
import shutil
import subprocess

import pytest
from harness import ROOT, WORKBENCH, LabPage, LabServer
from playwright.sync_api import sync_playwright

from workbench.jupyter import installed_paths

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def chromium() -> str:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        reason = "no Chromium on this machine: on Debian and Ubuntu, apt-get install chromium (or set CHROMIUM=path)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return chromium


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def ceilings_folder(tmp_path_factory):
    """Where the ceilings of the machine are kept, once they were measured, for all workers of this run."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "ceilings"


@pytest.fixture(scope="session")
def lab(chromium, ceilings_folder, tmp_path_factory):
    """JupyterLab as `workbench lab` starts it, on a fresh `workbench copy` of the course, for all test modules of a
    worker: each page opens its own notebooks there, with kernels of their own that end with it.

    The ceilings of the machine are measured by the first lecture that asks.
    """
    missing = [path for path in installed_paths() if not path.exists()]
    assert not missing, f"set up first (make setup, or python -m workbench.jupyter): no {missing}"
    folder = tmp_path_factory.mktemp("lab")
    subprocess.run([WORKBENCH, "copy", folder / "course"], cwd=ROOT, check=True)
    with LabServer(folder / "course", folder / "scratch", cache=ceilings_folder) as server:
        yield server


@pytest.fixture
def lab_page(browser, lab, request):
    """A new page on that JupyterLab; how it looked at the end stays in artifacts/, passed or failed."""
    with LabPage(browser, lab) as page:
        yield page
        page.screenshot(f"end-of-{request.node.name}")


@pytest.fixture(scope="module")
def page(browser, lab, request):
    """The lecture that the test module names in NOTEBOOK, opened and run once for all its tests; no error on its
    console."""
    name = request.module.NOTEBOOK
    with LabPage(browser, lab) as page:
        page.open(f"notebooks/{name}.ipynb")
        page.screenshot(f"{name}-top")
        page.run_all(timeout_s=1500)
        yield page
        page.screenshot(f"{name}-end")
        assert page.console_errors == []
