"""Lab 15: exercises, and how answers to them are checked."""
