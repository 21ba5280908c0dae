"""The bags that kernels pool, their features, and the windows that they store into."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Bags(NamedTuple):
    """The bags of one input on the rank that pools them: each feature has one bag for each sample of every rank.

    Example: features f and g, 2 samples, bags f: [5] [], g: [7, 7] [1]. values 5 7 7 1, offsets 0 1 1 3 4.
    """

    values: torch.Tensor
    """[n] int32 or int64, row ids"""
    offsets: torch.Tensor
    """[features * B + 1] int32 or int64: bag f * B + s of feature f and sample s begins here"""
    first_sample: torch.Tensor
    """[W + 1] int32: first sample of each rank, and the end"""
    samples: int
    """samples of all ranks, B"""
    samples_per_rank: int
    """largest number of samples of a rank, b"""
    weights: torch.Tensor | None = None
    """[n] float32: factors of the ids' rows"""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As kernels take them: without weights, the values again, unread."""
        return self.values, self.offsets, self.values if self.weights is None else self.weights


@dataclass(frozen=True, eq=False)
class FeatureTable:
    entries: torch.Tensor
    """[F, 6] int64: see the columns in `pooling`"""
    dim: int
    """a multiple of 4, at most 1024"""
    weight_dtype: torch.dtype
    """float32, float16 or bfloat16"""
    alignment: int
    """bytes, a power of two up to 16, that divide every table's address and every row's size"""
    column_alignment: int
    """elements, a power of two up to 16, that divide every column"""
    leaves_out: bool = False
    """whether some features' empty bags are not stored"""


EVERY_BAG = -1
"""share of a row shard that also stores a partial sum for empty bags"""


class Partials(NamedTuple):
    """The partial sums of one table in a window, one for each row shard."""

    columns: Sequence[int]
    """first column of each partial sum; the total is stored at the first"""
    dim: int
    shares: Sequence[int] = ()
    """for each row shard, the feature whose non-empty bags have a partial sum, or EVERY_BAG; empty if unknown"""


@dataclass(frozen=True, eq=False)
class Windows:
    """One window for each destination rank."""

    addresses: torch.Tensor
    """[W] int64"""
    stride: int
    """elements of a window's row"""
    dtype: torch.dtype
    """the wire type: float32, bfloat16 or float16"""
    alignment: int = 16
    """bytes that divide every address"""
