"""Lab 13: exercises, and how answers to them are checked."""
