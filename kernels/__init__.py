"""Triton kernels, one operation a file; installed as workbench.kernels."""
