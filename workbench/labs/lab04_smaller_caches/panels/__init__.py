"""Lab 04: the panels of its experiments."""
