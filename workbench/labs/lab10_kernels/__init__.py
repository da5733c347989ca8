"""Lab 10, kernels: traffic, tiles, bounds, and what launches cost.

Beside them: `case`, a kernel that is held to float64 and then timed; `cases`, all of them, from `cases_rows` and
`cases_attention`; `occupancy`, how many programs a processor holds at once.
"""

PREFIX = "kernels"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "attention_traffic",
    "sdpa_backends",
    "coalescing",
    "tiles",
    "tile_sweep",
    "bounds",
    "matvec",
    "attention",
    "crossover",
    "graphs",
)
PANELS = (
    "attention_traffic",
    "coalescing",
    "tiles",
    "bounds",
    "crossover",
    "graphs",
)  # those that have a panel, by the same stem
