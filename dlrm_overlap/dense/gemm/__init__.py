"""Products of matrices with their communication inside: all-gather before a product, reduce-scatter after one."""
