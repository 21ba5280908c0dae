"""Kernels of tables of any id: they map ids that are not known beforehand to rows."""
