"""Where a learner is, as a page: the labs in order with what is right, where to go on, and how long each takes.

`workbench lab` keeps it as `progress.md` in the course's folder, which JupyterLab shows as a page with links, and opens
it first for who has begun (`StartPage`). The first lecture shows the same (`where_you_are`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from workbench.checks import times
from workbench.checks.progress import NOT_ATTEMPTED, Attempt, Standing, attempts, progress_file, standings
from workbench.checks.summary import LabRow, labs_of, total
from workbench.errors import WorkbenchError
from workbench.files import write_text

NAME = "progress.md"
MARK = "<!-- written by workbench lab, again after each check; what you write here is lost -->"
FIRST = "00_start_here"
HEAD = ("Lab", "Exercises right", "Tries", "Your time, measured", "The lecture runs, measured", "Reading, estimated")


@dataclass(frozen=True)
class Next:
    """Where to go on: an exercise that is not yet right, and how often it was tried."""

    lab: times.LabTime
    exercise: times.Listed
    tries: int


def next_exercise(labs: Sequence[times.LabTime], noted: Sequence[Attempt]) -> Next | None:
    """In the lab that was worked on last, then in the first that is not finished; None when all is right."""
    lab_of = {exercise.grade_id: one for one in labs for exercise in one.exercises}
    standing_of = standings(noted)
    last = next((lab_of[one.exercise] for one in reversed(noted) if one.exercise in lab_of), None)
    for one in [*([last] if last else []), *labs]:
        for exercise in one.exercises:
            standing = standing_of.get(exercise.grade_id, Standing())
            if standing.passed_at is None:
                return Next(one, exercise, standing.tries)
    return None


def where_you_are(labs: Sequence[times.LabTime], noted: Sequence[Attempt], *, root: str = "") -> str:
    """The page, in Markdown. root: what leads from the page to the course's folder."""
    rows = labs_of(labs, noted)
    lines = ["# Where you are", "", _go_on(labs, noted, root), ""]
    lines += [_row(HEAD), _row(["---", *["---:"] * (len(HEAD) - 1)])]
    lines += [_row([_links(one, root), *_yours(row), _runs([one]), _reading([one])]) for one, row in zip(labs, rows)]
    lines += [_row(["all", *_yours(total(rows)), _runs(labs), _reading(labs)]), ""]
    return "\n".join([*lines, *_notes(labs)])


def _go_on(labs: Sequence[times.LabTime], noted: Sequence[Attempt], root: str) -> str:
    if not begun(noted):
        return f"Nothing is noted yet. **Begin with** {_lecture(labs[0], root)}." if labs else "There is no lab here."
    goal = next_exercise(labs, noted)
    if goal is None:
        return "**All exercises are right.**"
    tried = f"tried {goal.tries} {'time' if goal.tries == 1 else 'times'}" if goal.tries else "not begun"
    return (
        f"**Go on with** {_lecture(goal.lab, root)} and its [exercises]({root}exercises/{goal.lab.name}.ipynb): "
        f"next is *{goal.exercise.title}* (`{goal.exercise.grade_id}`), {tried}."
    )


def begun(noted: Sequence[Attempt]) -> bool:
    """Whether an exercise was tried."""
    return any(one.verdict != NOT_ATTEMPTED for one in noted)


def _lecture(lab: times.LabTime, root: str) -> str:
    return f"[{lab.lecture.title}]({root}notebooks/{lab.name}.ipynb)"


def _links(lab: times.LabTime, root: str) -> str:
    return _lecture(lab, root) + (f" · [exercises]({root}exercises/{lab.name}.ipynb)" if lab.exercises else "")


def _yours(row: LabRow) -> list[str]:
    if not row.exercises:
        return ["", "", ""]
    done = " ✓" if row.passed == row.exercises else ""
    return [f"{row.passed} of {row.exercises}{done}", str(row.tries or ""), f"{row.minutes} min" if row.tries else ""]


