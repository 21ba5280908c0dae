"""From a command to its ranks: options, checks of this machine, starting or finding ranks, the process group."""
