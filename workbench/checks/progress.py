"""What a learner has done so far: each check that was run in a notebook is noted in a file of their own.

    {"at": "2026-11-27T18:00:00+00:00", "exercise": "naive-loop", "verdict": "passed"}        a line for each

Nothing else is noted, nothing is sent anywhere, and no mark depends on it. The file lies at $WORKBENCH_PROGRESS ("off":
nothing is noted), else in the folder that the platform has for a user's data. Only kernels that a Jupyter server
started for a notebook note anything: not those of tests, of `workbench build` and of grading.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import from_home, user_folder, write_bytes

FILE, OFF = "WORKBENCH_PROGRESS", "off"  # the environment variable
BY_A_SERVER = "JPY_SESSION_NAME"  # a Jupyter server sets it for the kernel of a notebook that is open
LARGEST_BYTES = 4_000_000  # then the older half is dropped
LONGEST_LINE = 1000
NOT_ATTEMPTED = "not_attempted"
BREAK_S = 10 * 60.0  # a longer time between two checks is no time at work


@dataclass(frozen=True)
class Attempt:
    """One check that was run. verdict: "passed", "failed" or "not_attempted"."""

    at: datetime
    exercise: str
    verdict: str


@dataclass(frozen=True)
class Standing:
    """Of one exercise: how often it was checked, and when it was first right."""

    tries: int = 0
    passed_at: datetime | None = None


def progress_file() -> Path | None:
    """Where it is noted; None where nothing is to be."""
    given = os.environ.get(FILE)
    if given:
        return None if given == OFF else from_home(given)
    return user_folder("data") / "progress.jsonl"


def note(exercise: str, verdict: str) -> None:
    """Append an attempt, in a kernel of an open notebook. What cannot be written is a warning: the check counts."""
    file = progress_file()
    if file is None or not os.environ.get(BY_A_SERVER):
        return
    line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="seconds"), "exercise": exercise, "verdict": verdict})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > LARGEST_BYTES:
            _halve(file)
        # one write to the end of the file: two kernels at once do not mix their lines
        opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(opened, (line + "\n").encode())
        finally:
            os.close(opened)
    except (OSError, WorkbenchError) as error:
        warnings.warn(f"your progress is not noted: {file}: {error}; {FILE}={OFF} ends this", stacklevel=3)


def _halve(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    write_bytes(file, b"".join(lines[len(lines) // 2 :]), mode=0o600)


def attempts(file: Path | None = None) -> list[Attempt]:
    """All that are noted, the oldest first; lines that are none are left out. [] where there is no file.

    file: default `progress_file()`.
    """
    file = progress_file() if file is None else file
    if file is None or not file.is_file():
        return []
    with file.open("rb") as lines:
        read = [_attempt(line) for line in lines.read(2 * LARGEST_BYTES).splitlines()]
    return sorted((one for one in read if one is not None), key=lambda one: one.at)


def _attempt(line: bytes) -> Attempt | None:
    """None for a line that was cut, edited, or is of a later version."""
    if len(line) > LONGEST_LINE:
        return None
    try:
        values = json.loads(line)
        at = datetime.fromisoformat(values["at"])
        exercise, verdict = values["exercise"], values["verdict"]
        if at.tzinfo is None or not isinstance(exercise, str) or not isinstance(verdict, str):
            return None
        return Attempt(at.astimezone(UTC), exercise, verdict)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def standings(noted: Iterable[Attempt]) -> dict[str, Standing]:
    """By exercise; what was not attempted is no try."""
    by_exercise: dict[str, Standing] = {}
    for one in noted:
        if one.verdict == NOT_ATTEMPTED:
            continue
        before = by_exercise.get(one.exercise, Standing())
        right = one.at if one.verdict == "passed" else None
        by_exercise[one.exercise] = Standing(before.tries + 1, before.passed_at or right)
    return by_exercise


def seconds_at_work(noted: Sequence[Attempt]) -> float:
    """Between the first of these checks and the last, breaks of more than ten minutes left out. What came before the
    first is not known, so it is the least."""
    gaps = ((later.at - earlier.at).total_seconds() for earlier, later in itertools.pairwise(noted))
    return sum(gap for gap in gaps if gap <= BREAK_S)


def of_exercises(noted: Sequence[Attempt], names: Iterable[str]) -> list[Attempt]:
    known = set(names)
    return [one for one in noted if one.exercise in known]


def passed(standing_of: Mapping[str, Standing], names: Iterable[str]) -> int:
    """How many of these exercises were right once."""
    return sum(standing_of.get(name, Standing()).passed_at is not None for name in names)


def forget() -> Path | None:
    """Delete the file; what it was, None where there is none."""
    file = progress_file()
    if file is None or not file.exists():
        return None
    file.unlink()
    return file