def _runs(labs: Sequence[times.LabTime]) -> str:
    """What was measured, added up; what was not is left out, and said."""
    runs = [one.lecture.run for one in labs if one.lecture.run is not None]
    if not runs:
        return "not measured"
    left_out = f", {len(labs) - len(runs)} not measured" if len(runs) < len(labs) else ""
    busy = " *" if len(labs) == 1 and runs[0].busy else ""
    return times.in_minutes(sum(run.seconds for run in runs)) + busy + left_out


def _reading(labs: Sequence[times.LabTime]) -> str:
    minutes = sum(one.reading_minutes for one in labs)
    sittings = f", {len(labs[0].lecture.sittings)} sittings" if len(labs) == 1 < len(labs[0].lecture.sittings) else ""
    return (f"about {minutes} min" if minutes < 120 else f"about {minutes / 60:.0f} h") + sittings


def _notes(labs: Sequence[times.LabTime]) -> list[str]:
    runs = [one.lecture.run for one in labs if one.lecture.run is not None]
    machines = sorted({f"{run.machine}, {run.cores} cores" for run in runs})
    where = progress_file()
    measured = f"on {'; '.join(machines)}" if machines else "nowhere yet"
    return [
        "- *Your time* is what your checks show: from the first of a lab to the last, without breaks of more than ten "
        "minutes. What came before the first is not known.",
        f"- *The lecture runs* for so long when all of its cells run at once and nobody reads: measured {measured}"
        f"{'; * while that machine did something else' if any(run.busy for run in runs) else ''}.",
        f"- *Reading* is no measurement: the words of lecture and exercises, at {times.WORDS_PER_MINUTE} a minute. How "
        "long you write answers is not estimated.",
        "- "
        + (
            "Nothing is noted: it is switched off."
            if where is None
            else "Noted on this machine alone; `workbench progress --forget` deletes it."
        ),
        "",
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def labs_there(there: Callable[[str], bool] = lambda name: True) -> list[times.LabTime]:
    """The first lecture and the labs with exercises, in order: those whose name is there."""
    every = times.labs(times.read()).values()
    return [one for one in every if (one.name == FIRST or one.exercises) and there(one.name)]


def shown() -> str:
    """`where_you_are` of this learner, for a notebook that lies one folder below the course's."""
    return where_you_are(labs_there(), attempts(), root="../").replace("# Where you are\n\n", "", 1)


class StartPage:
    """`progress.md` of a course, kept as it should be. course: the folder."""

    def __init__(self, course: Path):
        self.file, self._notebooks = course / NAME, course / "notebooks"
        self._seen: tuple[int, int] | str | None = "nothing yet"
        self._broken = False
        self.shown = False  # whether the file is there and says what is so

    def _write(self) -> bool:
        """Whether it is there now. A file of this name that somebody else wrote stays; where nothing is noted, none is
        written."""
        if progress_file() is None or (self.file.exists() and not self._ours()):
            return False
        self._seen = self._state()
        page = where_you_are(labs_there(lambda name: (self._notebooks / f"{name}.ipynb").is_file()), attempts())
        now = datetime.now(UTC).isoformat(sep=" ", timespec="minutes")[:16]
        write_text(self.file, f"{page}\n*As of {now} UTC. Open the page again to see what came after.*\n\n{MARK}\n")
        return True

    def opens_first(self) -> bool:
        """Whether it is there and has something to say."""
        return self.shown and begun(attempts())

    def refresh(self) -> None:
        """Write it, the first time and when more was noted. What cannot be written is said once, and nothing ends."""
        if self._broken or self._state() == self._seen:
            return
        try:
            self.shown = self._write()
        except (OSError, WorkbenchError) as error:
            self.shown, self._broken = False, True
            print(f"workbench: {error}", file=sys.stderr)

    def _ours(self) -> bool:
        return MARK in self.file.read_text(encoding="utf-8", errors="replace")

    def _state(self) -> tuple[int, int] | None:
        """Of the file of attempts."""
        file = progress_file()
        if file is None or not file.is_file():
            return None
        seen = file.stat()
        return seen.st_mtime_ns, seen.st_size
