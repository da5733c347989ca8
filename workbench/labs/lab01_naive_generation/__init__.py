"""Lab 01, naive generation: the model opened (shown in lab 00), the loop without a cache, how a token is chosen, one
request seen from outside."""

PREFIX = "naive"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "decoder",
    "step_time",
    "strategies",
    "request",
)
PANELS = ("decoder", "step_time", "strategies", "request")  # those that have a panel, by the same stem
