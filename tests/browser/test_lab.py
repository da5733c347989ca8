"""Claims about the course in a real JupyterLab, read off the page as a student sees it.

Screenshots go to artifacts/ (not kept in the repository).
"""

import re

import nbformat
import pytest
from harness import BUSY_S, LabPage, button

from workbench.jupyter import DISPLAY_NAME, KERNEL_NAME

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

STEP_TIME = "how does the time of one step grow with the text?"


def put_notebook(lab_page: LabPage, name: str, *sources: str) -> str:
    """A small notebook of the test's own in the course's folder; returns its path there."""
    kernelspec = {"name": KERNEL_NAME, "display_name": DISPLAY_NAME, "language": "python"}
    book = nbformat.v4.new_notebook(metadata={"kernelspec": kernelspec})
    book.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(book, lab_page.server.course / name)
    return name


@pytest.fixture(scope="module")
def lab_01(browser, lab):
    """Lab 01, opened and run once for the tests below, which go through it in reading order."""
    with LabPage(browser, lab) as page:
        page.open("notebooks/01_naive_generation.ipynb")
        page.screenshot("lab-01-top")
        page.run_all(timeout_s=600)
        yield page
        page.screenshot("lab-01-end")


def test_serving_prints_one_line_and_that_is_the_address(lab):
    (line,) = lab.output.read_text().splitlines()
    assert re.fullmatch(r"http://(localhost|127\.0\.0\.1):\d+/lab\S*[?&]token=[\w-]+", line)
    assert lab.api("GET", "status")["kernels"] >= 0


def test_lab_01_runs_through_without_a_question_or_an_error(lab_01):
    """No dialog (LabPage.open and run_all fail on one), the course's kernel, every cell run, every widget alive."""
    assert lab_01.kernel_name() == DISPLAY_NAME
    assert lab_01.cell_problems() == []


def test_moving_a_slider_draws_the_new_prediction(lab_01):
    panel = lab_01.panel(STEP_TIME)
    length = panel.move("max length (tokens)", "ArrowLeft")
    panel.wait_for_picture_of(rf"predicted \(dashed\): [^;]* at {length}\b")  # the alt text ends where the plot does


def test_run_measures_and_shows_it_beside_the_prediction(lab_01):
    panel = lab_01.panel(STEP_TIME)
    length = panel.move("max length (tokens)", "ArrowLeft")
    panel.set("points", "3")
    panel.set("repeats", "2")
    panel.press("Run")
    panel.wait_status("^done: 4 measurements", BUSY_S)  # three lengths, and the rows of a generation
    # the six lengths from the notebook's own run
    panel.wait_for_change(lambda: len(panel.table()), 7)
    head, *rows = panel.table()
    assert head[:3] == ["tokens", "measured (p10 to p90)", "predicted"]
    assert (len(rows), rows[-1][0]) == (3, length)
    assert all(re.match(r"[\d.,]+ (µs|ms|s)", time) for row in rows for time in row[1:3]), rows
    panel.screenshot("lab-01-step-time-panel")


def test_stop_ends_a_long_run_soon(lab_01):
    """Twice: the second run must not find the first one's stop. How soon is held in test_panels, without a browser."""
    panel = lab_01.panel(STEP_TIME)
    panel.set("max length (tokens)", "1,024")
    panel.move("points", "End")
    panel.move("repeats", "End")
    for _ in range(2):
        panel.press("Run")
        panel.wait_status("^running: length", BUSY_S)
        lab_01.page.wait_for_timeout(500)
        assert "running" in panel.status(), "the run was to be long, so that there is something to stop"
        panel.press("Stop")
        panel.wait_status("^stopped", BUSY_S)


def test_the_page_logged_no_errors(lab_01):
    assert lab_01.console_errors == []


