"""Lab 01's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import pytest
from exercise_claims import SEEDS, ExerciseClaims, Lab, failures

from workbench import checks
from workbench.checks.arithmetic import close
from workbench.errors import WorkbenchError
from workbench.grading.check import Verdict, evaluate
from workbench.labs.lab01_naive_generation.checks import beam, exercises, loop

LAB = Lab("01_naive_generation")


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 41

    @pytest.fixture
    def lab_cells(self, tiny_model, monkeypatch):
        monkeypatch.setattr("workbench.load", lambda name: tiny_model, raising=False)

    def printed(self, lines: list[str]) -> None:
        assert "the same tokens as the workbench's own loop: True" in lines
        assert "2 beams: [1, 0] with probability 0.36" in lines
        counted = next(line for line in lines if line.startswith("the model processed"))
        assert counted.split()[3] == counted.split()[-1]  # the rows that ran are the rows predicted


def test_the_real_parts_pass_the_checks_of_the_exercises_that_stand_for_them():
    from workbench.decoding import beam, filters, loop

    real = {
        "naive-loop": loop.token_loop,
        "sampling-filters": filters.FILTERS,
        "repetition-penalty": filters.penalize_repetition,
        "beam-search": beam.beam_search,
    }
    for grade_id, part in real.items():
        for seed in SEEDS:
            result = evaluate(LAB.whole[grade_id], part, seed=seed)
            assert result.verdict == Verdict.PASSED, f"{grade_id}, seed {seed}: {failures(result)}"


def test_an_answer_that_never_ends_is_stopped_and_told_so():
    def endless(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        while True:
            choose(forward(prompt_ids)[-1], prompt_ids)

    result = evaluate(LAB.whole["naive-loop"], lambda *a, **k: iter(endless(*a, **k)))
    assert result.points == 0 and "forward was called more than" in result.message


# --- The starter ---


def test_one_filter_of_four_is_an_attempt_worth_its_own_points():
    filters = dict(LAB.defined("sampling-filters", LAB.sources(starter=True)["sampling-filters"]))
    filters["top_k"] = LAB.solution("sampling-filters")["top_k"]
    result = evaluate(LAB.whole["sampling-filters"], filters)
    assert result.verdict == Verdict.FAILED
    assert [check.name for check in result.checks if check.passed] == ["top-k"] and result.points == 1


def test_trying_says_not_attempted_in_one_line_and_hides_no_other_error(capsys):
    stub = LAB.defined("count-rows", LAB.sources(starter=True)["count-rows"])
    with checks.trying("count-rows"):
        stub(1, 2)
    assert (
        capsys.readouterr().out
        == "count-rows: not attempted yet. Write count_rows in the cell above, run it, then run this cell again.\n"
    )
    with pytest.raises(NotImplementedError, match="not for this device"), checks.trying("count-rows"):
        raise NotImplementedError("not for this device")
    with pytest.raises(ZeroDivisionError), checks.trying("count-rows"):
        1 / 0  # noqa: B018


# --- The check cell ---


def test_a_failed_check_renders_as_its_message_without_a_traceback(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_cell("from workbench import checks\nchecks.check('count-rows', lambda p, n: p * n)")
    shown = capsys.readouterr().out
    assert "count-rows: failed 0/4" in shown and "gave 6, expected 7" in shown
    assert "Traceback" not in shown and "lab01" not in shown and len(shown.splitlines()) <= 6


def test_an_unknown_exercise_is_named_with_the_nearest():
    with pytest.raises(WorkbenchError, match=r"unknown exercise 'naive-lop'; did you mean 'naive-loop'\?"):
        checks.check("naive-lop", print)


# --- The judges' own references ---


def test_an_infinity_is_close_to_itself_alone():
    """With a relative tolerance, |2 − (−inf)| ≤ tolerance · inf: a changed logit would count as unchanged."""
    inf = float("inf")
    assert close(-inf, -inf) and close(2.0, 2.0 + 1e-5) and close(1e6, 1e6 + 1)
    assert not close(2.0, -inf) and not close(-inf, 2.0) and not close(inf, -inf)
    assert not close(float("nan"), float("nan")) and not close(2.0, 2.01)


def test_the_count_in_the_syllabus_follows_its_formula_and_the_printed_one_does_not():
    judge = loop.judge_count
    assert judge({"prompt_tokens": 10, "new_tokens": 100}, {"rows": 5_950, "returned": "int"}) is None
    big = {"prompt_tokens": 2000, "new_tokens": 1000}
    assert judge(big, {"rows": 2_499_500, "returned": "int"}) is None
    assert "expected 2499500" in judge(big, {"rows": 2_500_500, "returned": "int"})  # 2,001 + … + 3,000


def test_the_beam_reference_finds_the_best_of_all_sequences_when_the_beam_holds_them_all():
    import itertools
    import random

    draw = random.Random(0)
    for penalty in (0.0, 1.0, 2.0):
        case = beam.beam_case(draw, lambda *_: True, beams=64, vocabulary=3, steps=4, penalty=penalty, eos=(2,))
        every = []
        for length in range(1, 5):
            for tokens in itertools.product(range(3), repeat=length):
                if 2 not in tokens[:-1] and (tokens[-1] == 2 or length == 4):
                    every.append((beam.log_probability(case, list(tokens)) / length**penalty, list(tokens)))
        score, tokens = beam.beam_reference(case)[0][0]
        assert tokens == max(every)[1] and score == pytest.approx(max(every)[0])


def test_the_exercises_are_the_five_of_the_lab():
    assert (exercises.EXERCISES.name, exercises.EXERCISES.lab) == (LAB.name, 1)
    assert LAB.ids == ["naive-loop", "sampling-filters", "repetition-penalty", "beam-search", "count-rows"]
