"""Claims about the page that says where a learner is: what it shows, where it sends them, and whose file it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from workbench import cli
from workbench.checks import progress, times
from workbench.checks.progress import Attempt, note
from workbench.checks.start_page import MARK, NAME, StartPage, labs_there, next_exercise, shown, where_you_are

ROOT = Path(__file__).parents[2]
MONDAY = datetime(2026, 11, 23, 9, 0, tzinfo=UTC)
LABS = labs_there()


def at(minutes: float, exercise: str, verdict: str = "failed") -> Attempt:
    return Attempt(MONDAY + timedelta(minutes=minutes), exercise, verdict)


@pytest.fixture
def noting(tmp_path, monkeypatch):
    """Attempts go to a file of this test, as in an open notebook."""
    monkeypatch.setenv(progress.FILE, str(tmp_path / "mine" / "progress.jsonl"))
    monkeypatch.setenv(progress.BY_A_SERVER, "exercises/01_naive_generation.ipynb")


@pytest.fixture
def course(tmp_path):
    """A course with two notebooks."""
    (tmp_path / "course" / "notebooks").mkdir(parents=True)
    for name in ("00_start_here", "03_kv_cache"):
        (tmp_path / "course" / "notebooks" / f"{name}.ipynb").write_text("{}")
    return tmp_path / "course"


def test_a_newcomer_is_sent_to_the_first_lecture_and_sees_every_lab():
    page = where_you_are(LABS, [])
    assert "Nothing is noted yet. **Begin with** [Start here](notebooks/00_start_here.ipynb)" in page
    rows = [line for line in page.splitlines() if line.startswith("| [")]
    assert len(rows) == len(LABS) == 16 and "| all | 0 of 80 |" in page
    assert all(re.search(r"about \d+ min", row) for row in rows)


def test_its_links_lead_to_notebooks_of_the_course():
    for page, folder in ((where_you_are(LABS, []), ROOT), (shown(), ROOT / "notebooks")):
        links = re.findall(r"\]\(([^)]+)\)", page)
        assert len(links) > 28 and [link for link in links if not (folder / link).is_file()] == []


def test_it_goes_on_in_the_lab_that_was_worked_on_last():
    noted = [at(0, "naive-loop"), at(1, "kv-append", "passed"), at(2, "kv-chunks"), at(3, "of another course")]
    goal = next_exercise(LABS, noted)
    assert (goal.lab.name, goal.exercise.grade_id, goal.tries) == ("03_kv_cache", "kv-chunks", 1)
    page = where_you_are(LABS, noted)
    assert "**Go on with** [Lab 03 · KV cache](notebooks/03_kv_cache.ipynb)" in page and "tried 1 time." in page
    assert "| 1 of 6 | 2 | 1 min |" in page and "| all | 1 of 80 | 3 | 1 min |" in page


def test_after_a_finished_lab_comes_the_first_unfinished_and_in_the_end_nothing():
    every = [(lab.name, one.grade_id) for lab in LABS for one in lab.exercises]
    third = [at(n, name, "passed") for n, (lab, name) in enumerate(every) if lab == "03_kv_cache"]
    assert next_exercise(LABS, third).lab.name == "01_naive_generation"
    assert "6 of 6 ✓" in where_you_are(LABS, third)
    whole = [at(n, name, "passed") for n, (_, name) in enumerate(every)]
    assert next_exercise(LABS, whole) is None and "**All exercises are right.**" in where_you_are(LABS, whole)


def test_what_is_measured_and_what_is_estimated_are_apart():
    page = where_you_are(LABS, [])
    assert "The lecture runs, measured" in page and "Reading, estimated" in page
    assert f"at {times.WORDS_PER_MINUTE} a minute" in page and "measured on " in page


def test_the_file_has_the_labs_that_are_there_and_is_written_again_after_a_check(noting, course):
    page = StartPage(course)
    page.refresh()
    text = (course / NAME).read_text()
    assert page.shown and not page.opens_first() and MARK in text
    assert "03_kv_cache" in text and "01_naive" not in text and "| all | 0 of 6 |" in text
    note("kv-append", "not_attempted")
    page.refresh()
    assert not page.opens_first()
    note("kv-append", "passed")
    page.refresh()
    assert page.opens_first() and "| all | 1 of 6 |" in (course / NAME).read_text()
    written = (course / NAME).stat().st_mtime_ns
    page.refresh()
    assert (course / NAME).stat().st_mtime_ns == written, "nothing new, nothing written"


def test_a_file_of_somebody_else_stays_and_without_notes_there_is_none(noting, course, monkeypatch):
    (course / NAME).write_text("# My own")
    page = StartPage(course)
    page.refresh()
    assert (course / NAME).read_text() == "# My own" and not page.shown
    (course / NAME).unlink()
    monkeypatch.setenv(progress.FILE, progress.OFF)
    page = StartPage(course)
    page.refresh()
    assert not (course / NAME).exists() and not page.opens_first()


def test_a_page_that_cannot_be_written_is_said_once_and_the_lecture_opens(noting, course, capsys):
    (course / NAME).mkdir()
    note("kv-append", "passed")
    page = StartPage(course)
    page.refresh()
    assert NAME in capsys.readouterr().err and not page.opens_first()
    note("kv-append", "passed")
    page.refresh()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tried", "arguments", "opened"),
    [
        (False, [], "notebooks/00_start_here.ipynb"),
        (True, [], NAME),
        (True, ["--notebook", "notebooks/03_kv_cache.ipynb"], "notebooks/03_kv_cache.ipynb"),
    ],
)
def test_jupyterlab_opens_the_first_lecture_for_a_newcomer_and_the_page_for_who_has_begun(
    tried, arguments, opened, noting, course, monkeypatch
):
    seen = []
    monkeypatch.setattr("workbench.lab_server.serve", lambda course, opened, **options: seen.append(opened) or 0)
    monkeypatch.setattr("workbench.cli._course", lambda: course)
    if tried:
        note("kv-append", "failed")
    assert cli.main(["lab", *arguments]) == 0 and seen == [opened]
    assert (course / NAME).exists() == tried, "for a newcomer it is written when the server runs"


def test_what_is_forgotten_is_gone_from_the_page_too(noting, course, monkeypatch, capsys):
    note("kv-append", "passed")
    StartPage(course).refresh()
    monkeypatch.setattr("workbench.instruments.doctor.find_course", lambda: course)
    assert cli.main(["progress", "--forget"]) == 0
    assert "Nothing is noted yet" in (course / NAME).read_text()


def test_neither_the_page_nor_the_command_imports_torch():
    code = (
        "import sys; from workbench import cli; from workbench.checks.start_page import shown; shown(); "
        "assert cli.main(['progress']) == 0; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stdout.splitlines()[-1] == "False False"


def test_the_command_says_what_each_lab_takes(noting, capsys):
    note("kv-append", "passed")
    assert cli.main(["progress"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"03_kv_cache +1 of 6 right, 1 try, 0 min between checks +lecture .*about \d+ min to read", said)
    assert re.search(r"^all +1 of 80 right", said, re.M) and "180 words a minute" in said
    assert cli.main(["progress", "--json"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "03_kv_cache")
    assert row["estimated"]["reading_minutes"] > 5 and set(row["measured"]) == {"lecture_run", "exercises_run"}
