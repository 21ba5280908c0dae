"""Samples: synthetic and Criteo's, and the loader."""
