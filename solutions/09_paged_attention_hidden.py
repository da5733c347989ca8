"""Hidden checks of lab 09: other texts and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab09_paged_attention.checks import attention, cow, pool, prefix, probes, waste


def hidden(name, probe, judge, cases, points=1) -> Check:
    return Check(name=name, points=points, cases=cases, probe=probe, judge=judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "paged-pool": (
        hidden("whole", probes.run_pool, pool.judge_pool, pool.refused_cases, points=2),
        hidden("edges", probes.run_pool, pool.judge_pool, pool.edge_cases),
    ),
    "paged-cow": (
        hidden("room", probes.run_tables, cow.judge_tables, cow.room_cases, points=2),
        hidden("refused", probes.run_tables, cow.judge_tables, cow.refused_cases),
        hidden("churn", probes.run_tables, cow.judge_tables, cow.churn_cases),
    ),
    "paged-attention": (
        hidden("several", probes.run_attention, attention.judge_attention, attention.several_cases, points=2),
        hidden("other-sizes", probes.run_attention, attention.judge_attention, attention.size_cases),
    ),
    "paged-prefix": (
        hidden("keys", probes.run_prefix, prefix.judge_prefix, prefix.key_cases),
        hidden("used", probes.run_prefix, prefix.judge_prefix, prefix.use_cases),
        hidden("churn", probes.run_prefix, prefix.judge_prefix, prefix.churn_cases),
    ),
    "paged-waste": (
        hidden("gaps", probes.run_account, waste.judge_account, waste.gap_cases, points=2),
        hidden("edges", probes.run_account, waste.judge_account, waste.edge_cases),
        hidden("refused", probes.run_waste_refused, waste.judge_refused, waste.refused_cases),
    ),
}
