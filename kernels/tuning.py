"""How the kernels that pool are cut into tasks and programs."""

from functools import lru_cache
from typing import NamedTuple

import torch

from dlrm_overlap.kernels.bags import FeatureTable


class Tuning(NamedTuple):
    task_bags: int
    """bags per task, a power of two"""
    unroll: int
    """rows of each bag that are loaded at a time"""
    num_warps: int
    groups: int = 1
    """groups of bags that a persistent program pools one after the other"""
    checked_ids: int = 64
    """ids of each bag that are checked at a time, a power of two"""


class PoolingOptions(NamedTuple):
    rank: int
    schedule: str
    """linear | remote_first | balanced, see `schedule`"""
    tuning: Tuning
    check_ids: bool = True
    """record ids outside their table, and replace them by 0 in `Bags.values`"""


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@lru_cache
def _short_ids(dim: int, itemsize: int) -> int:
    row_bytes = power_of_2(dim) * itemsize
    return 6 if row_bytes <= 128 else 8 if row_bytes <= 256 else 1


def has_short_bags(table: FeatureTable, values: torch.Tensor, offsets: torch.Tensor) -> bool:
    """Return whether the bags are short on average, from the shapes of an input alone (limits: docs/results/lab.md)."""
    return values.numel() <= _short_ids(table.dim, table.weight_dtype.itemsize) * (offsets.numel() - 1)


@lru_cache
def tuning_for(dim: int, itemsize: int, groups: int = 1, short: bool = False) -> Tuning:
    """Return the fastest tuning on H200 (docs/results/lab.md) for rows of `dim` elements of `itemsize` bytes.

    `short` is the result of `has_short_bags`; `groups` is more than 1 for the persistent kernel.
    """
    block = power_of_2(dim)
    row_bytes = block * itemsize
    checked_ids = 64  # with 16 or 32 the persistent kernel took up to 7% longer
    if short and block <= 128:
        # Offsets, ids and rows are loaded one after the other, so four bags hide more latency than many rows of one.
        # Fewer registers for the checks leave more for rows. Persistent kernels have fewer registers in total.
        bags, unroll = 4, 2 if groups > 1 or row_bytes > 256 else 4
        if row_bytes <= 256:
            checked_ids = 16 if unroll == 4 and row_bytes > 128 else 8
    # A warp has up to 4 KB of rows in flight. Small rows: several bags at once, so that each lane loads 16 bytes.
    elif row_bytes <= 128:
        bags, unroll = 4, 8
    elif row_bytes <= 256:
        bags, unroll = 2, 8
    else:
        bags, unroll = (2, 4) if block <= 128 else (1, 4) if block == 256 else (1, 2)
    return Tuning(bags * groups, unroll, max(1, block // 256), groups, checked_ids)


@lru_cache
def put_tuning_for(dim: int, itemsize: int) -> Tuning:
    """Return the tuning for messages to other nodes: more warps, since all warps of a program put its group."""
    tuning = tuning_for(dim, itemsize)
    return tuning._replace(task_bags=min(8, 4 * tuning.task_bags), num_warps=4 * tuning.num_warps)
