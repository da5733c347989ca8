"""Lab 05: the panels of its experiments."""
