"""Lab 05: exercises, and how answers to them are checked."""
