"""Gradients of four batches accumulated for one step of the dense optimizer, and clipped."""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.programs.clicks import clicks, collection, start, train

ROWS = {f"f_{i}": 20_000 for i in range(5)}
DIM, DENSE, EVERY = 8, 4, 4


class Accumulating(OptimizerWrapper):
    """Steps with the clipped sum of the gradients of `EVERY` batches."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.calls % EVERY == 0:
            self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % EVERY == 0:
            torch.nn.utils.clip_grad_norm_(list(self.params.values()), max_norm=1.0)
            super().step(closure)


class Ranker(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.collection = collection(ROWS, DIM)
        inputs = DENSE + DIM * len(ROWS)
        self.over = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.collection(batch.sparse_features)
        logits = self.over(torch.cat([batch.dense_features, pooled.values()], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def main(steps: int = 200) -> list[torch.Tensor]:
    device = start()
    torch.manual_seed(1)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    sharder = EmbeddingBagCollectionSharder(params)
    model = DistributedModelParallel(Ranker(device), device=device, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", Accumulating(adam))])
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    return train(pipeline, clicks(ROWS, 3, DENSE, 32, steps), steps)
