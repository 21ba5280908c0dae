"""Checkpoints: saves of a run, their files, and how they are loaded."""
