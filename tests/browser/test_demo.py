"""Claims about the pages of the panels alone, in a real browser: `workbench demo` on one lab and its index."""

import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from harness import BUSY_S, ROOT, PanelOnPage, free_port, save_picture
from playwright.sync_api import expect

from workbench.demo.pages import page_names

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

STEMS = ("block_pool", "allocators", "prefix_hits")  # of lab 09, none of which needs the machine's ceilings


@pytest.fixture(scope="module")
def served(browser, tmp_path_factory):
    """The line that `workbench demo --no-browser` printed, and its log. (Of a browser first: without one, nothing is
    started.)"""
    scratch = tmp_path_factory.mktemp("demo")
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    variables = {name: str(scratch / name.lower()) for name in folders}
    out, log = scratch / "out", scratch / "log"
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench.cli", "demo", "--no-browser", "--port", str(free_port())],
        cwd=ROOT,
        env={**os.environ, **variables, "WORKBENCH_CACHE": str(scratch / "cache"), "HF_HUB_OFFLINE": "1"},
        stdout=out.open("w"),
        stderr=log.open("w"),
    )
    deadline = time.monotonic() + 60
    while "\n" not in out.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        assert out.read_text().count("\n") == 1, log.read_text()
        yield out.read_text().strip(), log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@pytest.fixture(scope="module")
def page(browser, served):
    """The index, then the page of a lab, reached as a reader reaches it. Nothing was asked of another machine."""
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    page = context.new_page()
    answered, broken = [], []
    page.on("response", lambda answer: answered.append(answer.url))
    page.on("pageerror", lambda error: broken.append(str(error)))
    url, _ = served
    page.goto(url)
    expect(page.get_by_role("link", name=re.compile("^Lab"))).to_have_count(len(page_names()))
    save_picture(page, "demo-index")
    page.get_by_role("link", name=re.compile("^Lab 09")).click()
    expect(page.locator(".workbench-picture img")).to_have_count(len(STEMS), timeout=120_000)
    yield page
    save_picture(page, "demo-end")
    here = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
    assert [url for url in answered if not url.startswith((here, "data:", "blob:"))] == [] and len(answered) > 10
    assert broken == []
    context.close()


def panel(page, place: int) -> PanelOnPage:
    return PanelOnPage(SimpleNamespace(page=page), page.locator(".workbench-panel").nth(place))


def test_every_panel_is_drawn_under_its_question_and_no_source_is_shown(page):
    assert page.locator(".workbench-panel").count() == page.get_by_role("heading", level=2).count() == len(STEMS)
    for place in range(len(STEMS)):
        _, alt = panel(page, place).picture()
        assert len(alt) > 30 and panel(page, place).status().startswith("ready")
    text = page.locator("body").inner_text()
    assert "wb.panels" not in text and "import " not in text
    save_picture(page, "demo-page")


def test_a_slider_moves_the_predicted_curve(page):
    moved = panel(page, STEMS.index("prefix_hits"))
    before = moved.picture()
    moved.move("requests", "Home")
    _, alt = moved.wait_for_change(moved.picture, before)
    assert predicted(alt) != predicted(before[1]) and predicted(alt)


def predicted(alt: str) -> list[str]:
    """The dashed curves of a picture, in its words."""
    return re.findall(r"\(dashed\): [^;.]+", alt)


def test_run_measures_and_ends_in_a_picture_and_a_table(page):
    """Threads of the kernel draw, after the page was loaded: what they change must arrive."""
    run = panel(page, STEMS.index("allocators"))
    before = run.picture()
    run.press("Run")
    run.wait_status("^done: ", BUSY_S)
    _, alt = run.wait_for_change(run.picture, before)
    assert "Nothing measured yet" not in alt and re.search(r"paged, 16: measured \d+", alt)
    head, *rows = run.table()
    assert len(head) > 2 and len(rows) > 2
    save_picture(run.output, "demo-run")


def test_a_page_that_is_left_ends_its_kernel(page, served):
    said = served[1].read_text(errors="replace")
    assert (said.count("Kernel started"), said.count("Kernel shutdown")) == (2, 1), "the index was left"


def test_the_address_without_its_token_shows_nothing(browser, served):
    context = browser.new_context()
    other = context.new_page()
    other.goto(served[0].split("?")[0])
    assert "/login" in other.url and "Lab 01" not in other.locator("body").inner_text()
    context.close()
