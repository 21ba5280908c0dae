"""Lookups in the tables of one device, in PyTorch's own operators, so that they can be exported."""

import torch
from torch import nn
from torch.nn.functional import embedding_bag


class FloatTable(nn.Module):
    """Sums of the rows of a float32 table."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Take `weight` [rows, D] float32."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Map the ids [n] of b bags, the i-th from offsets[i] to offsets[i + 1], to pooled embeddings [b, D]."""
        return embedding_bag(ids, self.weight, offsets, mode="sum", include_last_offset=True)


class NarrowTable(nn.Module):
    """Sums, in float32, of the rows of a float16 table."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Take `weight` [rows, D] float16."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Pool as `FloatTable.forward`."""
        positions = torch.arange(ids.shape[0], device=ids.device)
        rows_nD = self.weight.index_select(0, ids).float()
        return embedding_bag(positions, rows_nD, offsets, mode="sum", include_last_offset=True)
