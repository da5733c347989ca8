"""Lab 06, speculative sampling: the rule, its proof by enumeration, and what a draft gains.

Beside them: `inputs`, a target with its draft; `rules`, the rule and ways to get it wrong; `costs` and
`round_costs`, what a round is predicted and counted to cost.
"""

PREFIX = "speculate"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "stepper",
    "exactness",
    "draft_lengths",
    "batches",
)
PANELS = ("stepper", "draft_lengths")  # those that have a panel, by the same stem
