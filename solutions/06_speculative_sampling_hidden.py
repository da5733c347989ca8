"""Hidden checks of lab 06: other tables and the edges. They never travel with the exercises."""

from __future__ import annotations

from workbench.grading.check import Check
from workbench.labs.lab06_speculative_sampling.checks import length, probes, proof, residual, rollback, rule


def hidden(name, probe, judge, cases, points=1, constant_passes=False) -> Check:
    return Check(name, points, cases, probe, judge, hidden=True, constant_passes=constant_passes)


HIDDEN: dict[str, tuple[Check, ...]] = {
    "spec-rule": (
        hidden("tensors", probes.run_rule, rule.judge_rule, rule.tensor_cases),
        hidden("nothing-drafted", probes.run_rule, rule.judge_rule, rule.nothing_cases),
        hidden("picked", probes.run_rule, rule.judge_rule, rule.picked_cases),
        hidden("whole-texts", probes.run_texts, rule.judge_texts, rule.text_cases((2, 3, 4), (3, 1, 3)), points=2),
    ),
    "spec-residual": (
        hidden("apart", probes.run_left_over, residual.judge_left_over, residual.apart_cases, constant_passes=True),
        hidden("one-token", probes.run_left_over, residual.judge_left_over, residual.one_token_cases, points=2),
    ),
    "spec-proof": (
        hidden(
            "other-sizes",
            probes.run_round_distribution,
            proof.judge_round_distribution,
            proof.round_cases((4, 2), (2, 4)),
        ),
        hidden("zeros", probes.run_round_distribution, proof.judge_round_distribution, proof.impossible_cases),
        hidden("one-mistake", probes.run_broken, proof.judge_broken, proof.shy_cases, points=2),
        hidden("alike", probes.run_broken, proof.judge_broken, proof.alike_cases),
    ),
    "spec-length": (
        hidden("edges", probes.run_length, length.judge_length, length.edge_cases),
        hidden("losing", probes.run_length, length.judge_length, length.losing_cases),
        hidden("refused", probes.run_length_refused, length.judge_refused, length.refused_cases),
    ),
    "spec-rollback": (
        hidden("behind", probes.run_rollback, rollback.judge_rollback, rollback.short_cases, points=3),
        hidden("beside", probes.run_rollback, rollback.judge_rollback, rollback.beside_cases),
    ),
}
