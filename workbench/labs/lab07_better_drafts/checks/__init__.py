"""Lab 07: exercises, and how answers to them are checked."""
