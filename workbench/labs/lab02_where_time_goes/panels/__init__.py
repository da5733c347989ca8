"""Lab 02: the panels of its experiments."""
