"""Target attention: what a sample's history holds about its candidate. Nothing here knows of ranks."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from dlrm_overlap.config import SequenceConfig


class TargetAttention(nn.Module):
    """A mean of a history's rows, weighted by how much each matters to the candidate, where positions count.

    As in the Deep Interest Network (Zhou et al., KDD 2018, arXiv 1706.06978, section 4.3) the candidate's embedding
    weighs the rows, here by scaled dot products of several heads. A key, and a value, is a row plus a learnt vector of
    its position. Neither has a layer of its own, since one query attends: their layers would be factors of those of
    query and output.

    After the last position comes one that has no row and is never masked, so an empty history has an output too. Every
    size is that of the batch or of `positions`, so nothing is read back from the device.
    """

    def __init__(self, config: SequenceConfig, dim: int) -> None:
        """Take `dim`, the columns D of the tables."""
        super().__init__()
        self.heads, self.dim = config.heads, dim
        self.query = nn.Linear(dim, config.heads * dim)
        self.output = nn.Linear(config.heads * dim, dim)
        self.position = nn.Parameter(torch.randn(config.positions + 1, dim) * dim**-0.5)

    def forward(self, candidate_bD: torch.Tensor, rows_nD: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return what the histories hold about the candidates, [b, D].

        Args:
            candidate_bD: pooled embeddings.
            rows_nD: of all histories, one sample's after another's, newest id first; n may exceed the sum of lengths.
            lengths: [b] integers, of the histories.

        Example: 2 positions, histories of 3 and 0 ids. Sample 0 attends to rows 0 and 1, and both to the position after
        them.
        """
        rows, is_there = by_position(rows_nD, lengths, len(self.position))
        counts = is_there.clone()
        counts[:, -1] = True
        # The heads' queries have the same keys, so they are queries of one attention: [b, 1, heads, D] to [b, 1, P, D].
        queries = self.query(candidate_bD).view(-1, 1, self.heads, self.dim)
        keys = (rows + self.position)[:, None].to(queries.dtype)  # once: autocast would cast keys and values apart
        found = scaled_dot_product_attention(queries, keys, keys, attn_mask=counts[:, None, None])
        return self.output(found.flatten(1))


def by_position(rows_nD: torch.Tensor, lengths: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `positions` - 1 rows of each bag in a tensor [b, positions, D], and where in it a row is.

    Other elements are 0. Their indices are those of later bags' rows, whose gradients so have zeros added, each a few.

    Args:
        rows_nD: of all bags, one after the other.
        lengths: [b] integers, of the bags.
        positions: at least 1; the last one never has a row.

    Example: rows [[1], [2], [3]], lengths [1, 0, 2], 2 positions: [[[1], [0]], [[0], [0]], [[2], [0]]].
    """
    place = torch.arange(positions, device=lengths.device)
    is_there = place < lengths[:, None].clamp(max=positions - 1)
    if not rows_nD.shape[0]:
        return rows_nD.new_zeros(len(lengths), positions, rows_nD.shape[1]), is_there
    first = lengths.cumsum(0) - lengths
    index = (first[:, None] + place).clamp(max=rows_nD.shape[0] - 1)
    rows = rows_nD.index_select(0, index.flatten()).view(*index.shape, -1)
    return torch.where(is_there[:, :, None], rows, 0), is_there
