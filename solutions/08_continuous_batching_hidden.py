"""Hidden checks of lab 08: other workloads and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab08_continuous_batching.checks import chunks, deadline, probes, scheduler, turn, waste


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "batching-waste": (
        hidden("uneven", probes.run_counts, waste.judge_all, waste.uneven_cases),
        hidden("nothing", probes.run_counts, waste.judge_all, waste.edge_cases),
        hidden("refused", probes.run_counts_refused, waste.judge_refused, waste.refused_cases),
    ),
    "batching-turn": (
        hidden("edges", probes.run_turn, turn.judge_turn, turn.edge_cases),
        hidden("turn-after-turn", probes.run_turns, turn.judge_day, turn.day_cases, points=2),
    ),
    "batching-chunks": (
        hidden("tight", probes.run_plan, chunks.judge_plan, chunks.tight_cases),
        hidden("to-the-end", probes.run_reading, chunks.judge_whole, chunks.whole_cases, points=2),
    ),
    "batching-deadline": (
        hidden("later", probes.run_order, deadline.judge_order, deadline.later_cases),
        hidden("stream", probes.run_stream, deadline.judge_stream, deadline.stream_cases, points=2),
    ),
    "batching-scheduler": (
        hidden("workloads", probes.run_scheduler, scheduler.judge_run, scheduler.workload_cases, points=2),
        hidden("door", probes.run_scheduler, scheduler.judge_run, scheduler.door_cases),
    ),
}
