"""Claims about lab 15 in a real JupyterLab: it runs through, its panel has a picture, Run serves the trace."""

import pytest
from harness import shot

from workbench.experiments import list_experiments

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "15_capstone"
[QUESTION] = [e.question for e in list_experiments() if e.lab == 15]


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


def test_the_panel_has_a_picture(page):
    panel = page.panel(QUESTION)
    assert panel.picture()
    panel.screenshot(shot(QUESTION))


def test_run_serves_the_trace_with_each_switch(page):
    panel = page.panel(QUESTION)
    panel.run()
    head, *rows = panel.table()
    assert len(rows) == 5 and all(len(row) == len(head) for row in rows)
    panel.screenshot("switches-run")
