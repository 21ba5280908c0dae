"""Dense parameters as one flat tensor, updated by one kernel, with gradients reduced in flat buckets.

Reading order: `flat`, `flat_steps`, `gradients`, `stores`.
"""
