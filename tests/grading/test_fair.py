"""Claims about fairness: what is left out of an answer's cell and what goes with it; `check` and `grade` say the same;
the check of a near miss says why; a constant earns nothing."""

from __future__ import annotations

import ast
import functools
import json
import runpy
from pathlib import Path
from typing import Any

import grading_toy as toy
import hostile_submissions as hostile
import pytest
import torch
from near_misses import NEAR_MISSES

from workbench import checks
from workbench.checks.mistakes import answers_in
from workbench.grading import Exercise, ExerciseSet, Limits, answer_source, check_notebook, evaluate, grade
from workbench.grading.answer_source import clean, with_helpers
from workbench.grading.cell import run_cell
from workbench.grading.check import Check, cases_of, judge_check, observe
from workbench.grading.notebooks import set_of
from workbench.grading.reference import reaches_around, uses

TESTS, ROOT = Path(__file__).parents[1], Path(__file__).parents[2]
SETS = checks.exercise_sets()
EXERCISES = {e.grade_id: (s, e) for s in SETS.values() for e in s.exercises}
REFERENCE = {k: v for name in SETS for k, v in answers_in(ROOT / "solutions" / f"{name}.py").items()}


# --- What is no part of an answer ---


@pytest.mark.parametrize(
    ("source", "left", "noted"),
    [
        ("%%time\nx = 1\n", "\nx = 1\n", ["'%%time'"]),
        ("%%timeit -n 3\n%time x = f(1)\n", "\nx = f(1)\n", ["'%%timeit -n 3'", "'%time x = f(1)'"]),
        ("def f():\n    %timeit g()\n    return 1\n", "def f():\n    pass\n    return 1\n", ["'%timeit g()'"]),
        ("!pip install einops\nx?\ny = 5 % 3\n", "pass\npass\ny = 5 % 3\n", ["'!pip", "'x?'"]),
        ("x = 1; checks.check('a', f); y = 2", "x = 1; pass; y = 2", ["checks.check('a', f)"]),
        ("with checks.trying('a'):\n    print(f(1))\nx = 2", "pass\n\nx = 2", ["checks.trying('a')"]),
        ("t = '''\n%time\n!ls\n'''\nz = (7\n% 4)\n", "t = '''\n%time\n!ls\n'''\nz = (7\n% 4)\n", []),
        ("def f(:\n    %time\n", "def f(:\n    %time\n", []),
        ('"""é"""; wb.checks.check("a", f)\nx = "checks.check(f)"', '"""é"""; pass\nx = "checks.check(f)"', ["check"]),
    ],
)
def test_magics_and_checks_are_left_out_of_a_cell_with_a_note_and_nothing_else_is(source, left, noted):
    cleaned = clean(source)
    assert cleaned.source == left and cleaned.problem is None and len(cleaned.notes) == len(noted)
    assert all(words in note for words, note in zip(noted, cleaned.notes))


def test_a_cell_in_another_language_is_refused_with_its_magic():
    assert "begins with %%bash" in clean("%%bash\nls\n").problem


# --- What an answer uses of other cells ---

BEFORE = [
    "from math import prod as product\nimport os",
    "SIZE = 3\nLIMITS = {'low': -float('inf')}\nmodel = load()\n%time\n",
    "def helper(x):\n    return product([x, SIZE])\n\nclass Base:\n    size = SIZE\n",
    "def helper(x):\n    'the last one counts'\n    return inner(x)\n\ndef inner(x):\n    return x * LIMITS['low']\n",
]


def helped(answer: str, after: tuple = (), given: str = "import torch") -> tuple[str, tuple[str, ...]]:
    whole = with_helpers(answer, BEFORE, after, given)
    return whole.source.split("\n# ----")[0] if whole.source != answer else "", whole.notes


@pytest.mark.parametrize("line", ["WIDTH = 2**16 - 1", "WIDTH = 1 << 8"])
def test_a_short_power_is_a_constant_and_a_long_one_is_computed(line):
    assert with_helpers("def f(): return WIDTH\n", [line], [], "").source.startswith("WIDTH = ")
    assert with_helpers("def f(): return WIDTH\n", ["WIDTH = 9**9**9"], [], "").notes


