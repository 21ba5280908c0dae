"""Kernels of the dense part: layers, all-reduce of gradients, update of parameters."""
