"""Target attention: what a sample's history holds about its candidate. Nothing here knows of ranks."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, pad

from dlrm_overlap.config import SequenceConfig

_MOST_PLACES = 128  # of a page: with more, the last one of a history would be emptier; with fewer, products smaller


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
                Rows after those are not read, but the first of all, which is finite, where every history is empty.
            lengths: [b] integers, of the histories.

        Example: 2 positions, histories of 3 and 0 ids. Sample 0 attends to rows 0 and 1, and both to the position after
        them.
        """
        queries = self.query(candidate_bD).view(-1, self.heads, self.dim)
        positions = len(self.position) - 1
        pages = pages_of(lengths, rows_nD.shape[0], positions, min(_MOST_PLACES, -(-positions // 8) * 8))
        # A key's products are the row's and the position's, so no tensor is made that holds the sums of both.
        unused = pages.is_empty.shape[2] - len(self.position)
        position = pad(self.position, (0, 0, 0, unused)).to(queries.dtype)
        found, weights = AttendToRows.apply(  # type: ignore[misc]
            queries, rows_nD.to(queries.dtype), queries @ position.T, pages, positions
        )
        return self.output((found + weights @ position).flatten(1))


class Pages(NamedTuple):
    """Histories in pages of C places, so that a short one among long ones takes little memory.

    There are m = n // C + b + 1 pages, as many as n rows of b histories can fill, and one that never has a row. Every
    history has K * C places for its positions, of which the last C never have a row.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving, arXiv 2309.06180, section 4.1.

    Example: C = 2, 3 positions, so K = 3; histories of 4 and 1 ids in 6 rows. Rows 0 1, 2 _, 4 _ are in pages 0, 1 and
    2, and 3, 4, 5 are empty. Row 3 is beyond the positions, and row 5 of no history.
    """

    rows: torch.Tensor
    """[m, C] int64: the row at each place, 0 where there is none"""
    sample: torch.Tensor
    """[m] int64: of each page, the sample"""
    number: torch.Tensor
    """[m] int64: of each page, its number among the K of the sample; without rows, that of places without any"""
    page: torch.Tensor
    """[b, K] int64: of each of a sample's K times C places, the page; m - 1 if there is none"""
    place: torch.Tensor
    """[n] int64: of each row, its place among m * C; the last one if it is in no page"""
    is_empty: torch.Tensor
    """[b, 1, K * C] bool: which of a sample's places have no row"""

    def to_samples(self, each: torch.Tensor) -> torch.Tensor:
        """Return [b, H, K * C] of numbers [m, H, C] of places, 0 where there is no row."""
        found = embedding(self.page, each.flatten(1)).unflatten(2, each.shape[1:])
        return found.transpose(1, 2).flatten(2).masked_fill_(self.is_empty, 0)

    def to_pages(self, each: torch.Tensor) -> torch.Tensor:
        """Return [m, H, C] of numbers [b, H, K * C], 0 where there is no row."""
        each = each.masked_fill(self.is_empty, 0)
        return each.unflatten(2, (self.page.shape[1], -1))[self.sample, :, self.number]

    def sums(self, each: torch.Tensor) -> torch.Tensor:
        """Return the sums [b, H, D] over each sample's pages of [m, H, D], which are 0 of a page without rows."""
        of_pages = embedding(self.page, each.flatten(1))
        return of_pages.sum(1, dtype=each.dtype).unflatten(1, each.shape[1:])  # else autocast makes it float32 on GPUs


def pages_of(lengths: torch.Tensor, rows: int, positions: int, places: int) -> Pages:
    """Return the pages of histories.

    Args:
        lengths: [b] integers.
        rows: n, at least the sum of lengths.
        positions: the most rows of a history that are in pages, its first ones.
        places: C, of a page; more than 1.
    """
    samples, grid = lengths.shape[0], -(-positions // places) + 1
    count = (rows // places + samples + 1) if samples else 0
    kept = lengths.long().clamp(max=positions)
    each = (kept + (places - 1)) // places
    ends, first_row = each.cumsum(0), lengths.cumsum(0) - lengths
    all_pages, all_places = torch.arange(count, device=lengths.device), torch.arange(places, device=lengths.device)
    sample = torch.searchsorted(ends, all_pages, right=True).clamp_(max=samples - 1)
    first_page = ends - each
    number = (all_pages - first_page[sample]).clamp_(max=grid - 1)
    at = number[:, None] * places + all_places
    is_there = at < kept[sample][:, None]
    index = first_row[sample][:, None] + at
    numbers = torch.arange(grid, device=lengths.device)
    page = (first_page[:, None] + numbers).where(numbers < each[:, None], count - 1)
    # Rows of no place are stored after the end.
    place = index.new_full((rows + 1,), count * places - 1)
    place.scatter_(0, index.where(is_there, rows).flatten(), torch.arange(count * places, device=lengths.device))
    is_empty = torch.arange(grid * places, device=lengths.device) >= kept[:, None, None]
    return Pages(index.where(is_there, 0), sample, number, page, place[:rows], is_empty)


class AttendToRows(torch.autograd.Function):
    """A softmax over rows and positions, and the sum of rows by its weights.

    Its backward makes the rows' gradients by one product, where autograd would add up those of scores and of sums, and
    brings each to its row by a gather, where autograd would sum them by atomics.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor, pages: Pages, positions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums [b, H, D] of rows by their weights, and the weights [b, H, K * C] of rows and positions.

        Args:
            queries: [b, H, D], of any floating type, as all tensors.
            rows: [n, D]; finite.
            scores: [b, H, K * C]: products of queries and positions, to which those of queries and rows are added.
            pages: of the rows.
            positions: the place that has no row, and is never masked.
        """
        is_masked = pages.is_empty.clone()
        is_masked[:, :, positions] = False
        if not rows.shape[0]:
            rows = rows.new_zeros(1, rows.shape[1])
        keys = embedding(pages.rows, rows)
        of_rows = pages.to_samples(torch.bmm(queries.index_select(0, pages.sample), keys.mT))
        precise = torch.promote_types(queries.dtype, torch.float32)
        ctx.scale = rows.shape[1] ** -0.5
        scores = (scores.to(precise) + of_rows) * ctx.scale
        weights = scores.masked_fill_(is_masked, -torch.inf).softmax(2)
        rounded = weights.to(queries.dtype)
        found = pages.sums(torch.bmm(pages.to_pages(rounded), keys))
        ctx.save_for_backward(queries, keys, weights)
        ctx.pages = pages
        return found, rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of queries, rows and scores."""
        of_found, of_weights = gradients
        queries, keys, weights = ctx.saved_tensors
        pages, heads = ctx.pages, queries.shape[1]
        of_rows = pages.to_samples(torch.bmm(of_found.index_select(0, pages.sample), keys.mT))
        of_weights = of_weights.to(weights.dtype) + of_rows
        of_scores = weights * (of_weights - (weights * of_weights).sum(2, keepdim=True)) * ctx.scale
        both = pages.to_pages(torch.cat((weights, of_scores), 1).to(keys.dtype))
        of_queries = pages.sums(torch.bmm(both[:, heads:], keys))
        of_keys = torch.bmm(both.mT, torch.cat((of_found, queries), 1).index_select(0, pages.sample))
        of_rows = of_keys.flatten(0, 1).index_select(0, pages.place)
        return of_queries, of_rows, of_scores.to(keys.dtype), None, None
