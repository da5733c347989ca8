"""Claims about right answers that are written in unusual ways: they get every point, by `grade` and by `check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unusual_answers import BEFORE, UNUSUAL

from workbench import checks
from workbench.grading import Limits, Verdict
from workbench.grading.desk import load_instructors
from workbench.grading.notebooks import grade_id_of, set_of
from workbench.grading.runner import Runner, preload_of

ROOT = Path(__file__).parents[2]
SETS = checks.exercise_sets()
LAB_OF = {e.grade_id: name for name, s in SETS.items() for e in s.exercises}
LABS = sorted({LAB_OF[name] for name in UNUSUAL})


def handed_in(lab: str) -> list[dict]:
    """The cells of the lab's notebook with the unusual answers, and what stands before them."""
    cells: list[dict] = []
    for cell in json.loads((ROOT / "exercises" / f"{lab}.ipynb").read_text("utf-8"))["cells"]:
        name = grade_id_of(cell)
        if name in UNUSUAL:
            cells += [{"cell_type": "code", "metadata": {}, "source": text} for text in BEFORE.get(name, ())]
            cell = cell | {"source": UNUSUAL[name].strip("\n")}
        cells.append(cell)
    return cells


@pytest.fixture(scope="module")
def runner():
    with Runner(preload_of(*SETS.values()), (), Limits(check_seconds=60)) as runner:
        yield runner


def test_there_are_fifty_of_all_labs():
    assert len(UNUSUAL) >= 50 and sorted(SETS) == LABS and LAB_OF.keys() >= UNUSUAL.keys() >= BEFORE.keys()


@pytest.mark.parametrize("lab", LABS)
def test_an_unusual_right_answer_gets_every_point(runner, lab):
    files = [ROOT / "solutions" / f"{lab}_hidden.py", ROOT / "solutions" / "forbidden.py"]
    exercises, answers = set_of(f"{lab}.ipynb", SETS, handed_in(lab))
    whole = exercises.with_hidden(*load_instructors(files))
    mine = [e for e in whole.exercises if e.grade_id in UNUSUAL]
    assert mine and not answers.problems
    results = [runner.run(whole, e, answers.sources[e.grade_id], seed="unusual") for e in mine]
    said = [f"{r.line}: " + "; ".join(c.message for c in r.checks if not c.passed) for r in results]
    assert [line for line, r in zip(said, results) if r.verdict != Verdict.PASSED] == []
