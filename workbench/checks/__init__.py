"""The visible checks of every lab's exercises: what a student's check cell runs.

>>> from workbench import checks
>>> checks.check("naive-loop", token_loop)        # doctest: +SKIP
naive-loop: passed 3/3
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from workbench.errors import unknown
from workbench.grading.check import Exercise, ExerciseSet, Verdict, evaluate

__all__ = ["CheckFailed", "NotAttempted", "WrongAnswer", "check", "exercise_sets", "trying"]


@dataclass(frozen=True)
class WrongAnswer:
    """A plausible mistake: the whole source of an answer's cell, and the name of the check that is there to catch it."""

    name: str
    source: str
    caught_by: str
    why: str


class _Short:
    """Shown by Jupyter as its message alone: the traceback would lead into the checks, not into the answer."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class CheckFailed(_Short, AssertionError):
    """The answer is not right yet; the message says what was seen, what was expected, and where to look."""


class NotAttempted(_Short, NotImplementedError):
    """The answer is still the stub of the starter notebook."""


def exercise_sets() -> dict[str, ExerciseSet]:
    """The exercises of every lab by the name of their notebook, with their visible checks only."""
    from workbench.checks import lab01, lab02, lab03, lab04, lab05, lab06, lab07, lab08, lab09, lab10

    labs = (lab01, lab02, lab03, lab04, lab05, lab06, lab07, lab08, lab09, lab10)
    return {lab.EXERCISES.name: lab.EXERCISES for lab in labs}


def _exercise(grade_id: str) -> Exercise:
    known = {e.grade_id: e for exercises in exercise_sets().values() for e in exercises.exercises}
    if grade_id not in known:
        raise unknown("exercise", grade_id, known)
    return known[grade_id]


def check(grade_id: str, answer: Any) -> None:
    """Run the visible checks of an exercise on `answer` and print one fixed line when all of them pass.

    Raises CheckFailed, NotAttempted, or WorkbenchError for a grade_id that no exercise has.
    """
    result = evaluate(_exercise(grade_id), answer)
    if result.verdict == Verdict.PASSED:
        print(result.line)
        return
    error = NotAttempted if result.verdict == Verdict.NOT_ATTEMPTED else CheckFailed
    raise error(f"{result.line}\n" + "\n".join(f"  {line}" for line in result.message.splitlines()))


@contextmanager
def trying(grade_id: str) -> Iterator[None]:
    """Around a cell that uses an answer before it is checked: an answer not written yet is said in one line, not raised.

    Every other error comes through.
    """
    exercise = _exercise(grade_id)
    try:
        yield
    except NotImplementedError as error:
        if not str(error).startswith(f"{grade_id}:"):
            raise
        print(
            f"{grade_id}: not attempted yet. Write {exercise.entry} in the cell above, run it, then run this cell again."
        )
