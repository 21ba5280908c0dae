"""Kernels of the backward: they send gradients to the ranks that hold the rows, and update the rows."""
