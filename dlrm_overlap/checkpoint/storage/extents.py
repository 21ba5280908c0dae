"""From the state of a sharded model to the extents that each rank holds, and from stored tensors back into them.

An extent is the elements [offsets, offsets + sizes) of a tensor of the unsharded model. A checkpoint stores extents; a
run of another plan has other extents, each of which is filled from the stored ones that overlap it.

Row-wise Adagrad keeps one number a row: the mean of squares of the row's gradient, summed over the steps. Of a table
cut by columns FBGEMM keeps it for each shard's rows apart, the mean over the shard's own columns. Here such a state has
the table's shape, [rows, D], and an extent of sizes (r, c) is r numbers, each standing for c columns. Then loading into
other cuts is a mean over columns: a shard made of several gets the mean of their numbers, weighted by the columns that
each gives: the number that it would have, had it been one shard from the start and seen these gradients. A shard that
is a piece of one gets that one's number, the best there is to know.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dlrm_overlap.checkpoint.storage.manifest import DamagedError, Manifest, Piece
from dlrm_overlap.checkpoint.storage.tensor_file import read_tensors
from dlrm_overlap.config import InputError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""offsets and sizes of an extent"""

Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""shape of a whole tensor, and offsets of an extent of it"""

_STATE = "optimizer.state."


@dataclass(frozen=True)
class Extent:
    """Elements of a tensor that this rank holds."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor
    """of shape `sizes`; where `per_row` is set, of shape (sizes[0],)"""
    per_row: bool = False
    replicated: bool = False
    """whether every rank holds this very extent"""

    @property
    def key(self) -> str:
        """Name of the extent in a file: the tensor's, and where it begins if it is not all of it."""
        whole = self.sizes == self.shape
        return self.name if whole else f"{self.name}@{','.join(map(str, self.offsets))}"


class Checkpoint:
    """The tensors of the checkpoint `path`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.tensors = path, manifest.tensors
        self._files: dict[str, dict[str, torch.Tensor]] = {}

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the elements of `piece`, a view of the mapped file.

        Raises:
            DamagedError: if the file has no such tensor.
        """
        if piece.file not in self._files:
            self._files[piece.file] = read_tensors(self.path / piece.file)
        tensor = self._files[piece.file].get(piece.name)
        if tensor is None or tuple(tensor.shape) not in (piece.sizes, piece.sizes[:1]):
            raise DamagedError(f"{self.path / piece.file} holds no {piece.name} of sizes {list(piece.sizes)}")
        return tensor


def local_extents(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], shards: Mapping[str, Cut] | None = None
) -> list[Extent]:
    """Return the extents that this rank holds, which share memory with the state.

    Args:
        model: state_dict of a DistributedModelParallel, by the names of the unsharded model.
        optimizer: state_dict of its CombinedOptimizer.
        shards: of dense parameters that are divided over the ranks, shape and offsets of this rank's extent.
    """
    shards = shards or {}
    extents = [
        extent
        for name, tensor in model.items()
        for extent in _extents_of(f"model.{name}", tensor, cut=shards.get(name))
    ]
    for parameter, state in optimizer["state"].items():
        for key, tensor in state.items():
            cut = _cut_of(parameter, shards) if tensor.dim() else None  # a count of steps is the same on all ranks
            extents += _extents_of(f"{_STATE}{parameter}.{key}", tensor, model.get(parameter), cut)
    return extents


def _cut_of(parameter: str, shards: Mapping[str, Cut]) -> Cut | None:
    """Return the cut of `parameter`, a name that may begin with that of its optimizer."""
    return next((cut for name, cut in shards.items() if f".{parameter}".endswith(f".{name}")), None)


def _extents_of(name: str, tensor: Any, table: Any = None, cut: Cut | None = None) -> Iterator[Extent]:
    """Yield this rank's extents of `tensor`, which, where `table` is given, is a state of the optimizer of that table.

    With `cut`, `tensor` is this rank's extent of a dense parameter or of a state of its shape.
    """
    if cut is not None:
        shape, offsets = cut
        yield Extent(name, shape, offsets, tuple(tensor.shape), tensor)
        return
    if not isinstance(tensor, ShardedTensor):
        shape = tuple(tensor.shape)
        yield Extent(name, shape, (0,) * len(shape), shape, tensor, replicated=True)
        return
    per_row = isinstance(table, ShardedTensor) and len(tensor.size()) == 1
    shape = tuple(table.size() if per_row else tensor.size())
    boxes = _boxes(tensor)
    if per_row:
        boxes = dict(zip(sorted(boxes), in_order_of_states(_boxes(table).values()), strict=True))
    for shard in tensor.local_shards():
        offsets, sizes = boxes[tuple(shard.metadata.shard_offsets)]
        yield Extent(name, shape, offsets, sizes, shard.tensor, per_row)


