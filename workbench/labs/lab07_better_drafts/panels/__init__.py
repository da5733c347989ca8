"""Lab 07: the panels of its experiments."""
