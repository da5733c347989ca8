"""Lab 06: the panels of its experiments."""
