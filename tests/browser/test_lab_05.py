"""Claims about lab 05 in a real JupyterLab: it runs through, bits flip, sliders and Play answer, Run measures."""

import re

import pytest
from harness import shot
from playwright.sync_api import expect

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NOTEBOOK = "05_quantization"
NUMBERS = "What do the bits of a number say, and what does each format do to it?"
ROW = "What becomes of one row of weights in few bits?"
OUTLIERS = "What do a few outlier channels do to each way to round, and what rescues it?"
AWQ = "By how much does AWQ scale a channel up before it is rounded?"
GPTQ = "Where does the rounding error of a column go?"
TABLE = "What does each method of quantization cost in bytes, quality and time?"
MOVED = {ROW: "bits", AWQ: "channels", GPTQ: "shown columns", TABLE: "budget (bits per weight)"}


def test_it_runs_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


@pytest.mark.parametrize("question", MOVED)
def test_moving_a_slider_draws_the_new_state(page, question):
    panel = page.panel(question)
    panel.redraw(MOVED[question])
    panel.screenshot(shot(question))


def test_a_bit_that_is_pressed_flips_the_number(page):
    panel = page.panel(NUMBERS)
    bits = panel.output.locator("button.widget-toggle-button:visible")
    sign, before = bits.first, panel.picture()
    read = sign.inner_text()
    sign.click()
    panel.wait_for_change(panel.picture, before)
    expect(sign).to_have_text({"0": "1", "1": "0"}[read])
    panel.screenshot(shot(NUMBERS))


def test_play_lets_the_columns_be_rounded_one_after_the_other(page):
    panel = page.panel(GPTQ)
    panel.set("shown columns", "2")
    _, shown = panel.slider("shown columns")
    before = panel.picture()
    panel.play()
    panel.wait_for_change(lambda: int(shown.inner_text()) >= 5, False)
    panel.wait_for_change(panel.picture, before)
    panel.play()  # the same button pauses
    panel.screenshot("gptq-played")


def test_run_measures_and_fills_the_table(page):
    panel = page.panel(AWQ)
    panel.run()
    head, *rows = panel.table()
    assert [row[0] for row in rows] == ["q, k, v", "o", "gate, up", "down"] and len(head) == len(rows[0])
    assert all(re.fullmatch(r"0\.\d\d", row[1]) for row in rows), rows
    panel.screenshot("awq-search-measured")


def test_every_recipe_stands_in_the_table_with_its_bits_and_its_time(page):
    panel = page.panel(TABLE)
    head, *rows = panel.table()
    assert rows[0][0] == "float32" and len(rows) >= 8 and head[1] == "bits per weight"
    assert all(float(row[1]) >= 2 for row in rows)
    assert all(re.search(r"[\d.,]+ (µs|ms|s)", row[8]) for row in rows[1:]), rows


def test_stop_ends_a_long_run(page):
    panel = page.panel(OUTLIERS)
    panel.stop()
    panel.screenshot(shot(OUTLIERS))
