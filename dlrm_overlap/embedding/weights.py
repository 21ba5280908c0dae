"""Initial weights that depend on the seed, the row and the column only, not on the rank that holds them."""

import zlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dlrm_overlap.embedding.replicated import data_parallel_weights
from dlrm_overlap.kernels.ids.id_map import mix

_CHUNK_ELEMENTS = 1 << 24  # limits int64 temporaries to a few hundred MB
_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as int64: SplitMix64's increment


def uniform_rows(out: torch.Tensor, first_row: int, first_column: int, columns: int, stream: int, bound: float) -> None:
    """Fill `out` [n, d] with elements from (first_row, first_column) on of a table of `columns` columns.

    They are uniform in [-bound, bound), a function of (stream, row, column), the same on CPUs and GPUs.
    """
    rows, width = out.shape
    column = torch.arange(first_column, first_column + width, device=out.device)
    step = max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, rows, step):
        row = torch.arange(first_row + start, first_row + min(start + step, rows), device=out.device)
        counter = row[:, None] * columns + column[None, :]
        bits = mix(mix(counter * _GOLDEN + stream) + stream) >> 40 & (2**24 - 1)
        out[start : start + step] = (bits.float() * 2.0**-23 - 1.0) * bound


def initialise_tables(model: nn.Module, seed: int) -> None:
    """Fill all tables and shards on this rank in place, uniform in +-1/sqrt(rows)."""
    with torch.no_grad():
        for name, weight in model.state_dict().items():  # has this rank's tables only
            if isinstance(weight, ShardedTensor) and weight.dtype.is_floating_point:  # not the ids of a table
                for shard in weight.local_shards():
                    _fill(shard.tensor, shard.metadata.shard_offsets, name, weight.size(), seed)
        for name, weight in data_parallel_weights(model).items():
            _fill(weight.data, (0, 0), name, weight.size(), seed)


def _fill(out: torch.Tensor, first: Sequence[int], name: str, size: torch.Size, seed: int) -> None:
    (row, column), (rows, columns) = first, size
    uniform_rows(out, row, column, columns, (seed << 32) + zlib.crc32(name.encode()), rows**-0.5)
