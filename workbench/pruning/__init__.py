"""Pruning: what matters, a smaller model, and what heals it.

scores = importance(model)                                      # forward passes over 32 × 256 tokens
plan = plan_by_parameters(scores, model.config, 5_500_000, "width")
small = prune(model, plan)                                      # a new model; `workbench train` heals it
"""

from __future__ import annotations

from workbench.pruning.cut import prune
from workbench.pruning.importance import (
    Cut,
    Importance,
    by_chance,
    by_magnitude,
    importance,
    loss_without,
    losses_without,
    rank_correlation,
    without,
)
from workbench.pruning.plans import Plan, plan_by_counts, plan_by_parameters, plan_by_share

__all__ = [
    "Importance",
    "Plan",
    "Cut",
    "importance",
    "by_chance",
    "by_magnitude",
    "loss_without",
    "losses_without",
    "without",
    "rank_correlation",
    "plan_by_counts",
    "plan_by_share",
    "plan_by_parameters",
    "prune",
]
