"""Lab 03, the KV cache: its exercises and their visible checks.

What a right cache gives is worked out without any cache: by attention as it is defined (`attention`), or by a decoder
with `Recompute` and eager attention; no expected value comes from `workbench.kv.contiguous`.
"""

from __future__ import annotations

from workbench.grading.check import Check, Exercise, ExerciseSet, claim
from workbench.labs.lab03_kv_cache.checks import cache, counting, prefill, probes

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
            ),
            given=("Batch", "WorkbenchError"),
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
            ),
            given=("WorkbenchError",),
        ),
    ),
)
