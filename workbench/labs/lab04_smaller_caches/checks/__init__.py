"""Lab 04: exercises, and how answers to them are checked."""
