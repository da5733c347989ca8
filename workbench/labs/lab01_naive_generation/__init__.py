"""Lab 01, naive generation: the loop without a cache, how a token is chosen, one request seen from outside."""

PREFIX = "naive"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "step_time",
    "strategies",
    "request",
)
PANELS = ("step_time", "strategies", "request")  # those that have a panel, by the same stem
