"""Lab 11: exercises, and how answers to them are checked."""
