"""Hidden checks of lab 14: other sizes and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab14_beyond_transformers.checks import (
    convolution,
    discretize,
    passes,
    probes,
    rollback,
    selective_scan,
    unmask,
)


def hidden(name, probe, judge, cases, points=1, constant_passes=False) -> Check:
    return Check(name, points, cases, probe, judge, hidden=True, constant_passes=constant_passes)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "beyond-discretize": (
        hidden("legs", probes.run_discretize, discretize.judge_discretize, discretize.legs_cases),
        hidden(
            "every-token",
            probes.run_discretize,
            discretize.judge_discretize,
            discretize.selective_cases((1, 1, 1), (4, 4, 4), (2, 3, 5)),
        ),
        hidden("very-stiff", probes.run_discretize, discretize.judge_discretize, discretize.stiff_cases),
    ),
    "beyond-convolution": (
        hidden(
            "long",
            probes.run_convolve,
            convolution.judge_convolve,
            convolution.convolution_cases((2, 250, 3, 250), (1, 129, 2, 40)),
        ),
        hidden(
            "lengths",
            probes.run_convolve,
            convolution.judge_convolve,
            convolution.convolution_cases((1, 1, 1, 1), (3, 1, 2, 5), (2, 7, 2, 1), (1, 16, 2, 50)),
        ),
        hidden(
            "slow-recurrence",
            probes.run_layer,
            convolution.judge_layer,
            convolution.layer_cases(("slow", 2, 60, 2, 3), ("matrix", 2, 21, 2, 4), ("complex", 2, 30, 3, 6)),
        ),
    ),
    "beyond-scan": (
        hidden(
            "trees",
            probes.run_combine,
            selective_scan.judge_combine,
            selective_scan.combine_cases(("halves", 16), ("right", 5), ("left", 9)),
        ),
        hidden("any-cut", probes.run_scan, selective_scan.judge_scan, selective_scan.any_cut_cases),
        hidden("long", probes.run_scan, selective_scan.judge_scan, selective_scan.long_cases),
    ),
    "beyond-rollback": (
        hidden("rounds", probes.run_script, rollback.judge_bytes, rollback.round_cases),
        hidden("family", probes.run_script, rollback.judge_script, rollback.family_cases),
    ),
    "beyond-unmask": (
        hidden("blocks", probes.run_unmask_block, unmask.judge_block, unmask.block_cases),
        hidden("other-canvases", probes.run_unmask, unmask.judge_pass, unmask.other_cases),
    ),
    "beyond-passes": (
        hidden("other-texts", probes.run_passes_of, passes.judge_passes, passes.other_texts),
        hidden("other-cards", probes.run_speedup, passes.judge_speedup, passes.other_cards),
    ),
}
