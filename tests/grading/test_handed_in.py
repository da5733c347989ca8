"""Claims about when things were handed in, by whom, and what counts of several; and about receipts."""

from __future__ import annotations

import csv
import os
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import hostile_submissions as toy
import pytest
from test_grading_class import book, pack, settings, write

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.grading import grade
from workbench.grading.batch import Late, _one_of_each_lab, late_after
from workbench.grading.collect import Submission, find_submissions
from workbench.grading.handed_in import moment_of, read_times, zone_of
from workbench.grading.receipts import collect
from workbench.grading.reports import Graded

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def marked_late(timestamp: str) -> int:
    return Late(datetime(2026, 2, 28, tzinfo=UTC), 10).applied(Graded("a", "l", "f", timestamp)).days_late


# --- Times ---


def test_what_students_can_write_is_shown_and_not_used(tmp_path):
    """A zip, a timestamp.txt and a file's date, each of them backdated."""
    early = zipfile.ZipInfo("91.ipynb", (2025, 1, 1, 0, 0, 0))
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(tmp_path / "in" / "ann.zip", "w") as archive:
        archive.writestr(early, book())
    stamped = write(tmp_path / "in" / "bob" / "x" / "91.ipynb", book())
    write(stamped.with_name("timestamp.txt"), b"2025-01-01 00:00:00 UTC\n")
    os.utime(stamped, (1_700_000_000, 1_700_000_000))
    ann, bob = find_submissions([tmp_path / "in"])
    assert (ann.timestamp, bob.timestamp) == ("", "")
    assert ann.claims == ("the zip says 2025-01-01 00:00:00, in no zone",)
    assert bob.claims == ("timestamp.txt says 2025-01-01 00:00:00 UTC", "the file was changed 2023-11-14 22:13:20 UTC")
    assert marked_late("") == 0 and marked_late("2026-03-01 12:00:00") == 2


def test_a_table_that_a_student_wrote_is_not_gradescopes(tmp_path):
    """`workbench grade submitted/*` is given folders of students."""
    write(tmp_path / "ann" / "submission_1" / "91.ipynb", book())
    table = "submission_1:\n  :submitters:\n  - :sid: bob\n  :created_at: 2025-01-01 00:00:00 +00:00\n"
    write(tmp_path / "ann" / "submission_metadata.yml", table.encode())
    (one,) = find_submissions([tmp_path / "ann"])
    assert (one.student_id, one.timestamp) == ("submission_1", "")
    assert "assignment_123_export" in one.notes[0]
    (tmp_path / "ann").rename(tmp_path / "assignment_7_export")
    (one,) = find_submissions([tmp_path / "assignment_7_export"])
    assert (one.student_id, one.timestamp, one.source) == ("bob", "2025-01-01 00:00:00", "Gradescope")
    naive = table.replace(" +00:00", "")
    write(tmp_path / "assignment_7_export" / "submission_metadata.yml", naive.encode())
    with pytest.raises(WorkbenchError, match=r"submission_1: 2025-01-01 00:00:00 has no time zone; .*--zone"):
        find_submissions([tmp_path / "assignment_7_export"])
    (one,) = find_submissions([tmp_path / "assignment_7_export"], zone=zone_of("+02:00"))
    assert one.timestamp == "2024-12-31 22:00:00"


@pytest.mark.parametrize(
    ("text", "zone", "utc"),
    [
        ("2026-11-30T23:59+01:00", None, "2026-11-30 22:59"),
        ("2026-11-30 23:59 -0500", None, "2026-12-01 04:59"),
        ("2026-11-30 23:59 UTC", None, "2026-11-30 23:59"),
        ("2026-11-30 23:59", "+09:00", "2026-11-30 14:59"),
        ("2026-07-01 12:00", "Europe/Berlin", "2026-07-01 10:00"),
        ("2026-11-30 23:59", None, "has no time zone"),
        ("2026-10-25 02:30", "Europe/Berlin", "is two moments or none"),
        ("2026-03-29 02:30", "Europe/Berlin", "is two moments or none"),
        ("soon", "UTC", "is not a time"),
    ],
)
def test_a_time_has_a_zone_or_is_asked_for_one(text, zone, utc):
    zone = zone and zone_of(zone)
    if utc[0].isdigit():
        assert moment_of(text, zone, "x").astimezone(UTC) == datetime.fromisoformat(utc).replace(tzinfo=UTC)
    else:
        with pytest.raises(WorkbenchError, match=utc):
            moment_of(text, zone, "x")


