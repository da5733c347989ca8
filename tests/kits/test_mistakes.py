"""Claims about known mistakes: how they are written down, what of them a table keeps, and which one a check sees."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from workbench import build, checks
from workbench.checks.mistakes import Mistake, answers_in, read_mistakes, table_file, table_is_stale, write_table
from workbench.errors import WorkbenchError
from workbench.grading.check import Check, Exercise, ExerciseSet, Verdict, evaluate
from workbench.grading.mistakes import Known, agree, fingerprint, parts_of, tabulate
from workbench.models.config import ModelConfig

ROOT = Path(__file__).parents[2]
TABLES = sorted(ROOT.glob("workbench/labs/*/checks/mistakes.json"))

# --- How they are written down ---

SOURCE = """# %% [markdown]
# Add and count.

# %% nbgrader={"grade": false, "solution": true, "grade_id": "toy-mean"}
def mean(numbers):
    ### STUB: the sum over the number
    ### BEGIN SOLUTION
    total = 0.0
    for x in numbers:
        total += x
    return {"mean": total / len(numbers), "count": len(numbers)}
    ### END SOLUTION

# %% nbgrader={"grade": true, "solution": false, "grade_id": "toy-mean-check", "points": 3}
checks.check("toy-mean", mean)
"""
WRITTEN = """
# several
not divided: that is the sum; divide it by how many there are, which is a
mean
-    return {"mean": total / len(numbers), "count": len(numbers)}
+    return {"mean": total, "count": len(numbers)}

last forgotten: the last number is missing
     total = 0.0
-    for x in numbers:
+    for x in numbers[:-1]:

one too many counted: one too many was counted
-    return {"mean": total / len(numbers), "count": len(numbers)}
+    return {"mean": total / len(numbers), "count": len(numbers) + 1}

# one
sum of one: one number is its own mean
+def mean(numbers):
+    return {"mean": sum(numbers), "count": len(numbers)}

