"""Checkpoints: saves of a run, their folders, and how they are loaded."""
