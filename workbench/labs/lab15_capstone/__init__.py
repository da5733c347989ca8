"""Lab 15, the capstone: serve a trace under a budget, with everything that the course has, judged by counts."""

PREFIX = "capstone"  # an experiment's name is PREFIX.stem
EXPERIMENTS = ("switches",)  # stems, in reading order
PANELS = ("switches",)  # those that have a panel, by the same stem
