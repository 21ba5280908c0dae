"""Checkpoints on disk: files of tensors, the manifest that describes them, and the branches of a folder."""