def _boxes(tensor: ShardedTensor) -> dict[tuple[int, ...], Box]:
    """Return offsets and sizes of all shards, by offsets."""
    shards = tensor.metadata().shards_metadata
    return {tuple(m.shard_offsets): (tuple(m.shard_offsets), tuple(m.shard_sizes)) for m in shards}


def in_order_of_states(boxes: Iterable[Box]) -> list[Box]:
    """Return the (offsets, sizes) of a table's shards in the order of their per-row states.

    TorchRec joins these to one tensor of one dimension: by columns, then by rows.
    """
    return sorted(boxes, key=lambda box: (box[0][1], box[0][0]))


def deal(extents: list[Extent], rank: int, world_size: int) -> list[Extent]:
    """Return the extents that `rank` is to store: its own, and its share of those that all ranks hold.

    All ranks deal alike: the largest first, each to the rank that has been dealt the fewest bytes.
    """
    mine = [extent for extent in extents if not extent.replicated]
    dealt = [0] * world_size
    shared = sorted(
        (extent for extent in extents if extent.replicated), key=lambda extent: (-extent.tensor.nbytes, extent.name)
    )
    for extent in shared:
        target = dealt.index(min(dealt))
        dealt[target] += extent.tensor.nbytes
        if target == rank:
            mine.append(extent)
    return mine


@torch.no_grad()
def fill(extent: Extent, stored: Checkpoint) -> None:
    """Copy the stored elements of `extent` into it.

    Raises:
        InputError: if the checkpoint has no such tensor, has it in another shape, or lacks elements of it.
    """
    source = stored.tensors.get(extent.name)
    if source is None:
        raise InputError(f"the checkpoint has no {extent.name}, which this run's model and optimizers have")
    if (source.shape, source.per_row) != (extent.shape, extent.per_row):
        raise InputError(
            f"the checkpoint has {extent.name} of shape {list(source.shape)}, this run {list(extent.shape)}"
            + (", one number a row" if source.per_row != extent.per_row else "")
        )
    total = torch.zeros(extent.tensor.shape, dtype=torch.float64) if extent.per_row else None
    found = 0
    for piece in source.pieces:
        low = [max(a, b) for a, b in zip(extent.offsets, piece.offsets, strict=True)]
        ends = zip(extent.offsets, extent.sizes, piece.offsets, piece.sizes, strict=True)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        sizes = [last - first for first, last in zip(low, high, strict=True)]
        if any(size <= 0 for size in sizes):
            continue
        found += math.prod(sizes)
        to = tuple(slice(i - o, j - o) for i, j, o in zip(low, high, extent.offsets, strict=True))
        start = tuple(slice(i - o, j - o) for i, j, o in zip(low, high, piece.offsets, strict=True))
        values = stored.read(piece)
        if total is None:
            extent.tensor[to].copy_(values[start])
        else:
            total[to[0]] += values[start[0]].double() * (sizes[1] / extent.sizes[1])
    if total is not None:
        extent.tensor.copy_(total)  # the bits that were stored, where one piece has all columns
    if found != math.prod(extent.sizes):
        raise InputError(f"the checkpoint lacks elements of {extent.name}")


@torch.no_grad()
def whole(name: str, stored: Checkpoint) -> torch.Tensor:
    """Return the tensor `name` of `stored`, unsharded, on the CPU; one number a row where it has such."""
    source = stored.tensors[name]
    shape = source.shape[:1] if source.per_row else source.shape
    dtype = stored.read(source.pieces[0]).dtype if source.pieces else torch.float32
    tensor = torch.empty(shape, dtype=dtype)
    fill(Extent(name, source.shape, (0,) * len(source.shape), source.shape, tensor, source.per_row), stored)
    return tensor
