"""Models with unpooled tables, trained under TorchRec and under the drop-in. Imports no pytest."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder, OverlapEmbeddingCollectionSharder
from dlrm_overlap.embedding.unpooled import UnpooledExchange
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from tests.distributed.models import Table, local_tensors, open_pipeline, optimizer_states, sharding_of, world

DIM = 8
TABLES = {  # table -> rows, features; f has two tables, x has none
    "shared": (20, ["f", "g"]),
    "columns": (30, ["h", "f"]),
    "rows": (13, ["k"]),
    "whole": (40, ["m"]),
}
ROWS = {"k": 13, "f": 20, "x": 5, "g": 20, "h": 30, "m": 40, "p": 25, "q": 6}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5},
    "dense_sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1},  # the dense parameters' rate
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 0.1},
    "rowwise_adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-3},
}
OPTIMIZERS["decay"] = {**OPTIMIZERS["rowwise_adagrad"], "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}


@dataclass(frozen=True)
class Case:
    """A model, how its tables are cut, and its batches."""

    plan: str = "mixed"
    """mixed, or one way for all tables; `tables` have their own"""
    bags: tuple[int, int] = (0, 5)
    """least and most ids of a sample's sequence"""
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """the same for single features"""
    samples: Sequence[int] = (4,)
    """of each rank, in turns"""
    optimizer: str = "sgd"
    kernel: str = "fused"
    """compute kernel of `TABLES`"""
    clipped: bool = False
    """whether gradients are clipped, many of them"""
    pooled: bool = False
    """whether there is a pooled collection, too, and data-parallel tables"""
    repeated: int = 0
    """how often an id is in another sequence of rank 0"""
    steps: int = 3
    longer: Mapping[int, int] = field(default_factory=dict)
    """step -> factor of the lengths of its sequences"""
    need_indices: bool = False
    rows: DataType = DataType.FP32
    few: int = 0
    """number of ids of which most are drawn; 0 for all"""
    tables: Mapping[str, Table] | None = None
    """used in place of `TABLES`, all of one dim"""
    features: Sequence[str] = tuple(ROWS)
    """in the order of the batches"""
    ids: torch.dtype = torch.int64
    variable_batch: bool = False
    """whether half of a feature's sequences are of several samples"""
    capacity: BatchCapacity | None = None
    """of captured steps; None is learnt"""
    nodes: int | Literal["auto"] = "auto"
    """emulated nodes"""

    @property
    def rows_of(self) -> dict[str, int]:
        """Feature -> number of rows."""
        if self.tables is None:
            return ROWS
        rows = {name: [t.rows for t in self.tables.values() if name in t.features] for name in self.features}
        return {name: min(each, default=ROWS.get(name, 3)) for name, each in rows.items()}


class Model(nn.Module):
    """Weighs every row by its position in its sequence, so that a wrong order gives another loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        tables = TABLES if case.tables is None else {name: (t.rows, t.features) for name, t in case.tables.items()}
        (dim,) = {DIM} if case.tables is None else {table.dim for table in case.tables.values()}
        configs = [
            EmbeddingConfig(rows, dim, name=name, feature_names=features, data_type=case.rows)
            for name, (rows, features) in tables.items()
        ]
        meta = torch.device("meta")
        self.sequences = EmbeddingCollection(configs, device=meta, need_indices=case.need_indices)
        if case.pooled:
            bags = [EmbeddingBagConfig(ROWS[key], dim, name=f"t_{key}", feature_names=[key]) for key in "pq"]
            self.pooled = EmbeddingBagCollection(bags, device=meta)
        self.dense = nn.Linear(3, dim, bias=False)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.sequences(batch.sparse)
        scale = self.dense(batch.dense)  # [b, D]
        pooled = self.pooled(batch.sparse) if hasattr(self, "pooled") else None
        return _loss_and_output(found, scale, pooled)


class _Pulled(torch.autograd.Function):
    """Returns 0, and a gradient of 3 for the padding after `count` rows, which must reach no row of a table."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, count: int) -> torch.Tensor:
        ctx.gradient = torch.zeros_like(values)
        ctx.gradient[count:] = 3.0
        return values.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient * gradients[0].to(ctx.gradient.dtype), None


