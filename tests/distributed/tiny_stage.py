"""An embedding stage small enough that every rank knows all of it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.kernels import reference

CPU = torch.device("cpu")
ROWS = 20
"""of every table"""
LEARNING_RATE = 0.5


def _key(shard: FeatureShard) -> str:
    return f"{shard.name}, shard {shard.row_shard}" if shard.is_cut_by_rows else shard.name


class Stage:
    """The tables and ids of all ranks, which every rank knows, and what one rank is given of them."""

    def __init__(
        self,
        owners: Sequence[tuple[list[int], list[int]]],
        rank: int,
        mode: BoundsCheckMode = BoundsCheckMode.FATAL,
        optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
        cut: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> None:
        """Give each rank tables: dims of those that are summed, then of those that are averaged.

        Args:
            cut: of tables that are cut by rows, and are summed, the dim and the owners; each has as many rows.
        """
        self.rank, self.world_size = rank, len(owners)
        self.shards: list[FeatureShard] = []
        lookups = []
        for owner, pooled in enumerate(owners):
            lookup = feature = 0
            by_rows = {len(pooled[0]) + i: each for i, each in enumerate(each for each in cut if owner in each[1])}
            for mean, dims in enumerate([[*pooled[0], *(dim for dim, _ in by_rows.values())], pooled[1]]):
                for table, dim in enumerate(dims):
                    name, rows, number = f"rank{owner}_{feature}", (0, 0), 0
                    if not mean and table in by_rows:
                        number = by_rows[table][1].index(owner)
                        name, rows = f"cut{cut.index(by_rows[table])}", (number * ROWS, (number + 1) * ROWS)
                    place = (owner, 0, feature, lookup, table, 0)
                    self.shards.append(FeatureShard(name, *place, dim, bool(mean), torch.float32, name, rows, number))
                    feature += 1
                if dims and owner == rank:
                    pooling = PoolingMode.MEAN if mean else PoolingMode.SUM
                    lookups.append(self._make_lookup(dims, pooling, mode, optimizer))
                lookup += bool(dims)
        self.layout = Layout(self.shards, sorted({shard.name for shard in self.shards}, reverse=True), len(owners))
        generator = torch.Generator().manual_seed(0)
        self.weights = {_key(shard): torch.randn(ROWS, shard.dim, generator=generator) for shard in self.shards}
        self.tables = LocalTables(lookups)
        for shard in self.layout.by_owner[rank]:
            self.tables.weight(shard).copy_(self.weights[_key(shard)])

    @staticmethod
    def _make_lookup(dims: list[int], pooling: PoolingMode, mode: BoundsCheckMode, optimizer: EmbOptimType) -> Any:
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(ROWS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for dim in dims],
            pooling_mode=pooling,
            optimizer=optimizer,
            learning_rate=LEARNING_RATE,
            bounds_check_mode=mode,
        )

    def rows_and_states(self) -> dict[str, torch.Tensor]:
        """Return, by name, this rank's rows and the states of their optimizers, where they are."""
        shards = self.layout.by_owner[self.rank]
        rows = {f"rows of {shard.name}": self.tables.weight(shard) for shard in shards}
        named = ((shard.name, i, state) for shard in shards for i, state in enumerate(self.tables.states(shard)))
        return rows | {f"state {i} of {name}": state for name, i, state in named}

    def exchange(self, group: dist.ProcessGroup, backend: str, **options: Any) -> Exchange:
        options = {"backend": backend, "slice_bags": 2, "wait_timeout_s": 20.0} | options
        return Exchange(self.layout, self.tables, ExchangeOptions(**options), group, CPU)

    def inputs(self, number: int, sizes: Sequence[int]) -> tuple[list[KeyedJaggedTensor], torch.Tensor]:
        """Return this rank's inputs of step `number`, and the pooled embeddings [b, D_total] of its samples."""
        generator = torch.Generator().manual_seed(number)
        samples, first = sum(sizes), sum(sizes[: self.rank])
        keys, lengths, values = [], [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        expected = torch.zeros(sizes[self.rank], self.layout.total_dim)
        for shard in self.shards:
            bags = torch.randint(0, 4, (samples,), generator=generator)
            ids = torch.randint(0, ROWS, (int(bags.sum()),), generator=generator)
            pooled = reference.pool(self.weights[_key(shard)], bags, ids, shard.mean)
            column = self.layout.output_column(shard)
            expected[:, column : column + shard.dim] += pooled[first : first + sizes[self.rank]]
            if shard.owner == self.rank:
                keys.append(shard.name)
                lengths.append(bags)
                values.append(ids)
        return [KeyedJaggedTensor(keys, values=torch.cat(values), lengths=torch.cat(lengths))], expected
