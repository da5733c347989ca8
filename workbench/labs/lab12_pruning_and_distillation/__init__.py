"""Lab 12, pruning and distillation: what can be cut from a model, how it recovers, and what is faster then."""

PREFIX = "pruning"
EXPERIMENTS = ("drop_layer", "importance", "shapes", "masks", "healing", "cheaper", "pruned_draft")
PANELS = ("drop_layer", "importance", "shapes", "masks", "healing", "cheaper", "pruned_draft")
