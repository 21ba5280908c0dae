"""Kernels that make synthetic samples: features and lengths, ids, labels."""
