"""Lab 04, smaller caches: its exercises and their visible checks.

What a right answer gives is worked out from definitions, in float64 or whole numbers; no expected value comes from
`workbench.kv`. What an answer costs is counted: the largest tensor it makes and the FLOPs of its products.
"""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, claim, demands
from workbench.labs.lab04_smaller_caches.checks import attention, budget, convert, int8, latent, probes, window

PRELUDE = """\
import math
from dataclasses import replace

import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab04_smaller_caches.checks import parts as caches
from workbench.labs.lab04_smaller_caches.checks.parts import Design, Ring
from workbench.models.attention import causal_mask, eager_attention
from workbench.models.batch import Batch
from workbench.models.decoder import Decoder"""


def _attention(name: str, judge, cases, points: int = 1) -> Check:
    return claim(name, probes.run_attention, judge, cases, points)


def _ring(name: str, cases, points: int = 1) -> Check:
    return claim(name, probes.run_ring, window.judge_ring, cases, points)


def _latent(name: str, judge, cases, points: int = 1) -> Check:
    return claim(name, probes.run_latent, judge, cases, points)


def _int8(name: str, cases, points: int = 1) -> Check:
    return claim(name, probes.run_int8, int8.judge_int8, cases, points)


def _conversion(name: str, cases, points: int = 1) -> Check:
    return claim(name, probes.run_conversion, convert.judge_conversion, cases, points)


def _budget(name: str, cases, points: int = 1) -> Check:
    return claim(name, probes.run_budget, budget.judge_budget, cases, points)


EXERCISES = ExerciseSet(
    name="04_smaller_caches",
    lab=4,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "smaller-gqa",
            "Groups without repeats",
            "grouped_attention",
            (
                _attention(
                    "one-query",
                    attention.judge_attention,
                    attention.attention_cases((1, 6, 4, 2), (1, 9, 6, 3), (1, 1, 2, 1)),
                ),
                _attention(
                    "whole-prompt", attention.judge_attention, attention.attention_cases((5, 5, 4, 2), (7, 7, 6, 2))
                ),
                _attention(
                    "no-repeats",
                    attention.judge_no_repeats,
                    attention.attention_cases((1, 400, 16, 2), (4, 300, 32, 2, 32)),
                    points=2,
                ),
                demands(
                    probes.run_demand,
                    claim(
                        "size-of-values",
                        probes.run_attention,
                        attention.judge_no_repeats,
                        attention.attention_cases((2, 9, 4, 2, 8, 5), (1, 200, 16, 1, 8, 12)),
                    ),
                ),
            ),
            given=("causal_mask", "WorkbenchError"),
            counted=True,
        ),
        Exercise(
            "smaller-window",
            "A rolling window",
            "RollingBuffer",
            (
                _ring("before-it-wraps", window.before_wrap_cases),
                _ring("around-the-ring", window.wrap_cases),
                _ring("chunks", window.chunk_cases),
                _ring("refused", window.refused_cases),
                demands(
                    probes.run_demand,
                    claim("to-nothing", probes.run_ring, window.judge_ring, window.to_nothing_cases),
                    claim("widths", probes.run_ring, window.judge_ring, window.narrow_cases),
                ),
            ),
            given=("Ring", "eager_attention", "causal_mask", "WorkbenchError"),
        ),
        Exercise(
            "smaller-latent",
            "Latent attention, both ways",
            "latent_attention",
            (
                _latent(
                    "expanded",
                    latent.judge_latent,
                    latent.latent_cases(("expanded",), (1, 7, 2, 4, 2, 6, 5), (4, 9, 3, 6, 6, 6, 6)),
                ),
                _latent(
                    "absorbed",
                    latent.judge_latent,
                    latent.latent_cases(("absorbed",), (1, 7, 2, 4, 2, 6, 5), (1, 9, 3, 6, 6, 6, 6)),
                ),
                _latent(
                    "absorbed-cost",
                    latent.judge_cost,
                    latent.latent_cases(("absorbed",), (1, 300, 8, 24, 8, 24, 32)),
                    points=2,
                ),
                demands(
                    probes.run_demand,
                    claim(
                        "chunks",
                        probes.run_latent,
                        latent.judge_latent,
                        latent.latent_cases(
                            latent.FORMS, (3, 8, 2, 4, 2, 6, 5), (5, 5, 4, 4, 8, 6, 3), (1, 1, 1, 2, 2, 2, 9)
                        ),
                    ),
                    claim(
                        "each-at-its-cost",
                        probes.run_latent,
                        latent.judge_cost,
                        latent.latent_cases(("expanded",), (160, 160, 4, 8, 8, 8, 64)),
                    ),
                    claim(
                        "absorbed-chunk-cost",
                        probes.run_latent,
                        latent.judge_cost,
                        latent.latent_cases(("absorbed",), (4, 300, 8, 24, 8, 24, 32)),
                    ),
                ),
                claim(
                    "absorbed-speed",
                    probes.run_latent_steps,
                    latent.judge_steps,
                    latent.step_cases,
                    speedup=latent.OVER_EXPANDED,
                ),
            ),
            given=("causal_mask", "eager_attention", "WorkbenchError"),
            counted=True,
        ),
        Exercise(
            "smaller-int8",
            "Int8, and how far off",
            "int8_kv",
            (
                _int8("half-a-step", int8.tensor_cases("normal", "positive only"), points=2),
                _int8("constant-rows", int8.tensor_cases("constant channel", "constant token")),
                _int8("keys-and-values", int8.kv_cases("normal", "outlier channel"), points=2),
                demands(
                    probes.run_demand,
                    claim(
                        "tiny-and-negative",
                        probes.run_int8,
                        int8.judge_int8,
                        int8.tensor_cases("tiny range", "negative only"),
                    ),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "smaller-convert",
            "From many heads to few",
            "to_gqa",
            (
                _conversion("mean-of-a-group", convert.conversion_cases((4, 4, 2), (6, 6, 2))),
                _conversion("biases", convert.conversion_cases((6, 6, 3), qkv_bias=True, attention_output_bias=True)),
                _conversion("equal-heads", convert.equal_cases),
                demands(
                    probes.run_demand,
                    claim(
                        "from-grouped",
                        probes.run_conversion,
                        convert.judge_conversion,
                        convert.conversion_cases((8, 4, 2), (6, 2, 1), (4, 4, 4), qkv_bias=True),
                    ),
                    claim("refused", probes.run_refused_conversion, convert.judge_refused, convert.refused_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "smaller-budget",
            "A design for a budget",
            "cache_planner",
            (
                _budget("heads", budget.head_cases),
                _budget("windows", budget.window_cases),
                _budget("latents", budget.latent_cases),
                _budget("gb-and-gib", budget.memory_cases),
                _budget("choice", budget.choice_cases),
                demands(
                    probes.run_demand,
                    claim("sharing", probes.run_budget, budget.judge_budget, budget.sharing_cases),
                    claim("precision", probes.run_budget, budget.judge_budget, budget.precision_cases),
                    claim("nothing-fits", probes.run_budget, budget.judge_budget, budget.nothing_fits_cases),
                ),
            ),
            given=("Design", "WorkbenchError"),
        ),
    ),
)
