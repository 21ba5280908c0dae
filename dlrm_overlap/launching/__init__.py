"""From a command to its ranks and their process group."""
