"""Sums gradients by row, where many ids of a batch name the same row: each sum is then sent once.

The sum is an update of rows of zeros by SGD at a learning rate of -1: in float32, in a fixed order.
"""

from typing import NamedTuple

import torch

from dlrm_overlap.kernels.backward.optimizers import OptimizerRows, Rule
from dlrm_overlap.kernels.backward.row_runs import CHUNK_IDS, InputFeatures, Preparation, SortedIds
from dlrm_overlap.kernels.backward.update_rows import RowUpdate
from dlrm_overlap.kernels.optimizer_params import OptimizerParams

_INFO_BITS = 30


class Runs(NamedTuple):
    """Gradients [n, D] sorted by the row that each is added to."""

    rows: torch.Tensor
    """[n or more] int32: row of each run, all different"""
    starts: torch.Tensor
    """[n + 1 or more] int32: run i has the gradients order[starts[i]] .. order[starts[i + 1] - 1]"""
    count: torch.Tensor
    order: torch.Tensor
    """[n] int32: overwritten by a sum"""


class RowSums:
    """The sum on a GPU; it holds the tensors that a capture cannot make."""

    def __init__(self, dim: int, device: torch.device) -> None:
        """`dim` is a multiple of 4."""
        self._dim, units = dim, dim // 4
        entries = torch.tensor([[0, units, 0, 0], [0, units, 0, 0]], dtype=torch.int64, device=device)
        # One range of all rows: only its two ends are searched for, so that rows need no order.
        boundaries = torch.tensor([0, torch.iinfo(torch.int32).max], dtype=torch.int64, device=device)
        self._features = InputFeatures(entries, any_mean=False, boundaries=boundaries)
        numbers = torch.tensor(OptimizerParams(-1.0), device=device)
        self._rule = Rule(numbers, torch.zeros(1, dtype=torch.int64, device=device))

    def __call__(self, gradient: torch.Tensor, runs: Runs, rows: int, chunk_ids: int = CHUNK_IDS) -> torch.Tensor:
        """Return the sums [rows, D] float32, zeros where a row has no gradient.

        `gradient` [n, D] is float32, bfloat16 or float16, contiguous from a multiple of 16 bytes on; `runs`, its order,
        is overwritten.
        """
        assert gradient.is_contiguous()
        sums = torch.zeros(rows, self._dim, device=gradient.device)
        if runs.order.numel() == 0:
            return sums
        ids = SortedIds(runs.rows, runs.starts, runs.count, runs.order, _INFO_BITS, runs.starts, runs.order.numel())
        prepared = Preparation(ids, self._features, self._dim // 4, chunk_ids)(ids)
        range_of_all = OptimizerRows(0, sums, (), 0, (), self._dim, any_mean=False, optimizer="sgd")
        RowUpdate(range_of_all, chunk_ids)(prepared, gradient, self._rule)
        return sums
