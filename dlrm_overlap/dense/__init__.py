"""Dense parameters as one flat tensor, updated by one kernel, with gradients reduced in flat buckets."""
