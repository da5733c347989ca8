"""Lab 07, better drafts: lookup, trees, heads, grammars, and how long to draft.

Beside them: `inputs`, drafts by name; `peer_predictions`, what `peers` predicts of rounds that it counted.
"""

PREFIX = "drafts"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "draft_origin",
    "draft_threshold",
    "draft_tree",
    "heads",
    "draft_grammar",
    "draft_speed",
    "peers",
)
PANELS = (
    "draft_origin",
    "draft_threshold",
    "draft_tree",
    "draft_grammar",
    "draft_speed",
)  # those that have a panel, by the same stem
