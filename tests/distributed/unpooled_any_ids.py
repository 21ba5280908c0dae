"""A small model with unpooled tables of any id, and what it must give: a dictionary of rows in float64."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.id_tables.sharder import OverlapManagedCollisionEmbeddingCollectionSharder
from tests.distributed.any_ids import DIM, LR, SAMPLES, START, Rows, start_at
from tests.distributed.models import CPU, world

TABLES = {"t0": ["f0", "f1"], "t1": ["f2"]}
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
        self.over = nn.Linear(len(SEQUENCES) * DIM, 1)
        with torch.no_grad():
            self.over.weight.fill_(0.3)
            self.over.bias.zero_()

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
        weighed = values[: len(sample)] * (1 + position[:, None] / 4)
        every.append(values.new_zeros(len(lengths), DIM).index_add(0, sample, weighed))
    return torch.cat(every, dim=1)


def shard(model: nn.Module, nodes: int = 1) -> DistributedModelParallel:
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
    sharders: list[Any] = [OverlapManagedCollisionEmbeddingCollectionSharder(fused, nodes=nodes)]
    planner = EmbeddingShardingPlanner(topology=Topology(dist.get_world_size(), "cpu"))
    plan = planner.collective_plan(model, sharders, world())
    return DistributedModelParallel(model, device=CPU, sharders=sharders, plan=plan)


def expected_losses(steps: Sequence[Sequence[Sequence[Sequence[Sequence[int]]]]]) -> list[float]:
    """Return the losses of a model in float64 whose rows are in a dictionary; `steps` are step -> rank -> ids."""
    rows, over, bias = Rows(), torch.full((len(SEQUENCES), DIM), 0.3, dtype=torch.float64), 0.0
    first, losses = torch.full((DIM,), START, dtype=torch.float64), list[float]()
    for ranks in steps:
        changes, of_over, of_bias, total = Rows(), torch.zeros_like(over), 0.0, 0.0
        number = len(ranks) * SAMPLES
        for ids in ranks:
            for bags in zip(*ids, strict=True):
                looked_up = [
                    (s, (int(table[1]), id), 1 + k / 4)
                    for s, (table, feature) in enumerate(SEQUENCES)
                    for k, id in enumerate(bags[int(feature[1])])
                ]
                inputs = torch.zeros_like(over)
                for s, key, weight in looked_up:
                    inputs[s] += weight * rows.get(key, first)
                output = float((inputs * over).sum()) + bias
                total += output**2 / number
                gradient = 2 * output / number
                of_over, of_bias = of_over + gradient * inputs, of_bias + gradient
                for s, key, weight in looked_up:
                    changes[key] = changes.get(key, 0) + gradient * weight * over[s]
        losses.append(total)
        rows |= {key: rows.get(key, first) - LR * change for key, change in changes.items()}
        over, bias = over - LR * of_over, bias - LR * of_bias
    return losses