fails
-    total = 0.0
+    total = None
"""


def write_toy(folder: Path, written: str = WRITTEN) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "90_toy.py").write_text(SOURCE)
    file = folder / "90_toy_wrong.py"
    lines = ("from workbench.checks.mistakes import read_mistakes", f"TOY = {written!r}")
    file.write_text("\n".join((*lines, 'WRONG = read_mistakes(__file__, {"toy-mean": TOY})\n')))
    return file


@pytest.fixture
def toy(tmp_path) -> dict[str, list[Mistake]]:
    return read_mistakes(write_toy(tmp_path), {"toy-mean": WRITTEN})


def test_a_mistake_is_the_reference_answer_with_its_lines_changed(tmp_path, toy):
    (reference,) = answers_in(tmp_path / "90_toy.py").values()
    assert reference.startswith("def mean(numbers):\n    total = 0.0\n") and "###" not in reference
    first, last, _, own, fails = toy["toy-mean"]
    assert first.source == reference.replace("total / len(numbers)", "total")
    assert first.says == "that is the sum; divide it by how many there are, which is a mean"
    assert last.source == reference.replace("in numbers:", "in numbers[:-1]:")
    assert own.source == 'def mean(numbers):\n    return {"mean": sum(numbers), "count": len(numbers)}\n'
    assert [m.caught_by for m in toy["toy-mean"]] == ["several"] * 3 + ["one"] * 2
    assert (fails.name, fails.says) == ("fails", "")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("# one\nmissed: words\n-    total = 1.0\n+    total = 2.0", "'missed' changes lines that stand 0 times"),
        ("# one\npart of a line\n-total = 0.0\n+total = 1.0", "'part of a line' changes lines that stand 0 times"),
        ("no check: words\n-    total = 0.0\n+    total = 1.0", "lacks its check, name or change"),
        ("# one\nno change: words", "lacks its check, name or change"),
    ],
)
def test_a_change_that_does_not_fit_the_answer_is_refused_by_name(tmp_path, written, message):
    with pytest.raises(WorkbenchError, match=r"90_toy_wrong\.py: ") as refused:
        read_mistakes(write_toy(tmp_path), {"toy-mean": written})
    assert message in str(refused.value)


# --- Fingerprints ---


def test_the_same_numbers_in_another_order_of_summing_agree_and_others_do_not():
    row = [0.37 * i * (-1) ** i for i in range(1, 200)]
    noisy = [x * (1 + 1e-6 * (-1) ** (i // 3)) + 1e-7 for i, x in enumerate(row)]
    assert agree(fingerprint(row), fingerprint(noisy))
    for others in ([*row[:-1], 0.0], [*row[1:], row[0]], [1.01 * x for x in row], row[:-1], [*row[:-1], float("nan")]):
        assert not agree(fingerprint(row), fingerprint(others))


def test_what_is_no_float_counts_exactly():
    for one, other in ((3, 4), ([1, 2], [2, 1]), ("a", "b"), ({"n": 1}, {"m": 1}), (True, 1.0), ([[1]], [1])):
        assert agree(fingerprint(one), fingerprint(one)) and not agree(fingerprint(one), fingerprint(other))
    assert not agree(fingerprint([{"$float": "inf"}, 1.0]), fingerprint([{"$float": "-inf"}, 1.0]))


def test_numbers_too_large_to_measure_agree_with_nothing():
    assert not agree(fingerprint([1e200, 2.0]), fingerprint([1.0, 2.0]))


def test_an_observation_with_more_or_longer_names_than_a_probe_gives_has_no_parts():
    assert parts_of({"value": {str(number): 0.5 for number in range(80_000)}}) == {}
    assert parts_of({"value": {"n" * 1_000: 0.5}}) == {}


def test_an_error_is_known_wherever_in_the_cell_it_was_raised():
    errors = [{"error": f"IndexError: out of range (line {line} of the answer's cell)"} for line in (3, 17)]
    assert (
        parts_of(errors[0]) == parts_of(errors[1]) != parts_of({"error": "KeyError: 3 (line 3 of the answer's cell)"})
    )


# --- Which one a check sees ---


def call(answer, numbers):
    return answer(numbers)


def judge(case: dict, seen: dict) -> str | None:
    right = {"mean": sum(case["numbers"]) / len(case["numbers"]), "count": len(case["numbers"])}
    wrong = [name for name in right if abs(seen[name] - right[name]) > 1e-6]
    return f"the {wrong[0]} is {seen[wrong[0]]:g}, expected {right[wrong[0]]:g}" if wrong else None


def numbers(*cases: list[float]):
    return lambda draw: [{"numbers": case} for case in cases]


SEVERAL = Check("several", 1, numbers([2.0, 0.0], [3.0, 4.0, 5.0]), call, judge)
ONE = Check("one", 1, numbers([4.0], [5.0, 1.0]), call, judge)
MEAN = Exercise("toy-mean", "Mean", "mean", (SEVERAL, ONE))
SET = ExerciseSet("90_toy", 90, "import math", (MEAN,))
REFERENCE = 'def mean(numbers):\n    return {"mean": sum(numbers) / len(numbers), "count": len(numbers)}\n'


def hints(answer, mistakes: dict[str, list[Mistake]], seed: int = 0) -> list[str]:
    """Of each failing check, what follows the judge's words."""
    known = SET.with_known(Known(json.loads(json.dumps(tabulate(SET, {"toy-mean": REFERENCE}, mistakes, seed=seed)))))
    result = evaluate(known.exercises[0], answer, seed=seed)
    return [check.message.partition(". Hint: ")[2] for check in result.checks if not check.passed]


def test_an_answer_that_shows_what_a_mistake_shows_gets_its_words(toy):
    assert hints(lambda n: {"mean": sum(n), "count": len(n)}, toy)[0].startswith("that is the sum")
    assert hints(lambda n: {"mean": sum(n) / len(n), "count": 1 + len(n)}, toy)[0] == "one too many was counted"
    assert hints(lambda n: {"mean": 77.0, "count": len(n)}, toy) == ["", ""]
    assert hints(lambda n: {"mean": sum(n) / len(n), "count": len(n)}, toy) == []


def test_of_mistakes_alike_on_the_failing_case_the_other_cases_decide(toy):
    forgets_when_long = replace(toy["toy-mean"][0], name="other", says="another", source=REFERENCE.replace(
        "sum(numbers) / len(numbers)", "sum(numbers) / (1 if len(numbers) < 3 else 2)"
    ))  # fmt: skip
    both = {"toy-mean": [forgets_when_long, *toy["toy-mean"]]}
    assert hints(lambda n: {"mean": sum(n), "count": len(n)}, both)[0].startswith("that is the sum")
    assert hints(lambda n: {"mean": sum(n) / min(2, len(n) ** (len(n) > 2)), "count": len(n)}, both)[0] == "another"


