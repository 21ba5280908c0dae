"""Finding the ranks: launchers, process groups, options, and what a machine can refuse."""
