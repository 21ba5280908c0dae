"""The embedding stage without TorchRec: tables on their ranks, ids that every rank knows, and references.

Every rank makes all tables and all ids from a seed, so a reference needs no communication.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.torchrec_private.fbgemm import OPTIMIZERS
from tests.gpu.exchange.place import Place

_PRECISIONS = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16}
_EPS = 0.05  # so large that an update without it fails


@dataclass(frozen=True)
class Table:
    """A table of one feature; or another feature of a table, or other columns of a feature."""

    rows: int
    dim: int
    owner: int
    dtype: torch.dtype = torch.float32
    mean: bool = False
    longest: int = 4  # ids of its longest bag
    hot: bool = False  # whether row 0 is in every bag that is not empty
    rows_of: int | None = None  # the previous table, if this is another feature of it
    ids_of: int | None = None  # the previous table, if this one has the next columns of its feature, for the same ids


class Batch:
    """The ids of all ranks' samples, for all tables; every fifth bag is empty, or all are."""

    def __init__(
        self,
        place: Place,
        tables: Sequence[Table],
        sizes: Sequence[int],
        seed: int,
        ids: torch.dtype = torch.int32,
        empty: bool = False,
    ) -> None:
        self.sizes = tuple(sizes)
        self.first_sample = [0, *accumulate(sizes)]
        samples, generator = self.first_sample[-1], place.generator(seed)
        random = {"generator": generator, "device": place.device}
        lengths = [torch.randint(1, table.longest + 1, (samples,), **random) for table in tables]
        self.lengths = torch.stack(lengths)  # [T, B] int64
        self.lengths[:, ::5] = 0
        if empty:
            self.lengths.zero_()
        # The ids of each table, sample by sample.
        counts = zip(tables, self.lengths.sum(1).tolist(), strict=True)
        self.values = [torch.randint(0, table.rows, (n,), **random).to(ids) for table, n in counts]
        for t, table in enumerate(tables):
            if table.hot:
                starts = self.lengths[t].cumsum(0) - self.lengths[t]
                self.values[t][starts[self.lengths[t] > 0]] = 0
            if table.ids_of is not None:
                self.lengths[t], self.values[t] = self.lengths[table.ids_of], self.values[table.ids_of]
        self._ids = ids

    def inputs(self, tables: Sequence[int]) -> KeyedJaggedTensor:
        """Return the ids of some tables, as their owner's input."""
        values = torch.cat([self.values[t] for t in tables]) if tables else self.values[0].new_empty(0)
        lengths = self.lengths[list(tables)].flatten().to(self._ids)
        return KeyedJaggedTensor([f"t{t}" for t in tables], values, lengths=lengths)

    def bags(self, table: int, rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (bag, id) int64 of each id of a rank's samples, with bags counted from its first; None: all ranks."""
        lengths = self.lengths[table]
        first, end = (0, len(lengths)) if rank is None else self.first_sample[rank : rank + 2]
        begin, stop = int(lengths[:first].sum()), int(lengths[:end].sum())
        bag = torch.repeat_interleave(torch.arange(end - first, device=lengths.device), lengths[first:end])
        return bag, self.values[table][begin:stop].long()


class Stage:
    """Tables distributed over the ranks; this rank's are in FBGEMM's lookups."""

    def __init__(
        self,
        place: Place,
        tables: Sequence[Table],
        lr: float = 0.0,
        bounds_check: BoundsCheckMode = BoundsCheckMode.FATAL,
        optimizer: str = "sgd",
    ) -> None:
        """Make the tables without filling them."""
        self.place, self.tables = place, list(tables)
        # First column of each table in the output, and D_total.
        self.columns = [0, *accumulate(table.dim for table in tables)]
        # Tables of each rank, in the order of its input.
        self.owned: list[list[int]] = []
        self._piece_of: dict[int, FeatureShard] = {}
        for rank in range(place.world_size):
            self._add_pieces(rank)
        names = [f"t{t}" for t, table in enumerate(tables) if table.ids_of is None]
        self.layout = Layout(list(self._piece_of.values()), names, place.world_size)
        self._lookups = [self._lookup(group, lr, bounds_check, optimizer) for group in self._groups(place.rank)]
        self.local_tables = LocalTables(self._lookups)

    def _groups(self, rank: int) -> list[list[int]]:
        """Return the tables of each of a rank's FBGEMM lookups."""
        groups: dict[Any, list[int]] = {}
        for t, table in enumerate(self.tables):
            if table.owner == rank:
                groups.setdefault((table.dtype, table.mean), []).append(t)
        return list(groups.values())

    def _add_pieces(self, rank: int) -> None:
        groups = self._groups(rank)
        self.owned.append([t for group in groups for t in group])
        for g, group in enumerate(groups):
            for t, index in zip(group, self._rows_of(group), strict=True):
                table, first = self.tables[t], self._first_of(t)
                self._piece_of[t] = FeatureShard(
                    name=f"t{first}",
                    owner=rank,
                    input=0,
                    feature=self.owned[rank].index(t),
                    lookup=g,
                    table=index,
                    first_column=self.columns[t] - self.columns[first],
                    dim=table.dim,
                    mean=table.mean,
                    dtype=table.dtype,
                    feature_name=f"t{first}",
                )

    def _first_of(self, t: int) -> int:
        """Return the table with the first columns of this one's feature."""
        other = self.tables[t].ids_of
        return t if other is None else self._first_of(other)

    def _rows_of(self, group: Sequence[int]) -> list[int]:
        """Return the index of the lookup's table of each of its features."""
        return [index - 1 for index in accumulate(int(self.tables[t].rows_of is None) for t in group)]

    def _lookup(
        self, group: list[int], lr: float, bounds_check: BoundsCheckMode, optimizer: str
    ) -> SplitTableBatchedEmbeddingBagsCodegen:
        on_gpu = self.place.on_gpu
        location = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
        first = self.tables[group[0]]
        owning = [self.tables[t] for t in group if self.tables[t].rows_of is None]
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(table.rows, table.dim, location, compute) for table in owning],
            feature_table_map=self._rows_of(group),
            optimizer=next(kind for kind, name in OPTIMIZERS.items() if name == optimizer),
            learning_rate=lr,
            eps=_EPS,
            weights_precision=_PRECISIONS[first.dtype],
            pooling_mode=PoolingMode.MEAN if first.mean else PoolingMode.SUM,
            bounds_check_mode=bounds_check,
            device=self.place.device,
        )

    def weight(self, t: int) -> torch.Tensor:
        """Return [rows, D], the rows of a table of this rank."""
        return self.local_tables.weight(self._piece_of[t])

    def state(self, t: int) -> torch.Tensor | None:
        """Return [rows, D] or [rows] float32, the optimizer's state of a table of this rank; None for SGD."""
        return next(iter(self.local_tables.states(self._piece_of[t])), None)

    def fill(self, integers: bool, seed: int = 1) -> list[torch.Tensor]:
        """Fill this rank's tables, and return the rows of all ranks' tables in float32.

        Rows are integers, whose sums are exact in any order, or normally distributed.
        """
        everyones: list[torch.Tensor] = []
        for t, table in enumerate(self.tables):
            if table.rows_of is not None:
                everyones.append(everyones[table.rows_of])
                continue
            shape: Any = (table.rows, table.dim)
            random: Any = {"generator": self.place.generator(seed + t), "device": self.place.device}
            rows = torch.randint(-1000, 1000, shape, **random) if integers else torch.randn(shape, **random)
            rows = rows.to(table.dtype)
            if table.owner == self.place.rank:
                self.weight(t).copy_(rows)
            everyones.append(rows.float())
        return everyones

    def exchange(self, options: ExchangeOptions) -> Exchange:
        exchange = Exchange(self.layout, self.local_tables, options, self.place.group, self.place.device)
        self.place.recorded.append(weakref.WeakMethod(exchange.check))
        return exchange

    def inputs(self, batch: Batch) -> list[KeyedJaggedTensor]:
        return [batch.inputs(self.owned[self.place.rank])]

    @torch.no_grad()
    def baseline(self, batch: Batch, wire: torch.dtype) -> torch.Tensor:
        """Return [b, D_total] float32 by FBGEMM's lookup, `all_to_all_single` and unpacking."""
        place, total = self.place, batch.first_sample[-1]
        groups = self._groups(place.rank)
        bags = [batch.inputs(group) for group in groups]
        pooled = [lookup(ids.values(), ids.offsets()) for lookup, ids in zip(self._lookups, bags, strict=True)]
        empty = torch.empty(total, 0, device=place.device)
        send = torch.cat([empty, *pooled], dim=1).to(wire)
        mine = batch.sizes[place.rank]
        widths = [sum(self.tables[t].dim for t in owned) for owned in self.owned]
        received = send.new_empty(mine * sum(widths))
        sizes = [mine * width for width in widths], [size * widths[place.rank] for size in batch.sizes]
        dist.all_to_all_single(received, send.flatten(), *sizes, group=place.group)
        output = received.new_empty(mine, sum(widths))
        for owned, part in zip(self.owned, received.split(sizes[0]), strict=True):
            dims = [self.tables[t].dim for t in owned]
            for t, columns in zip(owned, part.view(mine, sum(dims)).split(dims, dim=1), strict=True):
                output[:, self.columns[t] : self.columns[t + 1]] = columns
        return output.float()


def pool_exactly(batch: Batch, everyones: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Return [b, D_total] float32, the sums of a rank's samples, of tables of integers."""
    parts = []
    for t, rows in enumerate(everyones):
        bag, ids = batch.bags(t, rank)
        parts.append(rows.new_zeros(batch.sizes[rank], rows.shape[1]).index_add_(0, bag, rows[ids]))
    return torch.cat(parts, dim=1)