LONG = "+".join(["1"] * 2_000)


@pytest.mark.parametrize(
    "before",
    [f"SIZE = {LONG}", f"SIZE = {'-' * 2_000}1", f"SIZE = a{'.b' * 2_000}", f"checks.check({LONG})"],
    ids=["sum", "signs", "attributes", "check"],
)
def test_a_statement_that_is_deeper_than_python_recurses_stops_nobody(before):
    """Parsed by Python itself, walked by us: no answer may end the grading of a class."""
    cells = [hostile.cell("", before, metadata={}), hostile.cell("toy-double", f"{before}\ndef double(x): return SIZE")]
    _, answers = set_of("91_hostile.ipynb", hostile.exercise_sets(), cells)
    assert "def double(x): return SIZE" in answers.sources["toy-double"]
    with_helpers("def double(x): return SIZE", [before], [before], "")


def test_each_cell_is_parsed_once_whatever_names_an_answer_uses(monkeypatch):
    """And of the names that are not there a few are said, in short."""
    parsed: list[str] = []
    monkeypatch.setattr(answer_source.ast, "parse", lambda text, real=ast.parse: parsed.append(text) or real(text))
    after = "\n".join(f"def {name}(): pass" for name in ("f" * 5_000, *(f"f{n}" for n in range(200))))
    whole = with_helpers("; ".join([f"f{n}" for n in range(200)] + ["f" * 5_000]), [], [after], "")
    assert parsed.count(after) <= 2, "once without its magics, and once for its statements"
    assert len(whole.notes) == answer_source.MAX_NOTES + 1 and all(len(note) < 200 for note in whole.notes)
    parsed.clear()
    clean("x = 1\n" * 40_000 + "%magic\n" * 40)
    assert sum(map(len, parsed)) < 2 * answer_source.MAX_PARSED, "a long cell is not parsed anew for every magic"


def test_what_a_student_adds_to_the_setup_cell_goes_with_an_answer():
    exercises, _ = EXERCISES["count-rows"]
    setup = {"cell_type": "code", "metadata": {"nbgrader": {"grade_id": "setup"}}}
    setup["source"] = exercises.prelude + "\nimport numpy as np\n"
    answer = {"cell_type": "code", "metadata": {"nbgrader": {"grade_id": "count-rows"}}}
    answer["source"] = "def count_rows(prompt_tokens, new_tokens):\n    return int(np.arange(new_tokens).sum())\n"
    _, answers = set_of("01_naive_generation.ipynb", SETS, [setup, answer])
    assert answers.sources["count-rows"].startswith("import numpy as np\n")


def test_plain_names_lead_nowhere_and_right_answers_have_no_others():
    counted = [e.grade_id for _, e in EXERCISES.values() if e.counted]
    assert {"smaller-gqa", "kernels-norm", "one-graph", "kv-chunks"} <= set(counted)
    assert {name: found for name in counted if (found := reaches_around(REFERENCE[name]))} == {}
    assert reaches_around("import numpy as np\nfrom torch.nn import functional as F\ny = F.relu(x) * np.pi\n") == []
    for text in ("import os", "x._C", "getattr(x, n)", "t = type", "import numpy as tl", "y = torch.sys", "'__code__'"):
        assert reaches_around(text), text


def test_definitions_that_an_answer_uses_go_with_it_and_no_others():
    assert helped("def f(x):\n    return torch.tensor(len(x))") == ("", ())
    helpers, notes = helped("def f(x):\n    return helper(x)")
    assert "the last one counts" in helpers and "def inner" in helpers and "LIMITS" in helpers
    assert not notes and not any(other in helpers for other in ("os", "SIZE", "product", "Base"))
    assert helped("class A(Base):\n    pass")[0] == "SIZE = 3\n\nclass Base:\n    size = SIZE"
    assert helped("def f(helper):\n    return helper(1)") == ("", ())
    assert helped("helper = 3\ndef f(x):\n    return helper") == ("", ())
    assert helped("def f(x):\n    return helper(x)", given="from a import helper")[0] == ""


