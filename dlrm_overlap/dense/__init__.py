"""Dense parameters as one flat tensor, with gradients that are reduced in buckets."""
