"""Training through the sharder: the same losses as stock TorchRec's, for any plan, and across checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.config import (
    Config,
    DataConfig,
    EmbeddingConfig,
    LogConfig,
    ModelConfig,
    TablesConfig,
    TrainConfig,
)
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.train.assembly import build_pipeline
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import LOSS_TOLERANCE, assert_all_near, assert_same
from tests.gpu.exchange.place import Check, Place

_BACKENDS = ("nccl", "pgas", "fused")
# Adagrad's so small that losses fall steadily: at 0.1 they jump, and TorchRec's own, with its ranks' samples swapped,
# part by 1.6e-5 in 20 steps on 4 ranks; at 0.03 by 2e-7.
_LEARNING_RATE = {"sgd": 20.0, "adagrad": 0.03, "rowwise_adagrad": 0.1}
COUNTING = "adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"
"""optimizers that count their steps, and that FBGEMM has on GPUs alone"""
_ROWS_TOLERANCE = 1e-3  # norm of a shard's error, relative to that of its change in a run, which amplifies rounding
_STEPS = 20
SAMPLES = 256  # a rank

_Rows = dict[tuple[str, int], torch.Tensor]
"""shards of a rank, by table and first column"""


def small_config(
    place: Place,
    backend: str,
    optimizer: str,
    plan: str = "auto",
    graph_dense: bool = False,
    pipeline: str = "torchrec",
) -> Config:
    """Return a small DLRM on synthetic data; gelu is smooth, so that runs that differ by rounding stay together."""
    return Config(
        model=ModelConfig(dim=16, bottom_mlp=[64, 16], top_mlp=[64, 32, 1], activation="gelu"),
        data=DataConfig(
            tables=TablesConfig(
                rows=[2000, 2000, 1000, 1000, 500, 500, 100, 20], multi_hot=[4, "0..6", 1, 1, 2, 1, 1, 1]
            ),
            eval_samples=4096,
            workers=0,  # ranks may have no children
        ),
        embedding=EmbeddingConfig(
            backend=backend,  # type: ignore[arg-type]
            optimizer=optimizer,  # type: ignore[arg-type]
            plan=plan,  # type: ignore[arg-type]
            lr=_LEARNING_RATE.get(optimizer, 0.01),
            wait_timeout_s=20.0,
        ),
        train=TrainConfig(
            batch_size=SAMPLES,
            steps=_STEPS,
            graph_dense=graph_dense,
            pipeline=pipeline,  # type: ignore[arg-type]
        ),
        log=LogConfig(dir=str(place.folder)),
    )


def make_trainer(place: Place, config: Config) -> Trainer:
    return Trainer(config, place.world, place.device, *open_datasets(config.data))


def train_steps(place: Place, trainer: Trainer, first: int, end: int) -> list[float]:
    """Take the steps [first, end) and return the mean losses of all ranks."""
    samples = place.world_size * SAMPLES
    batches = [trainer.train_data.read(step * samples + place.rank * SAMPLES, SAMPLES) for step in range(first, end)]
    trainer.pipeline.reset()
    segment, losses = iter(batches), []
    for step in range(first, end):
        trainer.learning_rate.set(step)
        losses.append(trainer.step(segment).detach().clone())  # a graph's outputs are its own
    total = torch.stack(losses)
    dist.all_reduce(total, group=place.group)
    return (total / place.world_size).tolist()


def rows_of(trainer: Trainer) -> _Rows:
    """Return copies of this rank's shards."""
    tables = {name: table for name, table in trainer.model.state_dict().items() if isinstance(table, ShardedTensor)}
    shards = [(name, shard) for name, table in tables.items() for shard in table.local_shards()]
    return {(name, shard.metadata.shard_offsets[1]): shard.tensor.clone() for name, shard in shards}


def _run(
    place: Place, backend: str, optimizer: str, plan: str = "auto", graph_dense: bool = False
) -> tuple[list[float], _Rows, _Rows]:
    """Return a run's losses, and its rows before and after; its backend must be what exchanges."""
    trainer = make_trainer(place, small_config(place, backend, optimizer, plan, graph_dense))
    used = [exchange.options.backend for exchange in exchanges(trainer.model)]
    assert used == ([] if backend == "torchrec" else [backend]), f"exchanged by {used}"
    backward = BACKENDS[backend].backward
    assert all(exchange.options.resolved_backward == backward for exchange in exchanges(trainer.model))
    before = rows_of(trainer)
    losses = train_steps(place, trainer, 0, _STEPS)
    after = rows_of(trainer)
    place.meet()
    trainer.close()
    return losses, before, after


