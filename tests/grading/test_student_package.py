"""Claims about the package that students install: it installs, checks an answer, and holds no answer."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.checks import exercise_sets
from workbench.checks.mistakes import answers_in
from workbench.cli import main
from workbench.grading.release import EDITION, without_unused

ROOT = Path(__file__).parents[2]
RUN = 5  # lines of code in a row: one or two may be anybody's
ENGINES_OWN = {  # what an exercise asks for is a part of the engine, which students run
    ("drafts-threshold", "workbench/speculation/lengths.py"),
    ("sampling-filters", "workbench/decoding/filters.py"),
    ("spec-length", "workbench/speculation/theory.py"),
    ("spec-length", "workbench/labs/lab06_speculative_sampling/checks/length.py"),  # the judge of its visible check
}


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("edition") / "course"
    assert main(["release", str(folder), "--package"]) == 0
    return folder


def code_lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def runs(text: str) -> Iterator[str]:
    lines = code_lines(text)
    return ("\n".join(lines[i : i + RUN]) for i in range(len(lines) - RUN + 1))


def shown_text(path: Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text("utf-8")
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"])


def test_no_file_of_it_holds_a_solution_a_hidden_check_or_a_wrong_answer(course):
    """By runs of lines of the answers, and by the names of what only the instructor has."""
    files = {
        str(path.relative_to(course)): "\n".join(code_lines(shown_text(path)))
        for path in course.rglob("*")
        if path.is_file() and path.suffix in (".py", ".ipynb", ".md", ".toml", ".txt")
    }
    assert len(files) > 400
    assert not [name for name in files if "solutions" in name or "_hidden" in name or "_wrong" in name]
    given = {run for name, text in files.items() if name.startswith("exercises/") for run in runs(text)}
    held, compared = set(), 0
    for lab, exercises in exercise_sets().items():
        listed = runpy.run_path(str(ROOT / "solutions" / f"{lab}_wrong.py"))
        for answers in (answers_in(ROOT / "solutions" / f"{lab}.py"), listed["ALTERNATIVE"]):
            for exercise in exercises.exercises:
                needles = set(runs(answers.get(exercise.grade_id, ""))) - given
                compared += len(needles)
                held |= {
                    (exercise.grade_id, name.removeprefix("package/"))
                    for name, text in files.items()
                    if any(needle in text for needle in needles)
                }
    assert compared > 500 and held == ENGINES_OWN
    hidden_only = ("def judge_waits", "def judge_engine", "def judge_served")
    for line in hidden_only:
        assert any(line in path.read_text("utf-8") for path in (ROOT / "workbench").rglob("checks/*.py"))
        assert not [name for name, text in files.items() if line in text], line


def test_it_installs_without_a_network_and_checks_an_answer(course, tmp_path):
    """Into a folder of its own, from where right answers pass their visible checks."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--no-compile",
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    target = tmp_path / "site"
    subprocess.run([*pip, "--target", str(target), str(course / "package")], check=True, env=environment, timeout=300)
    assert [path.name for path in target.glob("*.dist-info")] == [f"inference_workbench-0.1.0{EDITION}.dist-info"]
    assert (target / "workbench" / "models" / "zoo").is_dir() and (target / "workbench" / "kernels").is_dir()
    environment |= {"PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1"}
    where = "import workbench, sys; print(workbench.__file__)"
    command = [sys.executable, "-P", "-c", f"{where}; from workbench.cli import main; sys.exit(main(sys.argv[1:]))"]
    book = ROOT / "solutions" / "08_continuous_batching.ipynb"
    done = subprocess.run([*command, "check", str(book)], cwd=course, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(target)), "the installed package, and not the clone"


def test_what_only_hidden_checks_use_is_taken_out_and_nothing_else():
    name = "workbench/labs/lab01_x/checks/parts.py"
    text = "def used():\n    return helper()\n\n\ndef helper():\n    return 1\n\n\n"
    text += "@deco\ndef secret():\n    return inner()\n\n\ndef inner():\n    return inner\n\n\n"
    text += "def by_notebook():\n    pass\n"
    kept = without_unused({name: text, "workbench/labs/lab01_x/checks/exercises.py": "used()"}, ["by_notebook()"])
    assert set(kept) == {name}
    assert "secret" not in kept[name] and "inner" not in kept[name] and "deco" not in kept[name]
    assert all(f"def {part}" in kept[name] for part in ("used", "helper", "by_notebook"))
