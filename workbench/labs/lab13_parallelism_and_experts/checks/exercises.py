"""Lab 13, parallelism: its exercises and their visible checks.

What is right is worked out from definitions, in plain Python, float64 or fractions.
"""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, claim, demands
from workbench.labs.lab13_parallelism_and_experts.checks import break_even, connector, count, probes, schedule, split

PRELUDE = """\
import math

import torch

from workbench import checks"""


def _split(name: str, cases) -> Check:
    return claim(name, probes.run_split, split.judge_split, cases)


def _forward(name: str, cases) -> Check:
    return claim(name, probes.run_forward, split.judge_forward, cases)


def _counts(name: str, cases) -> Check:
    return claim(name, probes.run_counts, count.judge_counts, cases)


def _schedule(name: str, cases) -> Check:
    return claim(name, probes.run_schedule, schedule.judge_schedule, cases)


def _bound(name: str, cases) -> Check:
    return claim(name, probes.run_bound, schedule.judge_bound, cases)


def _connector(name: str, cases) -> Check:
    return claim(name, probes.run_connector, connector.judge_connector, cases)


def _seconds(name: str, cases) -> Check:
    return claim(name, probes.run_seconds, break_even.judge_seconds, cases)


def _plan(name: str, cases) -> Check:
    return claim(name, probes.run_plan, break_even.judge_plan, cases)


EXERCISES = ExerciseSet(
    name="13_parallelism_and_experts",
    lab=13,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "parallel-split",
            "Parts of a layer",
            "split",
            (
                _split("neurons", split.neuron_parts),
                _split("heads", split.head_parts),
                _split("replicated", split.replicated_parts),
                _forward("one-all-reduce", split.forward_cases),
                demands(
                    probes.run_demand,
                    _split("biases", split.bias_parts),
                    _forward("biases-added", split.bias_outputs),
                    _forward("together", split.together_cases),
                    _split("refused", split.refused_parts),
                    _split("one-rank", split.lone_parts),
                    _forward("ends", split.lone_outputs),
                ),
            ),
            given=(),
        ),
        Exercise(
            "parallel-count",
            "What a step exchanges",
            "step_counts",
            (
                _counts("tensor", count.tensor_cases),
                _counts("pipeline", count.pipeline_cases),
                _counts("both", count.both_cases),
                _counts("uneven", count.uneven_cases),
                demands(
                    probes.run_demand,
                    _counts("vocabulary", count.ragged_cases),
                    _counts("no-rows", count.rowless_cases),
                    _counts("ends", count.edge_cases),
                    _counts("refused", count.refused_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "parallel-schedule",
            "Groups in stages",
            "schedule",
            (
                _schedule("equal", schedule.equal_cases),
                _schedule("slow-stage", schedule.uneven_cases),
                _schedule("mixed", schedule.mixed_cases),
                _bound("min-groups", schedule.bound_cases),
                demands(
                    probes.run_demand,
                    _schedule("ends", schedule.edge_cases),
                    _schedule("idle", schedule.idle_cases),
                    _bound("exactly", schedule.exact_bounds),
                    _bound("bounds", schedule.bound_edges),
                ),
            ),
            given=(),
        ),
        Exercise(
            "parallel-connector",
            "Blocks for what arrives",
            "MyConnector",
            (
                _connector("reserve", connector.reserve_cases),
                _connector("arrived", connector.order_cases),
                _connector("twice", connector.twice_cases),
                _connector("drop", connector.drop_cases),
                demands(
                    probes.run_demand,
                    _connector("drop-twice", connector.drop_twice_cases),
                    _connector("ignored", connector.ignored_cases),
                    _connector("again", connector.again_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "parallel-break-even",
            "Load or compute",
            "break_even",
            (
                _seconds("seconds", break_even.seconds_cases),
                _plan("one-tier", break_even.one_tier_cases),
                _plan("tiers", break_even.tier_cases),
                _plan("holes", break_even.hole_cases),
                demands(
                    probes.run_demand,
                    _plan("whole-prompt", break_even.whole_prompt_cases),
                    _plan("attention", break_even.attention_cases),
                    _plan("ties", break_even.tie_cases),
                    _plan("nothing", break_even.nothing_cases),
                ),
            ),
            given=(),
        ),
    ),
)
