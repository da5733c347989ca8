"""Lab 08: the panels of its experiments."""
