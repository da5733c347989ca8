"""Lab 14, beyond transformers: a state of constant size instead of a cache, and many tokens a pass.

`diffusion_runs` has what the three experiments of diffusion share.
"""

PREFIX = "beyond"
EXPERIMENTS = (
    "hippo",
    "forms",
    "state_memory",
    "cache_table",
    "recall",
    "associative",
    "canvas",
    "tokens_per_pass",
    "few_passes",
)
PANELS = (
    "hippo",
    "forms",
    "state_memory",
    "cache_table",
    "recall",
    "associative",
    "canvas",
    "tokens_per_pass",
    "few_passes",
)
