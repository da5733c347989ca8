"""Lab 14's exercises prove themselves."""

from __future__ import annotations

from exercise_claims import ExerciseClaims, Lab

LAB = Lab("14_beyond_transformers")


class TestExercises(ExerciseClaims):
    lab = LAB
    all_points = 14
