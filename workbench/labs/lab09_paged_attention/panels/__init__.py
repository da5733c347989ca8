"""Lab 09: the panels of its experiments."""
