"""Claims about lab 13 in a real JupyterLab: it runs through, panels have pictures, sliders redraw, Run measures."""

import pytest
from harness import shot

from workbench.experiments import list_experiments

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "13_parallelism_and_experts"
QUESTIONS = {e.name: e.question for e in list_experiments() if e.lab == 13}
MESSAGES, BUBBLES, EXPERTS = (QUESTIONS[f"parallel.{name}"] for name in ("messages", "bubbles", "experts"))


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_every_panel_has_a_picture(page, question):
    panel = page.panel(question)
    assert panel.picture()
    panel.screenshot(shot(question))


def test_more_groups_make_the_drawn_bubble_smaller(page):
    panel = page.panel(BUBBLES)
    panel.set("groups", "12")
    panel.wait_for_picture_of("4 stages and 15 ticks")
    panel.screenshot("bubbles-moved")


def test_run_sends_messages_between_two_processes(page):
    panel = page.panel(MESSAGES)
    panel.run()
    head, *rows = panel.table()
    assert len(rows) >= 10 and all(len(row) == len(head) for row in rows)
    panel.screenshot("messages-run")


def test_run_counts_the_experts_that_a_batch_chose(page):
    panel = page.panel(EXPERTS)
    panel.run()
    head, *rows = panel.table()
    assert len(rows) >= 3 and all(len(row) == len(head) for row in rows)
    panel.screenshot("experts-run")
