"""Lab 07, better drafts: its exercises and their visible checks. What is right is worked out from the definitions."""

from __future__ import annotations

from workbench.grading.check import Exercise, ExerciseSet, claim, demands
from workbench.labs.lab07_better_drafts.checks import jump, lookup, medusa, probes, threshold, tree

PRELUDE = """\
import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab07_better_drafts.checks import parts
from workbench.labs.lab07_better_drafts.checks.parts import Controller, Grammar"""


EXERCISES = ExerciseSet(
    name="07_better_drafts",
    lab=7,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "drafts-lookup",
            "Copying",
            "lookup",
            (
                claim("longest-latest", probes.run_lookup, lookup.judge_lookup, lookup.copy_cases, points=3),
                claim("lengths", probes.run_lookup, lookup.judge_lookup, lookup.length_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("into-the-end", probes.run_lookup, lookup.judge_lookup, lookup.end_cases),
                    claim("nothing", probes.run_lookup, lookup.judge_lookup, lookup.nothing_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "drafts-threshold",
            "How sure?",
            "MyThreshold",
            (
                claim("when-to-stop", probes.run_rounds, threshold.judge_rounds, threshold.stop_cases, points=3),
                claim("moves", probes.run_rounds, threshold.judge_rounds, threshold.move_cases, points=3),
                demands(
                    probes.run_demand,
                    claim("clamped", probes.run_rounds, threshold.judge_rounds, threshold.clamp_cases),
                    claim("plain-rounds", probes.run_rounds, threshold.judge_rounds, threshold.plain_cases),
                ),
            ),
            given=("Controller", "WorkbenchError"),
        ),
        Exercise(
            "drafts-tree-mask",
            "Trees",
            "tree_batch",
            (
                claim("fork", probes.run_tree, tree.judge_tree, tree.fork_cases, points=3),
                claim("other-trees", probes.run_tree, tree.judge_tree, tree.other_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("bare", probes.run_tree, tree.judge_tree, tree.bare_cases),
                    claim("refused", probes.run_tree_refused, tree.judge_refused, tree.refused_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "drafts-medusa",
            "Heads",
            "medusa",
            (
                claim("cross", probes.run_cross, medusa.judge_cross, medusa.cross_cases),
                claim("candidates", probes.run_candidates, medusa.judge_candidates, medusa.candidate_cases, points=2),
                claim("accept", probes.run_acceptance, medusa.judge_acceptance, medusa.accept_cases, points=3),
                demands(
                    probes.run_demand,
                    claim("sparse", probes.run_candidates, medusa.judge_candidates, medusa.sparse_cases),
                    claim("dead-ends", probes.run_acceptance, medusa.judge_acceptance, medusa.dead_end_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "drafts-jump",
            "Grammars",
            "jump",
            (
                claim("allowed", probes.run_jump, jump.judge_jump, jump.allowed_cases, points=2),
                claim("forced", probes.run_jump, jump.judge_jump, jump.forced_cases, points=2),
                claim("write", probes.run_jump, jump.judge_jump, jump.write_cases, points=2),
                demands(probes.run_demand, claim("ends", probes.run_jump, jump.judge_jump, jump.end_cases)),
            ),
            given=("Grammar", "WorkbenchError"),
        ),
    ),
)
