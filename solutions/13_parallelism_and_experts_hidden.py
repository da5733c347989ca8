"""Hidden checks of lab 13: other sizes and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab13_parallelism_and_experts.checks import break_even, connector, count, probes, schedule, split


def hidden(name, probe, judge, cases) -> Check:
    return Check(name, 1, cases, probe, judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "parallel-split": (
        hidden("other-neurons", probes.run_split, split.judge_split, split.other_neurons),
        hidden("other-heads", probes.run_split, split.judge_split, split.other_heads),
        hidden("other-outputs", probes.run_forward, split.judge_forward, split.other_outputs),
    ),
    "parallel-count": (
        hidden("other-steps", probes.run_counts, count.judge_counts, count.other_steps),
        hidden("long-pipelines", probes.run_counts, count.judge_counts, count.long_pipelines),
        hidden("first-and-last", probes.run_counts, count.judge_counts, count.first_and_last),
    ),
    "parallel-schedule": (
        hidden("other-schedules", probes.run_schedule, schedule.judge_schedule, schedule.other_schedules),
        hidden("wide-and-narrow", probes.run_schedule, schedule.judge_schedule, schedule.wide_and_narrow),
        hidden("other-bounds", probes.run_bound, schedule.judge_bound, schedule.other_bounds),
    ),
    "parallel-connector": (
        hidden("long-scripts", probes.run_connector, connector.judge_connector, connector.long_scripts),
        hidden("side-by-side", probes.run_connector, connector.judge_connector, connector.side_by_side),
        hidden("full-pools", probes.run_connector, connector.judge_connector, connector.full_pools),
    ),
    "parallel-break-even": (
        hidden("other-seconds", probes.run_seconds, break_even.judge_seconds, break_even.other_seconds),
        hidden("other-plans", probes.run_plan, break_even.judge_plan, break_even.other_plans),
        hidden("edges", probes.run_plan, break_even.judge_plan, break_even.edge_plans),
    ),
}
