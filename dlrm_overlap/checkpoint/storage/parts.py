"""From the state of a sharded model to the parts that each rank holds, and from stored tensors back into them.

A part is the elements [offsets, offsets + sizes) of a tensor of the unsharded model. What a checkpoint stores are such
parts; a run of another plan has other parts, each of which is put together from those that overlap it.

Row-wise Adagrad keeps one number a row: the mean of squares of the row's gradient, summed over the steps. Of a table
cut by columns FBGEMM keeps it for each shard's rows apart, the mean over the shard's own columns. Here such a state has
the table's shape, [rows, D], and a part of sizes (r, c) is r numbers, each standing for c columns. Then loading into
other cuts is a mean over columns: a shard made of several gets the mean of their numbers, weighted by the columns that
each gives, which is what it would have had, had it been one shard from the start and seen these gradients. A shard that
is a piece of one gets that one's number, the best there is to know.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dlrm_overlap.checkpoint.storage.manifest import Piece, StoredTensor
from dlrm_overlap.config import InputError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""offsets and sizes of a part of a tensor"""

Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""shape of a whole tensor, and offsets of a part of it"""

_STATE = "optimizer.state."


@dataclass(frozen=True)
class Part:
    """What this rank holds of a tensor."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor
    """of shape `sizes`; where `per_row` is set, of shape (sizes[0],)"""
    per_row: bool = False
    replicated: bool = False
    """whether every rank holds this very part"""

    @property
    def key(self) -> str:
        """Name of the part in a file: the tensor's, and where it begins if it is not all of it."""
        whole = self.sizes == self.shape
        return self.name if whole else f"{self.name}@{','.join(map(str, self.offsets))}"


