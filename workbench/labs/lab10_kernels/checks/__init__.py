"""Lab 10: exercises, and how answers to them are checked."""
