"""Claims about grading a class: what may be handed in, runs that are killed, several workers and machines, what comes
out."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
import zipfile
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import hostile_submissions as toy
import psutil
import pytest

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.grading import Limits, Verdict, grade
from workbench.grading.batch import Late, late_after, seed_in
from workbench.grading.check import CheckResult, Result
from workbench.grading.collect import find_submissions
from workbench.grading.desk import load_instructors
from workbench.grading.handed_in import Time, Times
from workbench.grading.notebooks import answers_in
from workbench.grading.reference import uses
from workbench.grading.reports import Graded, junit_xml
from workbench.grading.runner import Runner, preload_of
from workbench.grading.summary import summary_html

TESTS = Path(__file__).parents[1]
ANSWERS = {
    "right": toy.RIGHT,
    "wrong": toy.WRONG,
    "half": "def double(x):\n    return 2 * x if x < 10_000 else x\n",
    "lost": "import os\nos._exit(1)\n",
}
SCORES = {"right": 2, "wrong": 0, "half": 1, "lost": 0}


def book(answer: str = "right", *more: dict) -> bytes:
    return toy.notebook(toy.cell("toy-double", ANSWERS.get(answer, answer)), *more)


def write(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def pack(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 3, 1, 12, 0, 0)), data)
    return path


def settings(folder: Path, **more) -> dict:
    hidden = folder / "hidden.py"
    if not hidden.exists():
        hidden.write_text("from hostile_submissions import HIDDEN\n")
    return {"sets": "hostile_submissions:exercise_sets", "hidden": [hidden], "import_paths": [TESTS]} | more


def gradebook(out: Path) -> dict[str, str]:
    """All that students and gradebooks get, by file."""
    files = [
        p for p in sorted(out.rglob("*")) if p.is_file() and ".grading" not in p.parts and p.name != "summary.html"
    ]
    return {str(path.relative_to(out)): path.read_text("utf-8") for path in files}


def rows(out: Path) -> dict[str, dict]:
    return {row["student_id"]: row for row in csv.DictReader((out / "grades.csv").open(encoding="utf-8"))}


# --- What is handed in ---


def found(*paths: Path) -> list[tuple]:
    return [(s.student_id, s.name, s.error and "error") for s in find_submissions(paths)]


def test_zips_are_a_students_or_a_classs(tmp_path):
    one = pack(tmp_path / "in" / "ann.zip", {"work/91_hostile.ipynb": book(), "__MACOSX/._x.ipynb": b"", "a.txt": b""})
    pack(tmp_path / "in" / "bob" / "w.zip", {"x.ipynb": book(), ".ipynb_checkpoints/x.ipynb": b""})
    pack(tmp_path / "in" / "cem.zip", {"notes.txt": b""})
    write(tmp_path / "in" / "dan.rar", b"Rar!")
    write(tmp_path / "in" / "eve.zip", b"PK this is no zip")
    assert found(tmp_path / "in") == [
        ("ann", "91_hostile.ipynb", None),
        ("bob", "x.ipynb", None),
        ("cem", "cem.zip", "error"),
        ("dan", "dan.rar", "error"),
        ("eve", "eve.zip", "error"),
    ]
    whole = pack(tmp_path / "class.zip", {f"submitted/{n}/91_hostile/x.ipynb": book() for n in ("fay", "gil")})
    assert found(whole) == [("fay", "x.ipynb", None), ("gil", "x.ipynb", None)]
    assert answers_in(find_submissions([one])[0].cells(), ["toy-double"]).sources == {"toy-double": toy.RIGHT}


@pytest.mark.parametrize("name", ["../x.ipynb", "/etc/x.ipynb", "a/../../x.ipynb", "..\\x.ipynb", "C:/x.ipynb"])
def test_entries_that_lead_out_of_an_archive_are_refused_and_the_others_read(tmp_path, name):
    path = pack(tmp_path / "in" / "ann.zip", {name: book(), "91_hostile.ipynb": book()})
    read = {s.member: s.error for s in find_submissions([path.parent])}
    assert read.pop("91_hostile.ipynb") is None
    assert all("leads out of the archive" in error for error in read.values()) and len(read) == 1


def test_links_passwords_copies_and_crowds_in_an_archive_are_refused(tmp_path):
    path = tmp_path / "ann.zip"
    with zipfile.ZipFile(path, "w") as archive:
        link = zipfile.ZipInfo("link.ipynb")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        with pytest.warns(UserWarning, match="Duplicate"):
            for _ in range(2):
                archive.writestr("twice.ipynb", book())
        archive.writestr("secret.ipynb", book())
    data = bytearray(path.read_bytes())
    data[data.rfind(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    errors = {s.name: s.error for s in find_submissions([path])}
    assert "is a link" in errors["link.ipynb"] and "2 files named" in errors["twice.ipynb"]
    assert "encrypted" in errors["secret.ipynb"]
    crowd = pack(tmp_path / "bob.zip", {f"{n:060}": b"" for n in range(40_000)})
    assert "too many files" in find_submissions([crowd])[0].error


def test_what_gradescope_and_nbgrader_export_says_who_and_when(tmp_path):
    export = tmp_path / "assignment_7_export"
    write(export / "submission_1" / "x.ipynb", book())
    write(export / "submission_2" / "x.ipynb", book())
    write(export / "submission_3" / "x.ipynb", book())
    table = """
