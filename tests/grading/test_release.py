"""Claims about what is handed out: nothing that gives answers away, valid for nbgrader, the same bytes every time; and
about the grader for Gradescope, which runs where nothing of ours is but what its zip holds."""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.grading import Verdict
from workbench.grading.check import CheckResult, Result
from workbench.grading.gradescope import run as run_as_gradescope
from workbench.grading.release import autograder, checksum, release, released
from workbench.grading.reports import Graded, csv_text

ROOT = Path(__file__).parents[2]
LABS = sorted(path.stem for path in (ROOT / "exercises").glob("*.ipynb"))


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "course"
    release(ROOT, folder)
    return folder


def digests(folder: Path) -> dict[str, tuple]:
    return {
        str(p.relative_to(folder)): (
            p.stat().st_mode,
            p.stat().st_mtime,
            p.is_file() and hashlib.sha256(p.read_bytes()).hexdigest(),
        )
        for p in folder.rglob("*")
    }


def sources(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"]]


def test_the_release_holds_lectures_starters_and_the_policy_and_nothing_else(course):
    assert {p.name for p in course.iterdir()} == {
        "notebooks",
        "exercises",
        "docs",
        "AGENTS.md",
        "CLAUDE.md",
        "README.md",
    }
    assert sorted(p.stem for p in (course / "exercises").iterdir()) == LABS
    assert (course / "notebooks" / "00_start_here.ipynb").is_file()
    policy = (course / "AGENTS.md").read_text("utf-8")
    assert "coach, don't solve" in policy and "nbgrader.solution" in policy
    assert not [p for p in course.rglob("*") if p.suffix == ".py" or p.name.startswith(".")]


def test_no_line_of_an_answer_a_hidden_check_or_a_wrong_answer_is_in_it(course):
    """Long lines of code that only the instructor has; a lecture may quote the engine, an exercise may not."""
    given = {line.strip() for path in course.rglob("*.ipynb") for s in sources(path) for line in s.splitlines()}
    for lab in LABS:
        hidden = ast.unparse(ast.parse((ROOT / "solutions" / f"{lab}_hidden.py").read_text("utf-8")))
        secret = {line.strip() for line in hidden.splitlines() if len(line.strip()) > 45 and "import" not in line}
        assert len(secret) > 2 and not secret & given, lab
    for path in (course / "exercises").iterdir():
        text = path.read_text("utf-8")
        assert "SOLUTION" not in text and "HIDDEN TESTS" not in text and "### STUB" not in text


def test_nbgrader_itself_finds_it_valid(course):
    """Its metadata schema, its checksums, and its reader of notebooks."""
    pytest.importorskip("nbgrader")
    from nbgrader import nbgraderformat
    from nbgrader.utils import compute_checksum

    for path in sorted((course / "exercises").iterdir()):
        # raises when not valid
        book = nbgraderformat.read(str(path), as_version=nbgraderformat.SCHEMA_VERSION + 1)
        graded = [cell for cell in book.cells if "nbgrader" in cell.metadata]
        assert len(graded) > 5
        for cell in graded:
            assert cell.metadata.nbgrader.checksum == compute_checksum(cell)


def test_metadata_keeps_to_the_keys_of_nbgraders_schema(course):
    """Its v3.json: these keys and no others, booleans where they are asked for, points on cells that are graded."""
    types = {
        "schema_version": int,
        "grade": bool,
        "solution": bool,
        "locked": bool,
        "task": bool,
        "grade_id": str,
        "points": (int, float),
        "checksum": str,
        "cell_type": str,
    }
    for path in (course / "exercises").iterdir():
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            about = cell["metadata"].get("nbgrader", {})
            assert all(isinstance(about[key], types[key]) for key in about)
            assert not about or ("points" in about) == about["grade"]


def test_it_is_the_same_to_the_byte_whenever_it_is_made(course, tmp_path):
    release(ROOT, tmp_path / "again")
    assert digests(tmp_path / "again") == digests(course)


def test_one_lab_can_be_released_by_itself(tmp_path):
    files = release(ROOT, tmp_path / "one", [LABS[2]])
    assert [f for f in files if f.startswith("exercises/")] == [f"exercises/{LABS[2]}.ipynb"]
    assert {"notebooks/00_start_here.ipynb", f"notebooks/{LABS[2]}.ipynb"} <= set(files)
    assert f"notebooks/{LABS[1]}.ipynb" not in files
    with pytest.raises(WorkbenchError, match="unknown lab"):
        release(ROOT, tmp_path / "two", ["03_kv_cash"])
    assert not (tmp_path / "two").exists()


def test_nothing_is_overwritten_and_nothing_is_released_half(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "work.ipynb").write_text("mine")
    with pytest.raises(WorkbenchError, match="nothing is overwritten"):
        release(ROOT, tmp_path / "there")
    with pytest.raises(WorkbenchError, match="no notebooks/"):
        release(tmp_path / "there", tmp_path / "new")
    assert os.listdir(tmp_path) == ["there"] and os.listdir(tmp_path / "there") == ["work.ipynb"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s, about: s.replace("raise NotImplementedError(", "return ("), "is no stub"),
        (lambda s, about: s + "\n### BEGIN HIDDEN TESTS", "holds a marker"),
        (lambda s, about: about.update(extra=1) or s, "not of version 3"),
        (lambda s, about: about.update(schema_version=2) or s, "not of version 3"),
        (lambda s, about: about.update(grade_id="setup") or s, "or there twice"),
    ],
)
def test_an_exercise_that_would_give_something_away_stops_the_release(tmp_path, change, said):
    book = json.loads((ROOT / "exercises" / f"{LABS[0]}.ipynb").read_text("utf-8"))
    cell = next(c for c in book["cells"] if c["metadata"].get("nbgrader", {}).get("solution"))
    cell["source"] = change("".join(cell["source"]), cell["metadata"]["nbgrader"])
    path = tmp_path / "exercises" / f"{LABS[0]}.ipynb"
    path.parent.mkdir()
    path.write_text(json.dumps(book))
    with pytest.raises(WorkbenchError, match=said):
        released(path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("source", "0[1-9]*"))
    with pytest.raises(WorkbenchError, match=said):
        release(tmp_path, tmp_path / "course")
    assert not (tmp_path / "course").exists()


