"""DeepFM from TorchRec's own parts, whose dense part the user has compiled, under a schedule of torch's own."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.deepfm import DeepFM, FactorizationMachine
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.programs.clicks import clicks, collection, start

ROWS = {f"f_{i}": 20_000 for i in range(6)}
DIM, DENSE = 8, 5
COMPILER = "inductor" if torch.cuda.is_available() else "aot_eager"  # the latter needs no C++ compiler


class Interaction(nn.Module):
    """Factorization machine and deep layers on the same embeddings."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.numbers = nn.Linear(DENSE, DIM, device=device)
        inputs = DIM * (len(ROWS) + 1)
        layers = nn.Sequential(nn.Linear(inputs, 32, device=device), nn.Tanh(), nn.Linear(32, 16, device=device))
        self.machine, self.deep = FactorizationMachine(), DeepFM(dense_module=layers)
        self.over = nn.Linear(1 + 16 + DIM, 1, device=device)

    def forward(self, dense: torch.Tensor, embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits [b] of numbers and pooled embeddings."""
        numbers = torch.tanh(self.numbers(dense))
        every = [numbers, *embeddings]
        return self.over(torch.cat([self.machine(every), self.deep(every), numbers], dim=1)).squeeze(1)


class Click(nn.Module):
    """Predicts a click."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.collection = collection(ROWS, DIM)
        self.logits = torch.compile(Interaction(device), backend=COMPILER)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the loss, and what TorchRec's metrics would take."""
        pooled = self.collection(batch.sparse_features).to_dict()
        logits = self.logits(batch.dense_features, [pooled[key] for key in ROWS])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), torch.sigmoid(logits).detach())


def main(steps: int = 200) -> list[torch.Tensor]:
    """Train, and return the loss of each step."""
    device = start()
    torch.manual_seed(1)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 5.0}
    sharder = EmbeddingBagCollectionSharder(params)
    model = DistributedModelParallel(Click(device), device=device, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    sgd = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", sgd)])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=steps)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    batches, losses = clicks(ROWS, 2, DENSE, 32, steps), []
    for _ in range(steps):
        loss, _ = pipeline.progress(batches)
        losses.append(loss.clone())
        scheduler.step()
    return losses
