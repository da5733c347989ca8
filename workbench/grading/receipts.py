"""The collector: it takes what was handed in, and writes down when it took it.

    collected/ann/03_kv_cache.ipynb     the newest that the student has handed in
    collected/.earlier/ann/1-03_kv_…    those before it
    collected/receipts.csv              student, file, sha256, time: a row for each that was taken

Run it at the deadline, or every few minutes: what has not changed keeps the receipt that it has. The receipt is about
the file's content, so that a file which is put in its place later is not covered by it. Students can write to where it
takes files from, and must not be able to write to where it keeps them.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import resolved, write_bytes, write_text
from workbench.grading.collect import find_submissions
from workbench.grading.handed_in import RECEIPT_COLUMNS, read_csv, utc_text
from workbench.grading.reports import folder_name, for_terminal

RECEIPTS = "receipts.csv"
EARLIER = ".earlier"


@dataclass(frozen=True)
class Collected:
    """taken: (student, file) of each new receipt. same: how many had one. errors: a line for each that was not
    taken."""

    taken: tuple[tuple[str, str], ...]
    same: int
    errors: tuple[str, ...]


def collect(paths: Sequence[str | Path], into: Path, now: datetime | None = None) -> Collected:
    """Take the notebooks under `paths` into the folder `into`, with a receipt for each that is new or has changed.

    now: what the receipts say; the clock of this machine by default.
    """
    for path in map(Path, paths):
        if resolved(into).is_relative_to(resolved(path)) or resolved(path).is_relative_to(resolved(into)):
            raise WorkbenchError(
                f"{into} and {path} lie in each other; students must not reach where receipts are kept"
            )
    submissions = find_submissions(paths)
    into.mkdir(parents=True, mode=0o700, exist_ok=True)
    taken: list[tuple[str, str]] = []
    errors: list[str] = []
    same, seen = 0, dict[str, str]()
    with _alone_in(into):
        rows = _receipts(into / RECEIPTS)
        for one in submissions:
            student, file = folder_name(one.student_id), folder_name(one.name)
            key = f"{student}/{file}".casefold()
            try:
                data = one.data()
                if seen.setdefault(student.casefold(), one.home + one.student_id) != one.home + one.student_id:
                    raise WorkbenchError("a second student of this name was handed in; rename one of them")
                if key in seen:
                    raise WorkbenchError(f"two files named {file}; hand in one")
                seen[key] = ""
            except WorkbenchError as error:
                errors.append(for_terminal(f"{one.student_id}: {error}"))
                continue
            digest = hashlib.sha256(data).hexdigest()
            place = into / student / file
            last = next((row for row in reversed(rows) if row[:2] == (student, file)), None)
            if last is not None and last[2] == digest and place.is_file():
                same += 1
                continue
            if place.exists():
                _set_aside(place, into / EARLIER / student)
            write_bytes(place, data)
            rows.append((student, file, digest, utc_text(now or datetime.now(UTC)) + " +00:00"))
            write_text(into / RECEIPTS, _csv_of(rows), mode=0o600)
            taken.append((student, file))
    return Collected(tuple(taken), same, tuple(errors))


def _set_aside(place: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + sum(1 for _ in folder.iterdir())
    os.replace(place, folder / f"{number}-{place.name}")


def _receipts(file: Path) -> list[tuple[str, ...]]:
    if not file.exists():
        return []
    rows = read_csv(file, needed=RECEIPT_COLUMNS, allowed=RECEIPT_COLUMNS)
    return [tuple(cells[column] for column in RECEIPT_COLUMNS) for _, cells in rows]


def _csv_of(rows: Sequence[Sequence[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([RECEIPT_COLUMNS, *rows])
    return out.getvalue()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two collectors at once would lose each other's receipts."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WorkbenchError(f"another `workbench collect` is writing to {folder}; wait for its end") from None
        yield