@pytest.fixture
def clone(tmp_path) -> Path:
    """As small as a clone can be: one lab, and a package of one file."""
    clone = tmp_path / "clone"
    for name in (f"exercises/{LABS[0]}.ipynb", f"notebooks/{LABS[0]}.ipynb", "pyproject.toml", "LICENSE"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    for name in ("constraints.txt", "README.md", "workbench/__init__.py", "kernels/k.py"):
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text("")
    return clone


@pytest.mark.parametrize(
    ("stray", "said"),
    [
        ("workbench/seed", "no part of the course"),
        ("workbench/hidden.py~", "no part of the course"),
        ("kernels/grades.csv", "no part of the course"),
        ("notebooks/class.zip", "no part of the course"),
        ("notebooks/Untitled.ipynb", "was not made from notebooks/source/Untitled.py"),
        (f"notebooks/{LABS[0]}-Copy1.ipynb", "was not made from"),
        (f"exercises/{LABS[0]}-Copy1.ipynb", "was not made from"),
        ("workbench/link.py", "is a link"),
        ("notebooks/picture.png", "is a link"),
    ],
)
def test_what_lies_in_a_clone_by_accident_is_not_handed_out(clone, tmp_path, stray, said):
    """A seed, marks, an editor's copy, a solved notebook, a link to any of them."""
    (clone / "workbench" / ".hidden.py.swp").write_text("secret")
    (clone / "notebooks" / ".ipynb_checkpoints").mkdir()
    (clone / "notebooks" / ".ipynb_checkpoints" / "solved.png").write_text("secret")
    files = release(clone, tmp_path / "clean", package=True)
    assert "package/workbench/__init__.py" in files and not [name for name in files if "/." in name]
    (tmp_path / "secret").write_text("a seed")
    if said == "is a link":
        (clone / stray).symlink_to(tmp_path / "secret")
    elif stray.endswith(".ipynb"):
        shutil.copy(ROOT / "solutions" / f"{LABS[0]}.ipynb", clone / stray)
    else:
        (clone / stray).write_text("a seed")
    with pytest.raises(WorkbenchError, match=said):
        release(clone, tmp_path / "course", package=True)
    assert not (tmp_path / "course").exists()


def test_an_output_or_an_attachment_of_an_exercise_and_an_answer_in_a_lecture_stop_the_release(clone, tmp_path):
    """What a run of an answer has printed stays in a notebook whose answer was taken out again."""
    exercise, lecture = clone / "exercises" / f"{LABS[0]}.ipynb", clone / "notebooks" / f"{LABS[0]}.ipynb"
    whole = {path: path.read_text("utf-8") for path in (exercise, lecture)}
    printed = {"output_type": "stream", "name": "stdout", "text": ["passed 1/1\n", "def token_loop(…): …\n"]}
    picture = {"output_type": "display_data", "metadata": {}, "data": {"text/plain": "def token_loop"}}
    answer = {"metadata": {"nbgrader": {"grade_id": "naive-loop", "solution": True}}}
    changes = [
        (exercise, {"outputs": [printed]}),
        (exercise, {"outputs": [picture]}),
        (exercise, {"attachments": {"a.png": {"image/png": "AAAA"}}}),
        (lecture, answer),
        (lecture, {"source": "### BEGIN SOLUTION\n1"}),
    ]
    for path, change in changes:
        book = json.loads(whole[path])
        next(cell for cell in book["cells"] if cell["cell_type"] == "code").update(change)
        path.write_text(json.dumps(book), "utf-8")
        with pytest.raises(WorkbenchError, match="run `workbench build`"):
            release(clone, tmp_path / "course")
        path.write_text(whole[path], "utf-8")
    assert release(clone, tmp_path / "course")


@pytest.mark.parametrize("option", ["--autograder", "--seed-file"])
def test_hidden_checks_and_seed_never_lie_in_what_is_handed_out(tmp_path, capsys, option):
    course = tmp_path / "course"
    places = {"--autograder": tmp_path / "grader.zip", "--seed-file": tmp_path / "seed"}
    places[option] = course / "x" / ".." / "secret"
    command = ["release", str(course), "--lab", LABS[0], *(str(part) for item in places.items() for part in item)]
    assert main(command) == 2 and "which is handed out" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_the_checksum_is_nbgraders():
    """Computed by nbgrader 0.9.6 for this cell."""
    about = {"grade": True, "solution": False, "locked": True, "grade_id": "a-check", "points": 3}
    assert checksum("code", "check(1)", about) == "16a95c052a5f6712c58951518b841fa4"


# --- The command, and the grader for Gradescope ---


def test_the_command_writes_the_course_and_the_autograder(tmp_path, capsys):
    course, grader, seed = tmp_path / "course", tmp_path / "autograder.zip", tmp_path / "seed"
    assert main(["release", str(course), "--lab", LABS[0], "--autograder", str(grader)]) == 2
    assert "--seed-file" in capsys.readouterr().err and not course.exists()
    wanted = ["release", str(course), "--lab", LABS[0], "--autograder", str(grader), "--seed-file", str(seed)]
    assert main(wanted) == 0
    assert "do not hand it out" in capsys.readouterr().out
    assert (seed.stat().st_mode & 0o777, grader.stat().st_mode & 0o777) == (0o600, 0o600)
    with zipfile.ZipFile(grader) as archive:
        names = archive.namelist()
        assert {"setup.sh", "run_autograder", "settings.json", f"hidden/{LABS[0]}_hidden.py"} <= set(names)
        assert "package/workbench/grading/gradescope.py" in names
        assert not [n for n in names if "wrong" in n or n.endswith((".safetensors", ".pyc")) or ".." in n]
        assert archive.getinfo("run_autograder").external_attr >> 16 == 0o755
        assert json.loads(archive.read("settings.json"))["seed"] == seed.read_text().strip()
    again = tmp_path / "again.zip"
    autograder(
        ROOT, again, LABS[0], sorted((ROOT / "solutions").glob(f"{LABS[0]}_hidden.py")), seed.read_text().strip()
    )
    assert not (ROOT / "solutions" / "forbidden.py").exists() or len(again.read_bytes()) <= len(grader.read_bytes())
    with pytest.raises(WorkbenchError, match="nothing is overwritten"):
        autograder(ROOT, again, LABS[0], [], "s")


SCHEMA = {  # of Gradescope's results.json: key -> type of what may stand there
    "score": (int, float),
    "execution_time": (int, float),
    "output": str,
    "output_format": str,
    "visibility": str,
    "stdout_visibility": str,
    "tests": list,
}
TEST_SCHEMA = {
    "score": (int, float),
    "max_score": (int, float),
    "status": str,
    "name": str,
    "number": str,
    "output": str,
    "output_format": str,
    "visibility": str,
}


def test_the_zip_grades_a_submission_in_a_clean_folder(tmp_path):
    """In Gradescope's shape: source/, submission/, results/; our packages, but nothing of our checkout."""
    root, lab = tmp_path / "autograder", "02_where_time_goes"
    hidden = [ROOT / "solutions" / f"{lab}_hidden.py"]
    autograder(ROOT, tmp_path / "grader.zip", lab, hidden, "a seed for this test")
    with zipfile.ZipFile(tmp_path / "grader.zip") as archive:
        archive.extractall(root / "source")
    (root / "submission").mkdir()
    book = json.loads((ROOT / "solutions" / f"{lab}.ipynb").read_text("utf-8"))
    answers = [c for c in book["cells"] if c["metadata"].get("nbgrader", {}).get("solution")]
    answers[0]["source"] = "def layer_costs(*args, **settings):\n    raise ValueError('<wrong>')\n"
    (root / "submission" / "my work.ipynb").write_text(json.dumps(book))
    (root / "submission" / "notes.txt").write_text("nothing")
    (root / "submission_metadata.json").write_text('{"users": [{"email": "ann@example.org"}]}')
    interpreter = root / "venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={root}/source/package exec {sys.executable} -P "$@"\n')
    interpreter.chmod(0o755)
    shutil.copy(root / "source" / "run_autograder", root)
    environment = os.environ | {"AUTOGRADER_ROOT": str(root)}
    command = ["bash", str(root / "run_autograder")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    report = json.loads((root / "results" / "results.json").read_text("utf-8"))
    assert set(report) == set(SCHEMA) and all(isinstance(report[k], kind) for k, kind in SCHEMA.items())
    for test in report["tests"]:
        assert set(test) == set(TEST_SCHEMA) and all(isinstance(test[k], kind) for k, kind in TEST_SCHEMA.items())
        assert test["visibility"] in ("visible", "hidden", "after_due_date", "after_published")
        assert test["status"] in ("passed", "failed") and 0 <= test["score"] <= test["max_score"]
    assert report["score"] == sum(t["score"] for t in report["tests"]) > 0
    failed = {t["name"].split(":")[0] for t in report["tests"] if t["status"] == "failed"}
    assert failed == {answers[0]["metadata"]["nbgrader"]["grade_id"]}, "partial scores: the others keep theirs"
    assert {t["visibility"] for t in report["tests"]} == {"visible", "after_published"}
    assert os.stat(root / "results").st_mode & 0o777 == 0o700
    assert done.stdout.startswith("Confinement of students' code") and done.stdout.count("\n") == 1


METADATA = {  # as Gradescope writes it
    "id": 123456,
    "created_at": "2026-11-20T14:22:32.365935-07:00",
    "submission_method": "upload",
    "assignment": {
        "id": 25828,
        "title": "Lab 1",
        "total_points": "36.0",
        "group_submission": True,
        "late_due_date": None,
    },
    "users": [{"email": "ann@example.org", "id": 1234, "name": "Ann Lee"}, {"email": "bob@example.org", "id": 5}],
    "previous_submissions": [{"submission_time": "2026-11-19T14:22:32-07:00", "score": 0.0, "results": {}}],
}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "No notebook was handed in"),
        (["notes/answer.txt", "lab.pdf"], "No notebook was handed in"),
        (["lab.ipynb"], "lab.ipynb is not a notebook"),
        (["lab.rar"], "hand in a zip"),
    ],
)
def test_what_holds_no_answers_gets_no_points_and_is_told_why(tmp_path, files, said):
    (tmp_path / "source" / "hidden").mkdir(parents=True)
    settings = {
        "assignment": "02_where_time_goes",
        "seed": "a seed for this test",
        "sets": "workbench.checks:exercise_sets",
    }
    (tmp_path / "source" / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "submission_metadata.json").write_text(json.dumps(METADATA))
    (tmp_path / "submission").mkdir()
    for name in files:
        (tmp_path / "submission" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "submission" / name).write_text("{")
    report = run_as_gradescope(tmp_path)
    assert (report["score"], report["tests"]) == (0, []) and said in report["output"]
    assert json.loads((tmp_path / "results" / "results.json").read_text("utf-8")) == report


