"""Claims about labs 02 and 03 in a real JupyterLab: they run through, a slider answers, Run measures."""

import re
import time

import pytest
from harness import LabPage

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

# notebook -> (a panel's question, a control that is a slider, the calculator's question and one of its sliders)
LABS = {
    "02_where_time_goes": (
        "More users in one step",
        "context (tokens)",
        "What does a workload cost",
        "batch (sequences)",
    ),
    "03_kv_cache": (
        "What does remembering save?",
        "new tokens",
        "How much memory do the weights",
        "batch (sequences)",
    ),
}
REDRAWN_WITHIN_S = (
    2.0  # in the browser, on a busy test machine; the drawing itself is held in test_lab02 and test_lab03
)


@pytest.fixture(scope="module", params=LABS)
def opened(request, browser, lab):
    """One lab, opened and run once for the tests below."""
    with LabPage(browser, lab) as page:
        page.open(f"notebooks/{request.param}.ipynb")
        page.run_all(timeout_s=900)
        yield page, *LABS[request.param]
        page.screenshot(f"{request.param}-end")


def test_it_runs_through_without_a_question_or_an_error(opened):
    page, *_ = opened
    assert page.cell_problems() == []


def test_moving_a_slider_draws_the_new_prediction(opened):
    page, question, slider, calculator, batch = opened
    for words, control in ((question, slider), (calculator, batch)):
        panel = page.panel(words)
        before = panel.picture()
        panel.move(control, "ArrowLeft")
        started = time.monotonic()
        panel.wait_for_change(panel.picture, before)
        assert time.monotonic() - started < REDRAWN_WITHIN_S, words
        panel.screenshot(re.sub(r"\W+", "-", words.lower()).strip("-"))


def test_run_measures_and_fills_the_table(opened):
    page, question, *_ = opened
    panel = page.panel(question)
    panel.press("Run")
    panel.wait_status("^running", timeout_s=10)  # the notebook's own run has left "done" there
    panel.wait_status("^done: ", timeout_s=180)
    head, *rows = panel.table()
    assert rows and len(head) == len(rows[0])
    assert any(re.search(r"[\d.,]+ (µs|ms|s)", cell) for row in rows for cell in row), rows
    panel.screenshot(re.sub(r"\W+", "-", question.lower()).strip("-") + "-measured")


def test_the_page_logged_no_errors(opened):
    page, *_ = opened
    assert page.console_errors == []
