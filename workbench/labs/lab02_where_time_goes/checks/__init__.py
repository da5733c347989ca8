"""Lab 02: exercises, and how answers to them are checked."""
