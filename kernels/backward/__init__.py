"""Kernels that send gradients and update rows."""