submission_1:
  :submitters:
  - :name: Ann Bo Lee
    :sid: "31"
    :email: ann@example.org
  :created_at: 2026-03-01 10:00:00.5 +01:00
submission_2:
  :submitters:
  - :email: bob@example.org
submission_3: 7
"""
    write(export / "submission_metadata.yml", table.encode())
    read = {s.path.parent.name: s for s in find_submissions([export])}
    ann = read["submission_1"]
    assert (ann.student_id, ann.first_name, ann.last_name) == ("31", "Ann Bo", "Lee")
    assert (ann.timestamp, ann.source) == ("2026-03-01 09:00:00", "Gradescope")
    assert [read[f"submission_{n}"].student_id for n in (2, 3)] == ["bob@example.org", "submission_3"]
    for damaged in (b"!!python/object/apply:os.system ['false']", b"a: [", b"[" * 100_000):
        write(export / "submission_metadata.yml", damaged)
        with pytest.raises(WorkbenchError, match=r"cannot be read .*export it again, or delete it"):
            find_submissions([export])
    (export / "submission_metadata.yml").unlink()
    assert {s.student_id for s in find_submissions([export])} == {"submission_1", "submission_2", "submission_3"}


def test_the_order_of_the_paths_changes_nothing(tmp_path):
    for name in ("ann", "bob", "cem"):
        write(tmp_path / name / "x" / "91.ipynb", book())
    paths = [tmp_path / name for name in ("ann", "bob", "cem")]
    listed = [found(*random.Random(seed).sample(paths, 3)) for seed in range(5)]
    assert all(one == listed[0] for one in listed)


# --- A class, and what comes out ---


LATE = Late(datetime(2026, 2, 28, 0, 0, tzinfo=UTC), 50.0)
TIMES = Times(
    "times.csv",
    (
        Time("zipped", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        Time("right", datetime(2026, 2, 27, 12, tzinfo=UTC)),
        Time("zed", datetime(2026, 2, 27, 12, tzinfo=UTC)),
    ),
)


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """One class, with everything that goes wrong in one, graded once."""
    folder = tmp_path_factory.mktemp("class")
    submitted = folder / "submitted"
    for name in ANSWERS:
        write(submitted / name / "91_hostile.ipynb", book(name))
    write(submitted / "twice" / "one.ipynb", book("right"))
    write(submitted / "twice" / "two.ipynb", book("wrong"))
    write(submitted / "broken" / "91_hostile.ipynb", b"{")
    pack(submitted / "zipped.zip", {"91_hostile.ipynb": book("right")})
    (submitted / "empty").mkdir()
    summary = grade([submitted], folder / "out", **settings(folder), workers=2, late=LATE, times=TIMES)
    return folder, summary


def test_each_gets_the_marks_of_its_own_answers(graded):
    folder, summary = graded
    marks = {name: float(row["raw_score"]) for name, row in rows(folder / "out").items()}
    expected = SCORES | {"twice": 2, "broken": 0, "zipped": 2, "empty": 0}
    assert marks == expected
    assert len(summary.errors) == 2 and "6 of 8 submissions graded" in str(summary)


def test_duplicates_missing_exercises_and_unreadable_files_are_told_by_name(graded):
    _, summary = graded
    shown = str(summary)
    assert "twice: 2 notebooks of 91_hostile: one.ipynb counts, not two.ipynb" in shown
    assert "zed: has a time in times.csv, and handed nothing in" in shown
    assert "right: no cell for toy-again" in shown and "empty: the folder holds no notebook" in shown
    assert "broken: 91_hostile.ipynb is not a notebook" in shown


def test_who_is_late_loses_what_was_said_and_no_more(graded):
    folder, summary = graded
    row = rows(folder / "out")["zipped"]
    # two days begun
    assert (row["raw_score"], row["late_submission_penalty"], row["score"]) == ("2", "2", "0")
    assert (row["duedate"], row["timestamp"]) == ("2026-02-28 00:00:00", "2026-03-01 12:00:00")
    assert rows(folder / "out")["right"]["late_submission_penalty"] == "0"
    page = (folder / "out" / "summary.html").read_text("utf-8")
    assert "1 handed in late" in str(summary) and "Handed in late" in page
    assert '<td><bdi>91_hostile</bdi></td><td class="n">2</td><td class="n">2</td>' in page
    assert "handed in 2026-03-01" in (folder / "out" / "zipped" / "feedback.html").read_text("utf-8")
    assert "4 have no hand-in time from a source that students cannot write" in str(summary)
    assert late_after("2026-02-28T01:00+01:00", 50) == Late(datetime(2026, 2, 28, tzinfo=UTC), 50.0)
    for due, percent in (("soon", 0), ("2026-02-28T00:00Z", 101), ("2026-02-28T00:00Z", -1)):
        with pytest.raises(WorkbenchError):
            late_after(due, percent)


def test_junit_and_the_class_page_say_what_the_gradebook_says(graded):
    folder, _ = graded
    suites = ElementTree.parse(folder / "out" / "junit.xml").getroot()
    failures = {s.get("name"): (s.get("failures"), s.get("errors")) for s in suites}
    assert failures["half: 91_hostile"] == ("2", "0") and failures["broken: 91_hostile"] == ("0", "1")
    points = [int(p.get("value")) for p in suites[1].iter("property") if p.get("name") == "points"]
    assert len(suites) == 8 and set(points) <= {0, 1}
    page = (folder / "out" / "summary.html").read_text("utf-8")
    for said in (
        "8 submissions, 6 graded",
        '<a href="half/feedback.html">half</a>',
        "<td><bdi>toy-double: a large number</bdi></td>",
        "half, lost, wrong</bdi>",
        "Every failing check",
        "Double a number",
        "toy-double: a large number",
        "<svg",
        "no cell for toy-again",
    ):
        assert said in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    private = (folder / "out" / ".grading").stat().st_mode & 0o777
    assert private == 0o700 and str(toy.CANARY) not in page + (folder / "out" / "junit.xml").read_text("utf-8")


def test_a_rerun_keeps_what_has_not_changed_and_grades_what_has(graded):
    folder, _ = graded
    before = gradebook(folder / "out")
    options = settings(folder, late=LATE, times=TIMES, workers=1)
    kept = grade([folder / "submitted"], folder / "out", **options)
    assert kept.kept == 6 and gradebook(folder / "out") == before and "6 of them by an earlier run" in str(kept)
    write(folder / "submitted" / "wrong" / "91_hostile.ipynb", book("right"))
    again = grade([folder / "submitted"], folder / "out", **options)
    assert (again.kept, rows(folder / "out")["wrong"]["score"]) == (5, "2")


def test_bars_and_pages_hold_for_no_marks_and_odd_ones():
    assert "To be looked at" in summary_html([Graded("a", "", "f", "", error="<b>no</b>")])
    result = Result("e", Verdict.FAILED, 0, 0, "", (CheckResult("c\x00\x1b[1m", False, 0, 0, "m\x00<"),))
    one = Graded("a<b>", "l", "f", "", (result,), 0, titles=(("e", "E"),))
    assert "a&lt;b&gt;" in summary_html([one, Graded("z", "l", "f", "", error="x", notes=("a<b>",))])
    assert ElementTree.fromstring(junit_xml([one]))[0][0].get("name") == "c\\u0000"


# --- Seeds, and answers that call ours ---


def test_inputs_come_from_a_secret_seed_that_the_gradebook_keeps(tmp_path):
    one, two = seed_in(tmp_path / "one"), seed_in(tmp_path / "two")
    assert one != two and len(one) == 32 and seed_in(tmp_path / "one") == one
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600
    write(tmp_path / "three", b"7\n")
    with pytest.raises(WorkbenchError, match="holds no seed"):
        seed_in(tmp_path / "three")


@pytest.fixture(scope="module")
def runner():
    with Runner(preload_of(*toy.exercise_sets().values()), [TESTS], Limits(check_seconds=30)) as runner:
        yield runner


def test_answers_learned_from_the_public_checks_are_wrong(runner):
    """A table of the inputs that seed 0 draws, which is what check cells use."""
    exercise = toy.exercise_sets()["91_hostile"].exercises[0]
    check = exercise.checks[0]
    drawn = {c["x"]: 2 * c["x"] for c in check.cases(random.Random(f"0/{exercise.grade_id}/{check.name}"))}
    learned = f"def double(x):\n    return {drawn}.get(x, 0)\n"
    sets = toy.exercise_sets()["91_hostile"]
    assert runner.run(sets, exercise, learned).verdict == Verdict.PASSED, "as the student sees it"
    for seed in ("one secret", "another"):
        assert runner.run(sets, exercise, learned, seed=seed).points == 0


PRELUDE = "import workbench as wb\nfrom workbench.grading.check import brief\nfrom workbench import errors\n"
BRIEF = "workbench.grading.check:brief"


@pytest.mark.parametrize(
    ("source", "forbidden", "seen"),
    [
        ("def f(x): return brief(x)", [BRIEF], [BRIEF]),
        ("from workbench.grading import brief as b\ndef f(x): return b(x)", [BRIEF], [BRIEF]),
        ("import workbench.grading.check as c\nf = c.brief", [BRIEF], [BRIEF]),
        ("def f(x): return wb.grading.check.brief(x)", [BRIEF], [BRIEF]),
        ("import importlib\nm = importlib.import_module('workbench.grading.check')", [BRIEF], [BRIEF]),
        ("import sys\nf = vars(sys.modules['workbench.grading.check'])['bri' + 'ef']", [BRIEF], [BRIEF]),
        ("def f(x): return x.brief()", [BRIEF], []),
        ("def brief(x): return x", [BRIEF], []),
        ("def f(x): return brief(x)", ["workbench"], []),
        ("def f(x): raise errors.WorkbenchError('no')", ["workbench"], []),
        ("from workbench.errors import WorkbenchError", ["workbench"], []),
        ("import workbench\ndef f(x): return workbench.load(x)", ["workbench"], ["workbench", "workbench.load"]),
        ("def f(x): return wb.load(x)", ["workbench"], ["workbench.load"]),
        ("def f(x: ", [BRIEF], []),
    ],
)
def test_an_answer_that_names_the_reference_is_seen_in_its_text(source, forbidden, seen):
    assert sorted(uses(source, PRELUDE, forbidden)) == seen


def test_the_reference_is_not_there_however_an_answer_looks_for_it(tmp_path, runner):
    """Not named in the text: found among all objects. An answer that does the work itself is right."""
    file = write(tmp_path / "h.py", b"FORBIDDEN = {'toy-double': ('hostile_submissions:_twice',)}\n")
    hidden, forbidden = load_instructors([file])
    sets = toy.exercise_sets()["91_hostile"].with_hidden(hidden, forbidden)
    finds = """
