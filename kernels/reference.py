"""The kernels' maths in plain PyTorch: the oracle of every test, and the CPU path."""

from collections.abc import Sequence

import torch


def pooled_lookup(weights: Sequence[torch.Tensor], lengths: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each bag, an empty bag giving zeros.

    Args:
        weights: a table each, [rows_t, D], any float type.
        lengths: [T * B] int, bags of table 0, sample by sample, then table 1's.
        values: [sum of lengths] int, row ids in the same order.

    Returns:
        [B, T * D] float32, each sample's tables side by side. Sums run in the order of `values`, in float32.

    Example:
        Two tables, two samples, lengths [1, 2, 0, 1], values [5, 7, 7, 3]: sample 0 pools row 5 of table 0 and
        nothing of table 1; sample 1 pools row 7 twice of table 0 and row 3 of table 1.
    """
    samples = lengths.numel() // len(weights)
    ends = lengths.cumsum(0)
    pooled = torch.zeros(samples, len(weights), weights[0].shape[1], dtype=torch.float32, device=lengths.device)
    for t, weight in enumerate(weights):
        bags = lengths[t * samples : (t + 1) * samples].long()
        first, last = (int(ends[t * samples - 1]) if t else 0), int(ends[(t + 1) * samples - 1])
        sample = torch.repeat_interleave(torch.arange(samples, device=lengths.device), bags)
        pooled[:, t].index_add_(0, sample, weight[values[first:last].long()].float())
    return pooled.flatten(1)
