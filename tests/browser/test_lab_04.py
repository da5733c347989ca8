"""Claims about lab 04 in a real JupyterLab: it runs through, sliders and Play answer, Run measures."""

import re

import pytest
from harness import shot

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "04_smaller_caches"
DECODE = "What does a decode step cost, variant by variant?"
ROLLING = "What does a rolling buffer hold, token by token?"
QUALITY = "What does each way to remember fewer bytes cost in quality?"
MOVED = {DECODE: "largest context (tokens)", ROLLING: "shown tokens", QUALITY: "users"}
PANELS = {DECODE: 3}  # of one question: small, large and in few bits


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


@pytest.mark.parametrize("question", MOVED)
def test_moving_a_slider_draws_the_new_state(page, question):
    panel = page.panel(question, among=PANELS.get(question, 1))
    panel.redraw(MOVED[question])
    panel.screenshot(shot(question))


def test_run_measures_and_fills_the_table(page):
    panel = page.panel(DECODE, among=PANELS[DECODE])
    panel.run()
    head, *rows = panel.table()
    assert len(rows) == 6 and len(head) == len(rows[0])
    assert all(any(re.search(r"[\d.,]+ (µs|ms|s)", cell) for cell in row) for row in rows), rows
    panel.screenshot("decode-measured")