def test_a_result_is_written_whatever_fails_and_however_much_is_handed_in(tmp_path, monkeypatch):
    """0 with a reason, where our own side fails, too; and of a thousand notebooks a few are named."""
    (tmp_path / "source" / "hidden").mkdir(parents=True)
    settings = {"assignment": LABS[0], "seed": "a seed for this test", "sets": "workbench.checks:exercise_sets"}
    (tmp_path / "source" / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "submission_metadata.json").write_text("[" * 100_000)
    for number in range(1_000):
        (tmp_path / "submission" / "x").mkdir(parents=True, exist_ok=True)
        (tmp_path / "submission" / "x" / f"{number}.ipynb").write_text("{")
    report = run_as_gradescope(tmp_path)
    assert report["score"] == 0 and "1000 notebooks" in report["output"] and "and 979 more" in report["output"]
    assert len(report["output"]) < 1_000

    def fail(*_, **__):
        raise RecursionError("of ours")

    monkeypatch.setattr("workbench.grading.gradescope.grade", fail)
    with pytest.raises(RecursionError):
        run_as_gradescope(tmp_path)
    report = json.loads((tmp_path / "results" / "results.json").read_text("utf-8"))
    assert report["score"] == 0 and "no fault of yours (RecursionError)" in report["output"]


