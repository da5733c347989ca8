"""Claims about lab 12 in a real JupyterLab: it runs through, panels have pictures, sliders redraw, Run measures."""

import pytest
from harness import shot
from playwright.sync_api import expect

from workbench.experiments import list_experiments

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "12_pruning_and_distillation"
QUESTIONS = {e.name: e.question for e in list_experiments() if e.lab == 12}
LAYERS, CHEAPER = QUESTIONS["pruning.drop_layer"], QUESTIONS["pruning.cheaper"]


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_every_panel_has_a_picture(page, question):
    panel = page.panel(question)
    assert panel.picture()
    panel.screenshot(shot(question))


def test_more_children_share_the_cost_of_their_parent(page):
    panel = page.panel(CHEAPER)
    panel.set("children", "3")
    expect(panel.output).to_contain_text("for each of 3 children it is 0.737 times")
    panel.screenshot("cheaper-moved")


def test_run_leaves_out_every_layer_once(page):
    panel = page.panel(LAYERS)
    panel.run()
    head, *rows = panel.table()
    assert len(rows) >= 6 and all(len(row) == len(head) for row in rows)
    panel.screenshot("layers-run")
