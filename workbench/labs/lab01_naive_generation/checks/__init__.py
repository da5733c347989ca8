"""Lab 01: exercises, and how answers to them are checked."""