import gc, types
def double(x):
    functions = [o for o in gc.get_objects() if type(o) is types.FunctionType]
    named = [f for f in functions if f.__name__ == '_tw' + 'ice']
    return named[0]({'x': x}, None)
"""
    result = runner.run(sets, sets.exercises[0], finds)
    assert result.points == 0 and "IndexError" in result.message
    assert "walked all objects" in result.checks[0].mark
    assert runner.run(sets, sets.exercises[0], toy.RIGHT).verdict == Verdict.PASSED
    write(tmp_path / "bad.py", b"FORBIDDEN = {'toy-double': ('hostile_submissions:nothing',)}\n")
    with pytest.raises(WorkbenchError, match="does not exist"):
        uses("x = 1", "", load_instructors([tmp_path / "bad.py"])[1]["toy-double"])


# --- Killed, and elsewhere ---


def students(folder: Path, count: int) -> dict[str, int]:
    """`count` submissions, right and wrong in turn; the points that each has earned."""
    kinds = list(ANSWERS)
    for number in range(count):
        write(folder / "submitted" / f"s{number:02}" / "91_hostile.ipynb", book(kinds[number % len(kinds)]))
    return {f"s{number:02}": SCORES[kinds[number % len(kinds)]] for number in range(count)}


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from workbench.grading import grade
grade([Path({folder!r}) / "submitted"], Path({folder!r}) / "out", sets="hostile_submissions:exercise_sets",
      hidden=[Path({folder!r}) / "hidden.py"], import_paths=[{tests!r}], seed="of this test", workers=2,
      progress=lambda one: print(one.student_id, flush=True))
"""


