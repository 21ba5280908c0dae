"""A small model with tables of any id, and what it must give: a dictionary of rows in float64."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import IdTablesConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_tables.module import IdTableModule
from dlrm_overlap.embedding.id_tables.sharder import CACHED, OverlapManagedCollisionEmbeddingBagCollectionSharder
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.ids.id_map import EMPTY
from tests.conftest import read_metrics, run_cli
from tests.distributed.captured import captures
from tests.distributed.models import CPU, open_pipeline, world

DIM, SAMPLES, FEATURES = 8, 6, ("f0", "f1")
LR, START = 0.05, 0.1
MODULES = "tables._managed_collision_collection._managed_collision_modules."  # of a state dict
Rows = dict[tuple[int, int], torch.Tensor]


class Step(NamedTuple):
    losses: list[float]
    sharded: DistributedModelParallel

    @property
    def id_map(self) -> Any:
        (found,) = [each.id_map for each in self.sharded.modules() if isinstance(each, ExchangingModule)]
        return found


def start_at(rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return rows.fill_(START)


def zch_module(name: str, rows: int, **given: Any) -> HashZchManagedCollisionModule:
    """Return TorchRec's module of a table, which keeps ids for an hour."""
    keep = HashZchEvictionConfig(features=list(FEATURES), single_ttl=1)
    arguments = {"total_num_buckets": 4, "eviction_policy_name": HashZchEvictionPolicyName.LRU_EVICTION}
    return HashZchManagedCollisionModule(
        zch_size=rows, device=CPU, name=name, eviction_config=keep, **arguments | given
    )


def own_module(name: str, rows: int, **given: Any) -> IdTableModule:
    return IdTableModule(name, rows, CPU, IdTablesConfig(**given))


def weighted_sum(inputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, 1)
    with torch.no_grad():
        layer.weight.fill_(0.3)
        layer.bias.zero_()
    return layer


class Model(nn.Module):
    """Returns the loss and the outputs [b]: the weighted sum of two pooled embeddings."""

    def __init__(self, rows: int, make_module: Any, init_fn: Any = start_at, **given: Any) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=rows, embedding_dim=DIM, feature_names=[feature], init_fn=init_fn
            )
            for i, feature in enumerate(FEATURES)
        ]
        modules = {config.name: make_module(config.name, rows, **given) for config in configs}
        self.tables = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(configs, device=CPU), ManagedCollisionCollection(modules, configs)
        )
        self.over = weighted_sum(len(FEATURES) * DIM)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, _ = self.tables(batch.sparse)
        output = self.over(pooled.values()).squeeze(1)
        return output.square().mean(), output.detach()


def shard(
    model: Model,
    backend: str = "pgas",
    cached: Mapping[str, float] = MappingProxyType({}),
    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
    **fused: Any,
) -> DistributedModelParallel:
    """Shard a model; `cached` has the tables in host memory, and which shares of their rows have slots."""
    fused |= {"optimizer": optimizer, "learning_rate": LR}
    return shard_by(OverlapManagedCollisionEmbeddingBagCollectionSharder(fused, backend=backend), model, cached)


def shard_by(
    sharder: Any, model: nn.Module, cached: Mapping[str, float] = MappingProxyType({})
) -> DistributedModelParallel:
    planner = EmbeddingShardingPlanner(topology=Topology(dist.get_world_size(), "cpu"))
    plan = planner.collective_plan(model, [sharder], world())
    of_tables: Any = plan.plan["tables"]
    for name, share in cached.items():  # on CPUs the planner knows no caches
        of_tables[name].compute_kernel, of_tables[name].cache_params = CACHED, CacheParams(load_factor=share)
    return DistributedModelParallel(model, device=CPU, sharders=[sharder], plan=plan)


def batch_of(ids: Sequence[Sequence[Sequence[int]]]) -> Batch:
    """Return a batch of `ids`: feature -> sample -> bag."""
    bags = [bag for feature in ids for bag in feature]
    values = torch.tensor([id for bag in bags for id in bag], dtype=torch.int64)
    sparse = KeyedJaggedTensor(
        [f"f{i}" for i in range(len(ids))], values, lengths=torch.tensor([len(bag) for bag in bags])
    )
    samples = len(ids[0])
    return Batch(torch.zeros(samples, 1), sparse, torch.zeros(samples))


def draw(rank: int, step: int, pool: int = 60, seed: int = 0, features: int = len(FEATURES)) -> list[list[list[int]]]:
    """Return the ids of a rank's batch: feature -> sample -> bag."""
    known = torch.randint(0, 2**62, (pool,), generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        [
            known[
                torch.randint(pool, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator)
            ].tolist()
            for _ in range(SAMPLES)
        ]
        for _ in range(features)
    ]


def draw_shared(rank: int, step: int) -> tuple[list[list[list[int]]], Batch]:
    """Return ids as `draw` does, and a variable batch of them, in which samples share bags."""
    ids, generator = draw(rank, step), torch.Generator().manual_seed(10 * step + rank)
    sizes = [3 + rank, 5 - step % 3]
    inverse = torch.stack([torch.randint(size, (SAMPLES,), generator=generator) for size in sizes])
    bags = [bag for of, size in zip(ids, sizes, strict=True) for bag in of[:size]]
    sparse = KeyedJaggedTensor(
        list(FEATURES),
        torch.tensor([id for bag in bags for id in bag]),
        lengths=torch.tensor([len(bag) for bag in bags]),
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(list(FEATURES), inverse),
    )
    of_samples = [[of[number] for number in numbers] for of, numbers in zip(ids, inverse.tolist(), strict=True)]
    return of_samples, Batch(torch.zeros(SAMPLES, 1), sparse, torch.zeros(SAMPLES))


