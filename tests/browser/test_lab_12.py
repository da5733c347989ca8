"""Claims about lab 12 in a real JupyterLab: it runs through, panels have pictures, sliders redraw, Run measures."""

import pytest
from harness import shot

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "12_pruning_and_distillation"
LAYERS = "Which layer can be left out at the lowest price, and do the prices of several add up?"
HEALING = "A cut model is healed by its parent: how many tokens, and how many FLOPs, does that save?"
CHEAPER = "Forty times fewer tokens: how many times cheaper is that?"
EVERY = (
    LAYERS,
    HEALING,
    CHEAPER,
    "Does a score from forward passes know what the loss rises when a piece is cut?",
    "Narrower or with fewer layers: which loses less, and which is faster?",
    "Half of the weights are zero: what does it cost, and is anything faster?",
    "A draft cut from its target and healed by it: is it accepted more often, and is decoding faster?",
)


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


@pytest.mark.parametrize("question", EVERY)
def test_every_panel_has_a_picture(page, question):
    panel = page.panel(question)
    assert panel.picture()
    panel.screenshot(shot(question))


def test_more_children_share_the_cost_of_their_parent(page):
    panel = page.panel(CHEAPER)
    before = panel.picture()
    panel.set("children", "3")
    panel.wait_for_change(panel.picture, before)
    assert "for each of 3 children it is 0.737 times" in panel.output.inner_text()
    panel.screenshot("cheaper-moved")


def test_run_leaves_out_every_layer_once(page):
    panel = page.panel(LAYERS)
    panel.run()
    head, *rows = panel.table()
    assert len(rows) >= 6 and all(len(row) == len(head) for row in rows)
    panel.screenshot("layers-run")
