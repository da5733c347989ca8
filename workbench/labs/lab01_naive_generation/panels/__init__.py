"""Lab 01: the panels of its experiments."""
