"""This rank's rows, where FBGEMM keeps them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from dlrm_overlap.embedding.protocol.layout import FeatureShard

OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
}


class UpdateRule(NamedTuple):
    """The numbers of one lookup's optimizer."""

    lr: float
    arguments: Any
    """FBGEMM's OptimizerArgs: eps, weight_decay, max_norm and others"""

    @property
    def only_fbgemm(self) -> bool:
        """Whether FBGEMM's own operator alone updates rows so."""
        return bool(self.arguments.weight_decay or self.arguments.max_norm)


class LocalTables:
    """The fused lookups (TBE) that hold this rank's shards; their storage is read and updated in place."""

    def __init__(self, lookups: Sequence[SplitTableBatchedEmbeddingBagsCodegen]) -> None:
        self.lookups = list(lookups)
        self._storage: tuple[int, ...] | None = None
        self._weights: list[list[torch.Tensor]] = []
        self._states: list[list[list[torch.Tensor]]] = []

    @classmethod
    def of(cls, lookups: Sequence[Any]) -> "LocalTables":
        """Return the tables of TorchRec's lookup modules, one a sharding."""
        return cls([module.emb_module for lookup in lookups for module in lookup._emb_modules])

    @property
    def bounds_check(self) -> BoundsCheckMode:
        """What an id outside its table means: NONE is not looked for, IGNORE and WARNING take row 0, FATAL stops."""
        return BoundsCheckMode(self.lookups[0].bounds_check_mode_int) if self.lookups else BoundsCheckMode.NONE

    def storage(self) -> tuple[int, ...]:
        """Return where the lookups' rows lie now: it changes when they are moved or replaced."""
        return tuple((tbe.weights_host if tbe.use_cpu else tbe.weights_dev).data_ptr() for tbe in self.lookups)  # type: ignore

    def _split(self) -> None:
        if (storage := self.storage()) != self._storage:
            self._weights = [tbe.split_embedding_weights() for tbe in self.lookups]
            self._states = [tbe.split_optimizer_states() for tbe in self.lookups]
            self._storage = storage

    def weight(self, shard: FeatureShard) -> torch.Tensor:
        """Return the rows [rows, D] of a shard of this rank."""
        self._split()
        return self._weights[shard.group][shard.table]

    def state(self, shard: FeatureShard) -> torch.Tensor | None:
        """Return the optimizer's state of a shard's rows: [rows, D] or, row-wise, [rows] float32; None under SGD."""
        self._split()
        states = self._states[shard.group]
        return states[shard.table][0] if states else None

    def optimizer(self, shard: FeatureShard) -> str:
        """Return the optimizer of a shard's rows: sgd | adagrad | rowwise_adagrad."""
        return OPTIMIZERS[self.lookups[shard.group].optimizer]

    def rules(self) -> list[UpdateRule]:
        """Return how each lookup's rows are updated by a step whose forward is now: as FBGEMM, which reads it there."""
        return [UpdateRule(tbe.get_learning_rate(), tbe.optimizer_args) for tbe in self.lookups]
