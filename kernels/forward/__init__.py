"""Kernels of the forward: they pool embeddings and send them to the ranks that have the samples."""
