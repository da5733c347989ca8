"""Hidden checks of lab 02: other shapes and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab02_where_time_goes.checks import counts, edges, graph, probes, reading


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


def layer(name, cases) -> Check:
    return hidden(name, probes.run_layer, counts.judge_layer, cases)


def tpot(name, cases) -> Check:
    return hidden(name, probes.run_tpot, counts.judge_tpot, cases)


def limits(name, cases, judge=counts.judge_both) -> Check:
    return hidden(name, probes.run_limits, judge, cases)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "roofline-intensity": (
        layer("two-matrices", edges.two_matrix_cases),
        layer("grouped-heads", edges.grouped_cases),
        layer("chunks", edges.chunk_cases),
        layer("exact", edges.exact_cases),
    ),
    "roofline-tpot": (
        tpot("grouped-heads", edges.grouped_tpot_cases),
        tpot("gpt2", edges.gpt2_tpot_cases),
        tpot("any-step", edges.any_step_cases),
    ),
    "roofline-knee": (
        limits("tie", edges.tie_cases, counts.judge_knee),
        limits("grouped-heads", edges.grouped_limits_cases),
        limits("memory-edges", edges.memory_edge_cases, counts.judge_largest),
        limits("gpt2", edges.gpt2_limits_cases),
    ),
    "roofline-reading": (
        hidden("borders", probes.run_reading, reading.judge_reading((0, 1, 2)), edges.border_cases),
        hidden("other-machine", probes.run_reading, reading.judge_reading((0, 1, 2)), edges.other_machine_cases),
    ),
    "workload-cost": (
        hidden("one-output-token", probes.run_price, reading.judge_price((0, 1, 2)), edges.one_output_cases),
        hidden("other-weights", probes.run_price, reading.judge_price((0, 1, 2)), edges.other_weights_cases),
    ),
    "one-graph": (
        hidden("any-limit", probes.run_compiled, graph.judge_compiled, edges.limit_cases),
        hidden("edges", probes.run_eager, graph.judge_eager, edges.edge_cases),
    ),
}
