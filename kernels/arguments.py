"""What the exchange kernels are told: tensors, integers and tables of addresses."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch


class Bags(NamedTuple):
    """The ids of one launch, on the rank that pools them."""

    values: torch.Tensor
    """[n] int32 or int64, row ids"""
    offsets: torch.Tensor
    """[positions * B + 1] int32 or int64: the bag of (position, sample) is [offsets[i], offsets[i + 1])"""
    first_sample: torch.Tensor
    """[W + 1] int32: rank w owns samples [first_sample[w], first_sample[w + 1])"""
    samples: int
    """samples of all ranks, B"""
    samples_per_rank: int
    """samples of the rank that has most, b"""


@dataclass(frozen=True)
class FeatureTable:
    """The features that one launch pools: tables of one dim and one type."""

    entries: torch.Tensor
    """[F, 5] int64: address of the table's first row, its rows, column in the window, position of the bags, mean"""
    dim: int
    """D, a multiple of 4, at most 1024"""
    weight_dtype: torch.dtype
    """float32, float16 or bfloat16"""
    alignment: int
    """bytes, a power of two up to 16, that divide every table's address and row"""
    column_alignment: int
    """elements, a power of two up to 16, that divide every column"""


@dataclass(frozen=True)
class Windows:
    """Where pooled embeddings go, a window a destination."""

    addresses: torch.Tensor
    """[W] int64: of each rank's window"""
    stride: int
    """elements of a window's row, D_total"""
    dtype: torch.dtype
    """the wire's: float32, bfloat16 or float16"""
    alignment: int = 16
    """bytes that divide every address"""


class Tuning(NamedTuple):
    """How a launch is cut."""

    task_bags: int
    """bags a task, a power of two"""
    unroll: int
    """rows of each bag in flight"""
    num_warps: int
    groups: int = 1
    """parts of a task that a persistent program pools one after the other"""


@lru_cache
def tuning_for(dim: int, groups: int = 1) -> Tuning:
    """Return how to cut a launch for dim D, by what was fastest on H200 (docs/results/stage.md).

    Two rows of up to 128 elements side by side, four deep, keep a warp's loads in flight.
    """
    block = power_of_2(dim)
    bags, unroll = (2, 4) if block <= 128 else (1, 4) if block == 256 else (1, 2)
    return Tuning(bags * groups, unroll, max(1, block // 256), groups)


def power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


class PoolingOptions(NamedTuple):
    """What both kernels are told beside their tensors."""

    rank: int
    """of the caller, where the schedule begins"""
    schedule: str
    """linear | remote_first | balanced"""
    tuning: Tuning
    check_ids: bool = True
    """record ids outside their table and take row 0 for them, in `Bags.values` too"""
