"""Lab 10, kernels: its exercises and their visible checks. What is right is worked out from the definitions."""

from __future__ import annotations

from workbench.grading.check import Exercise, ExerciseSet, claim, demands
from workbench.labs.lab10_kernels.checks import int4, merge, norm, paged, probes, softmax

PRELUDE = """\
import torch

import workbench as wb  # before Triton: where there is no GPU it asks for Triton's interpreter
from workbench import checks
from workbench.labs.lab10_kernels.checks import parts
from workbench.labs.lab10_kernels.checks.parts import DEVICE, launch

# isort: split
import triton
import triton.language as tl"""


EXERCISES = ExerciseSet(
    name="10_kernels",
    lab=10,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "kernels-softmax",
            "Softmax in tiles",
            "softmax",
            (
                claim("one-tile", probes.run_softmax, softmax.judge_softmax, softmax.one_tile_cases),
                claim("tiles", probes.run_softmax, softmax.judge_softmax, softmax.tile_cases, points=3),
                claim("two-passes", probes.run_softmax, softmax.judge_reads, softmax.read_cases),
                demands(
                    probes.run_demand,
                    claim("minus-infinity", probes.run_softmax, softmax.judge_softmax, softmax.blank_cases),
                    claim("edges", probes.run_softmax, softmax.judge_softmax, softmax.edge_cases),
                ),
            ),
            given=("launch", "DEVICE"),
            counted=True,
        ),
        Exercise(
            "kernels-merge",
            "Merging what was split",
            "merge",
            (
                claim("weighted", probes.run_merge, merge.judge_merge, merge.few_cases, points=2),
                claim("far-from-zero", probes.run_merge, merge.judge_merge, merge.large_cases),
                claim("empty", probes.run_merge, merge.judge_merge, merge.empty_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("nothing", probes.run_merge, merge.judge_merge, merge.nothing_cases),
                    claim("sizes", probes.run_merge, merge.judge_sizes, merge.size_cases),
                ),
            ),
            given=("launch", "DEVICE"),
            counted=True,
        ),
        Exercise(
            "kernels-paged",
            "Attention through a table, in a kernel",
            "paged_decode",
            (
                claim("table", probes.run_paged, paged.judge_paged, paged.table_cases, points=3),
                claim("grouped-heads", probes.run_paged, paged.judge_paged, paged.grouped_cases, points=2),
                claim("ends", probes.run_paged, paged.judge_paged, paged.end_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("several", probes.run_paged, paged.judge_paged, paged.several_cases),
                    claim("views", probes.run_paged, paged.judge_paged, paged.view_cases),
                    claim("read-once", probes.run_paged, paged.judge_reads, paged.read_cases),
                ),
            ),
            given=("launch", "DEVICE"),
            counted=True,
        ),
        Exercise(
            "kernels-int4",
            "A product with four bits",
            "matvec_int4",
            (
                claim("nibbles", probes.run_int4, int4.judge_int4, int4.nibble_cases, points=2),
                claim("groups", probes.run_int4, int4.judge_int4, int4.group_cases, points=2),
                claim("rows", probes.run_int4, int4.judge_int4, int4.row_cases),
                demands(
                    probes.run_demand,
                    claim("tails", probes.run_int4, int4.judge_int4, int4.tail_cases),
                    claim("float16", probes.run_int4, int4.judge_int4, int4.float16_cases),
                    claim("read-once", probes.run_int4, int4.judge_reads, int4.read_cases),
                ),
            ),
            given=("launch", "DEVICE"),
            counted=True,
        ),
        Exercise(
            "kernels-norm",
            "RMSNorm and the residual in one pass",
            "rms_norm",
            (
                claim("norm", probes.run_norm, norm.judge_norm, norm.plain_cases),
                claim("residual", probes.run_norm, norm.judge_norm, norm.residual_cases, points=2),
                claim("odd-widths", probes.run_norm, norm.judge_norm, norm.odd_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("small", probes.run_norm, norm.judge_norm, norm.small_cases),
                    claim("float16", probes.run_norm, norm.judge_norm, norm.float16_cases),
                    claim("one-pass", probes.run_norm, norm.judge_reads, norm.read_cases),
                ),
            ),
            given=("launch", "DEVICE"),
            counted=True,
        ),
    ),
)
