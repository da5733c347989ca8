"""Claims about a lecture's questions in a real JupyterLab: the next cell waits for the guess of a person, and nothing
waits where nobody is."""

import nbformat
import pytest
from harness import LabPage, button
from playwright.sync_api import expect

from workbench.jupyter import DISPLAY_NAME, KERNEL_NAME

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

ASK = """from workbench.lectures import ask, summary
guess = ask("users", "How many times as long?", unit="times", example=16, low=0)
guess"""
ANSWER = "guess.answer()\nguess.compare(4.0, predicted=2)"
HIDDEN = "print('formatted')"


@pytest.fixture
def lecture(lab_page) -> LabPage:
    """A notebook that asks, answers, sums up, and has a hidden cell."""
    kernelspec = {"name": KERNEL_NAME, "display_name": DISPLAY_NAME, "language": "python"}
    book = nbformat.v4.new_notebook(metadata={"kernelspec": kernelspec})
    book.cells = [nbformat.v4.new_code_cell(source) for source in (ASK, ANSWER, "summary()", HIDDEN)]
    book.cells[-1].metadata["jupyter"] = {"source_hidden": True}
    nbformat.write(book, lab_page.server.course / "asking.ipynb")
    lab_page.open("asking.ipynb")
    return lab_page


def cell(page: LabPage, number: int):
    return page.book.locator(".jp-CodeCell").nth(number)


def run_cell(page: LabPage, number: int) -> None:
    cell(page, number).locator(".jp-InputPrompt").click()
    page.page.keyboard.press("Control+Enter")


def test_the_next_cell_waits_for_a_guess_and_goes_on_with_it(lecture):
    run_cell(lecture, 0)
    box = cell(lecture, 0).locator("input[type=text]")
    expect(box).to_have_value("")
    lecture.page.wait_for_timeout(1000)
    run_cell(lecture, 1)
    expect(cell(lecture, 1)).to_contain_text("Waiting for your guess above")
    lecture.screenshot("lecture-waits")
    status = cell(lecture, 0).locator("[role=status]")

    box.fill("many")
    button(lecture.page, "Predict").click()
    expect(status).to_contain_text("'many' is not a number")
    assert lecture.waiting_cells() == 1

    box.fill("3.9")
    box.press("Enter")
    expect(cell(lecture, 1)).to_contain_text(
        "Your guess: 3.9 times. Predicted by the model: 2 times. Measured: 4 times"
    )
    run_cell(lecture, 2)
    expect(cell(lecture, 2)).to_contain_text("Close: 1 of 1")
    lecture.screenshot("lecture-answered")

    box.fill("-1")
    button(lecture.page, "Predict").click()
    expect(status).to_contain_text("at least 0, and this is -1. Your guess stays 3.9 times.")

    run_cell(lecture, 0)
    expect(cell(lecture, 0).locator("input[type=text]")).to_have_value("3.9")
    expect(cell(lecture, 0).locator("[role=status]")).to_contain_text("Your guess so far: 3.9 times")
    lecture.wait_idle(60)
    assert lecture.console_errors == []


def test_run_all_waits_for_nobody(lecture):
    lecture.run_all()
    expect(cell(lecture, 1)).to_contain_text("An example guess stands in: 16 times. Put yours above and run this cell")
    expect(cell(lecture, 2)).to_contain_text("16 times (example)")
    hidden = cell(lecture, 3)
    expect(hidden).to_contain_text("formatted")
    assert not hidden.locator(".jp-InputArea-editor").is_visible(), "a cell that only formats is collapsed"
    lecture.screenshot("lecture-run-all")
    cell(lecture, 0).locator("input[type=text]").fill("5")
    button(lecture.page, "Predict").click()
    run_cell(lecture, 1)
    expect(cell(lecture, 1)).to_contain_text("Your guess: 5 times.")


def test_show_me_goes_on_without_a_guess_and_a_restart_asks_again(lecture):
    run_cell(lecture, 0)
    expect(cell(lecture, 0).locator("input[type=text]")).to_have_value("")
    lecture.page.wait_for_timeout(1000)
    run_cell(lecture, 1)
    expect(cell(lecture, 1)).to_contain_text("Waiting for your guess above")
    button(lecture.page, "Show me").click()
    expect(cell(lecture, 1)).to_contain_text("Measured: 4 times.")

    lecture.menu("Kernel", "Restart Kernel…")
    lecture.page.locator(".jp-Dialog button", has_text="Restart").last.click()
    lecture.page.wait_for_timeout(1500)
    lecture.wait_idle(60)
    run_cell(lecture, 0)
    expect(cell(lecture, 0).locator("[role=status]")).to_contain_text("No guess yet")
    lecture.page.wait_for_timeout(1000)
    run_cell(lecture, 1)
    expect(cell(lecture, 1)).to_contain_text("Waiting for your guess above")
    lecture.menu("Kernel", "Interrupt Kernel")
    expect(cell(lecture, 1)).to_contain_text("Stopped waiting for a guess. Predict above, then run this cell again.")
    assert "Traceback" not in cell(lecture, 1).inner_text()
    run_cell(lecture, 1)
    expect(cell(lecture, 1)).to_contain_text("Waiting for your guess above")
    cell(lecture, 0).locator("input[type=text]").fill("4")
    button(lecture.page, "Predict").click()
    expect(cell(lecture, 1)).to_contain_text(
        "Your guess: 4 times. Predicted by the model: 2 times. Measured: 4 times. That"
    )
