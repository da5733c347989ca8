"""Progress as rows: of each lab, and of each exercise of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workbench.checks import times
from workbench.checks.progress import Attempt, Standing, of_exercises, passed, seconds_at_work, standings


class Titled(Protocol):
    @property
    def grade_id(self) -> str: ...
    @property
    def title(self) -> str: ...


class Lab(Protocol):
    """An `ExerciseSet`, or a `LabTime`, which takes no import of the lab."""

    @property
    def name(self) -> str: ...
    @property
    def exercises(self) -> Sequence[Titled]: ...


@dataclass(frozen=True)
class LabRow:
    """name: of the notebook. minutes: between its checks, breaks left out."""

    name: str
    exercises: int
    passed: int
    tries: int
    minutes: int

    def in_words(self) -> str:
        done = f"{self.passed} of {self.exercises} right"
        return f"{done}, {_tries(self.tries)}, {self.minutes} min between checks" if self.tries else done


@dataclass(frozen=True)
class ExerciseRow:
    name: str
    title: str
    tries: int
    passed_at: str | None  # ISO 8601, UTC

    def in_words(self) -> str:
        state = f"right since {self.passed_at[:16].replace('T', ' ')} UTC" if self.passed_at else "not yet right"
        return f"{state}, {_tries(self.tries)}" if self.tries else "not begun"


def _tries(count: int) -> str:
    return f"{count} {'try' if count == 1 else 'tries'}"


def labs_of(sets: Iterable[Lab], noted: Sequence[Attempt]) -> list[LabRow]:
    """In the order of the sets."""
    standing_of, rows = standings(noted), []
    for one in sets:
        names = [exercise.grade_id for exercise in one.exercises]
        tries = sum(standing_of.get(name, Standing()).tries for name in names)
        minutes = round(seconds_at_work(of_exercises(noted, names)) / 60)
        rows.append(LabRow(one.name, len(names), passed(standing_of, names), tries, minutes))
    return rows


def total(rows: Iterable[LabRow]) -> LabRow:
    """All labs together."""
    rows = list(rows)
    summed = (sum(getattr(row, name) for row in rows) for name in ("exercises", "passed", "tries", "minutes"))
    return LabRow("all", *summed)


def needs(one: times.LabTime) -> dict[str, Any]:
    """What a lab takes, plain: measured seconds with their machines, words, and what is estimated from them."""
    runs = {"lecture_run": one.lecture.run, "exercises_run": one.answers and one.answers.run}
    return {
        "measured": {name: run and vars(run) for name, run in runs.items()},
        "words": one.words,
        "estimated": {"reading_minutes": one.reading_minutes, "words_per_minute": times.WORDS_PER_MINUTE},
    }


def exercises_of(one: Lab, noted: Sequence[Attempt]) -> list[ExerciseRow]:
    """In the order of the notebook."""
    standing_of = standings(noted)
    rows = []
    for exercise in one.exercises:
        standing = standing_of.get(exercise.grade_id, Standing())
        at = None if standing.passed_at is None else standing.passed_at.isoformat()
        rows.append(ExerciseRow(exercise.grade_id, exercise.title, standing.tries, at))
    return rows
