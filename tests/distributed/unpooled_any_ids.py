"""A small model with unpooled tables of any id, and what it must give: a dictionary of rows in float64."""

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.id_tables.sharder import OverlapManagedCollisionEmbeddingCollectionSharder
from tests.distributed import any_ids
from tests.distributed.any_ids import CPU, DIM, LR, start_at

TABLES = {"t0": ["f0", "f1"], "t1": ["f2"]}
GROWTH = 1 / 4  # of the weights from one position of a sequence to the next
SEQUENCES = [(table, feature) for table, features in TABLES.items() for feature in features]


class Model(nn.Module):
    """Returns the loss and the outputs [b]: sums of rows, each weighed by its position in its sequence."""

    def __init__(self, rows: int, make_module: Any, need_indices: bool = False, **given: Any) -> None:
        super().__init__()
        configs = [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=features, init_fn=start_at)
            for name, features in TABLES.items()
        ]
        modules = {config.name: make_module(config.name, rows, **given) for config in configs}
        self.tables = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(configs, device=CPU, need_indices=need_indices),
            ManagedCollisionCollection(modules, configs),
        )
        self.over = any_ids.weighted_sum(len(SEQUENCES) * DIM)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found, _ = self.tables(batch.sparse)
        output = self.over(summed(found)).squeeze(1)
        return output.square().mean(), output.detach()


@torch.fx.wrap
def summed(found: Any) -> torch.Tensor:
    """Return [b, S * D]: the rows of each sequence of a sample, added up with the weights of their positions."""
    every = []
    for _, name in SEQUENCES:
        values, lengths = found[name].values(), found[name].lengths().long()
        sample = torch.repeat_interleave(lengths)
        position = torch.arange(len(sample)) - (lengths.cumsum(0) - lengths)[sample]
        weighed = values[: len(sample)] * (1 + GROWTH * position[:, None])
        every.append(values.new_zeros(len(lengths), DIM).index_add(0, sample, weighed))
    return torch.cat(every, dim=1)


def shard(model: nn.Module, nodes: int = 1) -> DistributedModelParallel:
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
    return any_ids.shard_by(OverlapManagedCollisionEmbeddingCollectionSharder(fused, nodes=nodes), model)


def expected_losses(steps: Sequence[Sequence[Sequence[Sequence[Sequence[int]]]]]) -> list[float]:
    return any_ids.expected_losses(steps, [int(table[1]) for table, _ in SEQUENCES], growth=GROWTH)
