"""Claims about what is known of each lab without importing it: its words, its exercises, and how long it ran."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from workbench.checks import exercise_sets, times
from workbench.checks.times import LabTime, Listed, Notebook, Run
from workbench.notebook_source import find_sources, read_source

ROOT = Path(__file__).parents[2]
QUIET = Run(60.0, 50.0, "a machine", 4, "2026-11-28", 0.5)


def test_every_notebook_of_the_course_is_there_with_its_words_and_exercises():
    noted = times.read()
    assert set(noted) == {source.relative_name for source in find_sources(ROOT)}
    assert [why for s in find_sources(ROOT) if (why := times.stale(times.FILE, s.relative_name, read_source(s)))] == []


def test_exercises_are_those_of_the_checks_in_their_order():
    labs = times.labs(times.read())
    for name, one in exercise_sets().items():
        assert [listed.grade_id for listed in labs[name].exercises] == [e.grade_id for e in one.exercises]
        assert all(listed.title for listed in labs[name].exercises)


def test_every_run_says_where_and_when_and_whether_the_machine_was_busy():
    runs = [one.run for one in times.read().values() if one.run is not None]
    assert len(runs) >= 8 and all(run.machine and run.cores and run.date >= "2026" and run.seconds > 1 for run in runs)
    assert QUIET.busy is False and Run(60.0, 50.0, "a machine", 4, "2026-11-28", 2.5).busy is True


def test_words_are_those_of_the_text_without_code_and_targets_of_links():
    text = "# Lab 99 · Sizes\n\nTwo [words](../docs/a-long-name.md#more), $x_1$ and it's 3.5."
    cells = [
        nbformat.v4.new_markdown_cell(text),
        nbformat.v4.new_code_cell("not = counted"),
        nbformat.v4.new_markdown_cell("## 1. The size\n\nHow many?"),
        nbformat.v4.new_code_cell("...", metadata={"nbgrader": {"solution": True, "grade_id": "a"}}),
    ]
    made = times.counted(nbformat.v4.new_notebook(cells=cells))
    assert made == Notebook("Lab 99 · Sizes", 15, (Listed("a", "The size"),))


def lecture(*cells: str):
    """A notebook; a cell that begins with # is text."""
    return nbformat.v4.new_notebook(
        cells=[(nbformat.v4.new_markdown_cell if c[0] == "#" else nbformat.v4.new_code_cell)(c) for c in cells]
    )


TWO = lecture(
    "# Lab 99 · Sizes\n\nTwo sittings.",
    "# Sitting 1: Small\n\nIt begins.",
    "wb.panels.a(x=1)",
    "## Deeper: why\n\nLong words here.",
    "wait()",
    "### A part of it",
    "## And on",
    "# Sitting 2: Large",
    "wb.panels.b()\nwb.panels.c()",
    "# Your guesses",
)


def test_a_lecture_has_its_sittings_with_deeper_parts_apart():
    """Words of the opening are those of the first sitting, words of the end those of the last."""
    small, large = times.counted(TWO).sittings
    assert (small.title, small.words, small.deeper_words, small.panels) == ("Small", 3 + 2 + 3 + 2 + 2, 2 + 3 + 4, 1)
    assert (large.title, large.words, large.deeper_words, large.panels) == ("Large", 3 + 2, 0, 2)
    (whole,) = times.counted(lecture("# Lab 98 · One\n\nText.", "wb.panels.a()")).sittings
    assert (whole.title, whole.words, whole.panels) == ("Lab 98 · One", 4, 1)


def test_minutes_of_a_sitting_are_words_panels_and_its_cells():
    assert times.run_of_sittings(TWO, {2: 30.0, 4: 6.0, 8: 60.0}) == (36.0, 60.0)
    run = replace(QUIET, sittings_s=(36.0, 60.0))
    made = replace(times.counted(TWO), run=run)
    assert made.sitting_minutes() == pytest.approx([12 / 180 + 1.5 + 0.6, 5 / 180 + 3 + 1.0])
    unmeasured = replace(made, run=replace(run, sittings_s=(36.0,)))  # of a lecture that had one sitting then
    assert unmeasured.sitting_minutes() == pytest.approx([12 / 180 + 1.5, 5 / 180 + 3])


def test_sittings_and_their_times_come_back_from_the_file(tmp_path):
    file = tmp_path / "times.json"
    file.write_text("{}")
    made = replace(times.counted(TWO), run=replace(QUIET, sittings_s=(36.0, 60.0)))
    assert times.note(file, "notebooks/99_a", made) and times.read(file) == {"notebooks/99_a": made}
    assert times.stale(file, "notebooks/99_a", TWO) is None


def test_a_run_stays_when_words_change_and_a_new_one_replaces_it(tmp_path):
    file = tmp_path / "times.json"
    file.write_text("{}")
    assert times.note(file, "notebooks/99_a", Notebook("A", 10, run=QUIET))
    assert not times.note(file, "notebooks/99_a", Notebook("A", 10))
    assert times.note(file, "notebooks/99_a", Notebook("A", 11))
    assert times.read(file) == {"notebooks/99_a": Notebook("A", 11, run=QUIET)}
    assert json.loads(file.read_text())["notebooks/99_a"]["run"]["cores"] == 4


@pytest.mark.parametrize(
    ("lab", "words"),
    [
        (LabTime("a", Notebook("A", 1800, run=QUIET), None), "lecture runs 60 s, about 10 min to read"),
        (LabTime("a", Notebook("A", 1200), Notebook("", 600)), "lecture not measured, about 10 min to read"),
        (LabTime("a", times.counted(TWO), None), "lecture not measured, about 0 min to read in 2 sittings"),
    ],
)
def test_measured_and_estimated_stand_apart_in_words(lab, words):
    assert lab.in_words() == words
