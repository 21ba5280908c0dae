"""What the products with communication inside are given, beside their matrices."""

from typing import NamedTuple

import torch

from dlrm_overlap.kernels.flags import Flags


class Tiling(NamedTuple):
    """How a product is cut into tiles and programs."""

    block_m: int = 128
    """rows of a tile"""
    block_n: int = 256
    """columns of a tile"""
    block_k: int = 64
    """of both matrices that are read at a time"""
    group: int = 8
    """blocks of rows that are computed together, see `order.tile_at`"""
    stages: int = 4
    """such reads that are under way at once, with the one that is used"""
    num_warps: int = 8
    """of a program that is not specialised"""
    parts: int = 2
    """in which a tile's columns go through shared memory to the stores: 1 or 2"""
    specialised: bool = True
    """on Hopper by `hopper.product_on_hopper`, which has warps that load and others that multiply; elsewhere, and if
    not, by `portable.product_in_triton`"""


class Signals(NamedTuple):
    """The flags that go with the rows of the shards, M / W rows each, and are raised to `flags.clock`."""

    flags: Flags
    """element (w, i) of a rank's flags stands for the rows [i * slot_rows, (i + 1) * slot_rows) of a shard: those of
    rank w that have come, or the own ones that w has multiplied. `counts` is not looked at: all these are in use"""
    slot_rows: int


class Destinations(NamedTuple):
    """Where a scattered product stores its tiles."""

    targets: torch.Tensor
    """[W] int64: address of [M / W, N] in each rank's memory, a multiple of 16, for this rank's part of its rows"""
    done: torch.Tensor
    """[W * regions] int32, regions = ceil(M / W / slot_rows): tiles of each region that are stored; 0 before and after.
    Launches that share it run one after the other"""
    order: str = "balanced"
    """of the shards: remote_first | balanced, see `order.tile_at`"""