@pytest.mark.parametrize("zone", ["Berlin", "+25:00", "", "../x", "+1"])
def test_an_unknown_zone_is_refused(zone):
    with pytest.raises(WorkbenchError, match="is not a time zone"):
        zone_of(zone)


def test_a_due_time_without_a_zone_is_refused():
    with pytest.raises(WorkbenchError, match="--due: 2026-02-28 00:00:00 has no time zone"):
        late_after("2026-02-28", 10)
    assert late_after("2026-02-28", 50, zone_of("+01:00")).due == datetime(2026, 2, 27, 23, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("student\nann\n", "no column 'time'"),
        ("student,time,marks\n", "unknown column of t.csv 'marks'"),
        ("student,time\nann,2026-03-01 12:00\n", "t.csv, line 2: .* has no time zone"),
        ("student,time\nann,2026-03-01T12:00Z\nann,2026-03-02T12:00Z\n", "line 3: a second time for 'ann'"),
        ("student,time\n,2026-03-01T12:00Z\n", "line 2: nothing in the column 'student'"),
        ("student,time\nann\n", "line 2: 1 cells where the first line has 2"),
        ('student,time\nann,"2026\n', "line"),
    ],
)
def test_a_csv_of_times_is_read_whole_or_refused_with_its_line(tmp_path, text, said):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(WorkbenchError, match=said):
        read_times(tmp_path / "t.csv", None)


# --- Receipts ---


def receipts(into: Path) -> list[tuple]:
    with (into / "receipts.csv").open(encoding="utf-8") as file:
        return [(row["student"], row["file"], row["time"]) for row in csv.DictReader(file)]


def test_a_receipt_is_about_the_content_that_was_taken(tmp_path):
    drop, into = tmp_path / "drop", tmp_path / "kept"
    first = write(drop / "ann" / "91_hostile.ipynb", book("wrong"))
    write(drop / "bob" / "notes.txt")
    done = collect([drop], into, NOON)
    assert done.taken == (("ann", "91_hostile.ipynb"),) and done.errors == (
        "bob: the folder holds no notebook (.ipynb)",
    )
    assert collect([drop], into, NOON.replace(hour=13)).same == 1
    first.write_bytes(book("right"))
    later = NOON.replace(day=2)
    assert collect([drop], into, later).taken == done.taken
    assert receipts(into) == [
        ("ann", "91_hostile.ipynb", "2026-03-01 12:00:00 +00:00"),
        ("ann", "91_hostile.ipynb", "2026-03-02 12:00:00 +00:00"),
    ]
    assert (into / ".earlier" / "ann" / "1-91_hostile.ipynb").read_bytes() == book("wrong")
    (one,) = find_submissions([into])
    assert one.data() == book("right") and (into / "receipts.csv").stat().st_mode & 0o777 == 0o600
    times = read_times(into / "receipts.csv", None)
    summary = grade([into], tmp_path / "out", **settings(tmp_path), times=times, late=Late(NOON, 50))
    assert (summary.graded[0].timestamp, summary.graded[0].days_late) == ("2026-03-02 12:00:00", 1)
    write(into / "ann" / "91_hostile.ipynb", book("half"))
    summary = grade([into], tmp_path / "out", **settings(tmp_path), times=times, late=Late(NOON, 50))
    (graded,) = summary.graded
    assert (graded.timestamp, graded.penalty) == ("", 0) and "another content" in graded.claims[-1]
    assert "1 have no hand-in time" in str(summary)
    page = (tmp_path / "out" / "summary.html").read_text("utf-8")
    assert "receipts.csv has a time for another content" in page and "not known" in page


