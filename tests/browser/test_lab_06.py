"""Claims about lab 06 in a real JupyterLab: it runs through, sliders and Play answer, Run measures."""

import re

import pytest

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "06_speculative_sampling"
STEPPER = "What does the draft guess, and what does the target accept of it?"
LENGTHS = "How many tokens should the draft guess before the target looks?"


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


def test_play_goes_through_the_rounds_and_the_colours_say_who_wrote_what(page):
    panel = page.panel(STEPPER)
    panel.set("shown round", "1")
    _, shown = panel.slider("shown round")
    before = panel.picture()
    panel.play()
    panel.wait_for_change(lambda: int(shown.inner_text()) >= 3, False)
    panel.wait_for_change(panel.picture, before)
    panel.play()  # the same button pauses
    colours = panel.output.locator("pre span").evaluate_all("all => all.map(s => s.style.background)")
    assert len({c for c in colours if c}) >= 2, colours
    panel.screenshot("stepper-played")


def test_run_writes_the_text_and_fills_the_table(page):
    panel = page.panel(STEPPER)
    panel.run()
    head, *rows = panel.table()
    assert head[:2] == ["round", "drafted"] and len(rows) > 5
    assert {row[-1] for row in rows} >= {"correction"}


def test_a_slider_moves_the_curve_beside_what_was_measured(page):
    panel = page.panel(LENGTHS)
    before = panel.picture()
    panel.move("alpha", "ArrowRight")
    panel.wait_for_change(panel.picture, before)
    _, *rows = panel.table()
    measured = [row for row in rows if re.fullmatch(r"[\d.]+ × \([\d.]+ to [\d.]+\)", row[7])]
    assert len(measured) >= 5 and rows[-1][0] == "dynamic"
    panel.screenshot("draft-lengths")
