"""Two towers, whose negatives are the items of the global batch, gathered from all ranks in the forward."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.nn.functional import all_gather
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.programs.clicks import clicks, collection, start, train

ROWS = {"user": 500, "history": 300, "item": 300, "words": 200}
DIM, SAMPLES, TEMPERATURE = 16, 16, 0.2


class InBatchLoss(nn.Module):
    """The loss of a rank's users among the items of all ranks."""

    def forward(self, query: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        """Return the loss [] of [SAMPLES, DIM] users and the items that they clicked."""
        every = torch.cat(all_gather(nn.functional.normalize(candidate)))
        logits = nn.functional.normalize(query) @ every.T / TEMPERATURE
        own = torch.arange(SAMPLES, device=logits.device) + dist.get_rank() * SAMPLES
        return nn.functional.cross_entropy(logits, own)


class TwoTower(nn.Module):
    """Embeds users near the items that they clicked."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.collection = collection(ROWS, DIM)
        self.query = MLP(2 * DIM, [32, DIM], activation=torch.tanh, device=device)
        self.candidate = MLP(2 * DIM, [32, DIM], activation=torch.tanh, device=device)
        self.loss = InBatchLoss()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.collection(batch.sparse_features).to_dict()
        query = self.query(torch.cat([pooled["user"], pooled["history"]], dim=1))
        candidate = self.candidate(torch.cat([pooled["item"], pooled["words"]], dim=1))
        loss = self.loss(query, candidate)
        return loss, loss.detach()


def likes(steps: int) -> Iterator[Batch]:
    """Yield batches in which each user clicks the item of the same number."""
    for batch in clicks(ROWS, 1, 1, SAMPLES, steps):
        ids = batch.sparse_features.values().view(len(ROWS), SAMPLES)
        ids[2] = ids[0] % ROWS["item"]
        yield replace(
            batch, sparse_features=KeyedJaggedTensor(list(ROWS), ids.view(-1), lengths=torch.ones(ids.numel()).int())
        )


def main(steps: int = 200) -> list[torch.Tensor]:
    device = start()
    torch.manual_seed(1)
    params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.2}
    sharder = EmbeddingBagCollectionSharder(params)
    model = DistributedModelParallel(TwoTower(device), device=device, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adagrad = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.02))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", adagrad)])
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    return train(pipeline, likes(steps), steps)
