"""Lab 01, naive generation: its exercises and their visible checks.

Every expected value is worked out beside the judges (lab01_loop, lab01_sampling, lab01_beam), in plain Python and apart
from `workbench.decoding`, so that a mistake there could not make the same mistake in an answer right.
"""

from __future__ import annotations

from workbench.grading.check import Exercise, ExerciseSet, claim, demands
from workbench.labs.lab01_naive_generation.checks import beam, edges, loop, probes, sampling

PRELUDE = """\
import torch

import workbench as wb
from workbench import checks"""


EXERCISES = ExerciseSet(
    name="01_naive_generation",
    lab=1,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "naive-loop",
            "The loop",
            "token_loop",
            (
                claim(
                    "last-row",
                    probes.run_loop,
                    loop.judge_choices,
                    lambda draw: [loop.loop_case(draw, 4, 3), loop.loop_case(draw, 1, 5)],
                ),
                claim(
                    "whole-text",
                    probes.run_loop,
                    loop.judge_texts,
                    lambda draw: [loop.loop_case(draw, 4, 5), loop.loop_case(draw, 2, 1)],
                ),
                claim("stop-token", probes.run_loop, loop.judge_tokens, loop.stopping_cases),
                demands(
                    probes.run_demand,
                    claim("lazy", probes.run_loop, edges.judge_lazy, edges.lazy_cases),
                    claim(
                        "prompt-untouched",
                        probes.run_loop,
                        edges.judge_prompt_untouched,
                        lambda draw: [loop.loop_case(draw, 3, 4)],
                    ),
                    claim("one-row", probes.run_loop, loop.judge_choices, edges.one_row_cases),
                    claim(
                        "stop-in-prompt",
                        probes.run_loop,
                        loop.judge_tokens,
                        lambda draw: loop.stopping_cases(draw, stop_in_prompt=True),
                    ),
                ),
            ),
            given=(),
        ),
        Exercise(
            "sampling-filters",
            "From logits to fewer tokens",
            "sampling_filters",
            (
                claim(
                    "temperature",
                    probes.run_filter,
                    sampling.judge_filter,
                    sampling.filter_cases("temperature", [2.0, 0.5]),
                ),
                claim("top-k", probes.run_filter, sampling.judge_filter, sampling.filter_cases("top_k", [3, 1])),
                claim("top-p", probes.run_filter, sampling.judge_filter, sampling.filter_cases("top_p", [0.8, 0.45])),
                claim("min-p", probes.run_filter, sampling.judge_filter, sampling.filter_cases("min_p", [0.25, 0.06])),
                demands(
                    probes.run_demand,
                    claim("batches", probes.run_filter, sampling.judge_filter, edges.batch_cases),
                    claim("input-untouched", probes.run_filter, sampling.judge_input_untouched, edges.untouched_cases),
                    claim("edges", probes.run_filter, sampling.judge_filter, edges.edge_cases),
                    claim("already-removed", probes.run_filter, sampling.judge_filter, edges.removed_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "repetition-penalty",
            "Not again",
            "penalize_repetition",
            (
                claim(
                    "divides-positive", probes.run_penalty, sampling.judge_penalty, sampling.penalty_cases("positive")
                ),
                claim(
                    "multiplies-negative",
                    probes.run_penalty,
                    sampling.judge_penalty,
                    sampling.penalty_cases("negative"),
                ),
                claim("leaves-others", probes.run_penalty, sampling.judge_penalty, sampling.penalty_cases("others")),
                demands(
                    probes.run_demand,
                    claim("once-per-token", probes.run_penalty, sampling.judge_penalty, edges.repeated_cases),
                    claim("edges", probes.run_penalty, sampling.judge_penalty, edges.penalty_edge_cases),
                    claim(
                        "input-untouched",
                        probes.run_penalty,
                        sampling.judge_input_untouched,
                        edges.penalty_untouched_cases,
                    ),
                ),
            ),
            given=(),
        ),
        Exercise(
            "beam-search",
            "The best of several paths",
            "beam_search",
            (
                claim("one-beam", probes.run_beam, beam.judge_beam, beam.one_beam_cases),
                claim("better-path", probes.run_beam, beam.judge_beam, beam.better_path_cases, points=2),
                claim("length-penalty", probes.run_beam, beam.judge_beam, beam.length_cases),
                demands(
                    probes.run_demand,
                    claim("full-beam", probes.run_beam, beam.judge_beam, edges.crowded_cases),
                    claim("more-beams-than-tokens", probes.run_beam, beam.judge_beam, edges.many_beams_cases),
                    claim("short-wins", probes.run_beam, beam.judge_beam, edges.reward_cases),
                ),
            ),
            given=(),
        ),
        Exercise(
            "count-rows",
            "What it costs",
            "count_rows",
            (
                claim("by-hand", probes.run_count, loop.judge_count, loop.count_cases((3, 2), (1, 1), (5, 4))),
                claim("100-after-10", probes.run_count, loop.judge_count, loop.count_cases((10, 100), (11, 100))),
                claim(
                    "1000-after-2000", probes.run_count, loop.judge_count, loop.count_cases((2000, 1000), (1999, 1000))
                ),
                demands(
                    probes.run_demand,
                    claim("nothing-new", probes.run_count, loop.judge_count, loop.count_cases((10, 0), (1, 0), (1, 2))),
                    claim("exact", probes.run_count, edges.judge_exact, edges.exact_cases),
                ),
            ),
            given=(),
        ),
    ),
)
