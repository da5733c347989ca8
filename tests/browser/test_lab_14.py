"""Claims about lab 14 in a real JupyterLab: it runs through, every panel has a picture, Play answers, Run counts."""

import pytest
from harness import shot

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "14_beyond_transformers"
HIPPO = "How much of a long past do N numbers remember?"
CANVAS = "In which order does diffusion write a text, and how many tokens come in a pass?"
FORMS = "The same scan as recurrence, in chunks, as a tree or as a convolution: what does each form cost?"
ASSOCIATIVE = "Does a state fail to recall since it is too small, or since it was trained at the wrong rate?"
EVERY = (
    HIPPO,
    CANVAS,
    FORMS,
    ASSOCIATIVE,
    "What do public models keep of a long text, and is what was published of it right?",
    "A text in 20 passes in place of 1,000 steps: 50 times as fast?",
    "How much of what a state loses against attention is recall of what the context has shown before?",
    "What does the memory of a text cost, when it is a state and when it is a cache?",
    "How many tokens a pass can be had for how much quality?",
)


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


@pytest.mark.parametrize("question", EVERY)
def test_every_panel_has_a_picture(page, question):
    panel = page.panel(question)
    assert panel.picture()
    panel.screenshot(shot(question))


def test_another_pass_of_the_canvas_is_drawn_and_play_goes_through_them(page):
    panel = page.panel(CANVAS)
    panel.set("shown pass", "0")
    _, shown = panel.slider("shown pass")
    before = panel.picture()
    panel.play()
    panel.wait_for_change(lambda: int(shown.inner_text()) >= 3, False)
    panel.wait_for_change(panel.picture, before)
    panel.play()  # the same button pauses
    panel.screenshot("canvas-played")


def test_run_counts_and_times_the_forms_of_a_scan(page):
    panel = page.panel(FORMS)
    panel.run()
    head, *rows = panel.table()
    assert len(rows) >= 3 and all(len(row) == len(head) for row in rows)
    assert {"recurrent", "chunked"} <= {row[0] for row in rows}
    panel.screenshot("forms-run")
