"""A known mistake is said where it is graded, too: for a secret seed, by the clone's solutions/ or Gradescope's zip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench import checks
from workbench.checks.mistakes import MistakesIn
from workbench.cli import main
from workbench.grading.batch import grade
from workbench.grading.desk import load_instructors
from workbench.grading.mistakes import Known

ROOT = Path(__file__).parents[2]
LAB, SEED = "05_quantization", "a secret of this test"
SOLUTIONS = MistakesIn(ROOT / "solutions")


@pytest.fixture
def submission(tmp_path) -> Path:
    """Every answer but one untouched; the one is right but for widths that are not 4 bits, which hidden checks have."""
    notebook = json.loads((ROOT / "exercises" / f"{LAB}.ipynb").read_text())
    wrong = next(m for m in SOLUTIONS.listed(LAB)["quant-pack"] if m.name == "half of the codes")
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == "quant-pack":
            cell["source"] = wrong.source
    file = tmp_path / "in" / "ada" / f"{LAB}.ipynb"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(notebook))
    return file.parent.parent


def messages(folder: Path) -> dict[str, str]:
    """name of a check -> its message to the instructor."""
    (kept,) = folder.glob(".grading/**/graded.json")
    noted = json.loads(kept.read_text())["outcome"]["results"]["quant-pack"]
    assert "shown" not in noted
    return {check["name"]: check["message"] for check in noted["checks"]}


WORDS = ". Hint: that is symmetric, max |w| over half of the codes; they span smallest … largest"


def test_the_command_finds_the_words_for_a_secret_seed_and_hidden_checks(tmp_path, submission, capsys):
    seed = tmp_path / "seed"
    seed.write_text(SEED)
    out = tmp_path / "out"
    assert main(["grade", str(submission), "--out", str(out), "--lab", LAB, "--seed-file", str(seed)]) == 0
    by_check = messages(out)
    assert by_check["nearest-codes"].endswith(WORDS) and by_check["other-widths"].endswith(WORDS)
    feedback = (out / "ada" / "feedback.html").read_text()
    visible = [check.name for check in checks.exercise_sets()[LAB].exercises[0].checks]
    assert feedback.count("Hint: that is symmetric") == sum(WORDS in by_check[name] for name in visible) > 0
    assert sum(WORDS in message for message in by_check.values()) > feedback.count("Hint:")  # hidden ones give none


def test_gradescopes_grader_finds_them_in_a_table(tmp_path, submission):
    hidden = [ROOT / "solutions" / f"{LAB}_hidden.py"]
    exercises = checks.exercise_sets()[LAB].with_hidden(*load_instructors(hidden))
    table = json.loads(json.dumps(SOLUTIONS.table(exercises, SEED)))
    more = {"sets": "workbench.checks:exercise_sets", "hidden": hidden, "assignment": LAB, "seed": SEED}
    grade([submission], tmp_path / "out", **more, known_for=lambda *_: Known(table))
    assert messages(tmp_path / "out")["other-widths"].endswith(WORDS)


def test_without_the_mistakes_there_are_no_hints(tmp_path, submission):
    more = {"sets": "workbench.checks:exercise_sets", "assignment": LAB, "seed": 0}
    grade([submission], tmp_path / "out", **more)
    assert "expected" in messages(tmp_path / "out")["nearest-codes"]
    assert "Hint" not in messages(tmp_path / "out")["nearest-codes"]
