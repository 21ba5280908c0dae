"""Kernels of the backward: they send gradients to the owners of the rows, and update the rows."""