def test_setup_installs_the_package_under_the_root_and_closes_what_is_secret(tmp_path):
    """With stand-ins for the installers: what `setup.sh` asks of them, and what it leaves."""
    root, log = tmp_path / "autograder", tmp_path / "log"
    hidden = [ROOT / "solutions" / f"{LABS[0]}_hidden.py"]
    autograder(ROOT, tmp_path / "grader.zip", LABS[0], hidden, "a seed for this test")
    with zipfile.ZipFile(tmp_path / "grader.zip") as archive:
        archive.extractall(root / "source")
    (tmp_path / "bin").mkdir()
    for name in ("apt-get", "python3"):
        made = tmp_path / "bin" / name
        pip = 'case "$*" in "-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/pip";; esac\n'
        made.write_text(f'#!/bin/sh\necho "$(basename "$0") $*" >> {log}\n{pip}')
        made.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "AUTOGRADER_ROOT": str(root)}
    subprocess.run(["bash", str(root / "source" / "setup.sh")], check=True, env=environment, cwd=tmp_path)
    asked = log.read_text().splitlines()
    assert asked[0] == "apt-get update" and "python3-venv" in asked[1]
    assert f"python3 -m venv {root}/venv" in asked
    assert asked[-1].startswith("pip install") and asked[-1].endswith(f"{root}/source/package")
    for secret in (
        root / "source" / "settings.json",
        root / "source" / "hidden",
        *(root / "source" / "hidden").iterdir(),
    ):
        assert secret.stat().st_mode & 0o077 == 0
    assert (root / "source" / "package" / "pyproject.toml").stat().st_mode & 0o044


