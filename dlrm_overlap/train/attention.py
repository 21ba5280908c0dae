"""Target attention: pools a sample's history by its relevance to the candidate."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, pad

from dlrm_overlap.config import SequenceConfig

_MAX_PAGE = 128  # entries; larger pages waste memory on a history's last one, smaller ones make products inefficient


class TargetAttention(nn.Module):
    """Multi-head attention of a sample's candidate over the rows and positions of its history.

    As in the Deep Interest Network (arXiv 1706.06978, section 4.3), with scaled dot products. Keys and values are rows
    plus a learnt vector per position. They have no linear layers, since the layers of query and output can absorb them.
    One more position has no row and is never masked, for empty histories. The forward never waits for the device.
    """

    def __init__(self, config: SequenceConfig, dim: int) -> None:
        super().__init__()
        self.heads, self.dim = config.heads, dim
        self.query = nn.Linear(dim, config.heads * dim)
        self.output = nn.Linear(config.heads * dim, dim)
        self.position = nn.Parameter(torch.randn(config.positions + 1, dim) * dim**-0.5)

    def forward(self, candidate_bD: torch.Tensor, rows_nD: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the output [b, D].

        Args:
            candidate_bD: pooled embeddings.
            rows_nD: rows of all histories, sample by sample, newest id first, then any number of unread rows; row 0
                must be finite if every history is empty.
            lengths: [b] integers, rows of each history.
        """
        queries = self.query(candidate_bD).view(-1, self.heads, self.dim)
        positions = len(self.position) - 1
        pages = pages_of(lengths, rows_nD.shape[0], positions, min(_MAX_PAGE, -(-positions // 8) * 8))
        # Scores of rows and of positions are computed apart: keys, which are their sums, are never stored.
        unused = pages.is_empty.shape[2] - len(self.position)
        position = pad(self.position, (0, 0, 0, unused)).to(queries.dtype)  # [K * C, D]
        found, weights = AttendToRows.apply(  # type: ignore[misc]
            queries, rows_nD.to(queries.dtype), queries @ position.T, pages, positions
        )
        return self.output((found + weights @ position).flatten(1))


class Pages(NamedTuple):
    """Histories cut into pages of C entries, so that other histories are not padded to the longest one.

    There are m = n // C + b + 1 pages for n rows of b histories; the last is empty. Each sample has K * C entries, the
    last C empty.

    Source: Kwon et al., arXiv 2309.06180, section 4.1.

    Example: C = 2, 3 positions, so K = 3; histories of 4 and 1 ids in 6 rows. Pages 0, 1 and 2 hold rows 0 1, 2 _ and 4
    _; pages 3, 4, 5 are empty. Row 3 is beyond the positions, and row 5 belongs to no history.
    """

    rows: torch.Tensor
    """[m, C] int64: row of each entry, 0 if empty"""
    sample: torch.Tensor
    """[m] int64: sample of each page"""
    number: torch.Tensor
    """[m] int64: index of each page in its sample; for an empty page, an index without rows"""
    page: torch.Tensor
    """[b, K] int64: pages of each sample; m - 1 if there is none"""
    entry: torch.Tensor
    """[n] int64: index of each row among the m * C entries; the last one for rows on no page"""
    is_empty: torch.Tensor
    """[b, 1, K * C] bool: the sample's entries without a row"""

    def to_samples(self, each: torch.Tensor) -> torch.Tensor:
        """Map [m, H, C] of pages to [b, H, K * C] of samples, 0 for empty entries."""
        found = embedding(self.page, each.flatten(1)).unflatten(2, each.shape[1:])
        return found.transpose(1, 2).flatten(2).masked_fill_(self.is_empty, 0)

    def to_pages(self, each: torch.Tensor) -> torch.Tensor:
        """Map [b, H, K * C] of samples to [m, H, C] of pages, 0 for empty entries."""
        each = each.masked_fill(self.is_empty, 0)
        return each.unflatten(2, (self.page.shape[1], -1))[self.sample, :, self.number]

    def sums(self, each: torch.Tensor) -> torch.Tensor:
        """Sum [m, H, D] over each sample's pages, [b, H, D]; empty pages must be 0."""
        of_pages = embedding(self.page, each.flatten(1))
        # Without a dtype, autocast would sum in float32 on GPUs.
        return of_pages.sum(1, dtype=each.dtype).unflatten(1, each.shape[1:])


def pages_of(lengths: torch.Tensor, rows: int, positions: int, page_size: int) -> Pages:
    """Cut histories into pages.

    Args:
        lengths: [b] integers.
        rows: number n of rows, at least the sum of `lengths`.
        positions: rows of a history beyond this number are left out.
        page_size: entries C per page, more than 1.
    """
    samples, grid = lengths.shape[0], -(-positions // page_size) + 1
    count = (rows // page_size + samples + 1) if samples else 0
    kept = lengths.long().clamp(max=positions)
    each = (kept + (page_size - 1)) // page_size  # [b]: pages that have rows
    ends, first_row = each.cumsum(0), lengths.cumsum(0) - lengths
    # Row of each entry of each page.
    all_pages, entries = torch.arange(count, device=lengths.device), torch.arange(page_size, device=lengths.device)
    sample = torch.searchsorted(ends, all_pages, right=True).clamp_(max=samples - 1)
    first_page = ends - each
    number = (all_pages - first_page[sample]).clamp_(max=grid - 1)
    at = number[:, None] * page_size + entries  # [m, C]: position in the history
    is_there = at < kept[sample][:, None]
    index = first_row[sample][:, None] + at
    # Pages of each sample.
    numbers = torch.arange(grid, device=lengths.device)
    page = (first_page[:, None] + numbers).where(numbers < each[:, None], count - 1)
    # Entry of each row. Empty entries scatter past the end.
    entry = index.new_full((rows + 1,), count * page_size - 1)
    entry.scatter_(0, index.where(is_there, rows).flatten(), torch.arange(count * page_size, device=lengths.device))
    is_empty = torch.arange(grid * page_size, device=lengths.device) >= kept[:, None, None]
    return Pages(index.where(is_there, 0), sample, number, page, entry[:rows], is_empty)


class AttendToRows(torch.autograd.Function):
    """Softmax over rows and positions, and the weighted sum of the rows.

    The backward computes the rows' gradient by one product and a gather; autograd would use two products and atomics.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor, pages: Pages, positions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sums of rows [b, H, D], and the weights [b, H, K * C] of rows and positions.

        Args:
            queries: [b, H, D]; all tensors have the same floating dtype.
            rows: [n, D]; finite.
            scores: [b, H, K * C]: products of queries and positions.
            positions: index of the entry without a row that is never masked.
        """
        is_masked = pages.is_empty.clone()
        is_masked[:, :, positions] = False
        if not rows.shape[0]:
            rows = rows.new_zeros(1, rows.shape[1])
        # Scores of rows, and the softmax in at least float32.
        keys = embedding(pages.rows, rows)  # [m, C, D]
        of_rows = pages.to_samples(torch.bmm(queries.index_select(0, pages.sample), keys.mT))
        precise = torch.promote_types(queries.dtype, torch.float32)
        ctx.scale = rows.shape[1] ** -0.5
        scores = (scores.to(precise) + of_rows) * ctx.scale
        weights = scores.masked_fill_(is_masked, -torch.inf).softmax(2)
        # Sum of rows.
        rounded = weights.to(queries.dtype)
        found = pages.sums(torch.bmm(pages.to_pages(rounded), keys))
        ctx.save_for_backward(queries, keys, weights)
        ctx.pages = pages
        return found, rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_found, of_weights = gradients
        queries, keys, weights = ctx.saved_tensors
        pages, heads = ctx.pages, queries.shape[1]
        # Backward of the sum and of the softmax.
        of_rows = pages.to_samples(torch.bmm(of_found.index_select(0, pages.sample), keys.mT))
        of_weights = of_weights.to(weights.dtype) + of_rows
        of_scores = weights * (of_weights - (weights * of_weights).sum(2, keepdim=True)) * ctx.scale
        # Queries and rows; weights and scores share the product that gives the rows' gradients.
        both = pages.to_pages(torch.cat((weights, of_scores), 1).to(keys.dtype))
        of_queries = pages.sums(torch.bmm(both[:, heads:], keys))
        of_keys = torch.bmm(both.mT, torch.cat((of_found, queries), 1).index_select(0, pages.sample))
        of_rows = of_keys.flatten(0, 1).index_select(0, pages.entry)
        return of_queries, of_rows, of_scores.to(keys.dtype), None, None
