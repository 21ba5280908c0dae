"""Extents: the elements [offsets, offsets + sizes) of the unsharded model's tensors that a rank holds.

A run with another plan fills its extents from the stored extents that overlap them. If a table is cut by columns,
row-wise Adagrad has one number per row in each cut. A cut's numbers are stored as a tensor [rows], such as
`momentum1@0:64` for columns [0, 64).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of an extent, one number per dimension"""

Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""(shape of a whole tensor, offsets of an extent in it)"""

_CHUNK = 1 << 28  # elements checked at a time


@dataclass(frozen=True)
class Extent:
    """Elements of a tensor that this rank holds."""

    path: tuple[str, ...]
    """keys that lead to the whole tensor in `{"model": .., "optimizer": ..}`, the state dicts of the unsharded model"""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    """the elements; any shape that fits `shape`, the whole tensor's, at `offsets`"""
    columns: tuple[int, int] | None = None
    """for optimizer state with one number per row: the table's columns [begin, end) that it covers; None for all"""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def stored_name(self) -> str:
        return self.name if self.columns is None else f"{self.name}@{self.columns[0]}:{self.columns[1]}"


def local_extents(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], shards: Mapping[str, Cut] | None = None
) -> list[Extent]:
    """Return this rank's extents, which share memory with the state dicts of TorchRec's model and optimizer.

    `shards` maps each dense parameter that is divided over ranks to its cut.
    """
    shards = shards or {}
    extents = [
        extent
        for name, tensor in model.items()
        for extent in _extents_of(("model", name), tensor, cut=shards.get(name))
    ]
    for parameter, state in optimizer["state"].items():
        for key, tensor in state.items():
            cut = _cut_of(parameter, shards) if tensor.dim() else None  # a count of steps is the same on all ranks
            extents += _extents_of(("optimizer", "state", parameter, key), tensor, model.get(parameter), cut)
    return extents


def _cut_of(parameter: str, shards: Mapping[str, Cut]) -> Cut | None:
    """Return the cut of `parameter`, whose name may begin with the name of its optimizer."""
    return next((cut for name, cut in shards.items() if f".{parameter}".endswith(f".{name}")), None)


def _extents_of(path: tuple[str, ...], tensor: Any, table: Any = None, cut: Cut | None = None) -> Iterator[Extent]:
    """Yield this rank's extents of `tensor`: a weight, or an optimizer state of `table`; `cut` if it is divided."""
    if cut is not None:
        yield Extent(path, *cut, tensor)
    elif not isinstance(tensor, ShardedTensor):
        yield Extent(path, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
    elif isinstance(table, ShardedTensor) and len(tensor.size()) == 1:
        rows, width = table.size()
        # TorchRec concatenates the states of a table's shards to one dimension: by columns, then by rows.
        in_order = sorted(_boxes(table).values(), key=lambda box: (box[0][1], box[0][0]))
        boxes = dict(zip(sorted(_boxes(tensor)), in_order, strict=True))
        for shard in tensor.local_shards():
            (row, first), (_, columns) = boxes[tuple(shard.metadata.shard_offsets)]
            yield Extent(path, (rows,), (row,), shard.tensor, None if columns == width else (first, first + columns))
    else:
        for shard in tensor.local_shards():
            yield Extent(path, tuple(tensor.size()), tuple(shard.metadata.shard_offsets), shard.tensor)


def _boxes(tensor: ShardedTensor) -> dict[tuple[int, ...], Box]:
    shards = tensor.metadata().shards_metadata
    return {tuple(m.shard_offsets): (tuple(m.shard_offsets), tuple(m.shard_sizes)) for m in shards}


def is_finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    for elements in tensor.detach().reshape(-1).split(_CHUNK):
        least, greatest = elements.aminmax()  # NaN, if there is one
        if not (math.isfinite(least) and math.isfinite(greatest)):
            return False
    return True


def sources(extent: Extent, stored: Iterable[str]) -> dict[str, int]:
    """Return the names of the stored tensors that fill `extent`, each with its number of columns as a weight.

    An extent that covers several cuts gets the mean of their numbers, weighted by columns, as one shard would have had.
    An extent that covers a part of a cut gets the number of the whole cut, which is an approximation.
    """
    if extent.name in stored:
        return {extent.name: 1}
    found = {}
    for name in stored:
        whole, _, columns = name.rpartition("@")
        if whole == extent.name:
            first, end = map(int, columns.split(":"))
            mine = extent.columns or (first, end)
            if (common := min(end, mine[1]) - max(first, mine[0])) > 0:
                found[name] = common
    return found
