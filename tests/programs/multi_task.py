"""Two tasks with the experts of PLE (Tang et al., RecSys 2020), dropout, a weighted loss for each task, and an
average of the weights.
"""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.programs.clicks import clicks, start

ROWS = {f"f_{i}": 20_000 + 50 * i for i in range(5)}
DIM, HIDDEN, DENSE = 8, 16, 4
WEIGHTS = {"click": 1.0, "like": 0.3}


def expert(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.GELU(), nn.Dropout(0.1))


class PLE(nn.Module):
    """Each task has experts and a gate, which weighs them and the shared ones."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.own = nn.ModuleDict({task: nn.ModuleList([expert(inputs), expert(inputs)]) for task in WEIGHTS})
        self.shared = nn.ModuleList([expert(inputs), expert(inputs)])
        self.gates = nn.ModuleDict({task: nn.Linear(inputs, 4) for task in WEIGHTS})
        self.towers = nn.ModuleDict({task: nn.Linear(HIDDEN, 1) for task in WEIGHTS})

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits [b] of each task."""
        shared, logits = [each(features) for each in self.shared], {}
        for task, own in self.own.items():
            experts = torch.stack([*(each(features) for each in own), *shared], dim=1)
            gate = torch.softmax(self.gates[task](features), dim=1).unsqueeze(1)
            logits[task] = self.towers[task](torch.bmm(gate, experts).squeeze(1)).squeeze(1)
        return logits


class MultiTask(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t_{key}", embedding_dim=DIM, num_embeddings=n, feature_names=[key], pooling=pooling
            )
            for (key, n), pooling in zip(ROWS.items(), 4 * [PoolingType.SUM] + [PoolingType.MEAN], strict=True)
        ]
        self.collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.ple = PLE(DENSE + DIM * len(ROWS)).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted losses [2], whose sum the pipeline takes, and the losses."""
        pooled = self.collection(batch.sparse_features)
        logits = self.ple(torch.cat([batch.dense_features, pooled.values()], dim=1))
        likes = (batch.dense_features[:, 0] > 0.5).float() * batch.labels
        losses = [
            nn.functional.binary_cross_entropy_with_logits(logits["click"], batch.labels),
            nn.functional.binary_cross_entropy_with_logits(logits["like"], likes),
        ]
        weighted = torch.stack([weight * loss for weight, loss in zip(WEIGHTS.values(), losses, strict=True)])
        return weighted, torch.stack(losses).detach()


def main(steps: int = 200) -> list[torch.Tensor]:
    """Train, and return the losses [2] of each step, and the norms of the averaged weights."""
    device = start()
    torch.manual_seed(1)
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05}
    sharder = EmbeddingBagCollectionSharder(params)
    model = DistributedModelParallel(MultiTask(device), device=device, sharders=[sharder])
    average = AveragedModel(model.module.ple, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.003))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", adam)])
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    batches, losses = clicks(ROWS, 4, DENSE, 32, steps), []
    while True:
        try:
            losses.append(pipeline.progress(batches).clone())
        except StopIteration:
            return [*losses, *(each.detach().norm() for each in average.parameters())]
        average.update_parameters(model.module.ple)