@torch.fx.wrap
def _loss_and_output(found: Any, scale: torch.Tensor, pooled: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and all elements of the sequences without padding."""
    loss, given = scale.square().sum(), list[torch.Tensor]()
    if pooled is not None:
        by_key = pooled.to_dict()
        # By tanh, since squares of sums of repeated rows grow without limit in a few steps.
        loss = loss + sum((by_key[key] * scale).tanh().square().sum() for key in ("p", "q"))
    for _, each in sorted(found.items()):
        values, lengths = each.values(), each.lengths().long()
        sample = torch.repeat_interleave(lengths)
        position = torch.arange(1, len(sample) + 1, device=values.device)[:, None]
        given += [values[: len(sample)].detach(), lengths[: len(lengths) * bool(len(sample))]]
        if (ids := each.weights_or_none()) is not None:
            given.append(ids[: len(sample)])
        weighed = values[: len(sample)].float() * scale[sample] * (1 + position / max(1, len(sample)))
        loss = loss + weighed.square().sum() / max(1, len(sample))
        loss = loss + _Pulled.apply(values, len(sample))
    return loss, torch.cat([each.flatten().double() for each in given])


def make_plan(model: Model, case: Case, sharders: Sequence[Any], world_size: int, device: str) -> ShardingPlan:
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # fewer where ranks share a GPU
    fused: dict[str, Any] = {"compute_kernel": case.kernel}
    ways: dict[str, Any] = {
        "shared": table_wise(1 % world_size, **fused),
        "columns": column_wise([world_size - 1, 0], **fused),
        "rows": row_wise(**fused),
        "whole": table_wise(0, **fused),
    }
    if case.tables is not None:
        ways = {name: sharding_of(table) for name, table in case.tables.items()}
    elif case.plan == "data_parallel":
        ways["whole"] = data_parallel()
    elif case.plan != "mixed":
        every = {
            "table_wise": lambda i: table_wise(i % world_size, **fused),
            "column_wise": lambda i: column_wise([i % world_size, (i + 1) % world_size], **fused),
            "row_wise": lambda i: row_wise(**fused),
            "one_rank": lambda i: table_wise(world_size - 1, **fused),
        }[case.plan]
        ways = {name: every(i) for i, name in enumerate(TABLES)}
    plans = {}
    for name, module in model.named_children():
        if name == "pooled":
            ways = {"t_p": table_wise(0, **fused), "t_q": data_parallel()}
        if name in ("pooled", "sequences"):
            sharder = sharders[name == "pooled"]
            plans[name] = construct_module_sharding_plan(module, ways, sharder, local_size, world_size, device)
    return ShardingPlan(plans)


def batches(case: Case, rank: int, placeholder: bool) -> Iterator[Batch]:
    """Yield the batches of a rank.

    With `placeholder`, as TorchRec needs it, a batch without samples has one without ids, whose gradient is 0, and
    every sample has its own sequence: TorchRec loses gradients of a sequence that samples share.
    """
    generator = torch.Generator().manual_seed(rank)
    for step in range(case.steps):
        samples = case.samples[rank % len(case.samples)]
        empty = placeholder and samples == 0
        samples = 1 if empty else samples
        lengths, values = [], []
        for key, rows in case.rows_of.items():
            least, most = case.sizes.get(key, case.bags)
            bags = -(-samples // 2) if case.variable_batch else samples
            some = torch.randint(least, most + 1, (bags,), generator=generator)
            some *= case.longer.get(step, 1) * (not empty)
            if step == 0 and case.longer:  # from which the capacity is learnt
                some[:] = most * (not empty)
            ids = torch.randint(0, rows, (int(some.sum()),), generator=generator)
            if case.few:
                ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.98, ids % case.few, ids)
            if len(ids) > 1:
                ids[0], ids[1] = 0, rows - 1
            if key == "m" and rank == 0 and samples:
                some[0] += case.repeated
                ids = torch.cat([torch.full((case.repeated,), 7), ids])
            lengths.append(some)
            values.append(ids)
        keys, own = list(case.rows_of), dict[str, Any]()
        if case.variable_batch:
            inverse = torch.randint(0, -(-samples // 2), (len(keys), samples), generator=generator)
            if placeholder:
                bags = [each.split(sizes.tolist()) for each, sizes in zip(values, lengths, strict=True)]
                values = [torch.cat([of[i] for i in row]) for of, row in zip(bags, inverse.tolist(), strict=True)]
                lengths = [sizes[row] for sizes, row in zip(lengths, inverse, strict=True)]
            else:
                strides = [[len(each)] for each in lengths]
                own = {"stride_per_key_per_rank": strides, "inverse_indices": (keys, inverse)}
        sparse = KeyedJaggedTensor(keys, torch.cat(values).to(case.ids), lengths=torch.cat(lengths), **own)
        dense = torch.rand(samples, 3, generator=generator) * (not empty)
        yield Batch(dense, sparse, torch.zeros(samples, 1))


def train(
    case: Case,
    sharders: Sequence[ModuleSharder[Any]],
    pipeline: str,
    device: torch.device,
    around: Callable[[DistributedModelParallel, int, bool], None] = lambda *_: None,
) -> dict[str, Any]:
    """Return this rank's outputs, by step, then its parameters and states.

    `around` is called with the sharded model and a step's number before the step, with True, and after it, with False.
    """
    torch.manual_seed(0)
    model, world_size = Model(case), dist.get_world_size()
    plan = make_plan(model, case, sharders, world_size, device.type)
    env = ShardingEnv.from_process_group(world())
    sharded = DistributedModelParallel(model, env=env, device=device, plan=plan, sharders=list(sharders))
    initialise_tables(sharded, seed=0)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    nn.init.uniform_(model.dense.weight.data, 0.5, 1.0, generator=torch.Generator(device.type).manual_seed(0))
    keyed = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer = CombinedOptimizer([sharded.fused_optimizer, ("dense", keyed)])
    steps = open_pipeline(pipeline, sharded, optimizer, case.capacity, device)
    given: dict[str, torch.Tensor] = {}
    placeholder = not isinstance(sharders[0], OverlapEmbeddingCollectionSharder)
    remaining = batches(case, dist.get_rank(), placeholder)
    for step in range(case.steps):
        around(sharded, step, True)
        output = steps.progress(remaining)
        around(sharded, step, False)
        optimizer.zero_grad()
        given[f"output of step {step}"] = output.clone()
    if pipeline != "sparse_dist":
        (batch,) = batches(replace(case, steps=1, longer={0: 3}), 10 + dist.get_rank(), placeholder)
        sharded.eval()
        with torch.inference_mode() if pipeline == "graph" else torch.no_grad():
            output = steps.progress(iter([batch])) if pipeline == "graph" else sharded(batch.to(device))[1]
        given["evaluated"] = output.clone()
    given |= dict(local_tensors(sharded.state_dict()))
    given |= optimizer_states(sharded)
    found = exchanges(sharded)
    assert all(isinstance(each, UnpooledExchange) for each in found[:1])
    if isinstance(steps, GraphTrainPipeline):
        assert steps._fallback is None, "steps are not captured"
        if case.tables is None:
            assert bool(found[0].tables._cached_features) == (case.kernel != "fused"), "rows in caches"
        steps.close()
        dist.barrier()
    for exchange in found:
        exchange.close()
    return given


def _params(case: Case) -> dict[str, Any]:
    return {**OPTIMIZERS[case.optimizer], **({"gradient_clipping": True, "max_gradient": 0.02} if case.clipped else {})}


def torchrec_sharders(case: Case) -> list[Any]:
    params = _params(case)
    return [EmbeddingCollectionSharder(dict(params)), EmbeddingBagCollectionSharder(dict(params))]


def our_sharders(case: Case, **options: Any) -> list[Any]:
    params = _params(case)
    return [
        OverlapEmbeddingCollectionSharder(dict(params), nodes=case.nodes, **options),
        OverlapEmbeddingBagCollectionSharder(dict(params), nodes=case.nodes),
    ]
