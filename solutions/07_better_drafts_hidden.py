"""Hidden checks of lab 07: other shapes and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab07_better_drafts.checks import jump, lookup, medusa, probes, threshold, tree


def hidden(name, probe, judge, cases, points=1, constant_passes=False) -> Check:
    return Check(name, points, cases, probe, judge, hidden=True, constant_passes=constant_passes)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "drafts-lookup": (
        hidden("into-the-end", probes.run_lookup, lookup.judge_lookup, lookup.end_cases, points=2),
        hidden("nothing", probes.run_lookup, lookup.judge_lookup, lookup.nothing_cases, points=2),
    ),
    "drafts-threshold": (
        hidden("clamped", probes.run_rounds, threshold.judge_rounds, threshold.clamp_cases),
        hidden("plain-rounds", probes.run_rounds, threshold.judge_rounds, threshold.plain_cases),
        hidden("many-rounds", probes.run_rounds, threshold.judge_rounds, threshold.fresh_cases),
    ),
    "drafts-tree-mask": (
        hidden("bare", probes.run_tree, tree.judge_tree, tree.bare_cases, points=2),
        hidden("refused", probes.run_tree_refused, tree.judge_refused, tree.refused_cases, constant_passes=True),
    ),
    "drafts-medusa": (
        hidden("sparse", probes.run_candidates, medusa.judge_candidates, medusa.sparse_cases, points=2),
        hidden("dead-ends", probes.run_acceptance, medusa.judge_acceptance, medusa.dead_end_cases, points=2),
    ),
    "drafts-jump": (
        hidden("longer-tokens", probes.run_jump, jump.judge_jump, jump.long_cases, points=2),
        hidden("ends", probes.run_jump, jump.judge_jump, jump.end_cases),
    ),
}
