"""Claims about two panels of lab 05 in a real JupyterLab: bits are flipped by hand, and a row of weights answers its
sliders."""

import re

import nbformat
import pytest
from harness import BUSY_S, LabPage
from playwright.sync_api import expect

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

NUMBERS = "What do the bits of a number say, and what does each format do to it?"
ROW = "What becomes of one row of weights in few bits?"
NOTEBOOK = "two_panels.ipynb"  # of our own: the lecture has more panels, and other tests
CELLS = (
    "from workbench import panels",
    'panels.numbers(format="fp8_e4m3", number="0.1")',
    'panels.weight_row(model="stdlib-3m-gqa", outlier=20)',
)


@pytest.fixture(scope="module")
def page(browser, lab):
    """A notebook with the two panels, opened and run once for the tests below."""
    like = nbformat.read(lab.course / "notebooks" / "04_smaller_caches.ipynb", as_version=4)
    book = nbformat.v4.new_notebook(metadata={"kernelspec": like.metadata.kernelspec})
    book.cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(book, lab.course / NOTEBOOK)
    with LabPage(browser, lab) as page:
        page.open(NOTEBOOK)
        page.run_all(timeout_s=300)
        yield page
        page.screenshot("lab05-numbers-end")


def bits_of(panel):
    """The buttons of the bits that are to be seen, the highest first."""
    return panel.output.locator("button.jupyter-widgets.widget-toggle-button:visible")


def test_they_run_through_without_a_question_or_an_error(page):
    assert page.cell_problems() == []


def test_a_bit_flipped_by_hand_changes_number_picture_and_table(page):
    panel = page.panel(NUMBERS)
    bits = bits_of(panel)
    assert bits.all_inner_texts() == list("00011101")
    assert re.fullmatch(r"sign bit, place 7, is 0: press to flip it", bits.first.get_attribute("title"))
    before = panel.picture()
    bits.first.click()
    panel.wait_for_change(panel.picture, before)
    assert bits.all_inner_texts() == list("10011101")
    assert panel.output.locator("textarea").input_value() == "-0.1015625"
    expect(panel.output).to_contain_text("(−1)^1 · 2^(3 − 7) · 1.101 in base 2")
    panel.screenshot("lab05-numbers-flipped")


def test_a_bit_is_flipped_without_a_mouse(page):
    panel = page.panel(NUMBERS)
    bits = bits_of(panel)
    now = bits.all_inner_texts()
    bits.last.focus()
    bits.last.press("Space")
    expect(bits.last).to_have_text("1" if now[-1] == "0" else "0")


def test_a_number_is_typed_and_another_format_rounds_it(page):
    panel = page.panel(NUMBERS)
    panel.output.locator("textarea").fill("3.14159")
    panel.output.locator("select").first.select_option("fp32")
    expect(bits_of(panel)).to_have_count(32)
    expect(panel.output).to_contain_text("(−1)^0 · 2^(128 − 127) · 1.1001001")
    panel.screenshot("lab05-numbers-fp32")
    panel.output.locator("select").first.select_option("int4")
    expect(bits_of(panel)).to_have_count(4)
    assert bits_of(panel).all_inner_texts() == list("0011")
    expect(panel.output).to_contain_text("0 + 2 + 1 = 3.")
    panel.screenshot("lab05-numbers-int4")


def test_a_text_that_is_no_number_is_answered_and_forgiven(page):
    panel = page.panel(NUMBERS)
    panel.output.locator("textarea").fill("three")
    panel.wait_status("^error: number must be a decimal", BUSY_S)
    panel.output.locator("textarea").fill("3")
    panel.wait_status("^ready", BUSY_S)


def test_run_measures_every_format(page):
    panel = page.panel(NUMBERS)
    panel.run()
    expect(panel.output).to_contain_text("Measured in 10 formats")
    head, *rows = panel.table()
    assert head[-1] == "measured" and len(rows) == 10 and all(float(row[-1]) > 0 for row in rows)
    panel.screenshot("lab05-numbers-measured")


@pytest.mark.parametrize("slider", ["bits", "group (weights)", "outlier (× rms)", "shown group"])
def test_a_moved_slider_draws_the_row_anew(page, slider):
    panel = page.panel(ROW)
    panel.redraw(slider)
    assert "error" not in panel.status()


def test_run_rounds_the_row_in_every_way(page):
    panel = page.panel(ROW)
    panel.run()
    expect(panel.output).to_contain_text("every error within its bound")
    head, *rows = panel.table()
    assert rows and all(len(row) == len(head) for row in rows)
    panel.screenshot("lab05-weight-row")


def test_the_page_logged_no_errors(page):
    assert page.console_errors == []
