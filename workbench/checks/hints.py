"""Three hints for each exercise, from the idea over its parts to what is easily missed; none of them has the answer.

They stand beside the checks of a lab as plain data, `checks/hints.json`: grade_id -> three texts.
"""

from __future__ import annotations

from workbench import registry
from workbench.errors import WorkbenchError, is_whole, unknown

STEPS = 3


def hint(grade_id: str, step: int = 1) -> None:
    """Print one hint of an exercise: 1 is the idea, 2 what it consists of, 3 what is nearest to the answer.

    Raises WorkbenchError for an exercise that is unknown, and for another step.
    """
    known = registry.labs().hints()
    if grade_id not in known:
        raise unknown("exercise", grade_id, known)
    if not is_whole(step) or not 1 <= step <= STEPS:
        raise WorkbenchError(f"an exercise has the hints 1 to {STEPS}, got {step!r:.80}")
    print(f"{grade_id}, hint {step} of {STEPS}: {known[grade_id][step - 1]}")
    if step < STEPS:
        print(f"The next one: {call(grade_id, step + 1)}")


def call(grade_id: str, step: int = 1) -> str:
    """What a cell says to get it."""
    return f'checks.hint("{grade_id}"' + (f", {step})" if step > 1 else ")")
