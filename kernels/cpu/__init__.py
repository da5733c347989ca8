"""Loops in C++ for a CPU, compiled once a machine (`workbench.native`); each file here calls one."""
