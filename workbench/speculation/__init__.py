"""Guessing ahead without changing the law: the rule, its proof by enumeration, drafts, and rounds on a real model."""

from workbench.speculation.drafts import DRAFTS, Ask, Draft, FirstOf, Law, ModelDraft, StagedDraft, draft_for
from workbench.speculation.draws import RandomDraws
from workbench.speculation.engine import Emitted, Round, Speculator, Writing
from workbench.speculation.lengths import Dynamic, Fixed, LengthPolicy, Outcome, Threshold, length_policy
from workbench.speculation.proposal import NOTHING, Proposal
from workbench.speculation.rule import (
    Draws,
    Verdict,
    acceptance,
    draw_children,
    grow,
    residual,
    verify,
    verify_greedy,
    without,
)

__all__ = [
    "DRAFTS",
    "NOTHING",
    "Ask",
    "Draft",
    "Draws",
    "Dynamic",
    "Emitted",
    "FirstOf",
    "Fixed",
    "Law",
    "LengthPolicy",
    "ModelDraft",
    "Outcome",
    "Proposal",
    "RandomDraws",
    "Round",
    "Speculator",
    "StagedDraft",
    "Threshold",
    "Verdict",
    "Writing",
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
