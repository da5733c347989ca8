"""Whether exercises prove themselves where they are graded: right answers get every point, each listed mistake is
caught.

The same limited processes as for a student's answer, so it says what the checks of an exercise cost on this machine,
too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.grading.check import ExerciseSet, Verdict
from workbench.grading.confine import Limits
from workbench.grading.constants import passed_by_constants
from workbench.grading.mistakes import Mistake
from workbench.grading.runner import Runner, preload_of


@dataclass(frozen=True)
class Proof:
    """What came of one exercise. seconds: in answer and probes, on the wall, for all of its checks; the slower of two
    right answers. caught: how many of the wrong ones failed the check meant for them. faults: what is not as it should
    be.
    """

    grade_id: str
    points: int
    visible: int
    hidden: int
    seconds: float
    wrong: int
    caught: int
    faults: tuple[str, ...]


def prove(
    exercises: ExerciseSet,
    right: Sequence[Mapping[str, str]],
    wrong: Mapping[str, Sequence[Mistake]],
    *,
    import_paths: Sequence[str | Path] = (),
    limits: Limits | None = None,
    seed: int | str = 0,
) -> Iterator[Proof]:
    """Each exercise of the set in turn. right: grade_id -> source, of each set of right answers.

    Raises WorkbenchError where the limited processes cannot be started.
    """
    with Runner(preload_of(exercises), import_paths, limits) as runner:
        for exercise in exercises.exercises:
            name, seconds, faults, caught = exercise.grade_id, 0.0, [], 0
            for number, sources in enumerate(right, 1):
                before = runner.answer_seconds
                result = runner.run(exercises, exercise, sources.get(name), seed=seed)
                seconds = max(seconds, runner.answer_seconds - before)
                if result.verdict != Verdict.PASSED:
                    faults.append(f"right answer {number}: {result.line}; {result.message}")
            for mistake in wrong.get(name, ()):
                result = runner.run(exercises, exercise, mistake.source, seed=seed)
                failed = [check.name for check in result.checks if not check.passed]
                caught += mistake.caught_by in failed
                if mistake.caught_by not in failed:
                    got = f"only by {', '.join(failed)}" if failed else "by no check"
                    faults.append(f"wrong answer {mistake.name!r}: caught {got}, expected {mistake.caught_by}")
            if wrong and right:
                passed = passed_by_constants(runner, exercises, name, right[0][name], seed)
                marked = {check.name for check in exercise.checks if check.constant_passes}
                faults += [f"a constant answer passes {one!r}: mark it constant_passes" for one in passed - marked]
            hidden = sum(check.hidden for check in exercise.checks)
            visible = len(exercise.checks) - hidden
            listed = len(wrong.get(name, ()))
            yield Proof(name, exercise.max_points, visible, hidden, seconds, listed, caught, tuple(faults))
