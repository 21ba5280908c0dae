"""Products of matrices whose tiles wait for their rows to arrive, or are stored where their rows belong."""
