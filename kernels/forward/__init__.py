"""Kernels that pool embeddings and send them."""