def test_the_collector_refuses_what_would_be_ambiguous_or_in_reach(tmp_path):
    for place in ("a", "b"):
        write(tmp_path / "drop" / "ann" / place / "x.ipynb", book())
    done = collect([tmp_path / "drop"], tmp_path / "kept", NOON)
    assert done.taken == (("ann", "x.ipynb"),) and done.errors == ("ann: two files named x.ipynb; hand in one",)
    for into in (tmp_path / "drop" / "in", tmp_path):
        with pytest.raises(WorkbenchError, match="lie in each other"):
            collect([tmp_path / "drop"], into)
    write(tmp_path / "odd" / "kept" / "receipts.csv", b"student,time\n")
    with pytest.raises(WorkbenchError, match="no column 'file'"):
        collect([tmp_path / "drop"], tmp_path / "odd" / "kept")


def test_the_command_collects_and_says_what_it_took(tmp_path, capsys):
    write(tmp_path / "drop" / "a\x1b[31mb" / "x.ipynb", book())
    assert main(["collect", str(tmp_path / "drop"), "--into", str(tmp_path / "kept")]) == 0
    out = capsys.readouterr().out
    assert "1 taken, 0 unchanged" in out and "\x1b" not in out


# --- Whose it is ---


def test_one_notebook_of_a_student_and_a_lab_counts_and_the_others_are_named():
    def one(name: str, when: str = "", home: str = "h") -> Submission:
        return Submission("ann", Path(name), home=home, timestamp=when)

    lab = toy.exercise_sets()["91_hostile"]
    read = (lab, object(), None)
    unread = (lab, None, "broken")

    def counts(*those) -> list[tuple]:
        submissions, outcomes = zip(*those)
        return [(s.name, others) for s, _, others in _one_of_each_lab(submissions, outcomes)]

    assert counts((one("b.ipynb"), read), (one("91_hostile.ipynb"), read)) == [("91_hostile.ipynb", ("b.ipynb",))]
    assert counts((one("91_hostile.ipynb"), unread), (one("b.ipynb"), read)) == [("b.ipynb", ("91_hostile.ipynb",))]
    newer = one("a.ipynb", "2026-03-01 10:00:00"), read
    assert counts(newer, (one("b.ipynb", "2026-03-01 11:00:00"), read)) == [("b.ipynb", ("a.ipynb",))]
    assert counts((one("b.ipynb"), read), (one("a.ipynb"), read)) == [("a.ipynb", ("b.ipynb",))]
    assert counts((one("a.ipynb"), read), (one("a.ipynb", home="another"), read)) == [("a.ipynb", ()), ("a.ipynb", ())]


def test_names_that_begin_with_a_dot_or_do_not_show_are_graded_and_reported(tmp_path):
    write(tmp_path / ".ann" / "91.ipynb", book())
    write(tmp_path / "bob" / ".work" / "91.ipynb", book())
    write(tmp_path / "cem" / ".work" / "91.ipynb", book())
    write(tmp_path / "cem" / "91.ipynb", book())
    write(tmp_path / "dan\u202e" / "91.ipynb", book())
    write(tmp_path / ".config" / "x" / "y.txt")
    for junk in ("cem/.ipynb_checkpoints/91.ipynb", "cem/._91.ipynb", ".git/x.ipynb"):
        write(tmp_path / junk, book())
    pack(tmp_path / "eve.zip", {".x/91.ipynb": book(), "__MACOSX/.x/91.ipynb": b""})
    notes = {one.student_id: one.notes for one in find_submissions([tmp_path])}
    assert notes == {
        ".ann": ("the name begins with a dot",),
        "bob": ("it lay under a name that begins with a dot",),
        "cem": ("not read, as a name that begins with a dot led to it: 91.ipynb",),
        "dan\u202e": ("the name holds characters that do not show: dan\\u202e",),
        "eve": ("it lay under a name that begins with a dot",),
    }
