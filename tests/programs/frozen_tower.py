"""A pretrained tower, and a head that is trained on top of it."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.programs.clicks import clicks, collection, start, train

ROWS = {f"f_{i}": 20_000 for i in range(5)}
DIM, DENSE = 8, 10


class OnTop(nn.Module):
    """Numbers go through a frozen tower, whose running means do not change either."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.collection = collection(ROWS, DIM)
        self.tower = nn.Sequential(nn.Linear(DENSE, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, DIM)).to(device)
        self.tower.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(DIM * (len(ROWS) + 1), 32), nn.Tanh(), nn.Linear(32, 1)).to(device)

    def train(self, mode: bool = True) -> "OnTop":
        super().train(mode)
        self.tower.eval()
        return self

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.collection(batch.sparse_features)
        with torch.no_grad():
            content = self.tower(batch.dense_features)
        logits = self.head(torch.cat([content, pooled.values()], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def main(steps: int = 200) -> list[torch.Tensor]:
    device = start()
    torch.manual_seed(1)
    model = OnTop(device)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 5.0}
    sharder = EmbeddingBagCollectionSharder(params)
    model = DistributedModelParallel(model, device=device, sharders=[sharder])
    model.train()
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    trained = {name: each for name, each in dense.items() if each.requires_grad}
    sgd = KeyedOptimizerWrapper(trained, lambda parameters: torch.optim.SGD(parameters, lr=0.3))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", sgd)])
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    return train(pipeline, clicks(ROWS, 2, DENSE, 32, steps), steps)
