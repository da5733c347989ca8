"""Lab 03: exercises, and how answers to them are checked."""