def test_a_name_that_is_no_definition_before_the_answer_is_said_in_a_note():
    _, (note,) = helped("def f(x):\n    return model(x)")
    assert "'model', which another cell computes" in note
    _, (note,) = helped("def f(x):\n    return later(x)", after=("def later(x):\n    return x",))
    assert "'later', which a cell after it defines" in note


def test_the_lines_of_an_answer_are_counted_in_its_own_cell():
    names: dict[str, Any] = {}
    run_cell(with_helpers("def f(x):\n    return helper(x) + undefined", BEFORE, [], "").source, names)
    double = toy.DOUBLE
    result = evaluate(double, lambda x: names["f"](x))
    assert "NameError: name 'undefined' is not defined (line 2 of the answer's cell)" in result.message
    assert "run after the setup cell and the definitions" in result.message


def test_a_docstring_names_no_part_of_the_workbench():
    forbidden = ("workbench", "workbench.decoding.loop:token_loop")
    for text in ("workbench.decoding.loop has it too", "workbench.decoding.loop"):
        assert uses(f'"""{text}"""\ndef f():\n    """{text}"""\n    "{text}"\n    return 1', "", forbidden) == []
    assert uses('raise ValueError("workbench.kv is not meant here")', "", forbidden) == []
    assert uses('__import__("workbench.decoding.loop")', "", forbidden)


# --- `check` and `grade` say the same ---


def cell(name: str | None, source: str) -> dict:
    about = {"nbgrader": {"grade_id": name, "solution": True, "grade": False}} if name else {}
    return {"cell_type": "code", "metadata": about, "source": source, "outputs": [], "execution_count": None}


RIGHT, TOTAL = "def double(x):\n    return 2 * x", "def total(values):\n    return values.sum()"
SUBMISSIONS = {
    "magic": [cell("toy-double", f"%%time\n{RIGHT}"), cell("toy-total", f"!ls\n{TOTAL}")],
    "helped": [
        cell(None, "def twice(x):\n    return SCALE * x"),
        cell("toy-total", TOTAL + "\ndouble = lambda x: twice(x)"),
        cell("toy-double", "double = lambda x: twice(x)"),
    ],
    "left": [
        cell("toy-double", f'"""workbench.kv"""\n{RIGHT}\nchecks.check("toy-double", double)'),
        cell("toy-total", "def total(values):\n    return two() * values.sum()"),
        cell(None, "def two():\n    return 1"),
    ],
    "twice": [*[cell("toy-double", RIGHT)] * 2, cell("toy-total", f"%%bash\n{TOTAL}")],
    "wrong": [
        cell("toy-double", "def double(x):\n    return abs(2 * x)"),
        cell("toy-total", f"import workbench.kv\n{TOTAL}"),
    ],
}
POINTS = {"magic": [3, 2], "helped": [3, 2], "left": [3, 0], "twice": [0, 0], "wrong": [2, 0]}  # of visible checks


def test_check_and_grade_give_the_same_verdict_for_every_visible_check(tmp_path):
    (tmp_path / "in").mkdir()
    for name, cells in SUBMISSIONS.items():
        notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
        (tmp_path / "in" / f"{name}.ipynb").write_text(json.dumps(notebook))
    more = {"import_paths": [TESTS], "limits": Limits(check_seconds=60)}
    grade([tmp_path / "in"], tmp_path / "out", sets="grading_toy:exercise_sets", seed=0, **more)
    messages = {}
    for name in SUBMISSIONS:
        graded = json.loads((tmp_path / "out" / name / "results.json").read_text())["tests"]
        by_grade = [
            sum(t["score"] for t in graded if t["name"].startswith(f"{one}:")) for one in ("toy-double", "toy-total")
        ]
        checked = check_notebook(tmp_path / "in" / f"{name}.ipynb", toy.exercise_sets(), **more)
        assert by_grade == [row["points"] for row in checked] == POINTS[name], (name, checked)
        messages[name] = "\n".join(row["message"] for row in checked)
        assert all(t["output"] in messages[name] for t in graded if t["status"] == "failed"), (name, graded)
    assert "a notebook's command and was left out" in messages["magic"]
    assert "which a cell after it defines" in messages["left"] and "begins with %%bash" in messages["twice"]
    assert "the answer uses workbench" in messages["wrong"]
    assert "command and was left out" in (tmp_path / "out" / "magic" / "feedback.html").read_text()


