"""Lab 14: exercises, and how answers to them are checked."""
