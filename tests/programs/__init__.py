"""Programs in the style of TorchRec's users, each a file with a `main`; see `two_lines`."""
