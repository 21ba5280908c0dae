"""Trains a TorchRec model whose ids are 64-bit integers that are not known beforehand (docs/any_ids.md).

    torchrun --nproc-per-node 2 examples/any_ids.py             # on GPUs, or on a CPU if there are none
    torchrun --nproc-per-node 2 examples/any_ids.py --backend torchrec    # on GPUs only
    torchrun --nproc-per-node 2 examples/any_ids.py --module mch    # by TorchRec's older module of such ids

Users and items come and go; a user clicks the items of its own taste. Only two lines differ from TorchRec
(--backend torchrec): the sharder and the pipeline.
"""

import argparse
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap import GraphTrainPipeline, OverlapManagedCollisionEmbeddingBagCollectionSharder, constraints
from dlrm_overlap.launching import launcher, process_group
from dlrm_overlap.launching.library_warnings import hide_library_warnings

FEATURES, ROWS, BUCKETS = ("user", "item"), 8192, 64
DIM, SAMPLES, TASTES, ALIVE = 16, 256, 2, 400  # so many users and items are alive at a time


def mpzch(name: str) -> ManagedCollisionModule:
    """Return a module that gives an id its row when it is first seen."""
    return HashZchManagedCollisionModule(
        zch_size=ROWS,
        device=torch.device("meta"),
        total_num_buckets=BUCKETS,
        name=name,
        eviction_policy_name=HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
        eviction_config=HashZchEvictionConfig(features=[], single_ttl=24),  # hours
    )


def mch(name: str) -> ManagedCollisionModule:
    """Return a module that gives ids rows every few steps, to those that were seen last."""
    return MCHManagedCollisionModule(
        zch_size=ROWS,
        device=torch.device("meta"),
        eviction_policy=LRU_EvictionPolicy(),
        eviction_interval=5,
        input_hash_size=2**62,
        name=name,
        buckets=BUCKETS,
    )


class Clicks(nn.Module):
    """Predicts whether a user clicks an item."""

    def __init__(self, device: torch.device, make_module: Callable[[str], ManagedCollisionModule]) -> None:
        super().__init__()
        meta = torch.device("meta")
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name])
            for name in FEATURES
        ]
        modules = {table.name: make_module(table.name) for table in tables}
        self.embedding = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables, device=meta), ManagedCollisionCollection(modules, tables)
        )
        self.scale = nn.Parameter(torch.ones((), device=device))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss [] twice: with its graph, and detached, for the pipeline to return."""
        pooled, _ = self.embedding(batch.sparse_features)
        by_name = pooled.to_dict()
        logits = self.scale * (by_name["user"] * by_name["item"]).sum(dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def synthetic_batches(steps: int, rank: int) -> Iterator[Batch]:
    """Yield this rank's batches. In every step some users and items leave, and others come, with ids of 63 bits."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        numbers = torch.randint(0, ALIVE, (len(FEATURES), SAMPLES), generator=generator) + step
        labels = (numbers[0] % TASTES == numbers[1] % TASTES).float()
        ids = numbers * 4_294_967_311 * 1_000_003 % (2**63 - 1)
        lengths = torch.ones(len(FEATURES) * SAMPLES, dtype=torch.int64)
        yield Batch(torch.empty(SAMPLES, 0), KeyedJaggedTensor(list(FEATURES), ids.flatten(), lengths=lengths), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["torchrec", "pgas", "fused"], default="pgas")
    parser.add_argument("--module", choices=["mpzch", "mch"], default="mpzch")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    hide_library_warnings()  # what TorchRec and PyTorch warn of in their own code
    world = launcher.detect()  # torchrun, mpirun, srun, or this process alone
    device = process_group.find_device("auto", world.local_rank, world.source)
    process_group.init_process_group(world, device)  # also sets streams' priorities on a GPU
    torch.manual_seed(0)
    logging.basicConfig()
    logging.getLogger("dlrm_overlap").setLevel(logging.INFO)  # logs how many tables are exchanged

    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.3}
    is_torchrec = options.backend == "torchrec"
    tables = EmbeddingBagCollectionSharder(fused_params)
    sharders: list[ModuleSharder] = [ManagedCollisionEmbeddingBagCollectionSharder(tables)]
    if not is_torchrec:  # the first of two lines that differ
        sharders = [OverlapManagedCollisionEmbeddingBagCollectionSharder(fused_params, backend=options.backend)]

    clicks = Clicks(device, mch if options.module == "mch" else mpzch)
    topology = Topology(world.world_size, device.type, local_world_size=world.local_world_size)
    planner = EmbeddingShardingPlanner(topology, batch_size=SAMPLES, constraints=constraints(clicks))
    plan = planner.collective_plan(clicks, sharders, dist.group.WORLD)
    model = DistributedModelParallel(clicks, device=device, plan=plan, sharders=sharders)

    dense = dict(in_backward_optimizer_filter(model.named_parameters()))  # not updated in the backward
    sgd = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.03))
    optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", sgd)])
    pipeline = (TrainPipelineSparseDist if is_torchrec else GraphTrainPipeline)(model, optimizer, device)  # the second

    batches = synthetic_batches(options.steps, world.rank)
    for step in range(1, options.steps + 1):
        loss = pipeline.progress(batches)
        if step % 20 == 0:
            dist.all_reduce(loss)
            if world.rank == 0:
                print(f"step {step}: loss {loss.item() / world.world_size:.6f}", flush=True)

    if isinstance(pipeline, GraphTrainPipeline):  # optional if the process ends, as here
        pipeline.close()
    process_group.shutdown()


if __name__ == "__main__":
    main()
