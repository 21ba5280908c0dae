"""A small TorchRec model of one's own, trained with the embedding exchange that the command line names.

    torchrun --nproc-per-node 2 examples/own_model.py --backend pgas        # on GPUs, or on a CPU where there are none
    python examples/own_model.py                                            # one process

A tower of users and a tower of items each make a vector of pooled embeddings; the vectors' product is the logit of a
click. Under TorchRec alone (--backend stock) two lines differ: the sharder and the pipeline. docs/torchrec.md has the
details.

TorchRec's planner warns of a topology that it made itself and of its own estimates, and PyTorch of how TorchRec calls
DDP. Nothing follows from these warnings here.
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
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap import GraphTrainPipeline, OverlapEmbeddingBagCollectionSharder, constraints
from dlrm_overlap.launching import launcher, process_group

USER, ITEM = ("user", "history"), ("item", "words")  # the features of each tower
ROWS = {"user": 4000, "history": 1000, "item": 1000, "words": 400}  # of each feature's table
MOST_IDS = {"user": 1, "history": 8, "item": 1, "words": 4}  # of a bag
DIM, SAMPLES, TASTES = 32, 256, 4


class TwoTowers(nn.Module):
    """Predicts whether a user clicks an item."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        self.embedding = EmbeddingBagCollection(tables, device=torch.device("meta"))  # ranks make their own shards
        self.user = nn.Sequential(nn.Linear(DIM * len(USER), 64), nn.GELU(), nn.Linear(64, 32)).to(device)
        self.item = nn.Sequential(nn.Linear(DIM * len(ITEM), 64), nn.GELU(), nn.Linear(64, 32)).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss [] of a batch twice: with its graph, and without it for the pipeline to return."""
        pooled = self.embedding(batch.sparse_features).to_dict()  # by name: the order of the columns does not matter
        user = self.user(torch.cat([pooled[name] for name in USER], dim=1))
        item = self.item(torch.cat([pooled[name] for name in ITEM], dim=1))
        loss = nn.functional.binary_cross_entropy_with_logits((user * item).sum(dim=1), batch.labels)
        return loss, loss.detach()


def made_up(steps: int, rank: int) -> Iterator[Batch]:
    """Yield this rank's made-up batches. An id modulo TASTES is a taste, and users click items of their own taste."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        tastes = torch.randint(0, TASTES, (2, SAMPLES), generator=generator)  # of the users, of the items
        lengths, values = [], []
        for name, rows in ROWS.items():
            bags = torch.randint(0, MOST_IDS[name] + 1, (SAMPLES,), generator=generator)
            taste = tastes[0 if name in USER else 1].repeat_interleave(bags)
            values.append(torch.randint(0, rows // TASTES, taste.shape, generator=generator) * TASTES + taste)
            lengths.append(bags)
        ids = KeyedJaggedTensor(list(ROWS), torch.cat(values), lengths=torch.cat(lengths))
        yield Batch(torch.empty(SAMPLES, 0), ids, labels=(tastes[0] == tastes[1]).float())


def main() -> None:
    """Build the model, shard it and train it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["stock", "nccl", "pgas", "fused"], default="pgas")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    world = launcher.detect()  # torchrun, mpirun, srun, or this process alone
    device = process_group.find_device("auto", world.local_rank, world.source)
    process_group.init_process_group(world, device)  # and, on a GPU, streams of the right priority
    torch.manual_seed(0)
    logging.basicConfig()
    logging.getLogger("dlrm_overlap").setLevel(logging.INFO)  # says how many tables are exchanged

    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    is_stock = options.backend == "stock"
    sharders: list[ModuleSharder] = [EmbeddingBagCollectionSharder(fused_params)]
    if not is_stock:  # the first of two lines that change
        sharders = [OverlapEmbeddingBagCollectionSharder(fused_params, backend=options.backend)]

    towers = TwoTowers(device)
    planner = EmbeddingShardingPlanner(batch_size=SAMPLES, constraints=constraints(towers))
    plan = planner.collective_plan(towers, sharders, dist.group.WORLD)
    model = DistributedModelParallel(towers, device=device, plan=plan, sharders=sharders)

    dense = dict(in_backward_optimizer_filter(model.named_parameters()))  # what the backward does not update itself
    adagrad = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.03))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", adagrad)])
    # The second. Under nccl, whose steps are not captured, it hands them to TrainPipelineSparseDist.
    pipeline = (TrainPipelineSparseDist if is_stock else GraphTrainPipeline)(model, optimizer, device)

    batches = made_up(options.steps, world.rank)
    for step in range(1, options.steps + 1):
        loss = pipeline.progress(batches)
        if step % 10 == 0:
            dist.all_reduce(loss)
            if world.rank == 0:
                print(f"step {step}: loss {loss.item() / world.world_size:.6f}", flush=True)

    if isinstance(pipeline, GraphTrainPipeline):  # not needed where the process ends, as here
        pipeline.close()
    process_group.shutdown()


if __name__ == "__main__":
    main()
