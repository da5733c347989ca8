"""The visible checks of every lab's exercises: what a student's check cell runs.

>>> from workbench import checks
>>> checks.check("naive-loop", token_loop)        # doctest: +SKIP
naive-loop: passed 3/3
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workbench import registry
from workbench.checks import hints
from workbench.checks.hints import hint
from workbench.checks.progress import note
from workbench.errors import unknown
from workbench.grading.check import Exercise, ExerciseSet, Verdict, evaluate

__all__ = ["CheckFailed", "NotAttempted", "check", "exercise_sets", "hint", "trying"]


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
    return registry.labs().exercise_sets()


def _exercise(grade_id: str) -> Exercise:
    known = {e.grade_id: e for exercises in exercise_sets().values() for e in exercises.exercises}
    if grade_id not in known:
        raise unknown("exercise", grade_id, known)
    return known[grade_id]


def check(grade_id: str, answer: Any) -> None:
    """Run the visible checks of an exercise on `answer` and print one fixed line when all of them pass. In an open
    notebook the attempt is noted for the learner (`checks.progress`). What fails says how to get a hint.

    Raises CheckFailed, NotAttempted, or WorkbenchError for a grade_id that no exercise has.
    """
    result = evaluate(_exercise(grade_id), answer)
    note(grade_id, result.verdict.value)
    if result.verdict == Verdict.PASSED:
        print(result.line)
        return
    error = NotAttempted if result.verdict == Verdict.NOT_ATTEMPTED else CheckFailed
    lines = [*result.message.splitlines(), *_where_hints_are(grade_id)]
    raise error(f"{result.line}\n" + "\n".join(f"  {line}" for line in lines))


def _where_hints_are(grade_id: str) -> list[str]:
    if grade_id not in registry.labs().hints():
        return []
    return [f"Hints, one at a time: {hints.call(grade_id)}"]


@contextmanager
def trying(grade_id: str) -> Iterator[None]:
    """Around a cell that uses an answer before it is checked: an answer not written yet is said in one line, not
    raised.

    Every other error comes through.
    """
    exercise = _exercise(grade_id)
    try:
        yield
    except NotImplementedError as error:
        if not str(error).startswith(f"{grade_id}:"):
            raise
        print(
            f"{grade_id}: not attempted yet. Write {exercise.entry} in the cell above, run it, then run this cell"
            " again."
        )
