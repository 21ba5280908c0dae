"""Two collections, of users and of items, which take the parts of one KeyedJaggedTensor that is split."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.programs.clicks import clicks, start

USERS = {"user": 500, "history": 300, "city": 100}
ITEMS = {"item": 20_000, "words": 200}


def collection(rows: dict[str, int], dim: int) -> EmbeddingBagCollection:
    """Return a collection of a table for each feature."""
    tables = [
        EmbeddingBagConfig(name=f"t_{key}", embedding_dim=dim, num_embeddings=count, feature_names=[key])
        for key, count in rows.items()
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


class Twins(nn.Module):
    """The product of a vector of the user and one of the item."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.users, self.items = collection(USERS, dim=16), collection(ITEMS, dim=8)
        self.user = nn.Sequential(nn.Linear(3 * 16, 32), nn.Tanh(), nn.Linear(32, 16)).to(device)
        self.item = nn.Sequential(nn.Linear(2 * 8, 32), nn.Tanh(), nn.Linear(32, 16)).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss twice."""
        users, items = batch.sparse_features.split([len(USERS), len(ITEMS)])
        user, item = self.user(self.users(users).values()), self.item(self.items(items).values())
        loss = nn.functional.binary_cross_entropy_with_logits((user * item).sum(dim=1), batch.labels)
        return loss, loss.detach()


def main(steps: int = 200) -> list[torch.Tensor]:
    """Train, and return the loss of each step."""
    device = start()
    torch.manual_seed(1)
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05}
    sharder = EmbeddingBagCollectionSharder(params)
    model = DistributedModelParallel(Twins(device), device=device, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adagrad = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.02))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", adagrad)])
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    batches, losses = clicks(USERS | ITEMS, 3, 1, 32, steps), []
    for _ in range(steps):
        losses.append(pipeline.progress(batches).clone())
    return losses


if __name__ == "__main__":
    main()