def test_of_mistakes_alike_in_all_of_a_check_it_is_one_meant_for_it_and_then_the_first_listed(toy):
    first, *_, own, _ = toy["toy-mean"]
    alike = {"toy-mean": [replace(own, name=str(i), says=f"words {i}", caught_by=c) for i, c in enumerate("xyx")]}
    summed = lambda n: {"mean": sum(n), "count": len(n)}  # noqa: E731
    assert hints(summed, alike) == ["words 0", "words 0"]
    meant = {"toy-mean": [first, own]}
    assert [hint[:8] for hint in hints(summed, meant)] == ["that is ", "one numb"]


def test_an_answer_with_two_mistakes_is_told_one_of_them(toy):
    (hint, _) = hints(lambda n: {"mean": sum(n), "count": len(n) + 1}, toy)
    assert hint.startswith("that is the sum")


def test_cases_of_another_seed_are_not_those_of_the_table(toy):
    drawn = replace(ONE, cases=lambda draw: [{"numbers": [draw.random(), 1.0]}])
    sets = replace(SET, exercises=(replace(MEAN, checks=(drawn,)),))
    known = sets.with_known(Known(tabulate(sets, {"toy-mean": REFERENCE}, toy)))
    summed = lambda n: {"mean": sum(n), "count": len(n)}  # noqa: E731
    assert ["Hint" in evaluate(known.exercises[0], summed, seed=seed).message for seed in (0, 1)] == [True, False]


# --- The tables of the labs ---


def course(tmp_path: Path) -> Path:
    """A course with the toy in it."""
    (tmp_path / "notebooks" / "source").mkdir(parents=True)
    write_toy(tmp_path / "solutions")
    table_file(tmp_path, "90_toy").parent.mkdir(parents=True)
    return tmp_path


def test_a_table_is_stale_when_an_answer_a_mistake_or_a_check_has_changed(tmp_path):
    root = course(tmp_path)
    assert table_is_stale(root, "90_toy") == "is missing"
    for file in ("solutions/90_toy.py", "solutions/90_toy_wrong.py", "workbench/labs/lab90_toy/checks/judge.py"):
        write_table(root, SET)
        assert table_is_stale(root, "90_toy") is None
        with (root / file).open("a") as more:
            more.write("\n# more\n")
        assert table_is_stale(root, "90_toy") == "is made from other answers, mistakes or checks"
    stale = [problem for problem in build.check(root) if "mistakes.json" in problem]
    assert stale == ["workbench/labs/lab90_toy/checks/mistakes.json is made from other answers, mistakes or checks"]


def test_a_table_is_stale_when_the_shape_of_a_model_has_another_field(tmp_path, monkeypatch):
    """Cases hold shapes, and a mistake is known by its case."""
    root = course(tmp_path)
    (root / "workbench/labs/lab90_toy/checks/judge.py").touch()
    write_table(root, SET)
    wider = dataclasses.make_dataclass("ModelConfig", [f.name for f in dataclasses.fields(ModelConfig)] + ["more"])
    monkeypatch.setattr("workbench.checks.mistakes.ModelConfig", wider)
    assert table_is_stale(root, "90_toy") == "is made from other answers, mistakes or checks"


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.parts[-3])
def test_a_table_holds_words_of_what_visible_checks_see_and_no_line_of_an_answer(file):
    name = file.parts[-3].removeprefix("lab")
    written = (ROOT / "solutions" / f"{name}_wrong.py").read_text()
    text = file.read_text()
    lines = {line[1:].strip() for line in written.splitlines() if line[:1] in ("+", "-", " ")}
    for answer in answers_in(ROOT / "solutions" / f"{name}.py").values():
        lines |= {line.strip() for line in answer.splitlines()}
    assert [line for line in lines if len(line) > 8 and line in text] == []
    table = json.loads(text)
    shown = {index for rows in table["cases"].values() for index, _ in rows}
    assert shown == set(range(len(table["words"]))) and set(table) == {"made_from", "words", "cases"}


def test_a_students_check_says_the_words(tmp_path):
    assert TABLES
    shutil.copy(ROOT / "solutions" / "05_quantization.py", tmp_path)
    names: dict = {}
    exec("import torch\n" + answers_in(tmp_path / "05_quantization.py")["quant-pack"], names)
    groups = names["groups"] | {"pack": lambda codes: codes.chunk(2, dim=-1)[0]}
    with pytest.raises(checks.CheckFailed, match=r"two-a-byte: .* Hint: only the first half was kept"):
        checks.check("quant-pack", groups)
    assert evaluate(checks._exercise("quant-pack"), groups).verdict == Verdict.FAILED