class Stored(Protocol):
    """Tensors of a checkpoint."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, by name."""
        ...

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the elements of `piece`, on the CPU."""
        ...


def local_parts(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], shards: Mapping[str, Cut] | None = None
) -> list[Part]:
    """Return the parts that this rank holds, which share memory with the state.

    Args:
        model: state_dict of a DistributedModelParallel, by the names of the unsharded model.
        optimizer: state_dict of its CombinedOptimizer.
        shards: dense parameters of which each rank holds another part, and what part this one holds.
    """
    shards = shards or {}
    parts = [
        part for name, tensor in model.items() for part in _parts_of(f"model.{name}", tensor, cut=shards.get(name))
    ]
    for parameter, state in optimizer["state"].items():
        for key, tensor in state.items():
            cut = _cut_of(parameter, shards) if tensor.dim() else None  # a count of steps is the same on all ranks
            parts += _parts_of(f"{_STATE}{parameter}.{key}", tensor, model.get(parameter), cut)
    return parts


def _cut_of(parameter: str, shards: Mapping[str, Cut]) -> Cut | None:
    """Return the cut of a parameter, before whose name a combined optimizer puts that of the optimizer."""
    return next((cut for name, cut in shards.items() if f".{parameter}".endswith(f".{name}")), None)


def _parts_of(name: str, tensor: Any, table: Any = None, cut: Cut | None = None) -> Iterator[Part]:
    """Yield this rank's parts of `tensor`, which, where `table` is given, is a state of the optimizer of that table.

    With `cut`, `tensor` is this rank's part of a dense parameter or of a state of its shape.
    """
    if cut is not None:
        shape, offsets = cut
        yield Part(name, shape, offsets, tuple(tensor.shape), tensor)
        return
    if not isinstance(tensor, ShardedTensor):
        shape = tuple(tensor.shape)
        yield Part(name, shape, (0,) * len(shape), shape, tensor, replicated=True)
        return
    per_row = isinstance(table, ShardedTensor) and len(tensor.size()) == 1
    shape = tuple(table.size() if per_row else tensor.size())
    boxes = _boxes(tensor)
    if per_row:
        boxes = dict(zip(sorted(boxes), in_order_of_states(_boxes(table).values()), strict=True))
    for shard in tensor.local_shards():
        offsets, sizes = boxes[tuple(shard.metadata.shard_offsets)]
        yield Part(name, shape, offsets, sizes, shard.tensor, per_row)


def _boxes(tensor: ShardedTensor) -> dict[tuple[int, ...], Box]:
    """Return offsets and sizes of all shards, by offsets."""
    shards = tensor.metadata().shards_metadata
    return {tuple(m.shard_offsets): (tuple(m.shard_offsets), tuple(m.shard_sizes)) for m in shards}


def in_order_of_states(boxes: Iterable[Box]) -> list[Box]:
    """Return the (offsets, sizes) of a table's shards in the order in which TorchRec lays out their per-row states.

    It lays them out one behind the other, as one long tensor of one dimension: those of shards by columns in the order
    of columns, those of shards by rows in the order of rows.
    """
    return sorted(boxes, key=lambda box: (box[0][1], box[0][0]))


def deal(parts: list[Part], rank: int, world_size: int) -> list[Part]:
    """Return the parts that `rank` is to store: its own, and its share of those that all ranks hold.

    All ranks deal alike: the largest first, each to the rank that has been dealt the fewest bytes.
    """
    mine = [part for part in parts if not part.replicated]
    dealt = [0] * world_size
    shared = sorted((part for part in parts if part.replicated), key=lambda part: (-part.tensor.nbytes, part.name))
    for part in shared:
        target = dealt.index(min(dealt))
        dealt[target] += part.tensor.nbytes
        if target == rank:
            mine.append(part)
    return mine


@torch.no_grad()
def fill(part: Part, stored: Stored) -> None:
    """Copy what `stored` has of `part` into it.

    Raises:
        InputError: if the checkpoint has no such tensor, has it in another shape, or lacks elements of it.
    """
    source = stored.tensors.get(part.name)
    if source is None:
        raise InputError(f"the checkpoint has no {part.name}, which this run's model and optimizers have")
    if (source.shape, source.per_row) != (part.shape, part.per_row):
        raise InputError(
            f"the checkpoint has {part.name} of shape {list(source.shape)}, this run {list(part.shape)}"
            + (", one number a row" if source.per_row != part.per_row else "")
        )
    total = torch.zeros(part.tensor.shape, dtype=torch.float64) if part.per_row else None
    found = 0
    for piece in source.pieces:
        low = [max(a, b) for a, b in zip(part.offsets, piece.offsets, strict=True)]
        ends = zip(part.offsets, part.sizes, piece.offsets, piece.sizes, strict=True)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        sizes = [last - first for first, last in zip(low, high, strict=True)]
        if any(size <= 0 for size in sizes):
            continue
        found += math.prod(sizes)
        to = tuple(slice(i - o, j - o) for i, j, o in zip(low, high, part.offsets, strict=True))
        start = tuple(slice(i - o, j - o) for i, j, o in zip(low, high, piece.offsets, strict=True))
        values = stored.read(piece)
        if tuple(values.shape) != (piece.sizes[:1] if part.per_row else piece.sizes):
            raise InputError(f"the checkpoint has a piece of {part.name} of another shape than it says")
        if total is None:
            part.tensor[to].copy_(values[start])
        else:
            total[to[0]] += values[start[0]].double() * (sizes[1] / part.sizes[1])
    if total is not None:
        part.tensor.copy_(total)  # the bits that were stored, where one piece has all columns
    if found != math.prod(part.sizes):
        raise InputError(f"the checkpoint lacks elements of {part.name}")


@torch.no_grad()
def whole(name: str, stored: Stored) -> torch.Tensor:
    """Return the tensor `name` of `stored`, unsharded, on the CPU; one number a row where it has such."""
    source = stored.tensors[name]
    shape = source.shape[:1] if source.per_row else source.shape
    dtype = stored.read(source.pieces[0]).dtype if source.pieces else torch.float32
    tensor = torch.empty(shape, dtype=dtype)
    fill(Part(name, source.shape, (0,) * len(source.shape), source.shape, tensor, source.per_row), stored)
    return tensor


def state_of(name: str, tables: Mapping[str, Any]) -> str | None:
    """Return the name of the table, one of `tables`, of whose optimizer `name` is a state; None for any other name."""
    if not name.startswith(_STATE):
        return None
    parameter = name[len(_STATE) :].rpartition(".")[0]
    while parameter and f"model.{parameter}" not in tables:
        parameter = parameter.rpartition(".")[0]
    return f"model.{parameter}" if parameter else None