# --- nbgrader's own commands on what is released ---

LAB = "08_continuous_batching"


@pytest.fixture(scope="module")
def nbgrader(tmp_path_factory):
    """nbgrader in a folder, as an instructor or a student types it, with our kernel and nothing of this user's
    settings."""
    pytest.importorskip("nbgrader")
    home = tmp_path_factory.mktemp("home")
    kernel = home / "jupyter" / "kernels" / "workbench"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "x", "language": "python"}))
    variables = {"HOME": home, "JUPYTER_CONFIG_DIR": home, "IPYTHONDIR": home / "ipython"}
    variables["JUPYTER_PATH"] = home / "jupyter"
    variables["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]  # it calls alembic by name
    environment = os.environ | {name: str(value) for name, value in variables.items()}

    def run(folder: Path, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "nbgrader", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


def cells_of(path: Path) -> list[tuple]:
    return [(c["id"], c["metadata"], "".join(c["source"])) for c in json.loads(path.read_text("utf-8"))["cells"]]


def with_answers(exercise: Path, solved: Path) -> dict:
    """The released notebook, with the answer cells of the solutions pasted in."""
    book = json.loads(exercise.read_text("utf-8"))
    answers = {
        about["grade_id"]: source for _, metadata, source in cells_of(solved) if (about := metadata.get("nbgrader"))
    }
    for cell in book["cells"]:
        about = cell["metadata"].get("nbgrader")
        if about and about["solution"]:
            cell["source"] = answers[about["grade_id"]]
    return book


def test_nbgrader_validate_fails_every_check_of_the_starter_and_changes_nothing(course, nbgrader):
    before = digests(course)
    output = nbgrader(course / "exercises", "validate", f"{LAB}.ipynb")
    checks = sum(
        bool(m.get("nbgrader", {}).get("grade")) for _, m, _ in cells_of(course / "exercises" / f"{LAB}.ipynb")
    )
    assert f"VALIDATION FAILED ON {checks} CELL(S)" in output and output.count("not attempted 0/") == checks > 4
    assert digests(course) == before


def test_nbgrader_validate_passes_the_right_answers_and_tells_of_a_changed_check(course, nbgrader, tmp_path):
    book = with_answers(course / "exercises" / f"{LAB}.ipynb", ROOT / "solutions" / f"{LAB}.ipynb")
    (tmp_path / "right.ipynb").write_text(json.dumps(book))
    assert "Success! Your notebook passes all the tests" in nbgrader(tmp_path, "validate", "right.ipynb")
    check = next(c for c in book["cells"] if c["metadata"].get("nbgrader", {}).get("grade"))
    check["source"] = "pass"
    (tmp_path / "changed.ipynb").write_text(json.dumps(book))
    assert "THE CONTENTS OF 1 TEST CELL(S) HAVE CHANGED" in nbgrader(tmp_path, "validate", "changed.ipynb")


def test_nbgraders_pipeline_takes_a_released_exercise_as_its_source(course, nbgrader, tmp_path):
    """As docs/instructor.md says: without the step that puts nbgrader's own stub in place of ours."""
    source, made = (tmp_path / step / LAB / f"{LAB}.ipynb" for step in ("source", "release"))
    source.parent.mkdir(parents=True)
    shutil.copy(course / "exercises" / f"{LAB}.ipynb", source)
    (tmp_path / "nbgrader_config.py").touch()
    nbgrader(tmp_path, "generate_assignment", LAB, "--create", "--ClearSolutions.enabled=False")
    assert cells_of(made) == cells_of(source)
    about = [metadata["nbgrader"] for _, metadata, _ in cells_of(made) if "nbgrader" in metadata]
    assert {(a["grade"], a["solution"], a["locked"]) for a in about} == {
        (False, False, True),  # what is only read
        (False, True, False),  # answers
        (True, False, True),  # checks
    }
    assert sum(a["points"] for a in about if a["grade"]) > 0


def test_the_gradebook_reads_as_nbgraders_own_export(tmp_path):
    """The same columns in the same order, and in them the same values, as its exporter writes for the same grades."""
    exporting = pytest.importorskip("nbgrader.plugins.export")
    handed_in = datetime(2026, 3, 1, 12, 0)
    ann = SimpleNamespace(id="ann", last_name="Lee", first_name="Ann", email="ann@example.org")
    lab = SimpleNamespace(name=LAB, duedate=datetime(2026, 2, 28), max_score=8.0)
    graded = SimpleNamespace(late_submission_penalty=2.0, timestamp=handed_in, score=5.0)
    gradebook = SimpleNamespace(assignments=[lab], students=[ann], find_submission=lambda *names: graded)
    exporting.CsvExportPlugin(to=str(tmp_path / "theirs.csv")).export(gradebook)
    check = CheckResult("c", True, 5, 8, "", False)
    one = Graded(
        "ann",
        LAB,
        "f.ipynb",
        str(handed_in),
        (Result("e", Verdict.FAILED, 5, 8, "", (check,)),),
        8,
        first_name="Ann",
        last_name="Lee",
        email="ann@example.org",
        duedate=str(lab.duedate),
        penalty=2.0,
    )
    texts = [list(csv.reader(text.splitlines())) for text in ((tmp_path / "theirs.csv").read_text(), csv_text([one]))]
    theirs, ours = ([[_number(cell) for cell in row] for row in rows] for rows in texts)
    assert ours == theirs and len(ours) == 2 and ours[0][-1] == "max_score"


def _number(cell: str) -> float | str:
    return float(cell) if cell.replace(".", "", 1).isdigit() else cell


def test_a_folder_of_a_submission_that_cannot_be_read_is_said(tmp_path):
    """`os.walk` passes over it, and a student would have handed in nothing."""
    from workbench.grading.gradescope import _files

    with pytest.raises(WorkbenchError, match="'none' cannot be read"):
        list(_files(tmp_path / "none"))
