"""docs/contributing.md says how a lab is added: its files, written into a copy of the course, work as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_rooms import lacks

ROOT = Path(__file__).parents[2]
BUILT = ("notebooks/99_kv_sizes.ipynb", "exercises/99_kv_sizes.ipynb", "solutions/99_kv_sizes.ipynb")


def blocks() -> dict[str, str]:
    """Path -> text of each file that the page shows: the first line of its block is a comment with the path."""
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    return dict(re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.S))


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """The course, linked, with lab 99 added as the page says (notebooks are built elsewhere)."""
    root = tmp_path_factory.mktemp("course")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for file in listed.stdout.splitlines():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        if Path(file).parent == Path("tests"):  # these find the course from where they lie
            shutil.copyfile(ROOT / file, root / file)
        elif (ROOT / file).is_file():
            (root / file).symlink_to(ROOT / file)
    files = blocks()
    registry = (ROOT / "workbench" / "labs" / "__init__.py").read_text(encoding="utf-8")
    files["workbench/labs/__init__.py"] = registry.replace("LABS = (", 'LABS = (\n    "lab99_kv_sizes",', 1)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).unlink(missing_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def test_the_lab_of_the_page_lacks_its_built_notebooks_alone(course):
    assert sorted(line.split(": ")[0] for line in lacks(course)) == sorted(BUILT)


def test_the_files_of_the_page_are_formatted_and_linted(course):
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *blocks()], cwd=course, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_tests_of_the_page_pass(course):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/labs/lab99"],
        cwd=course,
        env={**os.environ, "PYTHONPATH": str(course)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
