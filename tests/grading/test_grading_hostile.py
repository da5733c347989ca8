"""Claims about hostile submissions: no point gained, nothing learned, nothing broken, and the next student is graded.

A good half goes the whole way, through nbval and its kernel to the reports; the others, told by PLAIN, are run in
sessions of one runner, and their reports are made the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import hostile_submissions as hostile
import psutil
import pytest

from workbench.errors import WorkbenchError
from workbench.grading import Limits, grade
from workbench.grading.batch import _core_shares
from workbench.grading.collect import Submission
from workbench.grading.notebooks import answers_in, cells_of
from workbench.grading.reports import Graded, feedback_html, gradescope
from workbench.grading.runner import Runner, preload_of

TESTS = Path(__file__).parents[1]
LIMITS = Limits(check_seconds=1.0, submission_seconds=8.0, memory_bytes=256 << 20, processes=24, file_bytes=5_000_000)
WHOLE_WAY = (  # of BODIES; of the other kinds, all
    "loop in the function",
    "sleep without signals",
    "fork bomb, every one on its own",
    "memory bit by bit",
    "many files",
    "folders in folders",
    "output past Python",
    "ends the process",
    "kills everybody",
    "segmentation fault",
    "patched judge",
    "a number equal to everything",
    "a forged result with the nonce",
    "a flood of results",
    "a process that outlives",
    "forged result files",
    "changes the host's files",
    "reads through /proc",
    "reads the environment",
    "reads the hidden checks",
    "calls home",
    "tells the hidden input",
    "prints the hidden input",
    "markup and direction",
    "patched builtins",
)
PLAIN = [name for name in hostile.BODIES if name not in WHOLE_WAY]
RIGHT = [f"right {number}" for number in range(4)]


def fingerprints(folder: Path) -> dict[str, str]:
    """Every file and link of ours, its bytes, its rights."""
    return {
        str(path.relative_to(folder)): f"{path.lstat().st_mode} {_digest(path)}"
        for path in sorted(folder.rglob("*"))
        if not {"out", "__pycache__"} & set(path.relative_to(folder).parts)
    }


def _digest(path: Path) -> str:
    if not path.is_file():
        return ""
    if path.stat().st_size > 10**6:  # one of ours is all zeros, 51 MB of them
        return str(path.lstat().st_mtime_ns)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Path:
    """A folder that answers try to reach, which other users may enter."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret.txt").write_text(hostile.FILE_CANARY)
    (folder / "hidden.py").write_text("from hostile_submissions import HIDDEN  # canary-in-a-file\n")
    for path in (folder / "secret.txt", folder / "hidden.py"):
        path.chmod(0o644)
    for part in (folder, *list(folder.parents)[:2]):
        part.chmod(0o755)
    return folder


def bomb(path: Path) -> None:
    """A zip of a few hundred kB whose notebook would be 300 MB."""
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.ipynb", "w") as entry:
        for _ in range(300):
            entry.write(bytes(10**6))


def escaping(path: Path) -> None:
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../../left.ipynb", hostile.notebook(hostile.cell("toy-double", hostile.RIGHT)))


