"""Lab 14's exercises prove themselves: right answers pass, the starter does not, and each wrong answer is caught as
meant."""

from __future__ import annotations

import ast

from exercise_claims import ExerciseClaims, Lab

LAB = Lab("14_beyond_transformers")
IDS = ["beyond-discretize", "beyond-convolution", "beyond-scan", "beyond-rollback"]


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 28

    def test_the_starter_holds_no_line_of_an_answer(self, grade_id):
        """Answers here are methods of a class, too."""
        whole, cut = self.lab.sources()[grade_id], self.lab.sources(starter=True)[grade_id]
        assert "SOLUTION" not in cut
        given = {ast.unparse(n) for n in ast.walk(ast.parse(cut)) if isinstance(n, ast.stmt)}
        functions = [n for n in ast.walk(ast.parse(whole)) if isinstance(n, ast.FunctionDef)]
        last_lines = {ast.unparse(function.body[-1]) for function in functions}
        assert last_lines and not last_lines & given
