"""Hidden checks of lab 03: other shapes and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab03_kv_cache.checks import cache, counting, edges, prefill, probes


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "kv-append": (
        hidden("layers", probes.run_cache, cache.judge_cache, edges.both(cache.layer_cases, cache.multi_query_cases)),
        hidden("sequences", probes.run_cache, cache.judge_cache, edges.both(cache.ragged_cases, cache.rewound_cases)),
        hidden("real-model", probes.run_model, cache.judge_model, cache.model_cases),
    ),
    "kv-chunks": (
        hidden("second-turn", probes.run_prefill, prefill.judge_prefill, edges.second_turn_cases),
        hidden(
            "named-sequence",
            probes.run_prefill,
            prefill.judge_calls,
            prefill.prefill_cases((5, 3), (6, 1), sequence="user 7"),
        ),
    ),
    "kv-bytes": (
        hidden("head-size", probes.run_calculator, counting.judge_calculator, counting.head_size_cases),
        hidden(
            "batch-and-precision",
            probes.run_calculator,
            counting.judge_calculator,
            edges.both(counting.batch_cases, counting.precision_cases),
        ),
        hidden("nothing-fits", probes.run_calculator, counting.judge_calculator, counting.too_large_cases),
    ),
    "kv-truncate": (
        hidden("every-layer", probes.run_cache, cache.judge_chunks, cache.every_layer_cases),
        hidden("to-nothing", probes.run_cache, cache.judge_chunks, cache.to_nothing_cases),
        hidden("several-sequences", probes.run_cache, cache.judge_chunks, cache.several_cases),
    ),
    "kv-bug": (
        hidden("drafts", probes.run_cache, cache.judge_cache, cache.draft_cases),
        hidden("grouped-and-ragged", probes.run_cache, cache.judge_cache, edges.grouped_and_ragged_cases),
    ),
    "kv-savings": (
        hidden("edges", probes.run_work, counting.judge_work, counting.work_cases((10, 0), (10, 1), (1, 1), (1, 7))),
        hidden("exact", probes.run_work, counting.judge_work, counting.random_work_cases),
    ),
}
