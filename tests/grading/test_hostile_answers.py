"""Claims about answers to the labs' own exercises that solve nothing: no point, and a mark for the instructor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hostile_answers
import pytest
import torch

from workbench import checks
from workbench.grading import Limits
from workbench.grading.desk import load_instructors
from workbench.grading.judging import JudgeProcess
from workbench.grading.runner import Runner, preload_of

SOLUTIONS = Path(__file__).parents[2] / "solutions"
FILES = [file for file in [*SOLUTIONS.glob("*_hidden.py"), SOLUTIONS / "forbidden.py"] if file.is_file()]
SETS = {name: one.with_hidden(*load_instructors(FILES)) for name, one in checks.exercise_sets().items()}
OF = {exercise.grade_id: (one, exercise) for one in SETS.values() for exercise in one.exercises}
LIMITS = Limits(check_seconds=20, file_bytes=10_000_000, memory_bytes=1 << 30)


@pytest.fixture(scope="module")
def runner():
    with Runner(preload_of(*SETS.values()), (), LIMITS) as runner:
        yield runner


def test_there_are_forty_five_of_them_and_more():
    assert len(hostile_answers.ALL) >= 45


@pytest.mark.parametrize("name", hostile_answers.ALL, ids=lambda name: name.replace(" ", "-"))
def test_an_answer_that_solves_nothing_earns_nothing(runner, name):
    hostile = hostile_answers.ALL[name]
    exercises, exercise = OF[hostile.grade_id]
    result = runner.run(exercises, exercise, hostile.source)
    if hostile.only:
        seen = next(check for check in result.checks if check.name == hostile.only)
        assert not seen.passed, seen
    else:
        assert result.points == 0, [(check.name, check.message) for check in result.checks if check.points]
    messages = [check.message for check in result.checks]
    assert not hostile.said or any(hostile.said in message for message in messages), messages
    marks = [check.mark for check in result.checks if check.mark]
    assert marks or not hostile.named, result.message


def test_what_takes_long_to_judge_costs_its_check_and_no_more(runner):
    """A judge that fills the memory and one that never ends are stopped; what follows of this answer is not judged, and
    the next answer is."""
    exercises, exercise = OF["count-rows"]

    def endless(case, seen):
        while True:
            pass

    def filling(case, seen):
        kept = []
        while True:
            kept.append(bytearray(10**8))

    first, *others = exercise.checks
    slow = replace(exercise, checks=(replace(first, judge=filling), replace(others[0], judge=endless), *others[1:]))
    right = "def count_rows(p, n): return sum(range(p, p + n))\n"
    assert runner.run(exercises, exercise, right).verdict == "passed"
    runner._judge(exercises, slow)
    runner._judges.seconds = 1.0
    seen = runner.run(exercises, slow, right).checks
    assert not seen[0].passed and "could not be judged within 1 s" in seen[1].message
    assert not any(check.passed for check in seen[2:])
    assert runner.run(exercises, exercise, right).verdict == "passed"


def test_a_judge_may_use_all_of_torch_whatever_threads_its_grader_has_run():
    """The threads of a pool are not in a forked copy, which would wait for them for ever."""

    def multiplies(case, seen):
        square = torch.ones(1500, 1500)
        return None if (square @ square)[0, 0] == 1500 else "wrong"

    check = replace(OF["count-rows"][1].checks[0], judge=multiplies)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert multiplies({}, None) is None
        judges = JudgeProcess([check])
        try:
            assert judges.judge(check, [{}], [{"value": 1}]) is None
        finally:
            judges.close()
    finally:
        torch.set_num_threads(before)
