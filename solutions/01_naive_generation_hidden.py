"""Hidden checks of lab 01: other inputs and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab01_naive_generation.checks import beam, edges, loop, probes, sampling

STAGES = {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "min_p": 0.2}


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "naive-loop": (
        hidden("lazy", probes.run_loop, edges.judge_lazy, edges.lazy_cases),
        hidden(
            "prompt-untouched", probes.run_loop, edges.judge_prompt_untouched, lambda draw: [loop.loop_case(draw, 3, 4)]
        ),
        hidden("one-row", probes.run_loop, loop.judge_choices, edges.one_row_cases),
        hidden(
            "stop-in-prompt",
            probes.run_loop,
            loop.judge_tokens,
            lambda draw: loop.stopping_cases(draw, stop_in_prompt=True),
        ),
    ),
    "sampling-filters": (
        hidden("batches", probes.run_filter, sampling.judge_filter, edges.batch_cases),
        hidden("input-untouched", probes.run_filter, sampling.judge_input_untouched, edges.untouched_cases),
        hidden("edges", probes.run_filter, sampling.judge_filter, edges.edge_cases),
        hidden("already-removed", probes.run_filter, sampling.judge_filter, edges.removed_cases),
    ),
    "repetition-penalty": (
        hidden("once-per-token", probes.run_penalty, sampling.judge_penalty, edges.repeated_cases),
        hidden("edges", probes.run_penalty, sampling.judge_penalty, edges.penalty_edge_cases),
        hidden("input-untouched", probes.run_penalty, sampling.judge_input_untouched, edges.penalty_untouched_cases),
    ),
    "beam-search": (
        hidden("finished-aside", probes.run_beam, beam.judge_beam, edges.finished_cases, points=2),
        hidden("full-beam", probes.run_beam, beam.judge_beam, edges.crowded_cases),
        hidden("more-beams-than-tokens", probes.run_beam, beam.judge_beam, edges.many_beams_cases),
        hidden("short-wins", probes.run_beam, beam.judge_beam, edges.reward_cases),
        hidden("calls", probes.run_beam, edges.judge_calls, beam.length_cases),
    ),
    "count-rows": (
        hidden("nothing-new", probes.run_count, loop.judge_count, loop.count_cases((10, 0), (1, 0), (1, 2))),
        hidden("exact", probes.run_count, edges.judge_exact, edges.exact_cases),
    ),
}
