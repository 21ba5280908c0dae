"""A user's history of items, whose order matters, with pooled features and a data-parallel table."""

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.programs.clicks import clicks, start, train

ROWS = {"user": 500, "country": 20, "history": 2000}
MOST_IDS, DIM = 5, 16


class Attends(nn.Module):
    """A user's pooled embedding attends to the history, whose rows have vectors of their positions added."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        pooled = [
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=DIM, num_embeddings=ROWS[key], feature_names=[key])
            for key in ("user", "country")
        ]
        rows = EmbeddingConfig(
            name="t_history", embedding_dim=DIM, num_embeddings=ROWS["history"], feature_names=["history"]
        )
        self.pooled = EmbeddingBagCollection(tables=pooled, device=torch.device("meta"))
        self.histories = EmbeddingCollection(tables=[rows], device=torch.device("meta"))
        self.position = nn.Parameter(torch.randn(MOST_IDS, DIM, device=device) / 4)
        self.over = nn.Sequential(nn.Linear(3 + 3 * DIM, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, histories = self.pooled(batch.sparse_features), self.histories(batch.sparse_features)
        user, country = pooled["user"], pooled["country"]
        rows = histories["history"].to_padded_dense(MOST_IDS) + self.position
        found = nn.functional.scaled_dot_product_attention(user[:, None], rows, rows)[:, 0]
        logit = self.over(torch.cat([batch.dense_features, user, country, found], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logit, batch.labels)
        return loss, loss.detach()


def main(steps: int = 200) -> list[torch.Tensor]:
    device = start()
    torch.manual_seed(1)
    model = Attends(device)
    for collection in (model.pooled, model.histories):
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.05})
    planner = EmbeddingShardingPlanner(
        topology=Topology(dist.get_world_size(), device.type),
        constraints={
            "t_user": ParameterConstraints(sharding_types=["table_wise"]),
            "t_country": ParameterConstraints(sharding_types=["data_parallel"]),
            "t_history": ParameterConstraints(sharding_types=["row_wise"]),
        },
    )
    sharders = get_default_sharders()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adagrad = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.02))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", adagrad)])
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    return train(pipeline, clicks(ROWS, MOST_IDS, 3, 32, steps), steps)
