"""Export of a checkpoint for inference: a program of `torch.export` that loads in a process with torch alone."""
