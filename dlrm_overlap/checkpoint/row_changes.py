"""Which rows of tables training has changed: those whose marks are set, and those whose ids have changed.

For a table of any id, a copy of the ids as of the last delta is kept, 8 bytes a row.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dlrm_overlap.checkpoint.delta_files import EVICT, KEY, UPDATE, ChangedRows, check_backend
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.embedding.unpooled import UnpooledExchange
from dlrm_overlap.kernels.ids.id_map import EMPTY, unmix

_CHUNK_BYTES = 1 << 28  # of rows that are gathered on the device at a time


class TableShard(NamedTuple):
    """This rank's part of a table whose updates are marked."""

    name: str
    """of the table's weight in the model's state dict"""
    feature: str
    tables: LocalTables
    number: tuple[int, int]
    """its lookup and its number there"""
    weights: torch.Tensor
    """[rows, D]"""
    first_row: int
    first_column: int
    ids: torch.Tensor | None
    """[rows] int64: the hashed ids of a table of any id"""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.first_row, self.first_column


def mark_updates(model: DistributedModelParallel, backend: str, sends_ids: bool) -> None:
    """Mark the rows that updates change, from the first step on.

    `sends_ids` says whether `GraphTrainPipeline` takes the steps.

    Raises:
        InputError: if the backend cannot, or the updates of a table cannot.
    """
    check_backend(backend)
    for module in _exchanging(model):
        tables = module.exchange.tables
        if tables.fractions:
            raise InputError(
                f"{KEY}: {len(tables.fractions)} tables are in host memory behind a cache, whose updates name slots, "
                f"not rows; set embedding.memory to gpu, or {KEY} to 0"
            )
        if isinstance(module.exchange, UnpooledExchange) and not sends_ids:
            raise InputError(
                f"{KEY}: train.pipeline torchrec updates histories by FBGEMM, which does not tell which rows it "
                f"changes; take --train.pipeline graph, or 0 for no deltas"
            )
        if module.exchange.options.resolved_backward == "collective":
            check_backend("nccl")
        tables.mark_updates(module.exchange.device)


def _exchanging(model: DistributedModelParallel) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, ExchangingModule) and module.exchange is not None:
            yield module


def marked_shards(model: DistributedModelParallel) -> list[TableShard]:
    """Return this rank's shards of all tables; an InputError if updates of one are not marked."""
    owners: dict[int, tuple[Any, tuple[int, int]]] = {}
    for module in _exchanging(model):
        for number, rows in module.exchange.tables.shards():
            if rows.numel():
                owners[rows.data_ptr()] = module, number
    found = []
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, ShardedTensor) or not tensor.dtype.is_floating_point:
            continue
        for shard in tensor.local_shards():
            if not shard.tensor.numel():
                continue
            if shard.tensor.data_ptr() not in owners:
                raise InputError(
                    f"{KEY}: table {name} stays with TorchRec, whose updates are not marked; the log says why it "
                    f"stays; choose a plan that exchanges it, or set {KEY} to 0"
                )
            module, number = owners[shard.tensor.data_ptr()]
            row, column = shard.metadata.shard_offsets
            tables, id_map = module.exchange.tables, module.id_map
            names = {at: table for table, at in tables.numbers_of.items()}
            ids = None if id_map is None else id_map.shard(id_map.state.ids, names[number])
            layout = module.exchange.layout.by_owner[dist.get_rank()]
            feature = next((s.feature_name for s in layout if (s.lookup, s.table) == number), "")
            found.append(TableShard(name, feature, tables, number, shard.tensor.detach(), row, column, ids))
    return found


class RowChanges:
    """The rows of a model's tables that training has changed since `clear` was last called, on this rank."""

    def __init__(self, model: DistributedModelParallel) -> None:
        """Take a model whose updates are marked, see `mark_updates`. Call `clear` first."""
        self._model = model
        self._ids: dict[tuple[str, int, int], torch.Tensor] = {}
        """shard of a table of any id -> its ids when `clear` was last called"""

    def clear(self) -> None:
        for shard in marked_shards(self._model):
            marks = shard.tables.marks
            assert marks is not None
            marks.clear()
            if shard.ids is not None:
                self._ids[shard.key] = shard.ids.clone()

    def copied(self, are_finite: torch.Tensor) -> list[ChangedRows]:
        """Return the changes, copied to the CPU on the current stream.

        `are_finite`, [] bool on the device, becomes False if a changed weight is not finite.
        """
        return [each for shard in marked_shards(self._model) for each in self._of(shard, are_finite)]

    def _of(self, shard: TableShard, are_finite: torch.Tensor) -> Iterator[ChangedRows]:
        assert shard.tables.marks is not None
        rows = shard.tables.marks.marked(shard.number)
        about = shard.name, shard.feature
        if shard.ids is None:
            keys = rows + shard.first_row
        else:
            ids, before = shard.ids, self._ids[shard.key]
            moved = (ids != before).nonzero().flatten()
            gone = moved[(before[moved] != EMPTY) & ~torch.isin(before[moved], ids[moved])]
            if gone.numel():
                lost = to_cpu(unmix(before[gone])), to_cpu(gone + shard.first_row)
                yield ChangedRows(*about, EVICT, shard.first_column, *lost, None)
            rows = torch.cat([rows, moved]).unique()
            rows = rows[ids[rows] != EMPTY]  # initial rows of buckets are named by ids, but stay as they are
            keys = unmix(ids[rows])
        if rows.numel():
            weights = shard.weights
            values = torch.empty((rows.numel(), weights.shape[1]), dtype=weights.dtype, pin_memory=weights.is_cuda)
            size = max(1, _CHUNK_BYTES // (weights.shape[1] * weights.itemsize))
            for part, into in zip(rows.split(size), values.split(size), strict=True):
                chosen = weights.index_select(0, part)
                are_finite &= chosen.isfinite().all()
                into.copy_(chosen, non_blocking=True)
            found = to_cpu(keys), to_cpu(rows + shard.first_row)
            yield ChangedRows(*about, UPDATE, shard.first_column, *found, values)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, which is complete once the current stream is synchronized."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)