def test_a_run_that_was_killed_goes_on_and_comes_to_the_same_gradebook(tmp_path):
    points = students(tmp_path, 5)
    options = settings(tmp_path, seed="of this test")
    script = SCRIPT.format(tests=str(TESTS), folder=str(tmp_path))
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    for _ in range(2):
        assert run.stdout.readline()
    family = psutil.Process(run.pid).children(recursive=True)
    assert family
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "the warm process and all that it forked end with the grader"
    done = len(rows(tmp_path / "out"))
    assert 2 <= done < 5
    resumed = grade([tmp_path / "submitted"], tmp_path / "out", **options, workers=2)
    assert resumed.kept >= 2
    assert {name: float(row["score"]) for name, row in rows(tmp_path / "out").items()} == points
    first = gradebook(tmp_path / "out")
    shuffled = random.Random(1).sample(sorted((tmp_path / "submitted").glob("*/*.ipynb")), 5)
    moved = [p.rename(tmp_path / f"{p.parent.name}.ipynb") for p in shuffled]
    grade(moved, tmp_path / "other", **options, workers=3)
    assert (tmp_path / "other" / "grades.csv").read_text() == first["grades.csv"]


def test_two_runs_into_one_gradebook_are_refused(tmp_path):
    import fcntl

    students(tmp_path, 1)
    (tmp_path / "out" / ".grading").mkdir(parents=True)
    with open(tmp_path / "out" / ".grading" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(WorkbenchError, match="another `workbench grade`"):
            grade([tmp_path / "submitted"], tmp_path / "out", **settings(tmp_path))


class Broken:
    """An executor whose workers die."""

    def submit(self, function, unit):
        future: Future = Future()
        future.set_exception(RuntimeError("the worker is gone <b>"))
        return future


def test_a_worker_that_is_lost_costs_nobody_a_mark(tmp_path):
    """Told as no fault of the submission, and kept as no result of it, so that the next run grades it."""
    students(tmp_path, 2)
    summary = grade([tmp_path / "submitted"], tmp_path / "out", **settings(tmp_path), executor=Broken())
    assert len(summary.errors) == 2 and "no fault of the submission" in summary.errors[0]
    assert "<b>" not in (tmp_path / "out" / "s00" / "feedback.html").read_text("utf-8")
    assert not list((tmp_path / "out").rglob("graded.json"))


def test_a_cluster_grades_as_one_machine_does_though_a_worker_is_killed(tmp_path):
    """Two real dask workers, processes of their own; one is killed as soon as the first mark has arrived."""
    distributed = pytest.importorskip("distributed")
    from workbench.grading.remote import dask_executor

    points, killed = students(tmp_path, 5), []
    options = settings(tmp_path, seed="of this test")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:

        def kill_one(graded: Graded) -> None:
            if not killed:
                worker = next(iter(cluster.workers.values()))
                killed.append(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)

        with dask_executor(cluster.scheduler_address) as executor:
            summary = grade([tmp_path / "submitted"], tmp_path / "out", **options, executor=executor, progress=kill_one)
    assert killed and not summary.errors
    assert {one.student_id: one.score for one in summary.graded} == points
    time.sleep(0.1)
    with pytest.raises(WorkbenchError, match="no dask scheduler"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.grading.remote.CONNECT_SECONDS", 1)
        with dask_executor("tcp://127.0.0.1:9"):
            pass


def test_the_command_hands_over_what_was_asked_for(tmp_path, monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr("workbench.grading.grade", lambda paths, out, **options: asked.update(options) or "done")
    write(tmp_path / "x.ipynb", book())
    line = ["grade", str(tmp_path / "x.ipynb"), "--out", str(tmp_path / "out")]
    assert (
        main(
            [
                *line,
                "--lab",
                "03_kv_cache",
                "--seed-file",
                str(tmp_path / "seed"),
                "--workers",
                "3",
                "--again",
                "--due",
                "2026-03-01",
                "--zone",
                "UTC",
                "--late-percent",
                "10",
            ]
        )
        == 0
    )
    assert (asked["assignment"], asked["workers"], asked["again"]) == ("03_kv_cache", 3, True)
    assert asked["seed"] == (tmp_path / "seed").read_text().strip() and asked["late"].percent_per_day == 10
    for wrong in (
        ["--executor", "dask"],
        ["--scheduler", "tcp://x"],
        ["--workers", "0"],
        ["--late-percent", "5"],
        ["--due", "never"],
        ["--due", "2026-03-01"],
        ["--zone", "Berlin"],
        ["--times", str(tmp_path / "none.csv")],
    ):
        assert main([*line, *wrong]) == 2
    assert "workbench: error:" in capsys.readouterr().err
    assert json.dumps(sorted(asked)) and "executor" not in asked
