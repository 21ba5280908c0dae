"""Data-parallel tables: whole on every rank, looked up for its own samples, trained with the dense parameters.

TorchRec keeps them in FBGEMM's dense lookups, with one flat parameter each. An exchange that sends ids looks up the
rows, and adds the gradients of the rows to the gradient of the parameter.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrm_overlap.embedding.layout import FeatureShard
from dlrm_overlap.embedding.tables import StoredRows, bounds_check_modes
from dlrm_overlap.torchrec_private import BoundsCheckMode, TableBatchedEmbeddingSlice
from dlrm_overlap.torchrec_private.attributes import fused_lookups_of, own_groups


class ReplicatedTables:
    """FBGEMM's `DenseTableBatchedEmbeddingBagsCodegen`s, and the bounds check mode of each."""

    def __init__(self, lookups: Sequence[Any], bounds_checks: Sequence[BoundsCheckMode]) -> None:
        self.lookups, self.bounds_checks = list(lookups), list(bounds_checks)

    @classmethod
    def of(cls, shardings: Sequence[Any], lookups: Sequence[Any]) -> "ReplicatedTables":
        params = [group.fused_params or {} for s in shardings for group in own_groups(s)]
        modules = [each.module if isinstance(each, DistributedDataParallel) else each for each in lookups]
        return cls([tbe for module in modules for _, tbe in fused_lookups_of(module)], bounds_check_modes(params))

    def storage(self) -> tuple[int, ...]:
        return tuple(lookup.weights.data_ptr() for lookup in self.lookups)

    def weight(self, shard: FeatureShard) -> torch.Tensor:
        """Return the rows [rows, D] of the shard's table, a view of its lookup's parameter."""
        return self.table_in(self.lookups[shard.lookup].weights.detach(), shard)

    def table_in(self, flat: torch.Tensor, shard: FeatureShard) -> torch.Tensor:
        """Return a table's part [rows, D] of a flat tensor like its lookup's weights."""
        lookup = self.lookups[shard.lookup]
        rows, dim = lookup.embedding_specs[shard.table]
        begin = lookup.weights_physical_offsets[shard.table]
        return flat[begin : begin + rows * dim].view(rows, dim)


class ReplicatedGradients(ReplicatedTables):
    """The gradients of the rows in place of the rows: an SGD update at learning rate -1 adds a step's gradients."""

    LEARNING_RATE = -1.0
    marks = None
    """no updates of these tables are marked"""

    def storage(self) -> tuple[int, ...]:
        """Return the addresses of the gradients, which are created if there are none."""
        return tuple(self._gradient(number).data_ptr() for number in range(len(self.lookups)))

    def _gradient(self, lookup: int) -> torch.Tensor:
        weights: nn.Parameter = self.lookups[lookup].weights
        if weights.grad is None:
            weights.grad = torch.zeros_like(weights)
        return weights.grad

    def weight(self, shard: FeatureShard) -> torch.Tensor:
        """Return the gradients [rows, D] of the shard's table, a view of its parameter's gradient."""
        return self.table_in(self._gradient(shard.lookup), shard)

    def reserved_rows(self, shard: FeatureShard) -> None:
        """Return None: all rows are trained."""

    def states(self, shard: FeatureShard) -> list[torch.Tensor]:
        return []

    def stored(self, shard: FeatureShard) -> StoredRows:
        return StoredRows(self._gradient(shard.lookup), (), "sgd", stochastic_rounding=False)


def data_parallel_weights(model: nn.Module) -> dict[str, TableBatchedEmbeddingSlice]:
    """Return name -> data-parallel table of a sharded model; each table is a view of a dense lookup's parameter."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(parameter, TableBatchedEmbeddingSlice) and not hasattr(parameter, "_in_backward_optimizers")
    }


def unsynchronized_weights(model: nn.Module) -> dict[str, TableBatchedEmbeddingSlice]:
    """Return the part of `data_parallel_weights` that each rank trains alone.

    They are in modules that TorchRec's `mark_data_parallel_skip_grad_sync` was called for, which it leaves out of DDP.
    """
    marked = [module for module in model.modules() if getattr(module, "_skip_data_parallel_grad_sync", False)]
    alone = {id(parameter) for module in marked for parameter in module.parameters()}
    return {name: weight for name, weight in data_parallel_weights(model).items() if id(weight) in alone}