@pytest.fixture(scope="module")
def batch(host):
    """Everybody's submissions, right ones among them, graded two at a time."""
    submitted = host / "submitted"
    chosen = {n: data for n, data in hostile.answers(host).items() if n not in PLAIN}
    right = hostile.notebook(*(hostile.cell(g, hostile.RIGHT) for g in ("toy-double", "toy-again")))
    names = [*chosen, *RIGHT]
    for number, name in enumerate(names):
        folder = submitted / f"{number:03}"
        folder.mkdir(parents=True)
        (folder / "91_hostile.ipynb").write_bytes(chosen.get(name, right))
    odd = submitted / "張\u202e‮<b>&'\" student"
    odd.mkdir()
    (odd / "91_hostile – übung (1).ipynb").write_bytes(chosen["tells the hidden input"])
    (submitted / "linked").mkdir()
    (submitted / "linked" / "91_hostile.ipynb").symlink_to(host / "secret.txt")
    (submitted / "pipe").mkdir()
    os.mkfifo(submitted / "pipe" / "91_hostile.ipynb")
    (submitted / "huge").mkdir()
    with open(submitted / "huge" / "91_hostile.ipynb", "wb") as file:
        file.truncate(51_000_000)
    bomb(submitted / "bomb" / "work.zip")
    escaping(submitted / "escape" / "work.zip")
    (host / "tmp").mkdir(mode=0o755)
    before = fingerprints(host)
    processes = {p.pid for p in psutil.process_iter()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_TEST_SECRET", hostile.ENVIRONMENT_CANARY)
        patch.setattr(tempfile, "tempdir", str(host / "tmp"))
        summary = grade(
            [submitted],
            host / "out",
            sets="hostile_submissions:exercise_sets",
            hidden=[host / "hidden.py"],
            import_paths=[TESTS],
            limits=LIMITS,
            workers=2,
        )
    graded = {}
    for one in summary.graded:
        graded[names[int(one.student_id)] if one.student_id.isdigit() else one.student_id] = one
    return summary, graded, (before, processes)


def test_there_are_sixty_hostile_submissions_and_more(batch):
    _, graded, _ = batch
    assert len(graded) - len(RIGHT) >= 60
    assert len({*hostile.answers(Path("x")), "linked", "pipe", "huge", "bomb", "escape"}) >= 100


def test_none_of_them_gains_a_point_and_every_right_one_all(batch):
    summary, graded, _ = batch
    assert {name: one.score for name, one in graded.items() if one.score} == dict.fromkeys(RIGHT, 3)
    ours = [one for one in graded.values() if one.error and "no fault of the submission" in one.error]
    assert not ours, "a hostile submission must not look like our own failure"
    assert all(one.results or one.error for one in graded.values())
    assert summary.confinement.keys() == {"network", "processes", "files", "calls"}


def test_each_ends_within_its_limit_and_five_seconds(batch):
    """Beyond what the same machine takes for a right answer at the same time. Where that is long, as on a machine that
    is busy with others, the five seconds are four times as much."""
    _, graded, _ = batch
    usual = statistics.median(graded[name].seconds for name in RIGHT)
    most = usual + 2 * LIMITS.check_seconds + max(5, 4 * usual)
    slow = {n: one.seconds for n, one in graded.items() if one.seconds > most}
    assert slow == {}


def test_nothing_hidden_stands_in_what_students_get(batch, host):
    summary, _, _ = batch
    held = summary.confinement.get("files") and summary.confinement.get("processes")
    texts = {p: p.read_text("utf-8") for p in (host / "out").rglob("*") if p.is_file() and ".grading" not in p.parts}
    assert len(texts) > 120
    leaks = [(path.name, c) for path, text in texts.items() for c in hostile.CANARIES if c in text]
    assert not held or leaks == []


def test_no_file_of_ours_is_changed_and_nothing_is_left(batch, host):
    summary, _, (before, processes) = batch
    if summary.confinement.get("files"):
        assert fingerprints(host) == before
    assert not (host / "left.txt").exists() and not list(host.parent.glob("left*"))
    assert os.listdir(host / "tmp") == [], "folders that answers worked in"
    if summary.confinement.get("processes"):
        end = time.monotonic() + 10
        while (alive := _of_answers(processes)) and time.monotonic() < end:
            time.sleep(0.1)
        assert alive == []


def _of_answers(before: set[int]) -> list[psutil.Process]:
    """Processes of the users that answers run as, which were not there before and have no parent that is ours."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in before and 60_000 <= process.uids().real < 65_000 and process.ppid() == 1:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_text_of_students_is_inert_in_every_report(batch, host):
    _, graded, _ = batch
    for path in (host / "out").rglob("*"):
        if path.suffix in (".html", ".json", ".csv", ".xml") and ".grading" not in path.parts:
            text = path.read_text("utf-8")
            assert not {"\u202e", "\x1b", "\u2066", "\x07"} & set(text), path
            if path.suffix == ".html":
                assert "<script" not in text and "<img" not in text and "<b>" not in text
            if path.name == "results.json":
                assert json.loads(text)["score"] in (0, 3)
    page = next(p for p in (host / "out").rglob("feedback.html") if "張" in str(p)).read_text("utf-8")
    assert "&lt;b&gt;" in page and "\\u202e" in page
    assert "leads out of the student's folder" in graded["linked"].error
    assert "not a file" in graded["pipe"].error and "51 MB" in graded["huge"].error
    assert "more than 50 MB" in graded["bomb"].error and "leads out of the archive" in graded["escape"].error


# --- The others, in sessions of one runner ---


@pytest.fixture(scope="module")
def runner():
    preload = preload_of(*hostile.exercise_sets().values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_TEST_SECRET", hostile.ENVIRONMENT_CANARY)
        with Runner(preload, [TESTS], LIMITS) as runner:
            runner.start()
            yield runner


SET = hostile.exercise_sets()["91_hostile"].with_hidden(
    {name: tuple(replace(c, hidden=True) for c in checks) for name, checks in hostile.HIDDEN.items()}
)


@pytest.mark.parametrize("name", PLAIN, ids=lambda name: name.replace(" ", "-"))
def test_an_answer_gains_learns_and_breaks_nothing(runner, host, name):
    before = fingerprints(host)
    answers = answers_in(cells_of(hostile.answers(host)[name], name), ["toy-double"])
    start, runner.limits = time.monotonic(), replace(LIMITS, check_seconds=0.4)
    result = runner.run(SET, SET.exercises[0], answers.sources["toy-double"], seed="hostile")
    assert result.points == 0, result.message
    assert time.monotonic() - start < 2 * 0.4 + 5
    graded = Graded("ann", SET.name, "f", "t", (result,), result.max_points)
    reports = feedback_html(graded) + json.dumps(gradescope(graded), ensure_ascii=False)
    assert not runner.confinement["files"] or not [c for c in hostile.CANARIES if c in reports]
    if runner.confinement["files"]:
        assert fingerprints(host) == before


def test_the_next_student_after_all_of_them_is_graded(runner):
    runner.limits = replace(LIMITS, check_seconds=10)
    assert runner.run(SET, SET.exercises[0], hostile.RIGHT).points == 2


def test_an_archive_is_measured_by_what_comes_out_not_by_what_it_says(tmp_path):
    """The table of contents claims that the notebook has 10 bytes."""
    path = tmp_path / "work.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.ipynb", bytes(60_000_000))
    data = bytearray(path.read_bytes())
    entry = data.rfind(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(WorkbenchError, match="cannot be read"):
        Submission("ann", path, member="x.ipynb").cells()


def _bubblewrap_works() -> bool:
    program = shutil.which("bwrap")
    return program is not None and subprocess.run([program, "--ro-bind", "/", "/", "true"], check=False).returncode == 0


@pytest.mark.skipif(not _bubblewrap_works(), reason="bubblewrap is not installed, or the system lets it do nothing")
def test_in_bubblewrap_our_files_are_not_even_there(host):
    """Landlock keeps files from being opened; in bubblewrap, which stands in for it, they do not exist."""
    asks = f"import os\ndef double(x):\n    return repr(os.path.exists('{host}/secret.txt'))\n"
    preload = preload_of(*hostile.exercise_sets().values())
    with Runner(preload, [TESTS], LIMITS, bubblewrap=True) as within:
        result = within.run(SET, SET.exercises[0], asks)
        assert "gave False" in result.message and within.confinement["files"]
        assert within.run(SET, SET.exercises[1], hostile.RIGHT).points == 1
        folder = within.folder
    assert not os.path.exists(folder)


@pytest.fixture
def two_cores():
    """What is started from here uses no more: where more are seen, a container may still be given the time of two."""
    all_of_them = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_of_them)[:2])
    yield
    os.sched_setaffinity(0, all_of_them)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="one core (or a system that does not tell) is shared by all",
)
def test_a_neighbour_with_many_processes_takes_no_time_from_a_right_answer(tmp_path, two_cores):
    """Every one in a session of its own, so that no scheduler counts them as one, and each asks for all cores. Without
    cores of its own the right answer, half a second of work, runs into its limit of six."""
    limits = Limits(check_seconds=6, submission_seconds=60, memory_bytes=1 << 30, processes=64)
    worker = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\n" + hostile.RIGHT
    bomb = f"def double(x):\n    {hostile.BODIES['fork bomb, every one on its own']}\n"
    every = f"os.setsid(); os.sched_setaffinity(0, {os.sched_getaffinity(0)})"
    assert "os.setsid()" in bomb
    bomb = bomb.replace("os.setsid()", every)
    for name, answer in {"a-bomb": bomb, "b-right": worker, "c-right": worker, "d-right": worker}.items():
        place = tmp_path / "submitted" / name
        place.mkdir(parents=True)
        (place / "91_hostile.ipynb").write_bytes(hostile.notebook(hostile.cell("toy-double", answer)))
    summary = grade(
        [tmp_path / "submitted"],
        tmp_path / "out",
        sets="hostile_submissions:exercise_sets",
        import_paths=[TESTS],
        limits=limits,
        workers=2,
    )
    scores = {one.student_id: one.score for one in summary.graded}
    bombed, *right = [one.results[0].points for one in sorted(summary.graded, key=lambda one: one.student_id)]
    assert not bombed and all(right), scores


def test_each_worker_has_cores_of_its_own_while_there_are_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 1, 4, 2, 9}, raising=False)
    assert _core_shares(2) == [[1, 4, 9], [2, 7]]
    assert _core_shares(1) == [[1, 2, 4, 7, 9]] and _core_shares(5) == [[1], [2], [4], [7], [9]]
    assert _core_shares(6) == [[]] * 6
