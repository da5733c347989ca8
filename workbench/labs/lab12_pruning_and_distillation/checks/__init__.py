"""Lab 12: exercises, and how answers to them are checked."""
