"""Kernels of matrix products with communication inside."""
