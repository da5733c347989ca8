"""Lab 05, quantization: its exercises and their visible checks.

What a right answer gives is worked out from definitions, in float64 or whole numbers. The methods of
`workbench.quantization` are no reference here; of that package only rounding to the nearest is used, by quant-awq.
"""

from __future__ import annotations

from workbench.grading.check import Exercise, ExerciseSet, claim, demands
from workbench.labs.lab05_quantization.checks import awq, codebook, gptq, int8, pack, probes, recipe

PRELUDE = """\
import math

import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab05_quantization.checks import parts
from workbench.labs.lab05_quantization.checks.parts import Machine, Stored
from workbench.quantization import Calibration, IntegerFormat, quantize_tensor"""


EXERCISES = ExerciseSet(
    name="05_quantization",
    lab=5,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "quant-pack",
            "Groups, and two codes a byte",
            "groups",
            (
                claim(
                    "nearest-codes",
                    probes.run_groups,
                    pack.judge_groups,
                    pack.group_cases(("normal", 4, 16), ("all positive", 8, 32), ("a large group", 4, 8, 4)),
                    points=2,
                ),
                claim(
                    "equal-weights",
                    probes.run_groups,
                    pack.judge_groups,
                    pack.group_cases(("equal in a group", 4, 8), ("all zero", 4, 8)),
                ),
                claim("two-a-byte", probes.run_packing, pack.judge_packing, pack.packing_cases((4, 6), (3, 32))),
                demands(
                    probes.run_demand,
                    claim(
                        "other-widths",
                        probes.run_groups,
                        pack.judge_groups,
                        pack.group_cases(
                            ("normal", 2, 4, 5), ("all negative", 3, 16, 1), ("a large weight a row", 5, 10)
                        ),
                    ),
                    claim(
                        "many-axes",
                        probes.run_packing,
                        pack.judge_packing,
                        pack.packing_cases((2, 3, 8), (10,), (1, 2)),
                    ),
                    claim("refused", probes.run_refused, pack.judge_refused, pack.refused_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "quant-llm-int8",
            "Outlier columns in 16 bits",
            "int8_product",
            (
                claim(
                    "columns",
                    probes.run_outlier_columns,
                    int8.judge_columns,
                    int8.column_cases((6, 2, 12, 3), (4, 2, 7, 1)),
                ),
                claim(
                    "weights", probes.run_product, int8.judge_stored, int8.product_cases((2, 6, 12, 2), (2, 4, 9, 3))
                ),
                claim(
                    "product",
                    probes.run_product,
                    int8.judge_product,
                    int8.product_cases((5, 6, 20, 2), (3, 4, 48, 3)),
                    points=2,
                ),
                demands(
                    probes.run_demand,
                    claim(
                        "one-token",
                        probes.run_outlier_columns,
                        int8.judge_columns,
                        int8.column_cases((6, 2, 12, 3, "one token"), (5, 3, 8, 0)),
                    ),
                    claim(
                        "no-outliers",
                        probes.run_product,
                        int8.judge_product,
                        int8.product_cases((3, 4, 16, 0), (1, 5, 40, 0)),
                    ),
                    claim("zeros", probes.run_product, int8.judge_product, int8.product_cases((3, 4, 16, 1, "zeros"))),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "quant-awq",
            "Scaling up what matters",
            "awq",
            (
                claim(
                    "output-error",
                    probes.run_output_error,
                    awq.judge_error,
                    awq.error_cases((40, 5, 8, "channels"), (60, 3, 12, "mixed")),
                ),
                claim(
                    "scale", probes.run_scale, awq.judge_scale, awq.scale_cases((30, 8, "channels"), (30, 12, "mixed"))
                ),
                claim(
                    "search",
                    probes.run_search,
                    awq.judge_search,
                    awq.search_cases((80, [16], 16, 3, 8, 5), (80, [12], 32, 4, 16, 4, "mixed")),
                    points=2,
                ),
                claim("fold", probes.run_fold, awq.judge_fold, awq.fold_cases),
                demands(
                    probes.run_demand,
                    claim(
                        "shared-inputs",
                        probes.run_search,
                        awq.judge_search,
                        awq.search_cases((80, [10, 4, 4], 16, 3, 8, 4), (80, [6, 9], 24, 4, 24, 3, "mixed")),
                    ),
                    claim("unreached", probes.run_scale, awq.judge_scale, awq.scale_cases((30, 8, "dead"))),
                    claim(
                        "few-bits",
                        probes.run_search,
                        awq.judge_search,
                        awq.search_cases((60, [8], 8, 2, 4, 10), (60, [5], 16, 8, 16, 3, "dead")),
                    ),
                ),
            ),
            given=("quantize_tensor", "IntegerFormat", "WorkbenchError"),
        ),
        Exercise(
            "quant-gptq",
            "Spreading the error",
            "gptq",
            (
                claim(
                    "factor",
                    probes.run_factor,
                    gptq.judge_factor,
                    gptq.factor_cases((6, "full", 0.01), (9, "full", 0.1)),
                    points=2,
                ),
                claim(
                    "columns",
                    probes.run_columns,
                    gptq.judge_columns,
                    gptq.column_cases((6, 16, 16, 4, 1.0), (4, 10, 10, 3, 1.0)),
                    points=3,
                ),
                demands(
                    probes.run_demand,
                    claim(
                        "no-inverse",
                        probes.run_factor,
                        gptq.judge_factor,
                        gptq.factor_cases((8, "few", 0.01), (10, "few", 0.5)),
                    ),
                    claim(
                        "groups",
                        probes.run_columns,
                        gptq.judge_columns,
                        gptq.column_cases((4, 24, 8, 4, 1.0), (3, 12, 4, 2, 1.0), (2, 6, 1, 3, 1.0)),
                    ),
                    claim(
                        "last-codes",
                        probes.run_columns,
                        gptq.judge_columns,
                        gptq.column_cases((5, 16, 16, 8, 0.4), (4, 12, 6, 3, 0.4)),
                    ),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "quant-codebook",
            "Levels where they are needed",
            "codebook",
            (
                claim(
                    "nearest",
                    probes.run_assign,
                    codebook.judge_assign,
                    codebook.assign_cases((3, 20, 4, "normal"), (2, 30, 8, "normal")),
                ),
                claim(
                    "levels",
                    probes.run_levels,
                    codebook.judge_levels,
                    codebook.level_cases((3, 24, 3, "normal", 1), (2, 60, 4, "normal", 4)),
                    points=2,
                ),
                claim(
                    "kept-apart",
                    probes.run_outliers,
                    codebook.judge_outliers,
                    codebook.outlier_cases((4, 6, 3), (3, 20, 5)),
                ),
                demands(
                    probes.run_demand,
                    claim(
                        "empty-levels",
                        probes.run_levels,
                        codebook.judge_levels,
                        codebook.level_cases((3, 24, 4, "empty", 2), (1, 9, 8, "normal", 3)),
                    ),
                    claim(
                        "unreached",
                        probes.run_levels,
                        codebook.judge_levels,
                        codebook.level_cases((3, 24, 4, "unreached", 2), (2, 16, 3, "normal", 0)),
                    ),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "quant-recipe",
            "A recipe for a budget",
            "recipe_planner",
            (
                claim("bytes", probes.run_recipe, recipe.judge_recipe, recipe.bytes_cases, points=2),
                claim("speed-up", probes.run_recipe, recipe.judge_recipe, recipe.speed_cases),
                claim("step-time", probes.run_recipe, recipe.judge_recipe, recipe.time_cases),
                claim("choice", probes.run_recipe, recipe.judge_recipe, recipe.choice_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("tied-head", probes.run_recipe, recipe.judge_recipe, recipe.tied_cases),
                    claim("ties", probes.run_recipe, recipe.judge_recipe, recipe.tie_cases),
                    claim(
                        "nothing-fits",
                        probes.run_recipe,
                        recipe.judge_recipe,
                        lambda draw: recipe.odd_cases(draw) + recipe.nothing_fits_cases(draw),
                    ),
                ),
            ),
            given=("Machine", "Stored", "WorkbenchError"),
        ),
    ),
)
