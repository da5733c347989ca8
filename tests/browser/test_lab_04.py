"""Claims about lab 04 in a real JupyterLab: it runs through, sliders and Play answer, Run measures."""

import re
import time

import pytest
from harness import LabPage

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "04_smaller_caches"
DECODE = "What does a decode step cost, variant by variant?"
ROLLING = "What does a rolling buffer hold, token by token?"
QUALITY = "What does each way to remember fewer bytes cost in quality?"
MOVED = {DECODE: "largest context (tokens)", ROLLING: "shown tokens", QUALITY: "users"}
REDRAWN_WITHIN_S = 2.0  # in the browser, on a busy test machine; the drawing itself is held in test_lab04


@pytest.fixture(scope="module")
def page(browser, lab):
    """The lab, opened and run once for the tests below."""
    with LabPage(browser, lab) as page:
        page.open(f"notebooks/{NOTEBOOK}.ipynb")
        page.run_all(timeout_s=1500)
        yield page
        page.screenshot(f"{NOTEBOOK}-end")


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


@pytest.mark.parametrize("question", MOVED)
def test_moving_a_slider_draws_the_new_state(page, question):
    panel = page.panel(question)
    before = panel.picture()
    panel.move(MOVED[question], "ArrowLeft")
    started = time.monotonic()
    panel.wait_for_change(panel.picture, before)
    assert time.monotonic() - started < REDRAWN_WITHIN_S
    panel.screenshot(re.sub(r"\W+", "-", question.lower()).strip("-"))


def test_run_measures_and_fills_the_table(page):
    panel = page.panel(DECODE)
    panel.press("Run")
    panel.wait_status("^running", timeout_s=10)  # the notebook's own run has left "done" there
    panel.wait_status("^done: ", timeout_s=300)
    head, *rows = panel.table()
    assert len(rows) == 6 and len(head) == len(rows[0])
    assert all(any(re.search(r"[\d.,]+ (µs|ms|s)", cell) for cell in row) for row in rows), rows
    panel.screenshot("decode-measured")


def test_the_page_logged_no_errors(page):
    assert page.console_errors == []
