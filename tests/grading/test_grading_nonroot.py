"""Claims about grading as a user who is not root: answers run as that same user, and still gain, learn and break
nothing.

As root, this module runs itself as an ordinary user without an account. There are three machines: as it is; one that
allows no namespaces, as in most containers; and one that has no Landlock either and lets bubblewrap do nothing, where
the report has to say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import hostile_submissions as hostile
import psutil
import pytest

from workbench.errors import WorkbenchError
from workbench.grading import Limits, confine, grade

TESTS, USER = Path(__file__).parents[1], 48_123
LIMITS = Limits(check_seconds=1.0, submission_seconds=8.0, memory_bytes=256 << 20, processes=24)
CHOSEN = (  # of those that root's answers are tried with
    "fork bomb, every one on its own",
    "ends the process",
    "kills its parent",
    "kills everybody",
    "reads a file of ours",
    "a forged result with the nonce",
    "forged result files",
    "changes the host's files",
    "reads the environment",
    "reads the memory of others",
    "reads through /proc",
    "calls home",
    "a process that outlives",
    "leaves a file",
    "leaves shared memory",
)
MORE = {  # what only reaches out when the grader's processes and files are of the same user
    "kills the grader": (
        """
    import os
    for number in (15, 9):
        for pid in {VICTIM, os.getppid(), *range(max(2, os.getpid() - 40), os.getpid())}:
            try: os.kill(pid, number)
            except OSError: pass"""
    ),
    "limits the grader": (
        """
    import os, resource
    for deed in (lambda p: resource.prlimit(p, resource.RLIMIT_CPU, (0, 0)),
                 lambda p: os.setpriority(os.PRIO_PROCESS, p, 19), lambda p: os.sched_setaffinity(p, {0})):
        for pid in (VICTIM, os.getppid()):
            try: deed(pid)
            except OSError: pass
    os.setpriority(os.PRIO_USER, 0, 19)"""
    ),
    "a signal for what it writes": (
        """
    import fcntl, os
    for pid in (VICTIM, os.getppid()):
        read, write = os.pipe()
        try:
            fcntl.fcntl(read, fcntl.F_SETOWN, pid); fcntl.fcntl(read, 10, 9)
            fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK); os.write(write, b'x')
        except OSError: pass"""
    ),
    "speaks to another program": (
        """
    import socket
    s = socket.socket(socket.AF_UNIX); s.connect('HOST/socket'); s.send(b'run this')"""
    ),
    "empties what it may read": (
        """
    import os
    for deed in (lambda f: os.open(f, os.O_RDONLY | os.O_TRUNC), lambda f: os.truncate(f, 0), lambda f: os.chmod(f, 0),
                 lambda f: os.utime(f, (0, 0)), lambda f: os.setxattr(f, 'user.kept', b'x')):
        for file in ('HOST/library/notes.txt', 'HOST/secret.txt'):
            try: deed(file)
            except OSError: pass"""
    ),
}
NOTHING = ("unshare", "landlock", "mount")
EARNED = {"right": 2, "wrong": 0, "right, after all of them": 2}


def hostile_notebooks(host: Path, victim: int) -> dict[str, bytes]:
    made = {n: hostile.notebook(hostile.cell("toy-double", f"def double(x):\n    {b}\n")) for n, b in MORE.items()}
    made = {n: d.replace(b"HOST", str(host).encode()).replace(b"VICTIM", b"%d" % victim) for n, d in made.items()}
    known = hostile.answers(host)
    return {name: known[name] for name in CHOSEN} | made


def grade_here(host: Path, names: list[str] | None) -> dict:
    """Grade everybody, or of the hostile these, as this process's user; what came of it, and of what is not theirs."""
    (host / "secret.txt").write_text(hostile.FILE_CANARY)
    (host / "secret.txt").chmod(0o600)
    (host / "hidden.py").write_text("from hostile_submissions import HIDDEN\n")
    (host / "library").mkdir()
    (host / "library" / "notes.txt").write_text("read me")
    kept = [host / "secret.txt", host / "library" / "notes.txt", host / "hidden.py", host]
    before = [(path.stat().st_mode, path.stat().st_size) for path in kept]
    victim = subprocess.Popen(["sleep", "600"])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(host / "socket"))
        listener.listen()
        listener.setblocking(False)
        books = hostile_notebooks(host, victim.pid)
        books = {name: books[name] for name in (books if names is None else names)}
        for name, source in (
            ("right", hostile.RIGHT),
            ("wrong", hostile.WRONG),
            ("right, after all of them", hostile.RIGHT),
        ):
            books[name] = hostile.notebook(hostile.cell("toy-double", source))
        order = sorted(books, key="right, after all of them".__eq__)
        for number, name in enumerate(order):
            folder = host / "submitted" / f"{number:03}"
            folder.mkdir(parents=True)
            (folder / "91_hostile.ipynb").write_bytes(books[name])
        closed = host / "submitted" / "closed"
        closed.mkdir(mode=0)
        summary = grade(
            [host / "submitted"],
            host / "out",
            sets="hostile_submissions:exercise_sets",
            hidden=[host / "hidden.py"],
            import_paths=[TESTS, host / "library"],
            limits=LIMITS,
            workers=1,
        )
        refused = _refusals(host, closed) if os.getuid() else []
        closed.chmod(0o700)
        unspoken_to = True
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
            unspoken_to = False
    limits = resource.prlimit(victim.pid, resource.RLIMIT_CPU), os.getpriority(os.PRIO_PROCESS, victim.pid)
    found = {
        "user": os.getuid(),
        "scores": {order[int(one.student_id)]: one.score for one in summary.graded if one.results},
        "refused": refused,
        "errors": list(summary.errors),
        "confinement": summary.confinement,
        "summary": str(summary),
        "left alone": {
            "files": [(path.stat().st_mode, path.stat().st_size) for path in kept] == before,
            "process": (
                victim.poll() is None and limits == ((resource.RLIM_INFINITY,) * 2, os.getpriority(os.PRIO_PROCESS, 0))
            ),
            "socket": unspoken_to,
        },
    }
    victim.kill()
    return found


