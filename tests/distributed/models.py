"""A TorchRec model to train under any sharder: its tables, its plan, and what some steps make of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    calculate_shard_sizes_and_offsets,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    placement,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.backends.cpu import CpuPush
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline

CPU = torch.device("cpu")
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
Tables = Mapping[str, tuple[int, int, list[str], PoolingType]]
"""table -> rows, dim, features, pooling"""
Shards = Mapping[str, Sequence[int] | ParameterShardingGenerator]
"""table -> ranks of its shards: one is table-wise, several are column-wise, none is data-parallel; or its sharding"""


class Table(NamedTuple):
    rows: int
    dim: int
    features: list[str]
    mean: bool
    kind: str
    """TorchRec's sharding type"""
    ranks: list[int]
    """of the shards, those of the first columns first"""
    cuts: int
    """shards that have the same rows"""
    cached: bool = False
    """whether the exchange caches its rows"""


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def table_configs(tables: Tables, rows: DataType = DataType.FP32) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=name, num_embeddings=count, embedding_dim=dim, feature_names=features, pooling=pooling, data_type=rows
        )
        for name, (count, dim, features, pooling) in tables.items()
    ]


class Model(nn.Module):
    """Two embedding modules, and a loss whose gradient differs in every element."""

    def __init__(self, tables: Tables, others: Tables, weighted: bool = False, rows: DataType = DataType.FP32) -> None:
        super().__init__()
        modules = []
        self.names: list[list[str]] = []
        for module in (tables, others):
            configs = table_configs(module, rows)
            modules.append(EmbeddingBagCollection(configs, is_weighted=weighted, device=torch.device("meta")))
            self.names.append([name for names in get_embedding_names_by_table(configs) for name in names])
        self.embedding, self.other = modules
        self.keys: list[list[str]] = []
        """of the last outputs, the other module's first"""
        self.dense = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.dense.weight)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        pooled, other = self.embedding(batch.sparse), self.other(batch.sparse)
        scale = self.dense(batch.dense)
        self.keys = [other.keys(), pooled.keys()]
        by_name = other.to_dict()  # waits for the later one first
        outputs = {name: by_name[name] for name in self.names[1]}
        by_name = pooled.to_dict()
        outputs.update({name: by_name[name] for name in self.names[0]})
        losses = [(output.square() * scale).sum() for output in outputs.values()]
        return torch.stack(losses).sum() * 0.01, {name: output.detach().clone() for name, output in outputs.items()}


def _sharding(ranks: Sequence[int] | ParameterShardingGenerator) -> ParameterShardingGenerator:
    if callable(ranks):
        return ranks
    if not ranks:
        return data_parallel()
    if len(ranks) == 1:
        return table_wise(ranks[0], compute_kernel="fused")
    return column_wise(list(ranks), compute_kernel="fused")


def sharding_of(table: Table) -> ParameterShardingGenerator:
    """Return what generates a table's sharding: TorchRec's functions lack some cuts that its planner makes."""
    if table.kind == "data_parallel":
        return data_parallel()

    def generate(parameter: Any, local: int, ranks: int, device: str, _: Any) -> ParameterSharding:
        width = table.dim // table.cuts
        cut = calculate_shard_sizes_and_offsets(parameter, ranks, local, table.kind, col_wise_shard_dim=width)
        devices = [placement(device, rank, local) for rank in table.ranks]
        shards = [ShardMetadata(offset, size, where) for size, offset, where in zip(*cut, devices, strict=True)]
        spec = EnumerableShardingSpec(shards)
        return ParameterSharding(table.kind, "fused_uvm_caching" if table.cached else "fused", table.ranks, spec)

    return generate


def make_plan(
    model: Model,
    tables: Shards,
    others: Shards,
    sharder: ModuleSharder,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str = "cpu",
) -> ShardingPlan:
    world_size = world_size or world().size()
    return ShardingPlan(
        {
            name: construct_module_sharding_plan(
                model.get_submodule(name),
                {table: _sharding(ranks) for table, ranks in shards.items()},
                sharder,
                local_size=local_size or world_size,
                world_size=world_size,
                device_type=device_type,
            )
            for name, shards in {"embedding": tables, "other": others}.items()
        }
    )


