"""Lab 00, start here: the tour, and how good the shipped models are."""

PREFIX = "zoo"  # an experiment's name is PREFIX.stem
EXPERIMENTS = (  # stems, in reading order
    "held_out",
    "acceptance",
    "parsing",
)
PANELS = ()  # those that have a panel, by the same stem