def test_check_refuses_what_grade_refuses_in_every_lab():
    for exercises, exercise in EXERCISES.values():
        if exercise.grade_id != "spec-proof":
            assert uses("import workbench.kv.contiguous", exercises.prelude, exercise.forbidden), exercise.grade_id
    _, answers = set_of("x.ipynb", SETS, [cell("naive-loop", REFERENCE["naive-loop"])])
    assert answers.sources == {"naive-loop": REFERENCE["naive-loop"]} and not answers.notes


# --- A near miss ---


@functools.cache
def defined(grade_id: str, source: str) -> Any:
    exercises, exercise = EXERCISES[grade_id]
    names: dict[str, Any] = {"__name__": "__main__"}
    run_cell(exercises.prelude, names)
    run_cell(source, names)
    return names[exercise.entry]


@pytest.mark.parametrize(
    ("grade_id", "right", "wrong", "words"), NEAR_MISSES, ids=[f"{m[0]}-{m[2][:24]}" for m in NEAR_MISSES]
)
def test_a_visible_check_says_why_a_near_miss_is_none(grade_id, right, wrong, words):
    assert REFERENCE[grade_id].count(right) == 1
    result = evaluate(EXERCISES[grade_id][1], defined(grade_id, REFERENCE[grade_id].replace(right, wrong)))
    assert words in result.message, result.message


# --- A constant earns nothing ---

CONSTANTS: tuple[Any, ...] = (
    None, 0, 1, -1, 1.0, True, False, "", b"", [], (), {}, [[]], (0, 0), (0, 0, 0.0, 0), (None, 0), ([], []), ([], 0),
    ([], [], [], []), 5950, 2499500, ("compute", 1.0), torch.zeros(1), torch.ones(2, 2),
)  # fmt: skip


def constants(right: Any) -> list[tuple[str, Any]]:
    """Answers of the form of this one, whose every function or method gives one value, or an argument back."""

    def like(value: Any) -> Any:
        if isinstance(right, dict):
            return dict.fromkeys(right, value)
        if isinstance(right, type):
            own = [n for n, v in vars(right).items() if callable(v) and n != "__init__"]
            return type("Constant", (right,), {n: lambda self, *a, **k: value(*a, **k) for n in own})
        return value

    answers = [(repr(c), like(lambda *a, c=c, **k: c)) for c in CONSTANTS]
    return answers + [(f"argument {i}", like(lambda *a, i=i, **k: a[i] if len(a) > i else 0)) for i in (0, 1)]


def with_hidden(exercises: ExerciseSet, grade_id: str) -> Exercise:
    hidden = runpy.run_path(str(ROOT / "solutions" / f"{exercises.name}_hidden.py"))["HIDDEN"]
    return next(e for e in exercises.with_hidden(hidden).exercises if e.grade_id == grade_id)


def passes(check: Check, cases: list[dict], answer: Any) -> bool:
    """Whether it passes every case; the first that fails ends it."""
    return all(judge_check(check, [case], [observe("constant", check.probe, answer, case)]) is None for case in cases)


@pytest.mark.parametrize("grade_id", [g for g in EXERCISES if not g.startswith("kernels")])
def test_a_constant_answer_passes_no_check(grade_id):
    exercise = with_hidden(EXERCISES[grade_id][0], grade_id)
    checked = [(c, cases_of(exercise, c)) for c in exercise.checks if c.speedup is None]
    answers = constants(defined(grade_id, REFERENCE[grade_id]))
    found = [
        (label, check.name) for check, cases in checked for label, answer in answers if passes(check, cases, answer)
    ]
    assert found == []


def test_every_check_has_cases_of_more_than_one_kind_or_a_drawn_one():
    """A fixed single case could be answered by the number that its message says."""
    fixed = []
    for exercises, exercise in EXERCISES.values():
        for check in with_hidden(exercises, exercise.grade_id).checks:
            one, other = (cases_of(exercise, check, seed) for seed in (1, 2))
            fixed += [f"{exercise.grade_id}, {check.name}"] if len(one) == 1 and one == other else []
    assert fixed == []
