"""Claims about lab 03 in a real JupyterLab: it runs through, a slider answers, Run measures."""

import re

import pytest
from harness import shot

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "03_kv_cache"
QUESTION = "What does remembering save?"
MOVED = {QUESTION: "new tokens", "How much memory do the weights": "batch (sequences)"}


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


@pytest.mark.parametrize("question", MOVED)
def test_moving_a_slider_draws_the_new_prediction(page, question):
    panel = page.panel(question)
    panel.redraw(MOVED[question])
    panel.screenshot(shot(question))


def test_run_measures_and_fills_the_table(page):
    panel = page.panel(QUESTION)
    panel.run()
    head, *rows = panel.table()
    assert rows and len(head) == len(rows[0])
    assert any(re.search(r"[\d.,]+ (µs|ms|s)", cell) for row in rows for cell in row), rows
    panel.screenshot(shot(QUESTION) + "-measured")