def train(
    sharded: DistributedModelParallel,
    batches: Sequence[Batch],
    pipeline: str = "none",
    segment: int | None = None,
    before_step: Callable[[int], None] = lambda _: None,
) -> Step:
    """Take a step on each of `batches`; losses are means over all ranks.

    `pipeline` is as in `models.open_pipeline`, or `captured`. After every `segment` steps the pipeline is empty.
    """
    if pipeline == "captured":
        with captures() as taken:
            step = train(sharded, batches, "graph", segment, before_step)
        assert taken["replayed"] > min(len(batches) - 6, 3), "steps are captured after the first ones"
        return step
    dense = {name: each for name, each in sharded.named_parameters() if "over." in name}
    keyed = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=LR))
    optimizer = CombinedOptimizer([sharded.fused_optimizer, ("dense", keyed)])
    steps, outputs = open_pipeline(pipeline, sharded, optimizer), list[torch.Tensor]()
    for part in batched(batches, segment or len(batches)):
        remaining = iter(part)
        for _ in part:
            before_step(len(outputs))
            outputs.append(steps.progress(remaining).clone())
    losses = torch.stack([output.double().square().mean() for output in outputs])
    dist.all_reduce(losses)
    return Step((losses / dist.get_world_size()).tolist(), sharded)


def check_loads_between_steps(make: Callable[[], DistributedModelParallel], batches: Sequence[Batch]) -> None:
    """The next step begins with a state that was loaded before it, although its ids had been sent before."""
    losses = dict[str, list[float]]()
    for pipeline in ("none", "graph", *["captured"] * INTERPRETED):
        sharded = make()
        saved = deepcopy(dict(sharded.state_dict()))

        def load(step: int, sharded: Any = sharded, saved: Any = saved) -> None:
            torch.manual_seed(step)
            if step in (3, len(batches) - 3):
                sharded.load_state_dict(OrderedDict(deepcopy(saved)))

        losses[pipeline] = train(sharded, batches, pipeline, before_step=load).losses
        assert losses[pipeline] == pytest.approx(losses["none"], rel=1e-6), pipeline


def batched(batches: Sequence[Batch], size: int) -> Iterator[Sequence[Batch]]:
    for first in range(0, len(batches), size):
        yield batches[first : first + size]


def expected_losses(
    steps: Sequence[Sequence[Sequence[Sequence[Sequence[int]]]]],
    tables: Sequence[int] = range(len(FEATURES)),
    growth: float = 0.0,
) -> list[float]:
    """Return the losses of a model in float64 whose rows are in a dictionary; `steps` are step -> rank -> ids.

    `tables` has the table of each feature. The k-th row of a bag is weighed by 1 + k * growth.
    """
    rows, over, bias = Rows(), torch.full((len(tables), DIM), 0.3, dtype=torch.float64), 0.0
    first, losses = torch.full((DIM,), START, dtype=torch.float64), list[float]()
    for ranks in steps:
        changes, of_over, of_bias, total = Rows(), torch.zeros_like(over), 0.0, 0.0
        number = len(ranks) * SAMPLES
        for ids in ranks:
            for bags in zip(*ids, strict=True):
                looked_up = [
                    (feature, (table, id), 1 + growth * k)
                    for feature, (table, bag) in enumerate(zip(tables, bags, strict=True))
                    for k, id in enumerate(bag)
                ]
                inputs = torch.zeros_like(over)
                for feature, key, weight in looked_up:
                    inputs[feature] += weight * rows.get(key, first)
                output = float((inputs * over).sum()) + bias
                total += output**2 / number
                gradient = 2 * output / number
                of_over, of_bias = of_over + gradient * inputs, of_bias + gradient
                for feature, key, weight in looked_up:
                    changes[key] = changes.get(key, 0) + gradient * weight * over[feature]
        losses.append(total)
        rows |= {key: rows.get(key, first) - LR * change for key, change in changes.items()}
        over, bias = over - LR * of_over, bias - LR * of_bias
    return losses


def check_torchrec_finds_ids(state: Mapping[str, Any], table: str, rows: int) -> None:
    """Check that TorchRec's operator finds, in what a state dict has, each id where our map has it."""
    (mine,) = state[f"{MODULES}{table}._hash_zch_identities"].local_shards()
    ids = mine.tensor.flatten()
    size, here = rows // 4, ids[ids != EMPTY]
    assert len(here) > 10
    bucket = here % 4 - mine.metadata.shard_offsets[0] // size
    found, _ = torch.ops.fbgemm.zero_collision_hash(
        here, ids.view(-1, 1), 128, True, -1, True, torch.full_like(here, size), bucket * size
    )
    assert torch.equal(found, (ids != EMPTY).nonzero().flatten())


def check_resumes_on_fewer_ranks(folder: Path, *argv: str) -> None:
    """Check that a run that resumes ends with the same bits; on one rank instead of two, with the same losses but for
    rounding.
    """
    keys = ("--log.dir", str(folder), "--checkpoint.every", "20", "--checkpoint.keep", "3")
    losses = {}
    for name, ranks, resume in (("whole", 2, "never"), ("again", 2, "step_20"), ("alone", 1, "step_20")):
        start = str(folder / "whole" / "checkpoints" / resume) if resume != "never" else resume
        steps = ("--train.steps", "40", "--checkpoint.resume", start, "--log.name", name, "--nproc", str(ranks))
        result = run_cli(*argv, *keys, *steps)
        assert result.returncode == 0, result.stderr
        losses[name] = read_metrics(folder / name, "train/loss")
    later = [25, 30, 35, 40]
    assert [losses["again"][step] for step in later] == [losses["whole"][step] for step in later]
    assert [losses["alone"][step] for step in later] == pytest.approx(
        [losses["whole"][step] for step in later], rel=1e-4
    )
