"""Lab 14, beyond transformers: its exercises and their visible checks. What is right is worked out from the
definitions."""

from __future__ import annotations

from workbench.grading.check import Exercise, ExerciseSet, claim, demands
from workbench.labs.lab14_beyond_transformers.checks import passes, probes, unmask

PRELUDE = """\
import torch

from workbench import checks"""


EXERCISES = ExerciseSet(
    name="14_beyond_transformers",
    lab=14,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "beyond-unmask",
            "One pass over a canvas",
            "unmask",
            (
                claim("most-likely", probes.run_unmask, unmask.judge_pass, unmask.likely_cases),
                claim("drawn", probes.run_unmask, unmask.judge_pass, unmask.drawn_cases),
                claim("kept", probes.run_unmask, unmask.judge_pass, unmask.kept_cases),
                claim(
                    "schedule",
                    probes.run_unmask_counts,
                    unmask.judge_counts,
                    unmask.schedule_cases,
                    constant_passes=True,  # an answer that ignores the logits passes it
                ),
                demands(
                    probes.run_demand,
                    claim("ties", probes.run_unmask, unmask.judge_pass, unmask.tie_cases),
                    claim("ends", probes.run_unmask, unmask.judge_pass, unmask.end_cases),
                    claim("large-logits", probes.run_unmask, unmask.judge_pass, unmask.large_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "beyond-passes",
            "What few passes cost, and what they are worth",
            "passes",
            (
                claim("with-cache", probes.run_passes_of, passes.judge_passes, passes.cached_cases),
                claim("without-cache", probes.run_passes_of, passes.judge_passes, passes.uncached_cases),
                claim("totals", probes.run_totals, passes.judge_totals, passes.totals_cases),
                claim("worth", probes.run_speedup, passes.judge_speedup, passes.worth_cases),
                demands(
                    probes.run_demand,
                    claim("borders", probes.run_passes_of, passes.judge_passes, passes.border_cases),
                    claim("more-passes", probes.run_passes_of, passes.judge_passes, passes.more_passes_cases),
                    claim("decided", probes.run_passes_of, passes.judge_passes, passes.decided_cases),
                    claim("compute-bound", probes.run_speedup, passes.judge_speedup, passes.bound_cases),
                ),
            ),
            given=(),
        ),
    ),
)
