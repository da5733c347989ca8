"""Claims about lab 07 in a real JupyterLab: it runs through, Play and sliders answer, Run measures, Stop stops."""

import pytest
from harness import shot

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "07_better_drafts"
ORIGIN = "Who wrote which token of this text, and how many calls of the target did that save?"
TREE = "Which branch of the draft tree does the target go along?"
GRAMMAR = "How many tokens of a guided text does the model have to be asked for?"
SPEED = "Which draft makes which text faster, by how much, and does the count of its parts predict it?"
MOVED = {ORIGIN: "shown round", TREE: "shown step"}


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


@pytest.mark.parametrize("question", MOVED)
def test_moving_to_another_round_draws_it(page, question):
    panel = page.panel(question)
    panel.set(MOVED[question], "4")
    panel.redraw(MOVED[question], "ArrowRight")
    panel.screenshot(shot(question))


def test_play_grows_tree_after_tree(page):
    panel = page.panel(TREE)
    panel.set("shown step", "0")
    _, shown = panel.slider("shown step")
    before = panel.picture()
    panel.play()
    panel.wait_for_change(lambda: int(shown.inner_text()) >= 3, False)
    panel.wait_for_change(panel.picture, before)
    panel.play()  # the same button pauses
    panel.screenshot("draft-tree-played")


def test_run_counts_the_calls_that_a_grammar_saves(page):
    panel = page.panel(GRAMMAR)
    panel.run()
    # the page may still be drawing the last rows
    panel.wait_for_change(lambda: len(panel.table()) == 4, False)
    _, *rows = panel.table()
    asked = [int(row[3]) for row in rows]
    assert len(rows) == 3 and asked[0] > asked[1] > asked[2]


def test_stop_ends_a_long_run(page):
    panel = page.panel(SPEED)
    panel.stop()
