"""Exercises, checks and verdicts."""

from workbench.grading.batch import Summary, check_notebook, grade
from workbench.grading.check import (
    Check,
    CheckResult,
    Exercise,
    ExerciseSet,
    Result,
    Verdict,
    brief,
    decode,
    encode,
    evaluate,
)
from workbench.grading.confine import Limits

__all__ = [
    "Check",
    "CheckResult",
    "Exercise",
    "ExerciseSet",
    "Result",
    "Limits",
    "Summary",
    "Verdict",
    "brief",
    "check_notebook",
    "grade",
    "decode",
    "encode",
    "evaluate",
]