def _refusals(host: Path, closed: Path) -> list[str]:
    """What is said to a user who may not write the grades, or not read what was handed in."""
    refused = []
    for paths, out in (
        ([host / "submitted"], closed),
        ([host / "submitted"], closed / "out"),
        ([closed], host / "new"),
    ):
        try:
            grade(paths, out, sets="hostile_submissions:exercise_sets", import_paths=[TESTS])
        except WorkbenchError as error:
            refused.append(str(error))
    return refused


def without(calls: list[str]) -> None:
    """Have the system refuse these to this process and all it starts, as one does that does not know them."""
    numbers = {"unshare": (272, 97), "landlock": (444, 444), "mount": (165, 40)}
    column = confine._ARCHITECTURES[os.uname().machine][0]
    program = [(confine._LOAD, 0, 0, 0)]
    for name in calls:
        program += [
            (confine._EQUAL, 0, 1, numbers[name][column]),
            (confine._RETURN, 0, 0, confine._ERROR | confine._ENOSYS),
        ]
    confine.install_filter([*program, (confine._RETURN, 0, 0, confine._ALLOW)])


def closed_path(*paths: str) -> str | None:
    """The first of these paths that an ordinary user may not reach."""
    return next((path for path in paths if not confine._open_to_all(path)), None)


PACKAGES = [*dict.fromkeys(os.path.dirname(os.path.dirname(file)) for file in (pytest.__file__, psutil.__file__))]
NEEDED = (*PACKAGES, str(Path(confine.__file__).parent), str(TESTS))


def system_python() -> str | None:
    """The system's interpreter, where it is of this one's version and every user may run it."""
    for name in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(name, os.X_OK) and closed_path(name) is None:
            script = "import sys, venv; print(*sys.version_info[:2])"
            version = subprocess.run([name, "-c", script], capture_output=True, text=True, check=False).stdout
            if version.split() == [str(part) for part in sys.version_info[:2]]:
                return name
    return None


