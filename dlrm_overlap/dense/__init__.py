"""The dense parameters of a model as one flat tensor, updated by one kernel, their gradients reduced in flat buckets.

In reading order: `flat`, `flat_steps`, `gradients`, `stores`.
"""