def assert_agree(losses: Sequence[float], expected: Sequence[float], tolerance: float, name: str) -> None:
    assert len(losses) == len(expected)
    errors = [abs(loss - other) / other for loss, other in zip(losses, expected, strict=True)]
    assert max(errors) <= tolerance, (
        f"{name}, step {errors.index(max(errors))}: relative error {max(errors):.1e}; losses {losses}, not {expected}"
    )


def _check_losses(place: Place, optimizer: str, plan: str) -> None:
    expected, before, expected_rows = _run(place, "torchrec", optimizer, plan)
    assert min(expected) < 0.95 * expected[0], "a run that learns nothing agrees with anything"
    for backend in _BACKENDS:
        losses, _, rows = _run(place, backend, optimizer, plan)
        assert_agree(losses, expected, LOSS_TOLERANCE.get(optimizer, LOSS_TOLERANCE["adagrad"]), backend)
        assert rows.keys() == expected_rows.keys()
        for (name, column), shard in expected_rows.items():
            change = (shard - before[name, column]).norm()
            error = (rows[name, column] - shard).norm() / change
            assert change > 0
            assert error <= _ROWS_TOLERANCE, f"{backend}, {name} from column {column}: relative error {error:.1e}"


def _check_graphed(place: Place) -> None:
    """Runs with the dense part in CUDA graphs end in the same bits, whatever streams autograd and DDP run on."""
    expected, _, expected_rows = _run(place, "pgas", "rowwise_adagrad", graph_dense=True)
    for run in (1, 2):
        losses, _, rows = _run(place, "pgas", "rowwise_adagrad", graph_dense=True)
        assert losses == expected, f"run {run}: losses {losses}, not {expected}"
        assert_all_near(rows, expected_rows, 0.0, f"run {run}:")


def check_goes_on(place: Place, writer: Config, reader: Config, steps: int) -> None:
    """Half a run of one configuration, its checkpoint under another: the losses of a whole run of the first."""
    first, half = make_trainer(place, writer), steps // 2
    train_steps(place, first, 0, half)
    checkpointer = Checkpointer(place.folder / f"{place.name}_checkpoints", keep=1, shape={})
    checkpointer.write(half, extents_to_store(first.model, first.optimizer))
    expected = train_steps(place, first, half, steps)
    place.meet()
    first.close()
    second = make_trainer(place, reader)
    assert checkpointer.load(checkpointer.folder / f"step_{half}", second.model, second.optimizer) == half
    losses = train_steps(place, second, half, steps)
    place.meet()
    second.close()
    assert_agree(losses, expected, LOSS_TOLERANCE[writer.embedding.optimizer], "behind the checkpoint")


def _check_checkpoint(place: Place, writer: str, reader: str) -> None:
    first, second = (small_config(place, backend, "rowwise_adagrad") for backend in (writer, reader))
    check_goes_on(place, first, second, _STEPS)


@dataclass(frozen=True)
class _Case:
    """A model of two collections, and the ways of its tables."""

    backend: str
    row_wise: bool = False
    weighted: bool = False
    output: SparseType = SparseType.FP32


def _table(t: int, dim: int, pooling: PoolingType) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=f"table{t}", feature_names=[f"f{t}"], num_embeddings=40 + t, embedding_dim=dim, pooling=pooling
    )


