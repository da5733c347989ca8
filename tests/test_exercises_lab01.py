"""Lab 01's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as meant."""

from __future__ import annotations

import ast
import functools
import runpy
from pathlib import Path

import pytest
import torch

from workbench import checks
from workbench.checks import lab01, lab01_beam, lab01_loop
from workbench.checks.arithmetic import close
from workbench.errors import WorkbenchError
from workbench.grading.check import Verdict, cases_of, evaluate
from workbench.notebook_source import Source, cut_answers, read_source

ROOT = Path(__file__).resolve().parent.parent
NAME = "01_naive_generation"
HIDDEN = runpy.run_path(str(ROOT / "solutions" / f"{NAME}_hidden.py"))["HIDDEN"]
WRONG_FILE = runpy.run_path(str(ROOT / "solutions" / f"{NAME}_wrong.py"))
WRONG, ALTERNATIVE = WRONG_FILE["WRONG"], WRONG_FILE["ALTERNATIVE"]

VISIBLE = checks.exercise_sets()[NAME]
WHOLE = {e.grade_id: e for e in VISIBLE.with_hidden(HIDDEN).exercises}
IDS = list(WHOLE)
SEEDS = range(2)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def notebook():
    pytest.importorskip("jupytext")
    return read_source(Source(ROOT / "solutions" / f"{NAME}.py", ROOT, graded=True))


@functools.cache
def sources(starter: bool = False) -> dict[str, str]:
    """grade_id -> source, of the solutions or of the untouched starter."""
    cells = (cut_answers(notebook()) if starter else notebook()).cells
    return {c.metadata["nbgrader"]["grade_id"]: c.source for c in cells if "nbgrader" in c.metadata}


def defined(grade_id: str, source: str):
    """What the answer's cell defines, after the set's prelude."""
    names: dict = {}
    exec(VISIBLE.prelude, names)
    exec(compile(source, "<answer>", "exec"), names)
    return names[WHOLE[grade_id].entry]


def solution(grade_id: str):
    return defined(grade_id, sources()[grade_id])


def failures(result) -> str:
    return "; ".join(f"{c.name}: {c.message}" for c in result.checks if not c.passed)


# --- Right answers ---


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("grade_id", IDS)
def test_the_reference_solution_passes_every_check(grade_id, seed):
    result = evaluate(WHOLE[grade_id], solution(grade_id), seed=seed)
    assert result.verdict == Verdict.PASSED and result.points == result.max_points, failures(result)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("grade_id", IDS)
def test_a_right_answer_written_differently_passes_every_check(grade_id, seed):
    result = evaluate(WHOLE[grade_id], defined(grade_id, ALTERNATIVE[grade_id]), seed=seed)
    assert result.verdict == Verdict.PASSED, failures(result)


def test_the_real_parts_pass_the_checks_of_the_exercises_that_stand_for_them():
    from workbench.decoding import beam, loop, sampling

    real = {
        "naive-loop": loop.token_loop,
        "sampling-filters": sampling.FILTERS,
        "repetition-penalty": sampling.penalize_repetition,
        "beam-search": beam.beam_search,
    }
    for grade_id, part in real.items():
        for seed in SEEDS:
            result = evaluate(WHOLE[grade_id], part, seed=seed)
            assert result.verdict == Verdict.PASSED, f"{grade_id}, seed {seed}: {failures(result)}"


# --- Wrong answers ---


@functools.cache
def judged(grade_id: str, name: str, seed: int):
    """The result of a listed wrong answer under every check."""
    wrong = next(w for w in WRONG[grade_id] if w.name == name)
    return evaluate(WHOLE[grade_id], defined(grade_id, wrong.source), seed=seed)


MISTAKES = [(grade_id, wrong) for grade_id, listed in WRONG.items() for wrong in listed]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("grade_id", "wrong"), MISTAKES, ids=lambda v: v if isinstance(v, str) else v.name.replace(" ", "-")
)
def test_each_wrong_answer_is_caught_by_the_check_meant_for_it(grade_id, wrong, seed):
    result = judged(grade_id, wrong.name, seed)
    failed = {check.name: check for check in result.checks if not check.passed}
    assert result.verdict == Verdict.FAILED
    assert wrong.caught_by in failed, f"{wrong.name}: failed only {list(failed)}"
    assert failed[wrong.caught_by].message


