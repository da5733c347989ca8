"""Lab 03: the panels of its experiments."""
