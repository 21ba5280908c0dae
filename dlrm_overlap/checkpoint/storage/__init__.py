"""What a checkpoint is on disk: files of tensors, the manifest that describes them, and which of a folder counts."""