def test_stop_works_while_a_cell_is_running(lab_page):
    """JupyterLab hands widget messages to a thread beside the cell; Stop must not wait for the cell to end.

    ipykernel from 7.4 on hands them to the cell's own thread; the panels ask for the other.
    """
    lab_page.open(
        put_notebook(
            lab_page,
            "busy.ipynb",
            "import workbench as wb\npanel = wb.panels.step_time(max_length=1024, points=12, repeats=50)\npanel",
            "import time\npanel.start()\ntime.sleep(600)",
        )
    )
    lab_page.menu("Run", "Run All Cells")
    panel = lab_page.panel(STEP_TIME)
    panel.wait_status("^running: length", timeout_s=120)
    panel.press("Stop")
    panel.wait_status("^stopped", BUSY_S)
    assert lab_page.waiting_cells() == 1, "the cell itself is still running"


def test_the_opened_decoder_follows_text_layer_and_head(lab_page):
    """The panel of lab 00 on its own: tokens and weights beside the picture, a text that is too long, Run."""
    lab_page.open(put_notebook(lab_page, "opened.ipynb", "import workbench as wb\npanel = wb.panels.decoder()\npanel"))
    lab_page.run_all()
    panel = lab_page.panel("where does its attention look?")
    panel.wait_for_picture_of("layer 0, head 0")
    head, *rows = panel.table()
    assert head == ["weight", "shape [out, in]", "parameters", "bytes", "of the model"]
    assert ["attention.k.weight", "[128, 384]", "49,152", "197 kB", "0.45%"] in rows
    panel.set("layer", "3")
    panel.set("head", "4")
    panel.wait_for_picture_of("layer 3, head 4")
    panel.run()
    panel.wait_for_picture_of("given to the previous token: the most 88% in layer 3, head 4")
    panel.screenshot("opened-decoder")
    assert panel.small_or_cut(16) == []
    text = panel.output.locator("textarea")
    text.fill("import os\n" * 30)
    panel.wait_status(r"^error: the text has 90 tokens, and 3 to 48 are shown", BUSY_S)
    text.fill("import os\nimport")
    panel.wait_for_picture_of("A lower triangle of 4 by 4 cells")
    panel.wait_status("^ready", BUSY_S)


def test_a_failing_cell_does_not_go_unseen(lab_page):
    """The check that the tests above rely on."""
    lab_page.open(put_notebook(lab_page, "failing.ipynb", "1 / 0", "print('never reached')"))
    lab_page.run_all()
    shown, unrun = lab_page.cell_problems()
    assert "ZeroDivisionError" in shown and "never reached" in unrun


def test_a_panel_can_be_read_in_a_hall(lab_page):
    """Names under the pointer; no letter below 16 pixels and no label cut; the same is not drawn twice; and the switch
    that fills the screen, where letters are half as large again."""
    shown = "import workbench as wb\npanel = wb.panels.block_pool()\npanel"
    lab_page.open(put_notebook(lab_page, "hall.ipynb", shown, "panel.snapshot()"))
    lab_page.run_all()
    panel = lab_page.panel("Who holds which block")
    still = lab_page.book.locator('.jp-OutputArea-output img[src^="data:image/png"]')
    assert still.count() == 1 and not still.is_visible(), "a still beside its own panel"
    assert panel.small_or_cut(16) == []
    picture, note = panel.output.locator(".workbench-picture"), panel.output.locator(".workbench-note")
    box = picture.bounding_box()
    assert box["width"] > 0.95 * panel.output.bounding_box()["width"]
    seen = set()
    for share in range(5, 95, 5):
        lab_page.page.mouse.move(box["x"] + box["width"] * share / 100, box["y"] + 0.22 * box["height"])
        seen.add(note.inner_text() if note.is_visible() else "")
    assert any(re.match(r"block \d+: held once by A.*, 1 reference, \d of 4 tokens", text) for text in seen), seen
    panel.output.locator("button.workbench-projector").click()
    lab_page.page.wait_for_function("document.fullscreenElement?.classList.contains('workbench-panel')")
    lab_page.page.set_viewport_size({"width": 1280, "height": 720})
    edge = button(panel.output, "Run").bounding_box()
    assert edge["y"] + edge["height"] <= lab_page.page.evaluate("window.innerHeight"), "Run is out of sight"
    panel.output.get_by_text("The numbers").first.click()
    assert panel.small_or_cut(24) == []
    panel.redraw("shown step", "ArrowRight")
    panel.output.locator("button.workbench-projector").click()
    lab_page.page.wait_for_function("!document.fullscreenElement")
