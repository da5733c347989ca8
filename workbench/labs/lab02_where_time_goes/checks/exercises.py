"""Lab 02, where the time goes: its exercises and their visible checks.

Every expected value is worked out beside the judges (`counts`, `reading`, `graph`), in plain Python and apart from
`workbench.instruments.costs`, so that a mistake there could not make the same mistake in an answer right.
"""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, claim, demands
from workbench.labs.lab02_where_time_goes.checks import counts, edges, graph, probes, reading

PRELUDE = """\
import math

import torch

from workbench import checks"""


def _layer(name: str, cases) -> Check:
    return claim(name, probes.run_layer, counts.judge_layer, cases)


def _tpot(name: str, cases) -> Check:
    return claim(name, probes.run_tpot, counts.judge_tpot, cases)


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
                _layer("linear", counts.linear_cases),
                _layer("mlp", counts.mlp_cases),
                _layer("attention-decode", counts.decode_cases),
                _layer("attention-prompt", counts.prompt_cases),
                demands(
                    probes.run_demand,
                    claim("two-matrices", probes.run_layer, counts.judge_layer, edges.two_matrix_cases),
                    claim("grouped-heads", probes.run_layer, counts.judge_layer, edges.grouped_cases),
                    claim("exact", probes.run_layer, counts.judge_layer, edges.exact_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "roofline-tpot",
            "The time of a step",
            "predict_tpot",
            (
                _tpot("one-sequence", counts.one_sequence_cases),
                _tpot("batch", counts.batch_cases),
                _tpot("limits", counts.limit_cases),
                demands(
                    probes.run_demand,
                    claim("grouped-heads", probes.run_tpot, counts.judge_tpot, edges.grouped_tpot_cases),
                    claim("gpt2", probes.run_tpot, counts.judge_tpot, edges.gpt2_tpot_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "roofline-knee",
            "The knee and the wall",
            "batch_limits",
            (
                claim("knee", probes.run_limits, counts.judge_knee, counts.knee_cases),
                claim("never", probes.run_limits, counts.judge_knee, counts.never_cases),
                claim("memory", probes.run_limits, counts.judge_largest, counts.memory_cases),
                demands(
                    probes.run_demand,
                    claim("tie", probes.run_limits, counts.judge_knee, edges.tie_cases),
                    claim("grouped-heads", probes.run_limits, counts.judge_both, edges.grouped_limits_cases),
                    claim("memory-edges", probes.run_limits, counts.judge_largest, edges.memory_edge_cases),
                    claim("gpt2", probes.run_limits, counts.judge_both, edges.gpt2_limits_cases),
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
                claim("prompt-tokens", probes.run_price, reading.judge_price((0,)), reading.price_cases),
                claim("output-tokens", probes.run_price, reading.judge_price((1,)), reading.price_cases),
                claim("all-tokens", probes.run_price, reading.judge_price((2,)), reading.price_cases),
                demands(
                    probes.run_demand,
                    claim("one-output-token", probes.run_price, reading.judge_price((0, 1, 2)), edges.one_output_cases),
                    claim("other-weights", probes.run_price, reading.judge_price((0, 1, 2)), edges.other_weights_cases),
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
