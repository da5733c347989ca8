"""Lab 14, beyond transformers: its exercises and their visible checks.

What is right is worked out from definitions, in float64 or in fractions; no expected value comes from
`workbench.models.mixers` or `workbench.kv`.
"""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, claim, demands
from workbench.labs.lab14_beyond_transformers.checks import (
    convolution,
    discretize,
    passes,
    probes,
    rollback,
    selective_scan,
    unmask,
)

PRELUDE = """\
import torch

from workbench import checks"""


# --- States ---


def _steps(name: str, cases) -> Check:
    return claim(name, probes.run_discretize, discretize.judge_discretize, cases)


def _kernel(name: str, cases) -> Check:
    return claim(name, probes.run_kernel, convolution.judge_kernel, cases)


def _convolve(name: str, cases) -> Check:
    return claim(name, probes.run_convolve, convolution.judge_convolve, cases)


def _layer(name: str, cases) -> Check:
    return claim(name, probes.run_layer, convolution.judge_layer, cases)


def _combine(name: str, cases) -> Check:
    return claim(name, probes.run_combine, selective_scan.judge_combine, cases)


def _scan(name: str, cases) -> Check:
    return claim(name, probes.run_scan, selective_scan.judge_scan, cases)


def _script(name: str, cases, judge=rollback.judge_script) -> Check:
    return claim(name, probes.run_script, judge, cases)


STATES = (
    Exercise(
        "beyond-discretize",
        "Steps of a continuous system",
        "discretize",
        (
            _steps("bilinear", discretize.diagonal_cases("bilinear")),
            _steps("bilinear-matrix", discretize.matrix_cases),
            _steps("hold", discretize.diagonal_cases("zero_order_hold")),
            demands(
                probes.run_demand,
                _steps("near-zero", discretize.near_zero_cases),
                _steps("each-token", discretize.selective_cases((3, 2, 4))),
                _steps("stiff", discretize.stiff_cases),
            ),
        ),
    ),
    Exercise(
        "beyond-convolution",
        "The same layer as a convolution",
        "convolution",
        (
            _kernel("kernel", convolution.diagonal_kernels),
            _kernel("kernel-matrix", convolution.kernel_cases("matrix", (1, 2, 5), (3, 3, 7), (2, 4, 8))),
            _convolve("causal", convolution.convolution_cases((1, 6, 1, 6), (2, 9, 3, 9), (3, 4, 4, 4))),
            demands(
                probes.run_demand,
                _kernel("short-kernels", convolution.short_kernels),
                _convolve("other-lengths", convolution.convolution_cases((2, 8, 2, 3), (1, 5, 2, 14), (2, 1, 3, 1))),
                _layer("recurrence", convolution.layer_cases(("real", 2, 7, 3, 4), ("complex", 1, 1, 2, 4))),
            ),
        ),
    ),
    Exercise(
        "beyond-scan",
        "A scan that goes on",
        "scan",
        (
            _combine("combine", selective_scan.combine_cases(("left", 2), ("left", 3))),
            _scan("from-nothing", selective_scan.empty_cases),
            _scan("given-state", selective_scan.started_cases),
            demands(
                probes.run_demand,
                _combine("other-trees", selective_scan.combine_cases(("right", 4), ("halves", 7))),
                _scan("chunks", selective_scan.chunk_cases),
                _scan("strong-decay", selective_scan.strong_cases),
            ),
        ),
    ),
    Exercise(
        "beyond-rollback",
        "A state that goes back",
        "StateCheckpoints",
        (
            _script("advance", rollback.advance_cases),
            _script("truncate", rollback.truncate_cases),
            _script("refused", rollback.refused_cases),
            _script("fork", rollback.fork_cases),
            demands(
                probes.run_demand,
                _script("bytes", rollback.bytes_cases, rollback.judge_bytes),
                _script("twice", rollback.twice_cases, rollback.judge_bytes),
                _script("no-rewind", rollback.no_rewind_cases, rollback.judge_bytes),
            ),
        ),
    ),
)


DIFFUSION = (
    Exercise(
        "beyond-unmask",
        "One pass over a canvas",
        "unmask",
        (
            claim("most-likely", probes.run_unmask, unmask.judge_pass, unmask.likely_cases),
            claim("drawn", probes.run_unmask, unmask.judge_pass, unmask.drawn_cases),
            claim("kept", probes.run_unmask, unmask.judge_pass, unmask.kept_cases),
            claim(
                "schedule",
                probes.run_unmask_counts,
                unmask.judge_counts,
                unmask.schedule_cases,
                constant_passes=True,  # an answer that ignores the logits passes it
            ),
            demands(
                probes.run_demand,
                claim("ties", probes.run_unmask, unmask.judge_pass, unmask.tie_cases),
                claim("ends", probes.run_unmask, unmask.judge_pass, unmask.end_cases),
                claim("large-logits", probes.run_unmask, unmask.judge_pass, unmask.large_cases),
            ),
        ),
        given=(),
    ),
    Exercise(
        "beyond-passes",
        "What few passes cost, and what they are worth",
        "passes",
        (
            claim("with-cache", probes.run_passes_of, passes.judge_passes, passes.cached_cases),
            claim("without-cache", probes.run_passes_of, passes.judge_passes, passes.uncached_cases),
            claim("totals", probes.run_totals, passes.judge_totals, passes.totals_cases),
            claim("worth", probes.run_speedup, passes.judge_speedup, passes.worth_cases),
            demands(
                probes.run_demand,
                claim("borders", probes.run_passes_of, passes.judge_passes, passes.border_cases),
                claim("more-passes", probes.run_passes_of, passes.judge_passes, passes.more_passes_cases),
                claim("decided", probes.run_passes_of, passes.judge_passes, passes.decided_cases),
                claim("compute-bound", probes.run_speedup, passes.judge_speedup, passes.bound_cases),
            ),
        ),
        given=(),
    ),
)


EXERCISES = ExerciseSet(name="14_beyond_transformers", lab=14, prelude=PRELUDE, exercises=STATES + DIFFUSION)
