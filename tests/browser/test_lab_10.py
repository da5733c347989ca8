"""Claims about lab 10 in a real JupyterLab: it runs through, Play and sliders answer, Run counts, Stop stops."""

import pytest
from harness import shot

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "10_kernels"
TILES = "Which tiles does attention load, and what does it keep of a row?"
GRAPHS = "What is left of a decode step when nothing waits for Python?"
BOUNDS = "How near to the least possible time does each kernel come?"
TRAFFIC = "What does attention move, and what does it have to move?"
CROSSOVER = "From which size on does a step read instead of start?"


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


def test_another_tile_is_drawn_and_larger_blocks_are_fewer(page):
    panel = page.panel(TILES)
    panel.set("shown step", "7")
    panel.redraw("shown step", "ArrowRight")
    panel.redraw("block queries", "ArrowRight")
    head, *rows = panel.table()
    assert {"maximum m", "sum l"} <= set(head) and rows
    panel.screenshot("tiles")


def test_play_goes_through_the_tiles(page):
    panel = page.panel(TILES)
    panel.set("shown step", "0")
    _, shown = panel.slider("shown step")
    before = panel.picture()
    panel.play()
    panel.wait_for_change(lambda: int(shown.inner_text()) >= 3, False)
    panel.wait_for_change(panel.picture, before)
    panel.play()  # the same button pauses
    panel.screenshot("tiles-played")


def test_what_was_predicted_for_a_card_is_in_the_table_and_what_was_not_measured_says_so(page):
    panel = page.panel(GRAPHS)
    head, *rows = panel.table()
    gains = [float(row[head.index("gain, predicted")]) for row in rows]
    assert len(rows) == 7 and all(gain > 1 for gain in gains)
    assert {row[-1] for row in rows} == {"not yet measured"}


@pytest.mark.parametrize("question", [TRAFFIC, CROSSOVER, GRAPHS, BOUNDS])
def test_each_panel_has_a_table_of_what_it_draws(page, question):
    panel = page.panel(question)
    head, *rows = panel.table()
    assert len(rows) >= 3 and all(len(row) == len(head) for row in rows)
    panel.screenshot(shot(question))


def test_stop_ends_a_long_run(page):
    panel = page.panel(BOUNDS)
    panel.stop()
