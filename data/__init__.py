"""Samples, synthetic or from files, and the loader that reads them ahead of the training loop."""
