"""Lab 09, PagedAttention: blocks, allocators, shared prefixes.

Beside them: `scene`, the story that the block pool plays.
"""

PREFIX = "paging"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "block_pool",
    "allocators",
    "prefix_hits",
)
PANELS = ("block_pool", "allocators", "prefix_hits")  # those that have a panel, by the same stem
