"""Trains your own small TorchRec model with an embedding backend of your choice.

    torchrun --nproc-per-node 2 examples/own_model.py                       # on GPUs, or on a CPU if there are none
    python examples/own_model.py                                            # one process

The dot product of a user vector and an item vector is the logit of a click. Only two lines differ from TorchRec
(--backend torchrec): the sharder and the pipeline (docs/torchrec.md).
"""

import argparse
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap import GraphTrainPipeline, OverlapEmbeddingBagCollectionSharder, constraints
from dlrm_overlap.launching import launcher, process_group
from dlrm_overlap.launching.library_warnings import hide_library_warnings

USER, ITEM = ("user", "history"), ("item", "words")  # the features of each tower
ROWS = {"user": 4000, "history": 1000, "item": 1000, "words": 400}  # rows of each feature's table
MAX_IDS = {"user": 1, "history": 8, "item": 1, "words": 4}  # ids per bag
DIM, SAMPLES, TASTES = 32, 256, 4


class TwoTowers(nn.Module):
    """Predicts whether a user clicks an item."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        self.embedding = EmbeddingBagCollection(tables, device=torch.device("meta"))  # each rank creates its shards
        self.user = nn.Sequential(nn.Linear(DIM * len(USER), 64), nn.GELU(), nn.Linear(64, 32)).to(device)
        self.item = nn.Sequential(nn.Linear(DIM * len(ITEM), 64), nn.GELU(), nn.Linear(64, 32)).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss [] twice: with its graph, and detached, for the pipeline to return."""
        pooled = self.embedding(batch.sparse_features).to_dict()  # by name, independent of the order
        user = self.user(torch.cat([pooled[name] for name in USER], dim=1))
        item = self.item(torch.cat([pooled[name] for name in ITEM], dim=1))
        loss = nn.functional.binary_cross_entropy_with_logits((user * item).sum(dim=1), batch.labels)
        return loss, loss.detach()


def synthetic_batches(steps: int, rank: int) -> Iterator[Batch]:
    """Yield this rank's synthetic batches. An id modulo TASTES is a taste; users click items of their own taste."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        tastes = torch.randint(0, TASTES, (2, SAMPLES), generator=generator)  # of users and items
        lengths, values = [], []
        for name, rows in ROWS.items():
            bags = torch.randint(0, MAX_IDS[name] + 1, (SAMPLES,), generator=generator)
            taste = tastes[0 if name in USER else 1].repeat_interleave(bags)
            values.append(torch.randint(0, rows // TASTES, taste.shape, generator=generator) * TASTES + taste)
            lengths.append(bags)
        ids = KeyedJaggedTensor(list(ROWS), torch.cat(values), lengths=torch.cat(lengths))
        yield Batch(torch.empty(SAMPLES, 0), ids, labels=(tastes[0] == tastes[1]).float())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["torchrec", "nccl", "pgas", "fused"], default="pgas")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    hide_library_warnings()  # what TorchRec and PyTorch warn of in their own code
    world = launcher.detect()  # torchrun, mpirun, srun, or this process alone
    device = process_group.find_device("auto", world.local_rank, world.source)
    process_group.init_process_group(world, device)  # also sets streams' priorities on a GPU
    torch.manual_seed(0)
    logging.basicConfig()
    logging.getLogger("dlrm_overlap").setLevel(logging.INFO)  # logs how many tables are exchanged

    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    is_torchrec = options.backend == "torchrec"
    sharders: list[ModuleSharder] = [EmbeddingBagCollectionSharder(fused_params)]
    if not is_torchrec:  # the first of two lines that differ
        sharders = [OverlapEmbeddingBagCollectionSharder(fused_params, backend=options.backend)]

    towers = TwoTowers(device)
    topology = Topology(world.world_size, device.type, local_world_size=world.local_world_size)
    planner = EmbeddingShardingPlanner(topology, batch_size=SAMPLES, constraints=constraints(towers))
    plan = planner.collective_plan(towers, sharders, dist.group.WORLD)
    model = DistributedModelParallel(towers, device=device, plan=plan, sharders=sharders)

    dense = dict(in_backward_optimizer_filter(model.named_parameters()))  # not updated in the backward
    adagrad = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.03))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", adagrad)])
    # The second line. With nccl, whose steps are not captured, it falls back to TrainPipelineSparseDist.
    pipeline = (TrainPipelineSparseDist if is_torchrec else GraphTrainPipeline)(model, optimizer, device)

    batches = synthetic_batches(options.steps, world.rank)
    for step in range(1, options.steps + 1):
        loss = pipeline.progress(batches)
        if step % 10 == 0:
            dist.all_reduce(loss)
            if world.rank == 0:
                print(f"step {step}: loss {loss.item() / world.world_size:.6f}", flush=True)

    if isinstance(pipeline, GraphTrainPipeline):  # optional if the process ends, as here
        pipeline.close()
    process_group.shutdown()


if __name__ == "__main__":
    main()
