"""Device code and its plain-PyTorch twins, which see tensors and integers, never a process group or a config.

README.md has a line for each kernel.
"""
