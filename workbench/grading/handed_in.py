"""When something was handed in: only from sources that students cannot write.

These are Gradescope's table of an export, the receipt that `workbench collect` writes when it takes a file, and a CSV
of the instructor's. What stands in a zip, in a `timestamp.txt` or on a file's date is in the student's hands: it is
shown, and never used. A time without a zone is no moment: the zone is asked for, and not guessed.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from workbench.errors import WorkbenchError, unknown

RECEIPT_COLUMNS = ("student", "file", "sha256", "time")
MAX_CSV_BYTES = 20_000_000
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)")


def utc_text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def zone_of(text: str) -> tzinfo:
    """The zone of a name (Europe/Berlin, UTC) or an offset (+01:00)."""
    if offset := _OFFSET.fullmatch(text):
        minutes = int(offset[2]) * 60 + int(offset[3])
        if minutes < 24 * 60:
            return timezone(timedelta(minutes=-minutes if offset[1] == "-" else minutes))
    try:
        return UTC if text == "UTC" else ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise WorkbenchError(
            f"{text!r} is not a time zone; write one like Europe/Berlin or +01:00 ({brief_reason(error)})"
        ) from None


def brief_reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]


def moment_of(text: str, zone: tzinfo | None, what: str) -> datetime:
    """The moment that `text` names (2026-11-30 23:59:00 +01:00); `zone` is for a text that names none.

    Raises WorkbenchError, which begins with `what`, for a text that is no time, for one without a zone where none is
    given, and for a local time that a change of the clock has made two moments or none.
    """
    words = text.strip()
    words = f"{words.removesuffix(' UTC')}+00:00" if words.endswith(" UTC") else words
    words = re.sub(r"\s+(?=[+-]\d\d:?\d\d$)", "", words)
    try:
        moment = datetime.fromisoformat(words)
    except ValueError:
        raise WorkbenchError(f"{what}: {text!r} is not a time; write it like 2026-11-30T23:59+01:00") from None
    return in_zone(moment, zone, what)


def in_zone(moment: datetime, zone: tzinfo | None, what: str) -> datetime:
    """`moment` with its zone, or else with `zone`; WorkbenchError as of `moment_of`."""
    if moment.tzinfo is not None:
        return moment
    shown = moment.isoformat(sep=" ")
    if zone is None:
        raise WorkbenchError(
            f"{what}: {shown} has no time zone; write it after the time (+01:00), or say it for all of them, "
            "--zone Europe/Berlin"
        )
    early, late = (moment.replace(tzinfo=zone, fold=fold) for fold in (0, 1))
    if early.utcoffset() != late.utcoffset():
        raise WorkbenchError(
            f"{what}: {shown} in {zone} is two moments or none, as clocks were changed then; write the offset after it"
        )
    return early


# --- A CSV of times: the instructor's own, or the receipts of `workbench collect` ---


@dataclass(frozen=True)
class Time:
    """A row: of all files of a student, or of one of that name, or of that name and content."""

    student: str
    moment: datetime
    file: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Times:
    """What a CSV says. `name`: of the file, for reports."""

    name: str
    rows: tuple[Time, ...] = field(default=())

    def of(self, students: Iterable[str], file: str, digest: str) -> tuple[datetime | None, str]:
        """When this file of one student was handed in; or None and why it is not known. students: their id, and other
        names that they go by."""
        names = set(filter(None, students))
        theirs = [row for row in self.rows if row.student in names and row.file in ("", file)]
        if not theirs:
            return None, f"{self.name} has no time for it"
        exact = [row for row in theirs if row.sha256 in ("", digest)]
        if not exact:
            return None, f"{self.name} has a time for another content of {file}"
        return exact[-1].moment, ""

    @property
    def needs_digest(self) -> bool:
        return any(row.sha256 for row in self.rows)

    def unused(self, students: Iterable[str]) -> list[str]:
        """Students with a time who have handed nothing in, as far as is known: a name may be misspelt."""
        known = set(students)
        return sorted({row.student for row in self.rows} - known)


def read_times(path: Path, zone: tzinfo | None) -> Times:
    """The CSV at `path`: columns student and time, and also file and sha256 where it has them.

    Raises WorkbenchError, with the line, for what cannot be used, and for two rows about the same thing which differ.
    """
    rows: list[Time] = []
    for line, cells in read_csv(path, needed=("student", "time"), allowed=(*RECEIPT_COLUMNS, "lab")):
        what = f"{path.name}, line {line}"
        moment = moment_of(cells["time"], zone, what)
        row = Time(cells["student"], moment, cells.get("file", ""), cells.get("sha256", ""))
        clash = [r for r in rows if not r.sha256 and (r.student, r.file) == (row.student, row.file)]
        if clash and clash[0].moment != moment:
            raise WorkbenchError(f"{what}: a second time for {row.student!r}; keep one row for each")
        rows.append(row)
    return Times(path.name, tuple(rows))


def read_csv(path: Path, needed: Sequence[str], allowed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(line, column -> text) of each row of an instructor's CSV; WorkbenchError for one that is not of this form."""
    try:
        if path.stat().st_size > MAX_CSV_BYTES:
            raise WorkbenchError(f"{path} has more than {MAX_CSV_BYTES / 1e6:.0f} MB; is it the right file?")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkbenchError(f"{path} cannot be read: {brief_reason(error)}") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[tuple[int, dict[str, str]]] = []
    head: list[str] = []
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if not head:
                head = [cell.lower() for cell in cells]
                for column in head:
                    if column not in allowed:
                        raise unknown(f"column of {path.name}", column, allowed)
                if missing := [column for column in needed if column not in head]:
                    raise WorkbenchError(f"{path.name} has no column {missing[0]!r}; its first line names the columns")
                continue
            if len(cells) != len(head):
                raise WorkbenchError(
                    f"{path.name}, line {reader.line_num}: {len(cells)} cells where the first line has {len(head)}"
                )
            row = dict(zip(head, cells))
            if empty := [column for column in needed if not row[column]]:
                raise WorkbenchError(f"{path.name}, line {reader.line_num}: nothing in the column {empty[0]!r}")
            rows.append((reader.line_num, row))
    except csv.Error as error:
        raise WorkbenchError(f"{path.name}, line {reader.line_num}: {error}") from None
    if not head:
        raise WorkbenchError(f"{path.name} is empty; its first line names the columns: {', '.join(allowed)}")
    return rows
