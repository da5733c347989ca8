"""Claims about `solutions/forbidden.py`: no right answer is refused, and the part that an exercise asks for does not
pass."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from workbench import checks
from workbench.grading import Limits, Verdict
from workbench.grading.desk import load_instructors
from workbench.grading.reference import uses
from workbench.grading.runner import Runner, preload_of

SOLUTIONS = Path(__file__).parents[2] / "solutions"
FORBIDDEN = load_instructors([SOLUTIONS / "forbidden.py"])[1]
SETS = {
    n: s.with_hidden({}, FORBIDDEN) for n, s in checks.exercise_sets().items() if (SOLUTIONS / f"{n}.ipynb").is_file()
}
DISARMED = [(n, e) for n, s in SETS.items() for e in s.exercises if any(":" in name for name in e.forbidden)]


def solutions(lab: str) -> dict[str, str]:
    cells = json.loads((SOLUTIONS / f"{lab}.ipynb").read_text("utf-8"))["cells"]
    graded = [(cell["metadata"].get("nbgrader", {}), "".join(cell["source"])) for cell in cells]
    return {about["grade_id"]: source for about, source in graded if about.get("solution")}


@pytest.mark.parametrize("lab", SETS)
def test_no_right_answer_names_what_is_forbidden(lab):
    other = runpy.run_path(str(SOLUTIONS / f"{lab}_wrong.py"))["ALTERNATIVE"]
    found = {
        exercise.grade_id: named
        for right in (solutions(lab), other)
        for exercise in SETS[lab].exercises
        if (named := uses(right[exercise.grade_id], SETS[lab].prelude, exercise.forbidden))
    }
    assert found == {}


@pytest.fixture(scope="module")
def runner():
    with Runner(preload_of(*SETS.values()), (), Limits(check_seconds=60)) as runner:
        yield runner


@pytest.mark.parametrize(("lab", "exercise"), DISARMED, ids=[e.grade_id for _, e in DISARMED])
def test_a_right_answer_passes_where_the_reference_is_out_of_order(runner, lab, exercise):
    result = runner.run(SETS[lab], exercise, solutions(lab)[exercise.grade_id])
    assert result.verdict == Verdict.PASSED, result.message


def test_every_reference_belongs_to_an_exercise():
    references = runpy.run_path(str(SOLUTIONS / "forbidden.py"))["FORBIDDEN"]
    assert references.keys() <= {e.grade_id for s in SETS.values() for e in s.exercises}
    assert len(DISARMED) == len(references) > 15


def test_calling_ours_instead_of_writing_it_earns_nothing(runner):
    lab = "01_naive_generation"
    loop, *_ = SETS[lab].exercises
    named = "from workbench.decoding.loop import token_loop\n"
    found = (
        "import sys\nm = [m for n, m in sys.modules.items() if n.endswith('ing.loop')]\ntoken_loop = m[0].token_loop\n"
    )
    for source, said in ((named, "the answer uses workbench.decoding.loop"), (found, "IndexError: list index")):
        result = runner.run(SETS[lab], loop, source)
        assert result.points == 0 and said in result.message