def open_pipeline(
    kind: str | Callable[..., Any],
    model: DistributedModelParallel,
    optimizer: Any,
    capacity: BatchCapacity | None = None,
    device: torch.device = CPU,
) -> Any:
    """Return TorchRec's simplest pipeline (`none`), its `sparse_dist`, ours (`graph`), or what `kind` makes."""
    if callable(kind):
        return kind(model, optimizer, device)
    if kind == "none":
        return TrainPipelineBase(model, optimizer, device)
    if kind == "sparse_dist":
        return TrainPipelineSparseDist(model, optimizer, device)
    return GraphTrainPipeline(model, optimizer, device, capacity=capacity)


def train(
    model: Model,
    plan: ShardingPlan,
    sharder: ModuleSharder,
    batches: Sequence[Batch],
    pipeline: str | Callable[..., Any] = "none",
    wrap: Callable[[CombinedOptimizer], Any] = lambda optimizer: optimizer,
    dense_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    before: Callable[[DistributedModelParallel, CombinedOptimizer], object] = lambda *_: None,
    after: Callable[[DistributedModelParallel, CombinedOptimizer], object] = lambda *_: None,
    capacity: BatchCapacity | None = None,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Take a step on each of `batches`, and return this rank's outputs, weights, states, and which exchanges it used.

    Args:
        wrap: makes the optimizer that the pipeline is given of the one of all parameters.
        dense_optimizer: of the dense parameters, at a learning rate of 0.1.
        before: called with the sharded model and the optimizer of all, before the first step.
        after: called with the same, after the last one.
        capacity: of the batches, for captured steps; None is learnt.
    """
    sharded = DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(world()), device=device, plan=plan, sharders=[sharder]
    )
    initialise_tables(sharded, seed=0)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    for parameter in dense.values():  # the data-parallel tables among them
        nn.init.uniform_(parameter.data, 0.5, 1.0, generator=torch.Generator(device).manual_seed(0))
    keyed = KeyedOptimizerWrapper(dense, lambda parameters: dense_optimizer(parameters, lr=0.1))
    combined = CombinedOptimizer([sharded.fused_optimizer, ("dense", keyed)])
    before(sharded, combined)
    optimizer = wrap(combined)
    steps, remaining = open_pipeline(pipeline, sharded, optimizer, capacity, device), iter(batches)
    outputs = []
    for _ in batches:
        outputs.append(steps.progress(remaining))
        optimizer.zero_grad()  # as a user's loop may; the pipelines do not need it
    after(sharded, combined)
    result = {
        "outputs": outputs,
        "weights": dict(local_tensors(sharded.state_dict())),
        "states": optimizer_states(sharded),
        "keys": model.keys,
        "exchanged": [_way(exchange) for exchange in exchanges(sharded)],
    }
    for exchange in exchanges(sharded):
        exchange.close()
    return result


def _way(exchange: Exchange) -> tuple[str, str, int]:
    """Return backend, backward and the number of parts of the gradient windows, 0 without any."""
    backward = exchange._open().backward
    parts = backward.gradients.parts if isinstance(backward, CpuPush) else 0
    return exchange.options.backend, type(backward).__name__, parts


def local_tensors(tensors: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of what this rank holds of each tensor."""
    for name, tensor in tensors.items():
        shards = [s.tensor for s in tensor.local_shards()] if isinstance(tensor, ShardedTensor) else [tensor]
        for i, shard in enumerate(shards):
            yield f"{name}, shard {i}", shard.clone()


def optimizer_states(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Return copies of what this rank holds of the states of the fused optimizers."""
    states = model.fused_optimizer.state_dict()["state"].items()
    return dict(local_tensors({f"{name}, {key}": state for name, each in states for key, state in each.items()}))


def draw_ids(
    generator: torch.Generator,
    rows: Mapping[str, int],
    lengths: Sequence[torch.Tensor],
    ids: torch.dtype,
    weights: torch.Tensor | None = None,
) -> KeyedJaggedTensor:
    """Draw ids of features, whose tables have `rows`, for bags of these lengths; and, of `weights`, one for each id."""
    drawn = [
        torch.randint(0, rows[key], (int(n.sum()),), generator=generator) for key, n in zip(rows, lengths, strict=True)
    ]
    values = torch.cat(drawn).to(ids)
    if weights is not None:
        weights = weights[torch.randint(len(weights), values.shape, generator=generator)]
    return KeyedJaggedTensor(list(rows), values, weights, lengths=torch.cat(list(lengths)).to(ids))
