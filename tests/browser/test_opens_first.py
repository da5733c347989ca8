"""Claims about what JupyterLab opens first: for a newcomer the first lecture, for who has begun the page that says
where they are. Two visits to one course, with a right answer and a wrong one between them."""

import re
import shutil
import subprocess
import time

import nbformat
import pytest
from harness import ROOT, WORKBENCH, LabPage, LabServer, save_picture
from playwright.sync_api import expect

from workbench.checks.start_page import FIRST, NAME
from workbench.jupyter import DISPLAY_NAME, KERNEL_NAME

pytest_plugins = ["lab_fixtures"]
pytestmark = pytest.mark.browser

ANSWERS = """from workbench import checks
checks.check("count-rows", lambda prompt_tokens, new_tokens: sum(prompt_tokens + n for n in range(new_tokens)))
try:
    checks.check("naive-loop", lambda *given, **named: [])
except checks.CheckFailed as failed:
    print("not yet")"""


@pytest.fixture(scope="module")
def visits(browser, tmp_path_factory):
    """What was seen: the first visit and what is in its first lecture, the page then, and the page of the second."""
    folder = tmp_path_factory.mktemp("visits")
    course = folder / "course"
    subprocess.run([WORKBENCH, "copy", course], cwd=ROOT, check=True)
    kernelspec = {"name": KERNEL_NAME, "display_name": DISPLAY_NAME, "language": "python"}
    book = nbformat.v4.new_notebook(metadata={"kernelspec": kernelspec}, cells=[nbformat.v4.new_code_cell(ANSWERS)])
    nbformat.write(book, course / "answers.ipynb")
    seen = {}
    with LabServer(course, folder / "first") as lab, LabPage(browser, lab) as first:
        seen["first"] = lab.url
        first.page.goto(lab.url)
        expect(first.book.locator(".jp-Cell").first).to_be_visible(timeout=120_000)
        seen["first heading"] = first.book.locator("h1").first.inner_text()
        first.page.locator(".jp-BreadCrumbs-home").click()
        first.page.locator(".jp-DirListing-itemText", has_text="progress.md").dblclick()
        seen["empty"] = where(first.page)
        save_picture(first.page, "start-page-empty")
        first.open("answers.ipynb")
        first.run_all()
        deadline = time.monotonic() + 20
        while "1 of 5" not in (course / NAME).read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        seen["dialogs"] = first.dialogs()
    (folder / "second").mkdir()
    shutil.copy(folder / "first" / "progress.jsonl", folder / "second")
    with LabServer(course, folder / "second") as lab, LabPage(browser, lab) as second:
        seen["second"] = lab.url
        second.page.goto(lab.url)
        seen["marked"] = where(second.page)
        save_picture(second.page, "start-page-marked")
        front(second.page).get_by_role("link", name="exercises").first.click()
        expect(second.book.locator("h1").first).to_have_text(re.compile("Exercises of lab 01"))
        second.notebook = "exercises/01_naive_generation.ipynb"
        seen["dialogs"] += second.dialogs()
        seen["errors"] = second.console_errors
    return seen


def front(page):
    """The rendered Markdown in front."""
    return page.locator(".jp-MarkdownViewer:not(.lm-mod-hidden)")


def where(page) -> str:
    expect(front(page).locator("table")).to_be_visible(timeout=120_000)
    return front(page).inner_text()


def test_a_newcomer_sees_the_first_lecture_and_a_page_without_marks(visits):
    assert f"/lab/tree/notebooks/{FIRST}.ipynb?" in visits["first"] and "Start here" in visits["first heading"]
    assert "Nothing is noted yet. Begin with Start here." in visits["empty"] and "0 of 80" in visits["empty"]


def test_who_comes_back_sees_what_was_right_and_where_to_go_on(visits):
    assert f"/lab/tree/{NAME}?" in visits["second"]
    assert re.search(r"Lab 01 · Naive generation · exercises\s+1 of 5\s+2", visits["marked"])
    assert "Go on with Lab 01 · Naive generation and its exercises: next is " in visits["marked"]
    assert "(naive-loop), tried 1 time." in visits["marked"] and "written by" not in visits["marked"]


def test_nothing_asked_and_nothing_failed(visits):
    assert visits["dialogs"] == [] and visits["errors"] == []
