"""What the exercises of every lab claim about themselves.

    LAB = Lab("02_where_time_goes")
    class TestExercises(ExerciseClaims):
        lab = LAB

Right answers pass, the starter does not, each wrong answer is caught by the check meant for it, which says its words,
and the notebook's source agrees with the checks. What is special to a lab (its judges' references, what its cells
print) stands in the lab's own test file.
"""

from __future__ import annotations

import ast
import functools
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench import checks
from workbench.grading.check import Exercise, Result, Verdict, cases_of, evaluate
from workbench.grading.mistakes import Known, tabulate
from workbench.notebook_source import Source, cut_answers, read_source

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1)


class Lab:
    """One lab's exercises as its files in solutions/ and workbench/checks give them.

    visible: the ExerciseSet of the package. whole: grade_id -> Exercise with its hidden checks.
    wrong: grade_id -> list of Mistakes. alternative: grade_id -> source of a right answer written differently.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.visible = checks.exercise_sets()[name]
        self.hidden = runpy.run_path(str(ROOT / "solutions" / f"{name}_hidden.py"))["HIDDEN"]
        answers = runpy.run_path(str(ROOT / "solutions" / f"{name}_wrong.py"))
        self.wrong, self.alternative = answers["WRONG"], answers["ALTERNATIVE"]
        self.whole = {e.grade_id: e for e in self.visible.with_hidden(self.hidden).exercises}
        self.ids = list(self.whole)

    @functools.cached_property
    def worded(self) -> dict[str, Exercise]:
        """`whole`, whose checks know the mistakes on the cases of seed 0.

        The visible ones know them by the table that students get, where it is built.
        """
        whole = tuple(self.whole.values())
        untold = [replace(e, checks=tuple(c for c in e.checks if c.known is None)) for e in whole]
        known = Known(tabulate(replace(self.visible, exercises=tuple(untold)), self.sources(), self.wrong))
        return {
            e.grade_id: replace(e, checks=tuple(replace(c, known=c.known or known) for c in e.checks)) for e in whole
        }

    @functools.cached_property
    def notebook(self):
        pytest.importorskip("jupytext")
        return read_source(Source(ROOT / "solutions" / f"{self.name}.py", ROOT, graded=True))

    def cells(self, starter: bool = False) -> list:
        return (cut_answers(self.notebook) if starter else self.notebook).cells

    def sources(self, starter: bool = False) -> dict[str, str]:
        """grade_id -> source, of the solutions or of the untouched starter."""
        found = self._starter_sources if starter else self._solution_sources
        return dict(found)

    @functools.cached_property
    def _solution_sources(self) -> dict[str, str]:
        return self._by_grade_id(starter=False)

    @functools.cached_property
    def _starter_sources(self) -> dict[str, str]:
        return self._by_grade_id(starter=True)

    def _by_grade_id(self, starter: bool) -> dict[str, str]:
        graded = [c for c in self.cells(starter) if "nbgrader" in c.metadata]
        return {c.metadata["nbgrader"]["grade_id"]: c.source for c in graded}

    def defined(self, grade_id: str, source: str):
        """What the answer's cell defines, after the set's prelude."""
        names: dict = {}
        exec(self.visible.prelude, names)
        exec(compile(source, "<answer>", "exec"), names)
        return names[self.whole[grade_id].entry]

    def solution(self, grade_id: str):
        return self.defined(grade_id, self.sources()[grade_id])

    def wrong_answer(self, grade_id: str, name: str):
        return next(w for w in self.wrong[grade_id] if w.name == name)

    def judged(self, grade_id: str, name: str) -> Result:
        """The result of a listed wrong answer under every check; every other one with the inputs of another seed."""
        names = [wrong.name for wrong in self.wrong[grade_id]]
        return self.judged_at(grade_id, name, SEEDS[names.index(name) % len(SEEDS)])

    @functools.cache  # noqa: B019  (a handful of labs, for as long as the tests run)
    def judged_at(self, grade_id: str, name: str, seed: int) -> Result:
        wrong = self.wrong_answer(grade_id, name)
        exercises = self.worded if seed == 0 else self.whole
        return evaluate(exercises[grade_id], self.defined(grade_id, wrong.source), seed=seed)

    def message_of(self, grade_id: str, name: str) -> str:
        """The visible diagnosis of one listed wrong answer."""
        with pytest.raises(checks.CheckFailed) as failed:
            checks.check(grade_id, self.defined(grade_id, self.wrong_answer(grade_id, name).source))
        return str(failed.value)

    def run_cells(self, starter: bool) -> Iterator[tuple]:
        """Run the code cells in order, as Run All would; yield (cell, the error it raised or None)."""
        names: dict = {}
        for cell in self.cells(starter):
            if cell.cell_type == "code":
                try:
                    exec(cell.source, names)
                    yield cell, None
                except Exception as error:
                    yield cell, error


def failures(result: Result) -> str:
    return "; ".join(f"{c.name}: {c.message}" for c in result.checks if not c.passed)


class ExerciseClaims:
    """Subclass it as Test… with `lab`; `all_points` is what the lab's exercises are worth together (None: not said),
    `used_again` the answers of which the starter's last cells say once more that they are not there."""

    lab: Lab
    all_points: int | None = None
    used_again: tuple[str, ...] = ()

    def pytest_generate_tests(self, metafunc) -> None:
        if "wrong" in metafunc.fixturenames:
            mistakes = [(grade_id, w) for grade_id, listed in self.lab.wrong.items() for w in listed]
            ids = [f"{grade_id}-{w.name.replace(' ', '-')}" for grade_id, w in mistakes]
            metafunc.parametrize(("grade_id", "wrong"), mistakes, ids=ids)
        elif "grade_id" in metafunc.fixturenames:
            metafunc.parametrize("grade_id", self.lab.ids)
        if "seed" in metafunc.fixturenames:
            metafunc.parametrize("seed", SEEDS)

    @pytest.fixture(autouse=True)
    def one_thread(self):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    # --- Right answers ---

    def test_the_reference_solution_passes_every_check(self, grade_id, seed):
        result = evaluate(self.lab.whole[grade_id], self.lab.solution(grade_id), seed=seed)
        assert result.verdict == Verdict.PASSED and result.points == result.max_points, failures(result)

    def test_a_right_answer_written_differently_passes_every_check(self, grade_id, seed):
        answer = self.lab.defined(grade_id, self.lab.alternative[grade_id])
        result = evaluate(self.lab.whole[grade_id], answer, seed=seed)
        assert result.verdict == Verdict.PASSED, failures(result)

    # --- Wrong answers ---

    def test_each_wrong_answer_is_caught_by_the_check_meant_for_it(self, grade_id, wrong):
        result = self.lab.judged(grade_id, wrong.name)
        failed = {check.name: check for check in result.checks if not check.passed}
        assert result.verdict == Verdict.FAILED
        assert wrong.caught_by in failed, f"{wrong.name}: failed only {list(failed)}"
        assert failed[wrong.caught_by].message
        # every demand of a statement has a visible case
        assert any(not check.hidden for check in failed.values()), f"{wrong.name} passes all visible checks"

    def test_the_check_meant_for_a_mistake_says_its_words(self, grade_id, wrong):
        result = self.lab.judged_at(grade_id, wrong.name, 0)
        message = next(check.message for check in result.checks if check.name == wrong.caught_by)
        said = {w.says for w in self.lab.wrong[grade_id] if w.says and message.endswith(f". Hint: {w.says}")}
        assert said == {wrong.says} - {""}, message

    def test_there_are_five_or_more_different_mistakes_and_each_check_catches_one(self, grade_id):
        lab, wrong = self.lab, self.lab.wrong[grade_id]
        assert len({w.name for w in wrong}) >= 5
        assert len({w.name for w in wrong}) == len({w.source for w in wrong}) == len(wrong)
        assert lab.alternative.keys() == lab.wrong.keys() == lab.hidden.keys() == lab.whole.keys()
        caught = {c.name for w in wrong for c in lab.judged(grade_id, w.name).checks if not c.passed}
        assert {check.name for check in lab.whole[grade_id].checks} == caught

    # --- The starter ---

    def test_the_untouched_starter_scores_nothing_and_is_not_attempted(self, grade_id):
        answer = self.lab.defined(grade_id, self.lab.sources(starter=True)[grade_id])
        visible = next(e for e in self.lab.visible.exercises if e.grade_id == grade_id)
        for exercise in (self.lab.whole[grade_id], visible):
            result = evaluate(exercise, answer)
            assert (result.verdict, result.points) == (Verdict.NOT_ATTEMPTED, 0)
            assert f"{grade_id}: " in result.message
        with pytest.raises(checks.NotAttempted, match=f"{grade_id}: not attempted 0/"):
            checks.check(grade_id, answer)

    def test_the_starter_holds_no_line_of_an_answer(self, grade_id):
        whole, cut = self.lab.sources()[grade_id], self.lab.sources(starter=True)[grade_id]
        assert "SOLUTION" not in cut
        given = {ast.unparse(n) for n in ast.walk(ast.parse(cut)) if isinstance(n, ast.stmt)}
        functions = [n for n in ast.walk(ast.parse(whole)) if isinstance(n, ast.FunctionDef)]  # methods, too
        last_lines = {ast.unparse(function.body[-1]) for function in functions}
        assert last_lines and not last_lines & given

    def test_in_the_starter_only_the_check_cells_fail_and_each_says_not_attempted(self, lab_cells, capsys):
        failed = [(c.metadata.get("nbgrader", {}).get("grade_id"), e) for c, e in self.lab.run_cells(True)]
        failed = [(grade_id, error) for grade_id, error in failed if error]
        assert [grade_id for grade_id, _ in failed] == [f"{grade_id}-check" for grade_id in self.lab.ids]
        assert {type(error) for _, error in failed} == {checks.NotAttempted}
        said = [line for line in capsys.readouterr().out.splitlines() if "not attempted yet" in line]
        assert [line.split(":")[0] for line in said] == [*self.lab.ids, *self.used_again]

    # --- The check cells, and the notebook's source against the checks ---

    def test_a_passing_check_prints_one_fixed_line(self, grade_id, capsys):
        points = sum(check.points for check in self.lab.whole[grade_id].checks if not check.hidden)
        assert checks.check(grade_id, self.lab.solution(grade_id)) is None
        assert capsys.readouterr().out == f"{grade_id}: passed {points}/{points}\n"

    @pytest.fixture
    def lab_cells(self):
        """Override to prepare what the notebook's cells use, a small model in place of a shipped one, say."""

    def test_the_solutions_run_from_top_to_bottom_and_each_check_prints_its_line(self, lab_cells, capsys):
        errors = [error for _, error in self.lab.run_cells(starter=False) if error]
        lines = capsys.readouterr().out.splitlines()
        assert not errors
        assert [line for line in lines if ": passed " in line] == [
            f"{e.grade_id}: passed {e.max_points}/{e.max_points}" for e in self.lab.visible.exercises
        ]
        self.printed(lines)

    def printed(self, lines: list[str]) -> None:
        """Override with what is special in what the solutions print."""

    def test_the_setup_cell_is_the_prelude_of_the_exercises(self):
        assert self.lab.sources()["setup"] == self.lab.visible.prelude

    def test_every_exercise_has_an_answer_cell_and_a_check_cell_worth_all_of_its_points(self):
        cells = {c.metadata["nbgrader"]["grade_id"]: c for c in self.lab.cells() if "nbgrader" in c.metadata}
        assert set(cells) == {"setup", *self.lab.ids, *(f"{grade_id}-check" for grade_id in self.lab.ids)}
        for grade_id, exercise in self.lab.whole.items():
            check = cells[f"{grade_id}-check"]
            assert check.source == f'checks.check("{grade_id}", {exercise.entry})'
            assert check.metadata["nbgrader"]["points"] == exercise.max_points
            assert "nbval-check-output" in check.metadata["tags"]
            assert sum(c.hidden for c in exercise.checks) >= 2
        if self.all_points is not None:
            assert sum(e.max_points for e in self.lab.whole.values()) == self.all_points

    def test_the_cases_are_the_same_for_the_same_seed_and_others_for_another(self, grade_id):
        exercise = self.lab.whole[grade_id]

        def all_cases(seed):
            return [cases_of(exercise, check, seed) for check in exercise.checks]

        assert all_cases(1) == all_cases(1)
        assert all_cases(1) != all_cases(2)
