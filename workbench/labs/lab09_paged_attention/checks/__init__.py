"""Lab 09: exercises, and how answers to them are checked."""
