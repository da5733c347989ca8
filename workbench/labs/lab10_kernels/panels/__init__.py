"""Lab 10: the panels of its experiments."""
