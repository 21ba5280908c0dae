"""A simulator of the embedding stage and of the training step on more GPUs than are at hand; see docs/simulator.md."""
