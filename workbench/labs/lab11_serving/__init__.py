"""Lab 11, serving: an engine behind an API, the load that is put on it, and what counts as served."""

PREFIX = "server"  # an experiment's name is PREFIX.stem
EXPERIMENTS = ()
PANELS = ()
