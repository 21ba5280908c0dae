"""A simulator of the embedding stage and of the training step on many GPUs; see docs/simulator.md."""
