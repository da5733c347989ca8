"""Hidden checks of lab 15: other numbers and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab15_capstone.checks import pairs, plan, points, price, probes, rows


def hidden(name, probe, judge, cases) -> Check:
    return Check(name, 1, cases, probe, judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "capstone-price": (
        hidden("other-steps", probes.run_price, price.judge_price, price.other_steps),
        hidden("odd-steps", probes.run_price, price.judge_price, price.odd_steps),
    ),
    "capstone-points": (
        hidden("other-levels", probes.run_levels, points.judge_levels, points.other_levels),
        hidden("other-points", probes.run_points, points.judge_points, points.other_points),
        hidden("odd-points", probes.run_points, points.judge_points, points.odd_points),
    ),
    "capstone-pairs": (
        hidden("other-pairs", probes.run_pairs, pairs.judge_pairs, pairs.other_pairs),
        hidden("long", probes.run_pairs, pairs.judge_pairs, pairs.long_series),
        hidden("edges", probes.run_pairs, pairs.judge_pairs, pairs.edge_pairs),
    ),
    "capstone-least-rows": (
        hidden("other-texts", probes.run_rows, rows.judge_rows, rows.other_texts),
        hidden("conversations", probes.run_rows, rows.judge_rows, rows.conversations),
        hidden("edges", probes.run_rows, rows.judge_rows, rows.edge_texts),
    ),
    "capstone-plan": (
        hidden("other-steps", probes.run_plan, plan.judge_plan, plan.other_steps),
        hidden("tight-steps", probes.run_plan, plan.judge_plan, plan.tight_steps),
        hidden("other-traces", probes.run_served, plan.judge_traces, plan.other_traces),
    ),
}
