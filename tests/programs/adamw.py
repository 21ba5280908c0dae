"""AdamW with groups, clipping, a warm-up, and an average of the weights that evaluates in the end."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.programs.clicks import clicks, start

ROWS = {f"f_{i}": 20_000 for i in range(5)}
DIM, DENSE = 8, 6


class Ranker(nn.Module):
    """A normalised network of numbers and pooled embeddings."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=DIM, num_embeddings=rows, feature_names=[key])
            for key, rows in ROWS.items()
        ]
        self.collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        inputs = DENSE + DIM * len(ROWS)
        self.over = nn.Sequential(nn.BatchNorm1d(inputs), nn.Linear(inputs, 32), nn.SiLU(), nn.Linear(32, 1)).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss twice."""
        pooled = self.collection(batch.sparse_features)
        features = torch.cat([batch.dense_features, pooled.values()], dim=1)
        logits = self.over(features).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    """Return the parameters in two groups: biases and scales do not decay."""
    return [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.05},
        {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0},
    ]


def main(steps: int = 200) -> list[torch.Tensor]:
    """Train, and return the loss of each step and the sums of the averaged weights."""
    device = start()
    torch.manual_seed(1)
    params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.03}
    sharder = EmbeddingBagCollectionSharder(params)
    model = DistributedModelParallel(Ranker(device), device=device, sharders=[sharder])
    average = AveragedModel(model.module.over, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adamw = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.AdamW(groups(parameters), lr=0.01))
    clipped = GradientClippingOptimizer(adamw, clipping=GradientClipping.NORM, max_gradient=0.5)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=20, value=0.1)]
    warm = WarmupOptimizer(clipped, stages, lr=0.01)
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", warm)])
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    batches, losses = clicks(ROWS, 2, DENSE, 32, steps), []
    for _ in range(steps):
        losses.append(pipeline.progress(batches).clone())
        average.update_parameters(model.module.over)
    return [*losses, *(each.detach().float().norm() for each in average.parameters())]


if __name__ == "__main__":
    main()