@pytest.mark.parametrize("grade_id", IDS)
def test_there_are_five_or_more_different_mistakes_and_each_check_catches_one(grade_id):
    wrong = WRONG[grade_id]
    assert len({w.name for w in wrong}) >= 5 and len({w.source for w in wrong}) == len(wrong)
    assert ALTERNATIVE.keys() == WRONG.keys() == HIDDEN.keys() == WHOLE.keys()
    caught = {check.name for w in wrong for check in judged(grade_id, w.name, 0).checks if not check.passed}
    assert {check.name for check in WHOLE[grade_id].checks} == caught


def message_of(grade_id: str, name: str) -> str:
    """The visible diagnosis of one listed wrong answer."""
    wrong = next(w for w in WRONG[grade_id] if w.name == name)
    with pytest.raises(checks.CheckFailed) as failed:
        checks.check(grade_id, defined(grade_id, wrong.source))
    return str(failed.value)


DIAGNOSES = [
    (
        "naive-loop",
        "first row",
        ("token 1 was chosen from row 0", "the prediction after token 1 of 4", "logits[-1]"),
    ),
    ("naive-loop", "row of the prompt's end", ("token 2 was chosen from row 3",)),
    ("naive-loop", "all rows", ("shape [4, 12]", "[V] = [12]")),
    (
        "naive-loop",
        "only the new token",
        ("call 2 of forward was given 1 token,", "the whole text so far, 5 tokens"),
    ),
    ("naive-loop", "one token too many", ("6 tokens came for max_new_tokens=5",)),
    ("naive-loop", "stop token kept back", ("was chosen but not yielded",)),
    ("naive-loop", "never stops", ("more came after the stop token",)),
    ("sampling-filters", "temperature multiplies", ("the logits were multiplied by 2",)),
    ("sampling-filters", "probabilities from temperature", ("they sum to 1",)),
    ("sampling-filters", "removed tokens get 0", ("e⁰ = 1",)),
    ("sampling-filters", "keeps k + 1", ("4 tokens, expected 3",)),
    (
        "sampling-filters",
        "nucleus without the token that crosses p",
        ("kept tokens [2, 5], expected [0, 2, 5]", "hold 0.7 of the probability"),
    ),
    ("sampling-filters", "mask left in sorted order", ("as many as expected, but others", "own order")),
    ("sampling-filters", "min-p as an absolute border", ("0.25 × 0.5 = 0.125",)),
    ("repetition-penalty", "divides all", ("dividing a negative logit", "multiply it")),
    ("repetition-penalty", "every token", ("is not in the text, yet its logit went from",)),
    ("beam-search", "sums logits", ("log_softmax",)),
    ("beam-search", "with the prompt", ("without the prompt",)),
    ("beam-search", "identical beams", ("this is the greedy path",)),
    ("beam-search", "length penalty forgotten", ("that is the plain sum",)),
    ("beam-search", "prompt counted in the length", ("not the prompt's",)),
    ("count-rows", "one token too long", ("gave 6050, expected 5950", "the prompt alone")),
    ("count-rows", "as with a cache", ("gave 109, expected 5950", "the count with a cache")),
]


@pytest.mark.parametrize(("grade_id", "name", "said"), DIAGNOSES, ids=[f"{g}-{n}" for g, n, _ in DIAGNOSES])
def test_a_diagnosis_says_what_was_seen_and_where_to_look(grade_id, name, said):
    message = message_of(grade_id, name)
    for words in said:
        assert words in message, message


def test_an_answer_that_never_ends_is_stopped_and_told_so():
    def endless(forward, prompt_ids, choose, max_new_tokens, stop_token_ids=()):
        while True:
            choose(forward(prompt_ids)[-1], prompt_ids)

    result = evaluate(WHOLE["naive-loop"], lambda *a, **k: iter(endless(*a, **k)))
    assert result.points == 0 and "forward was called more than" in result.message


# --- The starter ---


