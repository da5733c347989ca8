"""The instructor's guide works as it is written, block by block, each in a fresh shell in the clone."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / "instructor.md").read_text("utf-8"), re.M | re.S)
LAB = "03_kv_cache"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A home in which two students have handed in: a right notebook, and one as it was handed out."""
    if not (ROOT / ".venv" / "bin" / "workbench").exists():
        pytest.skip("the guide is about a clone that `make setup` has set up")
    home = tmp_path_factory.mktemp("home")
    for student, folder in (("ann", "solutions"), ("bob", "exercises")):
        place = home / "llm-course" / "dropbox" / student
        place.mkdir(parents=True)
        shutil.copy(ROOT / folder / f"{LAB}.ipynb", place)
    return home


def test_every_block_of_the_guide_runs_in_a_fresh_shell(home):
    """With the environment that a login gives, and no more. `make setup` is only asked what it would do."""
    assert len(BLOCKS) >= 8 and {language for language, _ in BLOCKS} == {"sh"}
    kept = {name: os.environ[name] for name in ("WORKBENCH_CACHE", "OMP_NUM_THREADS") if name in os.environ}
    environment = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"} | kept
    printed = []
    for _, block in BLOCKS:
        block = re.sub(r"^make setup$", "make --dry-run setup", block, flags=re.M)
        command = ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", block]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{block}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        printed.append(done.stdout)
    course = home / "llm-course"
    with (course / "grades" / "grades.csv").open(encoding="utf-8") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    full = float(rows["ann"]["max_score"])
    assert (float(rows["ann"]["score"]), float(rows["bob"]["score"])) == (full - 1, 0)
    private = (course / "private-grades" / "grades.csv").read_text("utf-8")
    assert f"ann,,,,{full:g},0,{full:g}" in private
    assert (course / "lab-08.zip").is_file() and (course / "course" / "package" / "pyproject.toml").is_file()
    assert "ann, kv-append: 100% also in our solution" in "".join(printed)
    page = (course / "grades" / "summary.html").read_text("utf-8")
    assert "my loop is right for one chunk" in page and 'href="ann/feedback.html"' in page


def test_every_command_in_the_text_is_one_that_there_is():
    """Also those that stand in a sentence."""
    from workbench.cli import make_parser

    text = (ROOT / "docs" / "instructor.md").read_text("utf-8")
    known = set(re.findall(r"\w[\w-]*", make_parser().format_help()))
    assert {name for name in re.findall(r"workbench ([a-z]\w+)", text) if name not in ("likeness",)} <= known
    options = set(re.findall(r"(--[a-z][\w-]+)", text)) - {
        "--create",
        "--security-opt",
        "--cap-add",
        "--nthreads",
        "--quiet",
    }
    commands = ("release", "collect", "grade", "likeness", "exercises", "present", "capstone judge")
    listed = {option for name in commands for option in options_of(name)}
    assert options <= listed, options - listed


def options_of(command: str) -> set[str]:
    from workbench.cli import make_parser

    parser = make_parser()
    for name in command.split():
        parser = next(a.choices[name] for a in parser._actions if isinstance(a.choices, dict) and name in a.choices)
    return {option for action in parser._actions for option in action.option_strings}
