"""Hidden checks of lab 02: other shapes and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab02_where_time_goes.checks import counts, edges, graph, limits, probes, reading


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


def calls(name, cases) -> Check:
    return hidden(name, probes.run_calls, counts.judge_calls, cases)


def tpot(name, cases) -> Check:
    return hidden(name, probes.run_tpot, counts.judge_tpot, cases)


def batches(name, cases, judge=limits.judge_whole) -> Check:
    return hidden(name, probes.run_limits, judge, cases)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "roofline-intensity": (
        calls("products-of-heads", edges.heads_cases),
        calls("grouped-heads", edges.grouped_cases),
        calls("chunks", edges.chunk_cases),
        calls("exact", edges.exact_cases),
    ),
    "roofline-tpot": (
        tpot("other-shapes", edges.other_shape_cases),
        tpot("any-step", edges.any_step_cases),
        hidden("noise", probes.run_measure, counts.judge_measure, counts.noise_cases),
    ),
    "roofline-knee": (
        batches("other-machines", edges.other_knee_cases, limits.judge_knee),
        batches("borders", edges.border_of_memory_cases),
        batches("errors", edges.error_cases),
        batches("far-walls", limits.counted_cases, limits.judge_counted),
    ),
    "roofline-reading": (
        hidden("borders", probes.run_reading, reading.judge_reading((0, 1, 2)), edges.border_cases),
        hidden("other-machine", probes.run_reading, reading.judge_reading((0, 1, 2)), edges.other_machine_cases),
    ),
    "workload-cost": (
        hidden("one-output-token", probes.run_price, reading.judge_price((0, 1, 2, 3)), edges.one_output_cases),
        hidden("idle", probes.run_price, reading.judge_price((0, 1, 2, 3)), edges.idle_cases),
    ),
    "one-graph": (
        hidden("any-limit", probes.run_compiled, graph.judge_compiled, edges.limit_cases),
        hidden("edges", probes.run_eager, graph.judge_eager, edges.edge_cases),
    ),
}
