"""Lab 15, the capstone: its exercises and their visible checks.

What is right is worked out from definitions, in plain Python and fractions.
"""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, claim, demands
from workbench.labs.lab15_capstone.checks import pairs, plan, points, price, probes, rows

PRELUDE = """\
import math
import statistics

from workbench import checks"""


def _price(name: str, cases) -> Check:
    return claim(name, probes.run_price, price.judge_price, cases)


def _levels(name: str, cases) -> Check:
    return claim(name, probes.run_levels, points.judge_levels, cases)


def _points(name: str, cases) -> Check:
    return claim(name, probes.run_points, points.judge_points, cases)


def _pairs(name: str, cases) -> Check:
    return claim(name, probes.run_pairs, pairs.judge_pairs, cases)


def _rows(name: str, cases) -> Check:
    return claim(name, probes.run_rows, rows.judge_rows, cases)


def _plan(name: str, cases) -> Check:
    return claim(name, probes.run_plan, plan.judge_plan, cases)


def _served(name: str, cases) -> Check:
    return claim(name, probes.run_served, plan.judge_traces, cases)


EXERCISES = ExerciseSet(
    name="15_capstone",
    lab=15,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "capstone-price",
            "What a step takes",
            "step_s",
            (
                _price("model", price.model_cases),
                _price("draft", price.draft_cases),
                _price("not-named", price.sparse_cases),
                demands(probes.run_demand, _price("free", price.free_cases), _price("no-pass", price.passless_cases)),
            ),
            given=(),
        ),
        Exercise(
            "capstone-points",
            "Levels and points",
            "score",
            (
                _levels("levels", points.level_cases),
                _levels("beyond", points.beyond_cases),
                _points("points", points.points_cases),
                demands(
                    probes.run_demand,
                    _points("share", points.share_cases),
                    _points("a-zero", points.zero_cases),
                    _points("capped", points.capped_cases),
                    _points("no-weight", points.unweighted_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "capstone-pairs",
            "Pairs of runs",
            "ratios_of",
            (
                _pairs("five", pairs.five_cases),
                _pairs("more", pairs.more_cases),
                _pairs("even", pairs.even_cases),
                _pairs("ties", pairs.tied_cases),
                demands(probes.run_demand, _pairs("zero", pairs.zero_cases), _pairs("refused", pairs.refused_cases)),
            ),
            given=(),
        ),
        Exercise(
            "capstone-least-rows",
            "Rows that nobody saves",
            "least_rows",
            (
                _rows("apart", rows.apart_cases),
                _rows("openings", rows.opening_cases),
                _rows("outputs", rows.output_cases),
                demands(
                    probes.run_demand,
                    _rows("equal", rows.equal_cases),
                    _rows("goes-on", rows.goes_on_cases),
                    _rows("scattered", rows.scattered_cases),
                    _rows("least", rows.least_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "capstone-plan",
            "A scheduler by advice",
            "plan",
            (
                _plan("decodes", plan.decode_cases),
                _plan("chunks", plan.chunk_cases),
                _plan("blocks", plan.block_cases),
                _plan("preempt", plan.preempt_cases),
                _plan("starts", plan.start_cases),
                _served("trace", plan.served_cases),
                demands(
                    probes.run_demand,
                    _plan("itself", plan.last_itself_cases),
                    _plan("no-start", plan.no_start_cases),
                    _plan("overtaken", plan.overtaken_cases),
                    _plan("spent", plan.spent_cases),
                    _plan("ties", plan.tie_cases),
                    _plan("nothing", plan.empty_cases),
                ),
            ),
            given=(),
        ),
    ),
)
