"""Samples, synthetic or Criteo's, and the loader that reads them ahead of the training loop."""