class _Collections(nn.Module):
    """Two collections that one batch feeds, and a loss whose gradient differs in every element."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        sums = [_table(t, (64, 16)[t % 2], PoolingType.SUM) for t in range(5)]
        others = [_table(t, 32, PoolingType.SUM if weighted else PoolingType.MEAN) for t in range(5, 9)]
        self.names = [name for table in sums + others for name in table.feature_names]
        self.first, self.second = (
            EmbeddingBagCollection(tables, is_weighted=weighted, device=torch.device("meta"))
            for tables in (sums, others)
        )
        self.dense = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.dense.weight)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        first, second = self.first(batch.sparse), self.second(batch.sparse)
        scale = self.dense(batch.dense)
        outputs = first.to_dict() | second.to_dict()
        losses = torch.stack([(outputs[name].square() * scale).sum() for name in self.names])
        return losses.sum() * 0.01, {name: outputs[name].detach().clone() for name in self.names}


def _plan(place: Place, case: _Case, model: _Collections, sharder: Any) -> ShardingPlan:
    """Return tables in turn on each rank, cut by columns, and, if asked for, by rows."""
    ranks = list(range(place.world_size))
    modules: dict[str, Any] = {}
    for name in ("first", "second"):
        collection = getattr(model, name)
        ways = {}
        for t, table in enumerate(collection.embedding_bag_configs()):
            columns = [ranks[t % len(ranks)], ranks[(t + 1) % len(ranks)]]
            if t == 2 and case.row_wise:
                ways[table.name] = plans.row_wise(compute_kernel="fused")
            elif (t == 1 and table.embedding_dim >= 32) or case.output != SparseType.FP32:
                # TorchRec's lookups of a rank without tables of a kind are float32, whatever the others' are.
                ways[table.name] = plans.column_wise(columns, compute_kernel="fused")
            else:
                ways[table.name] = plans.table_wise(columns[0], compute_kernel="fused")
        modules[name] = plans.construct_module_sharding_plan(
            collection, ways, sharder, place.world.local_world_size, len(ranks), place.device.type
        )
    return ShardingPlan(modules)


def _batches(place: Place, case: _Case, names: Sequence[str]) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(place.rank)
    samples = SAMPLES + (0 if case.row_wise else place.rank)
    for _ in range(4):
        lengths = torch.randint(0, 4, (len(names) * samples,), generator=generator)
        ids = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator) if case.weighted else None
        sparse = KeyedJaggedTensor(list(names), ids, weights=weights, lengths=lengths)
        yield Batch(torch.rand(samples, 1, generator=generator), sparse, torch.zeros(samples))


def _outputs(place: Place, case: _Case, sharder: Any, expected_exchanges: int) -> list[dict[str, torch.Tensor]]:
    """Train the collections and return the pooled embeddings of each step."""
    model = _Collections(case.weighted)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(place.group),
        device=place.device,
        plan=_plan(place, case, model, sharder),
        sharders=[sharder],
    )
    initialise_tables(sharded, seed=0)
    assert len(exchanges(sharded)) == expected_exchanges
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), partial(torch.optim.SGD, lr=0.1)
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, ("dense", dense)])
    pipeline: Any = build_pipeline(sharded, optimizer, place.device)
    batches = list(_batches(place, case, model.names))
    segment = iter(batches)
    outputs = [pipeline.progress(segment) for _ in batches]
    place.meet()
    for exchange in exchanges(sharded):
        exchange.close()
    return outputs


def _check_collections(place: Place, case: _Case) -> None:
    """Pooled embeddings are stock TorchRec's: to the last bit at first, then but for the rounding of updates."""
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5, "output_dtype": case.output}
    stock = _outputs(place, replace(case, backend="torchrec"), EmbeddingBagCollectionSharder(dict(fused_params)), 0)
    sharder = OverlapEmbeddingBagCollectionSharder(dict(fused_params), backend=case.backend, wait_timeout_s=20.0)
    ours = _outputs(place, case, sharder, 2)
    for step, (outputs, expected) in enumerate(zip(ours, stock, strict=True)):
        assert list(outputs) == list(expected)
        for name in expected:
            where = f"step {step}, feature {name}"
            if step == 0 and not case.row_wise:  # whose partial sums stock TorchRec adds up in the collective's order
                assert_same(outputs[name], expected[name], where)
            error = (outputs[name] - expected[name]).abs().max() / expected[name].abs().max()
            rounding = 0.0 if case.output == SparseType.FP32 else torch.finfo(case.output.as_dtype()).eps
            assert error <= LOSS_TOLERANCE["sgd"] + rounding, f"{where}: relative error {error:.1e}"
    assert not torch.equal(stock[0]["f0"][:SAMPLES], stock[1]["f0"][:SAMPLES]), "the batches are all the same"


CHECKS = (
    {
        f"losses_{optimizer}": Check(partial(_check_losses, optimizer=optimizer, plan="auto"))
        for optimizer in _LEARNING_RATE
    }
    | {
        f"losses_{optimizer}": Check(partial(_check_losses, optimizer=optimizer, plan="auto"), gpu_only=True)
        for optimizer in COUNTING
    }
    | {"losses_columns": Check(partial(_check_losses, optimizer="sgd", plan="column_wise"))}
    | {"losses_rows": Check(partial(_check_losses, optimizer="sgd", plan="row_wise"), gpu_only=True)}
    | {"losses_graphed": Check(_check_graphed, gpu_only=True)}
    | {
        f"checkpoint_{writer}_{reader}": Check(partial(_check_checkpoint, writer=writer, reader=reader))
        for writer, reader in (("torchrec", "pgas"), ("pgas", "torchrec"), ("torchrec", "fused"))
    }
    | {f"collections_{backend}": Check(partial(_check_collections, case=_Case(backend))) for backend in _BACKENDS}
    | {
        f"collections_rows_{backend}": Check(
            partial(_check_collections, case=_Case(backend, row_wise=True)), gpu_only=True
        )
        for backend in _BACKENDS
    }
    | {
        f"collections_{output.value}_{backend}": Check(
            partial(_check_collections, case=_Case(backend, output=output)), gpu_only=output == SparseType.BF16
        )
        for output in (SparseType.BF16, SparseType.FP16)
        for backend in _BACKENDS
    }
    | {
        f"collections_weighted_{backend}": Check(partial(_check_collections, case=_Case(backend, weighted=True)))
        for backend in _BACKENDS
    }
)
