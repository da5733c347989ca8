"""Claims about lab 09 in a real JupyterLab: it runs through, Play and sliders answer, Run counts, Stop stops."""

import pytest
from harness import shot

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "09_paged_attention"
POOL = "Who holds which block, and what is copied when?"
ALLOCATORS = "How much of the memory holds tokens, and how many requests fit into it?"


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


def test_moving_to_another_step_draws_it(page):
    panel = page.panel(POOL)
    panel.set("shown step", "5")
    panel.redraw("shown step", "ArrowRight")
    panel.screenshot(shot(POOL))


def test_play_goes_through_the_scene(page):
    panel = page.panel(POOL)
    panel.set("shown step", "0")
    _, shown = panel.slider("shown step")
    before = panel.picture()
    panel.play()
    panel.wait_for_change(lambda: int(shown.inner_text()) >= 3, False)
    panel.wait_for_change(panel.picture, before)
    panel.play()  # the same button pauses
    panel.screenshot("block-pool-played")


def test_run_counts_what_each_allocator_wastes(page):
    panel = page.panel(ALLOCATORS)
    panel.run()
    head, *rows = panel.table()
    useful = {row[0]: float(row[head.index("useful, counted")].rstrip("%")) for row in rows}
    assert useful["contiguous maximum"] < useful["power-of-two buddy"] < 96 <= useful["paged, 16"]


def test_stop_ends_a_long_run(page):
    panel = page.panel(ALLOCATORS)
    panel.redraw("requests", "End")
    panel.stop()
