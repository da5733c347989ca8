"""Lab 06: exercises, and how answers to them are checked."""
