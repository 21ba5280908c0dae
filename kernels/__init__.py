"""Device code and its plain-PyTorch twins: sees tensors and integers, never a process group or a config."""