OPEN_HERE = os.getuid() != 0 or not closed_path(sys.prefix, sys.base_prefix, os.path.realpath(sys.executable))
OTHER_PYTHON = None if OPEN_HERE or sys.platform != "linux" else system_python()


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """This interpreter, or where it lies in a closed folder (/root) the system's over the same packages."""
    if OPEN_HERE:
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    subprocess.run([OTHER_PYTHON, "-m", "venv", "--without-pip", str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in PACKAGES]
    (own / "same.pth").write_text("\n".join(lines) + "\n")
    folder.chmod(0o755)
    yield str(folder / "bin" / "python")
    shutil.rmtree(folder)


pytestmark = [
    pytest.mark.skipif(not confine.can_refuse_calls(), reason="needs Linux and its seccomp"),
    pytest.mark.skipif(
        os.getuid() == 0 and closed_path(*NEEDED) is not None,
        reason=f"run as root, and closed to every other user: {closed_path(*NEEDED)}",
    ),
    pytest.mark.skipif(
        not OPEN_HERE and OTHER_PYTHON is None,
        reason="run as root by a Python that no other user may run, and the system has none of its version",
    ),
]


def graded_as_user(python: str, calls: Sequence[str], *, names: list[str] | None = None, as_root: bool = False) -> dict:
    host = Path(tempfile.mkdtemp(prefix="nonroot-"))
    user = USER if os.getuid() == 0 and not as_root else os.getuid()
    change = {"user": user, "group": user, "extra_groups": []} if user != os.getuid() else {}
    try:
        host.chmod(0o755)
        os.chown(host, user, -1)
        environment = os.environ | {
            "HOME": str(host),
            "USER": "nobody",
            "WORKBENCH_TEST_SECRET": hostile.ENVIRONMENT_CANARY,
        }
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(TESTS), "TMPDIR": str(host / "tmp")}
        (host / "tmp").mkdir(mode=0o1777)
        (host / "tmp").chmod(0o1777)
        done = subprocess.run(
            [python, __file__, str(host), json.dumps({"names": names, "without": calls})],
            cwd=host,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            **change,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["user"] == user and (user != 0 or as_root)
        texts = {
            p: p.read_text("utf-8") for p in (host / "out").rglob("*") if p.is_file() and ".grading" not in p.parts
        }
        found["leaks"] = [(p.parent.name, c) for p, text in texts.items() for c in hostile.CANARIES if c in text]
        found["left"] = [path.name for path in host.rglob("left*")] + os.listdir(host / "tmp")
        found["alive"] = _alive() if change else []
    finally:
        shutil.rmtree(host, ignore_errors=True)
    return found


def _alive() -> list[str]:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        found = [
            p.info
            for p in psutil.process_iter(["uids", "name", "status"])
            if p.info["uids"] and p.info["uids"].real == USER
        ]
        found = [f"{one['name']} {one['status']}" for one in found if one["status"] != psutil.STATUS_ZOMBIE]
        if not found:
            break
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("calls", [[], ["unshare"]], ids=["as-it-is", "without-namespaces"])
def test_answers_of_the_graders_own_user_gain_learn_and_break_nothing(python, calls):
    names = [*CHOSEN, *MORE]
    if calls:  # what namespaces would have kept in
        names = ["kills its parent", "kills everybody", "calls home", "a process that outlives", *MORE]
    found = graded_as_user(python, calls, names=names)
    held = found["confinement"]
    if not held["files"]:
        pytest.skip("the system has neither Landlock nor bubblewrap: files of the same user are open to answers")
    assert {n: score for n, score in found["scores"].items() if score} == {n: p for n, p in EARNED.items() if p}
    assert len(found["scores"]) - len(EARNED) == len(names) >= (9 if calls else 20)
    assert found["left alone"] == {"files": True, "process": True, "socket": True}
    assert (found["leaks"], found["left"], found["alive"]) == ([], [], [])
    assert held["calls"] and held["network"]
    assert not (calls and held["processes"]) and ("own processes: NO" in found["summary"]) == (not held["processes"])


def test_where_the_system_gives_nothing_the_report_says_so_and_marks_are_right(python):
    """Also: what this user may not read or write is said, and costs nobody else a mark."""
    found = graded_as_user(python, NOTHING, names=[])
    assert found["scores"] == EARNED
    assert found["errors"] == ["closed: closed cannot be read: permission denied"]
    assert len(found["refused"]) == 3
    assert all("cannot write to" in message or "cannot be read" in message for message in found["refused"])
    assert "own processes: NO, own files: NO" in found["summary"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give each answer a user of its own")
def test_with_root_answers_read_nothing_that_is_closed_to_others_also_where_the_system_gives_nothing(python):
    found = graded_as_user(python, NOTHING, names=["reads a file of ours", "changes the host's files"], as_root=True)
    assert {name for name, score in found["scores"].items() if score} == {n for n, points in EARNED.items() if points}
    assert found["left alone"]["files"] and found["leaks"] == []
    assert "own processes: NO, own files: NO" in found["summary"]


if __name__ == "__main__":
    asked = json.loads(sys.argv[2])
    if asked["without"]:
        without(asked["without"])
    print(json.dumps(grade_here(Path(sys.argv[1]), asked["names"])))
