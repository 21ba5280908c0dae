"""Matrix products with communication inside: all-gather before a product, reduce-scatter after one."""
