"""Lab 12, pruning and distillation: its exercises and their visible checks.

What is right is worked out from definitions, in plain Python, float64 or fractions.
"""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, claim, demands
from workbench.labs.lab12_pruning_and_distillation.checks import cut, distill, importance, plan, probes, wanda

PRELUDE = """\
import itertools
import math

import torch

from workbench import checks"""


def _scores(name: str, cases) -> Check:
    return claim(name, probes.run_scores, importance.judge_scores, cases)


def _kept(name: str, cases) -> Check:
    return claim(name, probes.run_kept, importance.judge_kept, cases)


def _cut(name: str, cases) -> Check:
    return claim(name, probes.run_cut, cut.judge_cut, cases)


def _distill(name: str, cases) -> Check:
    return claim(name, probes.run_distill, distill.judge_distill, cases)


def _norms(name: str, cases) -> Check:
    return claim(name, probes.run_norms, wanda.judge_norms, cases)


def _prune(name: str, cases) -> Check:
    return claim(name, probes.run_prune, wanda.judge_prune, cases)


def _cost(name: str, cases) -> Check:
    return claim(name, probes.run_cost, plan.judge_cost, cases)


def _plan(name: str, cases) -> Check:
    return claim(name, probes.run_plan, plan.judge_plan, cases)


EXERCISES = ExerciseSet(
    name="12_pruning_and_distillation",
    lab=12,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "pruning-importance",
            "What matters",
            "importance",
            (
                _scores("neurons", importance.neuron_cases),
                _scores("channels", importance.channel_cases),
                _scores("groups", importance.group_cases),
                _kept("kept", importance.kept_cases),
                demands(
                    probes.run_demand,
                    _scores("padding", importance.padded_cases),
                    _scores("empty", importance.empty_cases),
                    _kept("shares", importance.share_cases),
                    _kept("ends", importance.kept_ends),
                    _kept("ties", importance.tie_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "pruning-cut",
            "A cut through all matrices",
            "cut",
            (
                _cut("neurons", cut.neuron_cuts),
                _cut("channels", cut.channel_cuts),
                _cut("groups", cut.group_cuts),
                _cut("together", cut.all_cuts),
                demands(
                    probes.run_demand,
                    _cut("biases", cut.bias_cuts),
                    _cut("dtypes", cut.dtype_cuts),
                    _cut("whole", cut.whole_cuts),
                ),
            ),
            given=(),
        ),
        Exercise(
            "pruning-distill",
            "A teacher",
            "distill",
            (
                _distill("loss", distill.loss_cases),
                _distill("temperature", distill.temperature_cases),
                _distill("gradient", distill.gradient_cases),
                demands(
                    probes.run_demand,
                    _distill("masked", distill.masked_cases),
                    _distill("nothing-counts", distill.nothing_cases),
                    _distill("large-logits", distill.large_cases),
                    _distill("half-precision", distill.half_cases),
                    _distill("never-predicted", distill.never_cases),
                    _distill("teacher-is-given", distill.teacher_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "pruning-wanda",
            "Zeros in a matrix",
            "wanda",
            (
                _norms("norms", wanda.norms_cases),
                _prune("by-row", wanda.row_cases),
                _prune("two-of-four", wanda.group_cases),
                demands(
                    probes.run_demand,
                    _norms("odd-batches", wanda.odd_norms),
                    _prune("shares", wanda.share_cases),
                    _prune("ties", wanda.tie_cases),
                    _prune("dtypes", wanda.dtype_cases),
                    _prune("refused", wanda.refused_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "pruning-plan",
            "A plan for a budget",
            "budget",
            (
                _cost("cost", plan.cost_cases),
                _cost("coupled", plan.coupled_cases),
                _plan("parameters", plan.parameter_cases),
                _plan("step", plan.time_cases),
                demands(
                    probes.run_demand,
                    _plan("none", plan.none_cases),
                    _plan("exactly", plan.exact_cases),
                    _plan("ties", plan.tie_cases),
                    _plan("rules", plan.rule_cases),
                    _plan("below-zero", plan.negative_cases),
                ),
            ),
            given=(),
        ),
    ),
)
