"""Loops in C++ for a CPU, compiled once a machine: `build` compiles and opens them, each other file calls one."""
