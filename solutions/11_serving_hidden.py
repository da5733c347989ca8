"""Hidden checks of lab 11: other inputs and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check, demands
from workbench.labs.lab11_serving.checks import admission, events, goodput, policy, probes, stops


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "server-stops": (
        hidden("nothing-lost", probes.run_stops, stops.judge_stops, stops.lost_cases),
        hidden("in-the-server", probes.run_choice, stops.judge_served, stops.served_cases, points=2),
    ),
    "server-events": (
        hidden("several", probes.run_events, events.judge_events, events.several_cases, points=2),
        hidden("silence", probes.run_events, events.judge_events, events.ping_cases),
    ),
    "server-admission": (
        hidden("any-load", probes.run_wait, admission.judge_wait, admission.load_cases),
        hidden("edges", probes.run_wait, admission.judge_wait, admission.edge_cases),
        hidden("deadline", probes.run_retry, admission.judge_retry, admission.deadline_cases),
    ),
    "server-goodput": (
        hidden("edges", probes.run_goodput, goodput.judge_all, goodput.edge_cases),
        hidden("traces", probes.run_goodput, goodput.judge_all, goodput.trace_cases, points=2),
    ),
    "server-policy": (
        demands(
            probes.run_demand,
            hidden("waits", probes.run_policy, policy.judge_waits, policy.stream_cases),
            hidden("hits", probes.run_policy, policy.judge_hits, policy.hit_cases),
            name="nobody-starves",
            points=2,
        ),
        hidden("engine", probes.run_engine, policy.judge_engine, policy.engine_cases),
    ),
}
