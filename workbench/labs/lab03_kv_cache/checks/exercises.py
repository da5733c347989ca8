"""Lab 03, the KV cache: its exercises and their visible checks.

What a right cache gives is worked out without any cache: by attention as it is defined (`attention`), or by a decoder
with `Recompute` and eager attention; no expected value comes from `workbench.kv.contiguous`.
"""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, claim, demands
from workbench.labs.lab03_kv_cache.checks import cache, counting, edges, prefill, probes

PRELUDE = """\
import torch
import torch.nn.functional as F

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab03_kv_cache.checks.parts import Chunks, Slots
from workbench.models.batch import Batch"""


def _cache(name: str, cases, points: int = 1) -> Check:
    return claim(name, probes.run_cache, cache.judge_cache, cases, points)


def _prefill(name: str, judge, cases, points: int = 1) -> Check:
    return claim(name, probes.run_prefill, judge, cases, points)


def _calculator(name: str, cases, points: int = 1) -> Check:
    return claim(name, probes.run_calculator, counting.judge_calculator, cases, points)


EXERCISES = ExerciseSet(
    name="03_kv_cache",
    lab=3,
    prelude=PRELUDE,
    exercises=(
        Exercise(
            "kv-append",
            "Append and attend",
            "MyCache",
            (
                _cache("one-shot", cache.one_shot_cases),
                _cache("decode", cache.decode_cases, points=2),
                _cache("chunks", cache.chunk_cases, points=2),
                _cache("grouped-heads", cache.grouped_cases),
                demands(
                    probes.run_demand,
                    claim(
                        "layers",
                        probes.run_cache,
                        cache.judge_cache,
                        edges.both(cache.layer_cases, cache.multi_query_cases),
                    ),
                    claim(
                        "sequences",
                        probes.run_cache,
                        cache.judge_cache,
                        edges.both(cache.ragged_cases, cache.rewound_cases),
                    ),
                    claim("real-model", probes.run_model, cache.judge_model, cache.model_cases),
                ),
            ),
            given=("Slots", "WorkbenchError"),
        ),
        Exercise(
            "kv-chunks",
            "A prompt in chunks",
            "prefill",
            (
                _prefill("calls-and-rows", prefill.judge_calls, prefill.prefill_cases((9, 4), (7, 3)), points=2),
                _prefill("equals-one-shot", prefill.judge_prefill, prefill.prefill_cases((10, 4), (5, 2)), points=2),
                _prefill("no-remainder", prefill.judge_calls, prefill.prefill_cases((8, 4), (3, 16), (1, 1))),
                demands(
                    probes.run_demand,
                    claim("second-turn", probes.run_prefill, prefill.judge_prefill, edges.second_turn_cases),
                    claim(
                        "named-sequence",
                        probes.run_prefill,
                        prefill.judge_calls,
                        prefill.prefill_cases((5, 3), (6, 1), sequence="user 7"),
                    ),
                ),
            ),
            given=("Batch", "WorkbenchError"),
            counted=True,
        ),
        Exercise(
            "kv-bytes",
            "What it takes",
            "kv_calculator",
            (
                _calculator("formula", counting.formula_cases),
                _calculator("grouped-heads", counting.grouped_cases),
                _calculator("gib", counting.gib_cases),
                _calculator("largest-batch", counting.card_cases),
                demands(
                    probes.run_demand,
                    claim("head-size", probes.run_calculator, counting.judge_calculator, counting.head_size_cases),
                    claim(
                        "batch-and-precision",
                        probes.run_calculator,
                        counting.judge_calculator,
                        edges.both(counting.batch_cases, counting.precision_cases),
                    ),
                    claim("nothing-fits", probes.run_calculator, counting.judge_calculator, counting.too_large_cases),
                ),
            ),
            given=("WorkbenchError",),
        ),
        Exercise(
            "kv-truncate",
            "Forget and go on",
            "RewindableCache",
            (
                claim("cut", probes.run_cache, cache.judge_chunks, cache.cut_cases),
                claim("goes-on", probes.run_cache, cache.judge_chunks, cache.go_on_cases, points=2),
                claim("refused", probes.run_cache, cache.judge_chunks, cache.refused_cases),
                demands(
                    probes.run_demand,
                    claim("every-layer", probes.run_cache, cache.judge_chunks, cache.every_layer_cases),
                    claim("to-nothing", probes.run_cache, cache.judge_chunks, cache.to_nothing_cases),
                    claim("several-sequences", probes.run_cache, cache.judge_chunks, cache.several_cases),
                ),
            ),
            given=("Chunks", "WorkbenchError"),
        ),
        Exercise(
            "kv-bug",
            "It worked on my prompt",
            "RepairedCache",
            (
                _cache("one-shot", cache.one_shot_cases),
                _cache("decode", cache.decode_cases, points=2),
                _cache("chunks", cache.chunk_cases, points=2),
                demands(
                    probes.run_demand,
                    claim("drafts", probes.run_cache, cache.judge_cache, cache.draft_cases),
                    claim("grouped-and-ragged", probes.run_cache, cache.judge_cache, edges.grouped_and_ragged_cases),
                ),
            ),
            given=("Slots", "WorkbenchError"),
        ),
        Exercise(
            "kv-savings",
            "What it saves",
            "count_work",
            (
                claim("by-hand", probes.run_work, counting.judge_work, counting.work_cases((3, 2), (2, 3))),
                claim("rows", probes.run_work, counting.judge_rows, counting.work_cases((4096, 512))),
                claim("pairs", probes.run_work, counting.judge_pairs, counting.work_cases((4096, 512))),
                demands(
                    probes.run_demand,
                    claim(
                        "edges",
                        probes.run_work,
                        counting.judge_work,
                        counting.work_cases((10, 0), (10, 1), (1, 1), (1, 7)),
                    ),
                ),
            ),
            given=("WorkbenchError",),
        ),
    ),
)
