"""Kernels of the dense part, the cross network's and the parameters' update, and their twins."""