@pytest.mark.parametrize("grade_id", IDS)
def test_the_untouched_starter_scores_nothing_and_is_not_attempted(grade_id):
    answer = defined(grade_id, sources(starter=True)[grade_id])
    for exercise in (WHOLE[grade_id], next(e for e in VISIBLE.exercises if e.grade_id == grade_id)):
        result = evaluate(exercise, answer)
        assert (result.verdict, result.points) == (Verdict.NOT_ATTEMPTED, 0)
        assert f"{grade_id}: " in result.message
    with pytest.raises(checks.NotAttempted, match=f"{grade_id}: not attempted 0/"):
        checks.check(grade_id, answer)


def test_one_filter_of_four_is_an_attempt_worth_its_own_points():
    filters = dict(defined("sampling-filters", sources(starter=True)["sampling-filters"]))
    filters["top_k"] = solution("sampling-filters")["top_k"]
    result = evaluate(WHOLE["sampling-filters"], filters)
    assert result.verdict == Verdict.FAILED
    assert [check.name for check in result.checks if check.passed] == ["top-k"] and result.points == 1


def test_the_starter_holds_no_line_of_an_answer():
    for grade_id in IDS:
        answer, starter = (ast.parse(s[grade_id]) for s in (sources(), sources(starter=True)))
        given = {ast.unparse(n) for n in ast.walk(starter) if isinstance(n, ast.stmt)}
        cut = {ast.unparse(n) for f in answer.body if isinstance(f, ast.FunctionDef) for n in f.body[-1:]}
        assert not cut & given and "SOLUTION" not in sources(starter=True)[grade_id]


def test_trying_says_not_attempted_in_one_line_and_hides_no_other_error(capsys):
    stub = defined("count-rows", sources(starter=True)["count-rows"])
    with checks.trying("count-rows"):
        stub(1, 2)
    assert capsys.readouterr().out == (
        "count-rows: not attempted yet. Write count_rows in the cell above, run it, then run this cell again.\n"
    )
    with pytest.raises(NotImplementedError, match="not for this device"), checks.trying("count-rows"):
        raise NotImplementedError("not for this device")
    with pytest.raises(ZeroDivisionError), checks.trying("count-rows"):
        1 / 0  # noqa: B018


# --- The check cell ---


@pytest.mark.parametrize("grade_id", IDS)
def test_a_passing_check_prints_one_fixed_line(grade_id, capsys):
    points = sum(check.points for check in WHOLE[grade_id].checks if not check.hidden)
    assert checks.check(grade_id, solution(grade_id)) is None
    assert capsys.readouterr().out == f"{grade_id}: passed {points}/{points}\n"


