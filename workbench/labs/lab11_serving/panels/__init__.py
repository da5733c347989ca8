"""Lab 11: its panels."""
