"""Claims about lab 11 in a real JupyterLab: it runs through, every panel has its table, and Stop ends a live server."""

import pytest
from harness import shot

from workbench.experiments import list_experiments
from workbench.labs.lab11_serving import PANELS

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "11_serving"
QUESTIONS = {e.name: e.question for e in list_experiments() if e.lab == 11}
BREAKDOWN, LIVE = QUESTIONS["server.breakdown"], QUESTIONS["server.live"]
OTHERS = {f"server.{stem}": QUESTIONS[f"server.{stem}"] for stem in PANELS if stem not in ("breakdown", "live")}


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


def test_the_parts_of_a_request_are_in_the_table(page):
    head, *rows = page.panel(BREAKDOWN).table()
    assert {"answer", "part", "measured", "predicted"} <= set(head) and len(rows) == 24


@pytest.mark.parametrize("question", OTHERS.values(), ids=OTHERS)
def test_each_panel_has_a_table_of_what_it_draws(page, question):
    panel = page.panel(question)
    head, *rows = panel.table()
    assert len(rows) >= 2 and all(len(row) == len(head) for row in rows)
    panel.screenshot(shot(question))


def test_stop_ends_a_live_server(page):
    panel = page.panel(LIVE)
    panel.stop()
    panel.screenshot("live-stopped")
