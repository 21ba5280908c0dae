"""TorchRec's tutorial: its DLRM, its random data set in a DataLoader, and the optimizer in the backward."""

import torch
from torch.utils.data import DataLoader
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.programs.clicks import start

KEYS = ["product", "user", "shop", "time"]


def main(steps: int = 200) -> list[torch.Tensor]:
    device = start()
    torch.manual_seed(1)
    tables = [
        EmbeddingBagConfig(name=f"t_{key}", embedding_dim=16, num_embeddings=1000, feature_names=[key]) for key in KEYS
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    dlrm = DLRM(collection, 8, dense_arch_layer_sizes=[32, 16], over_arch_layer_sizes=[32, 1], dense_device=device)
    model = DLRMTrain(dlrm)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.05})
    model = DistributedModelParallel(module=model, device=device, sharders=get_default_sharders())

    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.02))
    pipeline = TrainPipelineSparseDist(model, optimizer, device)

    data = RandomRecDataset(KEYS, batch_size=32, hash_size=1000, ids_per_feature=2, num_dense=8, manual_seed=3)
    batches = iter(DataLoader(data, batch_size=None, batch_sampler=None))
    losses = []
    for step in range(steps):
        loss, _logits, _labels = pipeline.progress(batches)
        losses.append(loss.clone())
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    return losses
