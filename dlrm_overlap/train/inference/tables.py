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
        return _pool(self.weight.index_select(0, ids).float(), offsets)


class Int8Table(nn.Module):
    """Sums, in float32, of rows of 8 bits a weight.

    As in FBGEMM's row-wise quantisation, a row has a scale and an offset of its own: weight = code * scale + least.

    Example: the row [-1.0, 0.0, 4.1] has scale 5.1 / 255 = 0.02 and least -1.0, so its codes are [0, 50, 255].
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Take `codes` [rows, D] uint8 and `scales` [rows, 2] float32, each (scale, least weight) of a row."""
        super().__init__()
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Pool as `FloatTable.forward`."""
        scale, least = self.scales.index_select(0, ids).split(1, dim=1)
        return _pool(self.codes.index_select(0, ids).float() * scale + least, offsets)


def _pool(rows_nD: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(rows_nD.shape[0], device=rows_nD.device)
    return embedding_bag(positions, rows_nD, offsets, mode="sum", include_last_offset=True)


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the arguments of `Int8Table` for the rows `weight` [rows, D]: codes and scales.

    A row whose weights are all alike has the scale 0 and is exact.
    """
    weight = weight.float()
    least, most = weight.aminmax(dim=1, keepdim=True)
    scale = (most - least) / 255
    codes = ((weight - least) / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(0, 255)
    return codes.to(torch.uint8), torch.cat((scale, least), dim=1)
