"""Lab 04, smaller caches: grouped heads, latents, windows, shared layers, few bits.

Beside them: `inputs`, the trained variants and the kv that each is made for; `twins`, why windows win where nothing is
masked; `longer`, whether the variants' order holds when they are trained longer.
"""

PREFIX = "smaller"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "quality",
    "variants",
    "larger_batch",
    "latent",
    "rolling",
    "kv_formats",
    "windows",
    "convert",
)
PANELS = (
    "quality",
    "variants",
    "larger_batch",
    "latent",
    "rolling",
    "kv_formats",
    "windows",
    "convert",
)  # those that have a panel, by the same stem
