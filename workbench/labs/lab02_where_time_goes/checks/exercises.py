"""Lab 02, where the time goes: its exercises and their visible checks.

Every expected value is worked out beside the judges (`counts`, `limits`, `reading`, `graph`), in plain Python and
apart from `workbench.instruments.costs`, so that a mistake there could not make the same mistake in an answer right.
"""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, claim, demands
from workbench.labs.lab02_where_time_goes.checks import counts, edges, graph, limits, probes, reading

PRELUDE = """\
import math
import statistics
import time

import torch
import torch.nn.functional as F

from workbench import checks"""


def _calls(name: str, cases) -> Check:
    return claim(name, probes.run_calls, counts.judge_calls, cases)


def _tpot(name: str, cases) -> Check:
    return claim(name, probes.run_tpot, counts.judge_tpot, cases)


def _price(name: str, parts: tuple[int, ...], cases) -> Check:
    return claim(name, probes.run_price, reading.judge_price(parts), cases)


EXERCISES = ExerciseSet(
    name="02_where_time_goes",
    lab=2,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "roofline-intensity",
            "FLOPs per byte",
            "layer_costs",
            (
                _calls("product", counts.product_cases),
                _calls("layer", counts.layer_cases),
                _calls("attention-decode", counts.decode_cases),
                _calls("attention-prompt", counts.prompt_cases),
                demands(
                    probes.run_demand,
                    _calls("products-of-heads", edges.heads_cases),
                    _calls("mixed-elements", edges.mixed_cases),
                    _calls("grouped-heads", edges.grouped_cases),
                    _calls("chunks", edges.chunk_cases),
                    _calls("exact", edges.exact_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "roofline-tpot",
            "The time of a step",
            "step_times",
            (
                _tpot("one-sequence", counts.one_sequence_cases),
                _tpot("limits", lambda draw: [*counts.batch_cases(draw), *counts.limit_cases(draw)]),
                claim("measured", probes.run_measure, counts.judge_measure, counts.measure_cases),
                demands(
                    probes.run_demand,
                    _tpot("grouped-heads", edges.grouped_tpot_cases),
                    _tpot("gpt2", edges.gpt2_tpot_cases),
                    _tpot("any-step", edges.any_step_cases),
                    claim("noise", probes.run_measure, counts.judge_measure, counts.noise_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "roofline-knee",
            "The knee and the wall",
            "batch_limits",
            (
                claim("knee", probes.run_limits, limits.judge_knee, limits.knee_cases),
                claim("wall", probes.run_limits, limits.judge_largest, limits.wall_cases),
                claim("counted", probes.run_limits, limits.judge_counted, limits.counted_cases),
                demands(
                    probes.run_demand,
                    claim("borders", probes.run_limits, limits.judge_whole, edges.border_of_memory_cases),
                    claim("errors", probes.run_limits, limits.judge_whole, edges.error_cases),
                    claim("other-machines", probes.run_limits, limits.judge_knee, edges.other_knee_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "roofline-reading",
            "Reading a roofline",
            "read_roofline",
            (
                claim("roof", probes.run_reading, reading.judge_reading((0,)), reading.reading_cases),
                claim("fraction", probes.run_reading, reading.judge_reading((1,)), reading.reading_cases),
                claim("what-helps", probes.run_reading, reading.judge_reading((2,)), reading.reading_cases),
                demands(
                    probes.run_demand,
                    claim("borders", probes.run_reading, reading.judge_reading((0, 1, 2)), edges.border_cases),
                    claim(
                        "other-machine", probes.run_reading, reading.judge_reading((0, 1, 2)), edges.other_machine_cases
                    ),
                ),
            ),
            given=(),
        ),
        Exercise(
            "workload-cost",
            "What a million tokens cost",
            "workload_price",
            (
                _price("prompt-tokens", (0,), reading.price_cases),
                _price("output-tokens", (1,), reading.price_cases),
                _price("all-tokens", (2,), reading.price_cases),
                demands(
                    probes.run_demand,
                    _price("utilization", (3,), edges.utilization_cases),
                    _price("one-output-token", (0, 1, 2, 3), edges.one_output_cases),
                    _price("idle", (0, 1, 2, 3), edges.idle_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "one-graph",
            "One graph",
            "cap_logits",
            (
                claim("same-values", probes.run_eager, graph.judge_eager, graph.eager_cases),
                claim("one-graph", probes.run_compiled, graph.judge_compiled, graph.one_call_cases),
                claim("any-length", probes.run_compiled, graph.judge_compiled, graph.length_cases),
                demands(
                    probes.run_demand,
                    claim("any-limit", probes.run_compiled, graph.judge_compiled, edges.limit_cases),
                    claim("edges", probes.run_eager, graph.judge_eager, edges.edge_cases),
                ),
            ),
            given=(),
            counted=True,
        ),
    ),
)
