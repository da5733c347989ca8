"""Lab 15: its panels."""
