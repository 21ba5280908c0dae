"""Kernels of the forward: they pool embeddings and send them to the owners of the samples."""
