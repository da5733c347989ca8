"""What an instructor changes by hand: points, comments, and requests to grade again, in one CSV that every grading
reads.

    student,exercise,request,points,adjustment,comment
    ann,kv-append,"my cache is right",,1,"right, but slow: one more point"
    bob,kv-bytes,,3,,"graded by hand"
    cem,,,,,"see me about lab 4"

points: what the exercise earns, instead of what its checks gave. adjustment: points that come to it, or go (−1). No
exercise: of the whole notebook. A request without points, adjustment and comment is open, and the class page says so.
What the checks gave stays where it is; an adjustment is shown as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.errors import WorkbenchError, unknown
from workbench.grading.handed_in import read_csv
from workbench.grading.reports import Adjustment, Graded

_NUMBER = re.compile(r"[-−+]?\d{1,6}(\.\d{1,6})?")
COLUMNS = ("student", "lab", "exercise", "request", "points", "adjustment", "comment")


@dataclass(frozen=True)
class Row:
    student: str
    line: int
    lab: str = ""
    exercise: str = ""
    request: str = ""
    points: float | None = None
    adjustment: float | None = None
    comment: str = ""


def read_adjustments(path: Path, exercises: Iterable[str], labs: Iterable[str] = ()) -> tuple[Row, ...]:
    """The rows of the CSV at `path`. exercises: every grade_id that there is; labs: every lab.

    Raises WorkbenchError, with the line, for an unknown exercise or lab, for points that are no number, and for a row
    that gives both points and an adjustment.
    """
    known, known_labs = set(exercises), set(labs)
    rows: list[Row] = []
    for line, cells in read_csv(path, needed=("student",), allowed=COLUMNS):
        what = f"{path.name}, line {line}"
        exercise, lab = cells.get("exercise", ""), cells.get("lab", "")
        if exercise and exercise not in known:
            raise WorkbenchError(f"{what}: {unknown('exercise', exercise, known)}")
        if lab and lab not in known_labs:
            raise WorkbenchError(f"{what}: {unknown('lab', lab, known_labs)}")
        points, adjustment = (_number(cells.get(column, ""), column, what) for column in ("points", "adjustment"))
        if points is not None and (adjustment is not None or not exercise or points < 0):
            raise WorkbenchError(
                f"{what}: points are what an exercise earns, from 0, instead of an adjustment; got exercise "
                f"{exercise!r}, points {points:g}, adjustment {cells.get('adjustment', '')!r}"
            )
        row = Row(
            cells["student"],
            line,
            lab,
            exercise,
            cells.get("request", ""),
            points,
            adjustment,
            cells.get("comment", ""),
        )
        if points is not None and any(
            other.points is not None and (other.student, other.lab, other.exercise) == (row.student, lab, exercise)
            for other in rows
        ):
            raise WorkbenchError(f"{what}: points for {row.student!r} in {exercise} stand in another line, too")
        rows.append(row)
    return tuple(rows)


def _number(text: str, column: str, what: str) -> float | None:
    if not text:
        return None
    if not _NUMBER.fullmatch(text):
        raise WorkbenchError(f"{what}: {column} is a number, such as 1, -0.5 or nothing; got {text!r}")
    return float(text.replace("−", "-"))


def adjusted(graded: Graded, rows: Sequence[Row]) -> Graded:
    """`graded` with what the rows say of its student, its lab and its exercises.

    An exercise stays between 0 and what it is worth; where that cuts an adjustment, a note says so.
    """
    made, notes = [], []
    earned = {result.grade_id: float(result.points) for result in graded.results}
    worth = dict(graded.worth) or {result.grade_id: result.max_points for result in graded.results}
    theirs = [row for row in rows if row.student in (graded.student_id, graded.email) and row.student]
    for row in theirs:
        if (row.lab and row.lab != graded.assignment) or (row.exercise and row.exercise not in worth):
            continue
        change = row.adjustment or 0.0
        if row.exercise:
            before = earned.get(row.exercise, 0.0)
            wanted = row.points if row.points is not None else before + change
            after = min(max(0.0, wanted), worth[row.exercise])
            if after != wanted:
                notes.append(
                    f"line {row.line} of the adjustments asks for {wanted:g} points in {row.exercise}, which has 0 to "
                    f"{worth[row.exercise]}: {after:g} were given"
                )
            change, earned[row.exercise] = after - before, after
        open_ = bool(row.request) and row.points is None and row.adjustment is None and not row.comment
        made.append(Adjustment(row.exercise, change, row.comment, row.request, open_))
    return replace(graded, adjustments=tuple(made), notes=(*graded.notes, *notes))
