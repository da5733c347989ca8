"""Lab 13's panels: a view of each experiment."""
