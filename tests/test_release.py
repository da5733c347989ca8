"""Claims about what is handed out: nothing that gives answers away, valid for nbgrader, the same bytes every time; and
about the grader for Gradescope, which runs where nothing of ours is but what its zip holds."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.grading.release import autograder, checksum, release, released

ROOT = Path(__file__).parents[1]
LABS = sorted(path.stem for path in (ROOT / "exercises").glob("*.ipynb"))


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "course"
    release(ROOT, folder)
    return folder


def digests(folder: Path) -> dict[str, tuple]:
    return {
        str(p.relative_to(folder)): (p.stat().st_mode, p.stat().st_mtime, p.is_file() and hashlib.sha256(p.read_bytes()).hexdigest())
        for p in folder.rglob("*")
    }  # fmt: skip


def sources(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"]]


def test_the_release_holds_lectures_starters_and_the_policy_and_nothing_else(course):
    assert {p.name for p in course.iterdir()} == {
        "notebooks",
        "exercises",
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
    given = {
        line.strip() for path in course.rglob("*.ipynb") for s in sources(path) for line in s.splitlines()
    }
    for lab in LABS:
        hidden = ast.unparse(ast.parse((ROOT / "solutions" / f"{lab}_hidden.py").read_text("utf-8")))
        secret = {
            line.strip() for line in hidden.splitlines() if len(line.strip()) > 45 and "import" not in line
        }
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
        book = nbgraderformat.read(
            str(path), as_version=nbgraderformat.SCHEMA_VERSION + 1
        )  # raises when not valid
        graded = [cell for cell in book.cells if "nbgrader" in cell.metadata]
        assert len(graded) > 5
        for cell in graded:
            assert cell.metadata.nbgrader.checksum == compute_checksum(cell)


def test_metadata_keeps_to_the_keys_of_nbgraders_schema(course):
    """Its v3.json: these keys and no others, booleans where they are asked for, points on cells that are graded."""
    types = {"schema_version": int, "grade": bool, "solution": bool, "locked": bool, "task": bool, "grade_id": str,
        "points": (int, float), "checksum": str, "cell_type": str}  # fmt: skip
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
    shutil.copytree(
        ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("source", "0[1-9]*")
    )
    with pytest.raises(WorkbenchError, match=said):
        release(tmp_path, tmp_path / "course")
    assert not (tmp_path / "course").exists()


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
        ROOT,
        again,
        LABS[0],
        sorted((ROOT / "solutions").glob(f"{LABS[0]}_hidden.py")),
        seed.read_text().strip(),
    )
    assert not (ROOT / "solutions" / "forbidden.py").exists() or len(again.read_bytes()) <= len(
        grader.read_bytes()
    )
    with pytest.raises(WorkbenchError, match="nothing is overwritten"):
        autograder(ROOT, again, LABS[0], [], "s")


SCHEMA = {  # of Gradescope's results.json: key -> type of what may stand there
    "score": (int, float), "execution_time": (int, float), "output": str, "output_format": str, "visibility": str,
    "stdout_visibility": str, "tests": list,
}  # fmt: skip
TEST_SCHEMA = {"score": (int, float), "max_score": (int, float), "status": str, "name": str, "number": str,
    "output": str, "output_format": str, "visibility": str}  # fmt: skip


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
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "PYTHONPATH": str(root / "source" / "package")
    }
    command = [sys.executable, "-P", "-m", "workbench.grading.gradescope", str(root)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    report = json.loads((root / "results" / "results.json").read_text("utf-8"))
    assert set(report) == set(SCHEMA) and all(isinstance(report[k], kind) for k, kind in SCHEMA.items())
    for test in report["tests"]:
        assert set(test) == set(TEST_SCHEMA) and all(
            isinstance(test[k], kind) for k, kind in TEST_SCHEMA.items()
        )
        assert test["visibility"] in ("visible", "hidden", "after_due_date", "after_published")
        assert test["status"] in ("passed", "failed") and 0 <= test["score"] <= test["max_score"]
    assert report["score"] == sum(t["score"] for t in report["tests"]) > 0
    failed = {t["name"].split(":")[0] for t in report["tests"] if t["status"] == "failed"}
    assert failed == {answers[0]["metadata"]["nbgrader"]["grade_id"]}, (
        "partial scores: the others keep theirs"
    )
    assert {t["visibility"] for t in report["tests"]} == {"visible", "after_published"}
    assert os.stat(root / "results").st_mode & 0o777 == 0o700
