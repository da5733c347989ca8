"""Lab 06, speculative sampling: its exercises and their visible checks.

What a right answer does is worked out from definitions, in fractions; where an answer decides by chance it is taken
through everything that can happen, and its distribution is judged.
"""

from __future__ import annotations

from workbench.grading.check import Exercise, ExerciseSet, claim, demands
from workbench.labs.lab06_speculative_sampling.checks import length, probes, proof, residual, rollback, rule

PRELUDE = """\
from fractions import Fraction

import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab06_speculative_sampling.checks import parts
from workbench.speculation import Proposal, Verdict, residual, theory
from workbench.speculation.theory import table"""


EXERCISES = ExerciseSet(
    name="06_speculative_sampling",
    lab=6,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "spec-rule",
            "The rule",
            "my_verify",
            (
                claim("worked", probes.run_rule, rule.judge_rule, rule.worked_cases, points=2),
                claim(
                    "chains", probes.run_rule, rule.judge_rule, rule.contested_cases((1, 4), (2, 3), (3, 4)), points=3
                ),
                demands(
                    probes.run_demand,
                    claim("tensors", probes.run_rule, rule.judge_rule, rule.tensor_cases),
                    claim("nothing-drafted", probes.run_rule, rule.judge_rule, rule.nothing_cases),
                    claim("picked", probes.run_rule, rule.judge_rule, rule.picked_cases),
                ),
            ),
            given=("Proposal", "Verdict", "residual", "WorkbenchError"),
            withheld=("workbench.speculation.rule:verify",),
        ),
        Exercise(
            "spec-residual",
            "What is left of p",
            "left_over",
            (
                claim(
                    "fractions", probes.run_left_over, residual.judge_left_over, residual.plain_cases(4, 6), points=2
                ),
                claim("tensors", probes.run_left_over, residual.judge_left_over, residual.tensor_cases(4, 30)),
                claim("equal", probes.run_left_over, residual.judge_left_over, residual.equal_cases),
                demands(
                    probes.run_demand,
                    claim("one-token", probes.run_left_over, residual.judge_left_over, residual.one_token_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "spec-proof",
            "Everything that can happen",
            "proof",
            (
                claim(
                    "one-round",
                    probes.run_round_distribution,
                    proof.judge_round_distribution,
                    proof.round_cases((2, 1), (3, 1), (2, 2), (3, 2)),
                    points=3,
                ),
                claim("broken", probes.run_broken, proof.judge_broken, proof.broken_cases, points=2),
                demands(
                    probes.run_demand,
                    claim(
                        "zeros", probes.run_round_distribution, proof.judge_round_distribution, proof.impossible_cases
                    ),
                ),
            ),
            forbidden=(),  # asks for all that can happen under our rule
            given=(
                "Proposal",
                "Verdict",
                "residual",
                "table",
                "theory.distribution_of_target",
                "theory.distribution_of_texts",
                "theory.enumerate_outcomes",
                "theory.write_round",
                "theory.table",
                "theory.total_variation",
                "wb.speculation.verify",
                "WorkbenchError",
            ),
        ),
        Exercise(
            "spec-length",
            "How long a draft?",
            "lengths",
            (
                claim("expected", probes.run_length, length.judge_length, length.expected_cases),
                claim("by-position", probes.run_length, length.judge_length, length.position_cases),
                claim("speed-up", probes.run_length, length.judge_length, length.speed_cases, points=2),
                claim("best", probes.run_length, length.judge_length, length.best_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("edges", probes.run_length, length.judge_length, length.edge_cases),
                    claim("losing", probes.run_length, length.judge_length, length.losing_cases),
                    claim("refused", probes.run_length_refused, length.judge_refused, length.refused_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "spec-rollback",
            "Two caches",
            "rollback",
            (
                claim("some-accepted", probes.run_rollback, rollback.judge_rollback, rollback.some_cases, points=2),
                claim("all-accepted", probes.run_rollback, rollback.judge_rollback, rollback.all_cases, points=3),
                demands(
                    probes.run_demand,
                    claim("behind", probes.run_rollback, rollback.judge_rollback, rollback.short_cases),
                    claim("beside", probes.run_rollback, rollback.judge_rollback, rollback.beside_cases),
                ),
            ),
            given=("Verdict", "WorkbenchError"),
        ),
    ),
)
