"""Guessing ahead without changing the distribution: the rule, its proof by enumeration, drafts, and rounds on a real
model."""

from workbench.speculation.drafts import DRAFTS, Ask, Draft, FirstOf, ModelDraft, StagedDraft, draft_for
from workbench.speculation.engine import Drafting, Round, Speculator
from workbench.speculation.lengths import Dynamic, Fixed, LengthPolicy, Outcome, Threshold, length_policy
from workbench.speculation.proposal import NOTHING, Proposal
from workbench.speculation.rule import (
    Verdict,
    acceptance,
    draw_children,
    grow,
    residual,
    verify,
    verify_greedy,
    without,
)
from workbench.speculation.runner import SpeculationStats, SpeculativeRunner

__all__ = [
    "DRAFTS",
    "NOTHING",
    "Ask",
    "Draft",
    "Drafting",
    "Dynamic",
    "FirstOf",
    "Fixed",
    "LengthPolicy",
    "ModelDraft",
    "Outcome",
    "Proposal",
    "Round",
    "SpeculationStats",
    "SpeculativeRunner",
    "Speculator",
    "StagedDraft",
    "Threshold",
    "Verdict",
    "acceptance",
    "draft_for",
    "draw_children",
    "grow",
    "length_policy",
    "residual",
    "verify",
    "verify_greedy",
    "without",
]
