"""Kernels of products with their communication inside."""
