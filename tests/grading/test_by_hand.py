"""Claims about what an instructor changes by hand, what seeds are drawn per student and submission, and answers that
ignore what they are given."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import hostile_submissions as toy
import pytest
from test_grading_class import ANSWERS, book, rows, settings, write

from workbench.checks import exercise_sets
from workbench.errors import WorkbenchError
from workbench.grading import Check, Exercise, Limits, Verdict, evaluate, grade
from workbench.grading.adjustments import adjusted, read_adjustments
from workbench.grading.batch import _seed_for
from workbench.grading.check import CONSTANT, CheckResult, Result, conclude, judge_check
from workbench.grading.constants import constant_sources, passed_by_constants
from workbench.grading.desk import load_instructors
from workbench.grading.reports import Graded, feedback_html, gradescope, shown_message
from workbench.grading.runner import Runner, preload_of
from workbench.grading.session import Session

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def csv(folder: Path, *lines: str, head: str = "student,exercise,points,adjustment,comment") -> Path:
    return write(folder / "by-hand.csv", "\n".join([head, *lines]).encode())


def one(points: int = 1, **more) -> Graded:
    check = CheckResult("c", points == 3, points, 3, "no", False)
    result = Result("e", Verdict.FAILED, points, 3, "no", (check,))
    return replace(Graded("ann", "lab", "f", "", (result,), 3, worth=(("e", 3),)), **more)


# --- By hand ---


@pytest.mark.parametrize(
    ("line", "score", "said"),
    [
        ("ann,e,,1,good idea", 2, "2 of 3: e: +1 by hand: good idea"),
        ("ann,e,3,,graded by hand", 3, "e: +2 by hand: graded by hand"),
        ("ann,,,-0.5,copied text", 0.5, "The whole notebook: -0.5 by hand: copied text"),
        ("ann,e,,9,", 3, "asks for 10 points in e, which has 0 to 3: 3 were given"),
        ("ann,,,-7,", 0, ""),
        ("bob,e,3,,", 1, ""),
        ("ann,e,,,well written", 1, "e: well written"),
    ],
)
def test_points_and_comments_by_hand_are_added_and_shown_as_such(tmp_path, line, score, said):
    graded = adjusted(one(), read_adjustments(csv(tmp_path, line), ["e"]))
    assert (graded.score, graded.from_checks, graded.results[0].points) == (score, 1, 1)
    shown = " ".join([feedback_html(graded), gradescope(graded)["output"], *graded.notes])
    assert said.rpartition(": e:")[2] in shown and gradescope(graded)["score"] == score


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ann,f,,1,", "line 2: unknown exercise 'f'"),
        ("ann,e,much,,", "line 2: points is a number"),
        ("ann,e,nan,,", "points is a number"),
        ("ann,e,1,1,", "instead of an adjustment"),
        ("ann,,1,,", "points are what an exercise earns"),
        ("ann,e,-1,,", "from 0"),
        ("ann,e,1,,\nann,e,2,,", "line 3: points for 'ann' in e stand in another line"),
        (",e,1,,", "nothing in the column 'student'"),
    ],
)
def test_a_csv_by_hand_is_taken_whole_or_refused_with_its_line(tmp_path, line, said):
    with pytest.raises(WorkbenchError, match=said):
        read_adjustments(csv(tmp_path, line), ["e"])


def test_what_was_changed_by_hand_survives_grading_again_and_requests_stay_open(tmp_path):
    """Also for a submission that cannot be read, and with what is taken off for being late of the sum."""
    write(tmp_path / "in" / "ann" / "91_hostile.ipynb", book("half"))
    write(tmp_path / "in" / "bob" / "91_hostile.ipynb", b"{")
    head = "student,exercise,request,points,adjustment,comment"
    lines = ("ann,toy-double,please look,,1,you are right", "bob,toy-double,,2,,read by hand", "cem,,,,1,")
    file = csv(tmp_path, *lines, "ann,toy-again,and this,,,", head=head)
    summary = grade([tmp_path / "in"], tmp_path / "out", **settings(tmp_path), adjustments=file)
    marks = {name: row["score"] for name, row in rows(tmp_path / "out").items()}
    assert marks == {"ann": "2", "bob": "2"}
    assert "cem: stands in the adjustments, and handed nothing in" in str(summary)
    assert "to be graded again: 1 request;" in str(summary)
    page = (tmp_path / "out" / "summary.html").read_text("utf-8")
    assert "Changed by hand" in page and "you are right" in page and "Open requests" in page and "and this" in page
    file.unlink()
    write(tmp_path / "in" / "ann" / "91_hostile.ipynb", book("right"))
    grade([tmp_path / "in"], tmp_path / "out", **settings(tmp_path))
    assert rows(tmp_path / "out")["ann"]["score"] == "2", "2 of 2 from the checks, and no more by hand"
    assert rows(tmp_path / "out")["bob"]["score"] == "2"
    write(tmp_path / "out" / ".grading" / "adjustments.csv", b"student,exercise\nann,toy-dubble\n")
    with pytest.raises(WorkbenchError, match="did you mean 'toy-double'"):
        grade([tmp_path / "in"], tmp_path / "out", **settings(tmp_path))


# --- Seeds ---


def test_inputs_are_drawn_for_the_class_a_student_or_a_submission():
    first, second = {"e": "def f(): 1"}, {"e": "def f(): 2"}
    assert _seed_for("s", "class", "ann", first) == "s" == _seed_for("s", "class", "bob", second)
    of_student = {_seed_for("s", "student", name, answers) for name in ("ann", "bob") for answers in (first, second)}
    assert len(of_student) == 2
    drawn = [_seed_for("s", "submission", name, a) for name in ("ann", "bob") for a in (first, second)]
    assert len({*drawn, *of_student, _seed_for("t", "student", "ann", first)}) == 7
    assert drawn[0] == _seed_for("s", "submission", "ann", dict(first)), "grading again draws the same"


def test_what_one_report_shows_does_not_help_the_next_submission(tmp_path):
    """An answer that has learned the input which the last report showed."""
    path = write(tmp_path / "in" / "ann" / "91_hostile.ipynb", book("def double(x):\n    raise ValueError(x)\n"))
    out, options = tmp_path / "out", settings(tmp_path, seed="a secret")
    grade([tmp_path / "in"], out, **options)
    report = json.loads((out / "ann" / "results.json").read_text("utf-8"))
    shown = int(report["tests"][0]["output"].split("ValueError: ")[1].split()[0])
    path.write_bytes(book(f"def double(x):\n    return {2 * shown} if x == {shown} else 0\n"))
    scores = {}
    for seed_per in ("class", "submission"):
        grade([tmp_path / "in"], out, **options, seed_per=seed_per)
        scores[seed_per] = rows(out)["ann"]["score"]
    assert scores == {"class": "1", "submission": "0"}
    with pytest.raises(WorkbenchError, match="unknown seed_per"):
        grade([tmp_path / "in"], tmp_path / "o", **options, seed_per="day")


# --- Answers that ignore what they are given ---


def test_points_of_a_check_that_a_constant_passes_count_beside_another():
    def given(answer, x):
        return answer(x)

    given.__qualname__ = "given"
    cases = {"none": lambda rng: [{"x": 0}], "some": lambda rng: [{"x": rng.randrange(1, 9)}]}
    judge = lambda case, seen: None if seen == 2 * case["x"] else "wrong"  # noqa: E731
    weak = Check("none", 1, cases["none"], given, judge, constant_passes=True)
    exercise = Exercise("e", "E", "f", (weak, Check("some", 2, cases["some"], given, judge)))
    constant = evaluate(exercise, lambda x: 0)
    assert constant.points == 0 and constant.checks[0].passed and constant.checks[0].message == CONSTANT
    assert CONSTANT in shown_message(constant, constant.checks[0])
    hidden = replace(constant.checks[0], hidden=True)
    assert "what it runs is not shown. It passed, but has no points yet" in shown_message(constant, hidden)
    assert evaluate(exercise, lambda x: 2 * x).points == 3
    passed, failed = (CheckResult(c.name, c is weak, c.points * (c is weak), c.points, "") for c in exercise.checks)
    assert conclude(exercise, [passed, replace(failed, passed=True, points=2)]).points == 3


def test_the_constants_are_tried_where_answers_are_graded():
    """Of two hidden checks of lab 01: a constant 0 passes neither, as each asks about more than one size."""
    hidden, _ = load_instructors([ROOT / "solutions" / "01_naive_generation_hidden.py"])
    lab = exercise_sets()["01_naive_generation"].with_hidden(hidden)
    exercise = next(e for e in lab.exercises if e.grade_id == "count-rows")
    asked = tuple(c for c in exercise.checks if c.name in ("nothing-new", "exact"))
    lab = replace(lab, exercises=(replace(exercise, checks=asked),))
    source = f"def {exercise.entry}(*args, **kwargs):\n    return 0\n"
    assert source in constant_sources(exercise.entry, source)
    with Runner(preload_of(lab), [], Limits()) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.grading.constants.VALUES", ("0",))
        patch.setattr("workbench.grading.constants.GIVEN", ())
        assert passed_by_constants(runner, lab, "count-rows", source, "x") == set()


def test_constants_are_no_answers_for_classes_and_kernels():
    assert constant_sources("Cache", "class Cache:\n    pass\n") == []
    assert constant_sources("kernel", "@triton.jit\ndef kernel(x):\n    pass\n") == []


# --- What came from an answer, and is no observation ---

DEEP: list = []
for _ in range(2_000):
    DEEP = [DEEP]
ODD = [{"$float": "1e999"}, {"$float": []}, {"$float": {"$float": "nan"}}, DEEP, {"a": DEEP}, {"$float": 1}]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_odd_floats_and_deep_json_fail_one_check_with_a_sentence(value):
    """Whichever way they come: as an observation, or as the reply to loading the answer."""
    check = toy.exercise_sets()["91_hostile"].exercises[0].checks[0]
    case = check.cases(random.Random(0))[0]
    message = judge_check(check, [case], [{"value": value}])
    assert message is not None and ("no observation" in message or "not of the expected form" in message)
    session = Session.__new__(Session)
    session.source, session._ask = "", lambda *_: {"reason": value, "not_attempted": value}
    assert session.load(0.0) is None, "a reason is text"
    assert ANSWERS["right"]
