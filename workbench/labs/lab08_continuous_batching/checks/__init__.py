"""Lab 08: exercises, and how answers to them are checked."""
