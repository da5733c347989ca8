"""Hidden checks of lab 12: other sizes and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab12_pruning_and_distillation.checks import cut, distill, importance, plan, probes, wanda


def hidden(name, probe, judge, cases) -> Check:
    return Check(name, 1, cases, probe, judge, hidden=True)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "pruning-importance": (
        hidden("other-scores", probes.run_scores, importance.judge_scores, importance.other_scores),
        hidden("one-of-each", probes.run_scores, importance.judge_scores, importance.one_of_each),
        hidden("many-equal", probes.run_kept, importance.judge_kept, importance.many_equal),
    ),
    "pruning-cut": (
        hidden("other-cuts", probes.run_cut, cut.judge_cut, cut.other_cuts),
        hidden("square", probes.run_cut, cut.judge_cut, cut.square_cuts),
        hidden("single-groups", probes.run_cut, cut.judge_cut, cut.single_groups),
    ),
    "pruning-distill": (
        hidden("other-losses", probes.run_distill, distill.judge_distill, distill.other_losses),
        hidden("other-gradients", probes.run_distill, distill.judge_distill, distill.other_gradients),
        hidden("extremes", probes.run_distill, distill.judge_distill, distill.extreme_cases),
    ),
    "pruning-wanda": (
        hidden("other-norms", probes.run_norms, wanda.judge_norms, wanda.other_norms),
        hidden("other-rows", probes.run_prune, wanda.judge_prune, wanda.other_rows),
        hidden("other-groups", probes.run_prune, wanda.judge_prune, wanda.other_groups),
    ),
    "pruning-plan": (
        hidden("other-costs", probes.run_cost, plan.judge_cost, plan.other_costs),
        hidden("other-plans", probes.run_plan, plan.judge_plan, plan.other_plans),
        hidden("edges", probes.run_plan, plan.judge_plan, plan.edge_plans),
    ),
}
