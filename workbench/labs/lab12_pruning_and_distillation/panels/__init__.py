"""Lab 12: its panels."""
