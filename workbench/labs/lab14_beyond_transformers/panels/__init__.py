"""Lab 14: its panels."""
