"""Answers that ignore what they are given, and which checks they pass all the same.

An exercise that asks for a refusal, or for a table that does not change, has a check that one fixed answer passes. Such
a check is marked (`Check.constant_passes`), and its points count only beside a check that no fixed answer passes.
"""

from __future__ import annotations

import re
from dataclasses import replace

from workbench.grading.check import Check, ExerciseSet
from workbench.grading.runner import Runner

VALUES = ("None", "0", "1", "-1", "True", "False", "''", "[]", "{}", "()", "0.0", "(0, 0)", "([], [])")
GIVEN = ("args[0] if args else next(iter(kwargs.values()))", "(*args, *kwargs.values())[-1]")
MORE_SEEDS = ("another", "a third")  # what one draw lets pass by chance, these do not


def constant_sources(entry: str, right: str) -> list[str]:
    """Sources of answers that return one value, hand back an argument, or refuse everything; [] for an answer that is a
    class or a kernel."""
    if not re.search(rf"^def {entry}\b", right, re.MULTILINE) or "triton.jit" in right:
        return []
    made = [f"def {entry}(*args, **kwargs):\n    return {value}\n" for value in (*VALUES, *GIVEN)]
    return [*made, f"def {entry}(*args, **kwargs):\n    raise __import__('workbench').errors.WorkbenchError('no')\n"]


def first_value_source(entry: str, right: str) -> str:
    """The source of an answer that gives the right one's first value to every call, and prints it."""
    return (
        f"{right}\n_right, _first = {entry}, []\n"
        f"def {entry}(*args, **kwargs):\n"
        "    import copy\n"
        "    if not _first:\n        _first.append(_right(*args, **kwargs))\n        print(repr(_first))\n"
        "    return copy.deepcopy(_first[0])\n"
    )


def passed_by_constants(runner: Runner, exercises: ExerciseSet, grade_id: str, right: str, seed: int | str) -> set[str]:
    """Names of the checks of an exercise that one of these answers passes, with this seed and two more."""
    exercise = next(e for e in exercises.exercises if e.grade_id == grade_id)
    untimed = tuple(check for check in exercise.checks if check.speedup is None)

    def passed(checks: tuple[Check, ...], source: str) -> set[str]:
        printed: dict[str, str] = {}
        for number in (seed, *MORE_SEEDS):
            asked = replace(exercise, checks=checks, forbidden=())
            results = runner.run(exercises, asked, source, seed=number).checks
            kept = [r.name for r in results if r.passed and printed.setdefault(r.name, r.output) == r.output]
            checks = tuple(check for check in checks if check.name in kept)
            if not checks:
                break
        return {check.name for check in checks}

    sources = constant_sources(exercise.entry, right)
    names = set().union(*(passed(untimed, source) for source in sources))
    # by itself each: the first value is that of the check's own first case; a constant is the same for every seed
    if sources:
        names |= set().union(*(passed((c,), first_value_source(exercise.entry, right)) for c in untimed))
    return names
