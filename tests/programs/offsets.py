"""Bags of any length, of which the model reads offsets and ids as well; the last batch is short."""

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

ROWS = {"user": 500, "viewed": 300, "bought": 300}
DIM, MOST = 8, 20


class Reader(nn.Module):
    """Knows how many items a user has viewed, and which ones last."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=DIM, num_embeddings=rows, feature_names=[key])
            for key, rows in ROWS.items()
        ]
        self.collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.recent = nn.Embedding(ROWS["viewed"] + 1, DIM, padding_idx=0, device=device)
        inputs = (len(ROWS) + 1) * DIM + len(ROWS)
        self.over = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss twice."""
        ids = batch.sparse_features
        pooled = self.collection(ids)
        counts = torch.diff(ids.offsets()).view(len(ROWS), -1).T.float()
        viewed = ids["viewed"].to_padded_dense(desired_length=4, padding_value=-1.0)
        recent = self.recent(viewed.long() + 1).mean(dim=1)
        features = [pooled.values() / (1 + counts.sum(dim=1, keepdim=True)), recent, counts / MOST]
        logits = self.over(torch.cat(features, dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def main(steps: int = 200) -> list[torch.Tensor]:
    """Train, and return the loss of each step."""
    device = start()
    torch.manual_seed(1)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 5.0}
    sharder = EmbeddingBagCollectionSharder(params)
    model = DistributedModelParallel(Reader(device), device=device, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adagrad = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.02))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", adagrad)])
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    def batches():
        yield from clicks(ROWS, MOST, 1, 32, steps - 1)
        yield from clicks(ROWS, MOST, 1, 11, 1, seed=1)

    iterator, losses = batches(), []
    while True:
        try:
            losses.append(pipeline.progress(iterator).clone())
        except StopIteration:
            return losses


if __name__ == "__main__":
    main()
