"""Checkpoints: saving, folders and files, loading."""
