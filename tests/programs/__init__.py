"""Programs in the style of public ones of TorchRec's users, each a file that torchrun starts; see `two_lines`."""