def test_a_failed_check_renders_as_its_message_without_a_traceback(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_cell("from workbench import checks\nchecks.check('count-rows', lambda p, n: p * n)")
    shown = capsys.readouterr().out
    assert "count-rows: failed 0/3" in shown and "gave 6, expected 7" in shown
    assert "Traceback" not in shown and "lab01" not in shown and len(shown.splitlines()) <= 5


def test_an_unknown_exercise_is_named_with_the_nearest():
    with pytest.raises(WorkbenchError, match=r"unknown exercise 'naive-lop'; did you mean 'naive-loop'\?"):
        checks.check("naive-lop", print)


# --- The notebook's source and the checks agree ---


def test_the_setup_cell_is_the_prelude_of_the_exercises():
    assert sources()["setup"] == VISIBLE.prelude


def test_every_exercise_has_an_answer_cell_and_a_check_cell_worth_all_of_its_points():
    cells = {c.metadata["nbgrader"]["grade_id"]: c for c in notebook().cells if "nbgrader" in c.metadata}
    assert set(cells) == {"setup", *IDS, *(f"{grade_id}-check" for grade_id in IDS)}
    for grade_id, exercise in WHOLE.items():
        check = cells[f"{grade_id}-check"]
        assert check.source == f'checks.check("{grade_id}", {exercise.entry})'
        assert check.metadata["nbgrader"]["points"] == exercise.max_points
        assert "nbval-check-output" in check.metadata["tags"]
        assert sum(c.hidden for c in exercise.checks) >= 2


def run_cells(starter: bool):
    """Run the code cells in order, as Run All would; yield (cell, the error it raised or None)."""
    names: dict = {}
    for cell in (cut_answers(notebook()) if starter else notebook()).cells:
        if cell.cell_type == "code":
            try:
                exec(cell.source, names)
                yield cell, None
            except Exception as error:
                yield cell, error


def test_the_solutions_run_from_top_to_bottom_and_each_check_prints_its_line(tiny_model, monkeypatch, capsys):
    monkeypatch.setattr("workbench.load", lambda name: tiny_model, raising=False)
    errors = [error for _, error in run_cells(starter=False) if error]
    lines = capsys.readouterr().out.splitlines()
    assert not errors
    assert [line for line in lines if ": passed " in line] == [
        f"{e.grade_id}: passed {e.max_points}/{e.max_points}" for e in VISIBLE.exercises
    ]
    assert "the same tokens as the workbench's own loop: True" in lines
    assert "2 beams: [1, 0] with probability 0.36" in lines
    counted = next(line for line in lines if line.startswith("the model processed"))
    assert counted.split()[3] == counted.split()[-1]  # the rows that ran are the rows predicted


def test_in_the_starter_only_the_check_cells_fail_and_each_says_not_attempted(
    tiny_model, monkeypatch, capsys
):
    monkeypatch.setattr("workbench.load", lambda name: tiny_model, raising=False)
    failed = [(cell.metadata.get("nbgrader", {}).get("grade_id"), error) for cell, error in run_cells(True)]
    failed = [(grade_id, error) for grade_id, error in failed if error]
    assert [grade_id for grade_id, _ in failed] == [f"{grade_id}-check" for grade_id in IDS]
    assert {type(error) for _, error in failed} == {checks.NotAttempted}
    said = [line for line in capsys.readouterr().out.splitlines() if "not attempted yet" in line]
    assert [line.split(":")[0] for line in said] == IDS


# --- The judges' own references ---


def test_an_infinity_is_close_to_itself_alone():
    """With a relative tolerance, |2 − (−inf)| ≤ tolerance · inf: a changed logit would count as unchanged."""
    inf = float("inf")
    assert close(-inf, -inf) and close(2.0, 2.0 + 1e-5) and close(1e6, 1e6 + 1)
    assert not close(2.0, -inf) and not close(-inf, 2.0) and not close(inf, -inf)
    assert not close(float("nan"), float("nan")) and not close(2.0, 2.01)


def test_the_count_in_the_syllabus_follows_its_formula_and_the_printed_one_does_not():
    judge = lab01_loop.judge_count
    assert judge({"prompt_tokens": 10, "new_tokens": 100}, {"rows": 5_950, "returned": "int"}) is None
    big = {"prompt_tokens": 2000, "new_tokens": 1000}
    assert judge(big, {"rows": 2_499_500, "returned": "int"}) is None
    assert "expected 2499500" in judge(big, {"rows": 2_500_500, "returned": "int"})  # 2,001 + … + 3,000


def test_the_beam_reference_finds_the_best_of_all_sequences_when_the_beam_holds_them_all():
    import itertools
    import random

    draw = random.Random(0)
    for penalty in (0.0, 1.0, 2.0):
        case = lab01_beam.beam_case(
            draw, lambda *_: True, beams=64, vocabulary=3, steps=4, penalty=penalty, eos=(2,)
        )
        every = []
        for length in range(1, 5):
            for tokens in itertools.product(range(3), repeat=length):
                if 2 not in tokens[:-1] and (tokens[-1] == 2 or length == 4):
                    every.append(
                        (lab01_beam.log_probability(case, list(tokens)) / length**penalty, list(tokens))
                    )
        score, tokens = lab01_beam.beam_reference(case)[0][0]
        assert tokens == max(every)[1] and score == pytest.approx(max(every)[0])


@pytest.mark.parametrize("grade_id", IDS)
def test_the_cases_are_the_same_for_the_same_seed_and_others_for_another(grade_id):
    def all_cases(seed):
        return [cases_of(WHOLE[grade_id], check, seed) for check in WHOLE[grade_id].checks]

    assert all_cases(1) == all_cases(1)
    assert all_cases(1) != all_cases(2)


def test_the_exercises_are_the_five_of_the_lab():
    assert (lab01.EXERCISES.name, lab01.EXERCISES.lab) == (NAME, 1)
    assert IDS == ["naive-loop", "sampling-filters", "repetition-penalty", "beam-search", "count-rows"]
