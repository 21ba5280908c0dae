"""Builds one rank's model, optimizer and train pipeline from a configuration."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.config import Config, EmbeddingConfig, InputError, TrainConfig
from dlrm_overlap.data.batch import Dataset
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.dense.tensor_parallel import shards_of
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.id_tables.rules import rows_of_tables
from dlrm_overlap.embedding.options import WIRE_DTYPES
from dlrm_overlap.embedding.plan import build_topology, make_plan
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.kernels.ids.id_map import SEGMENT
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.train.auto_backend import Sharders, plan_by_backend
from dlrm_overlap.train.dense_part import cast_once, compile_dense, compile_loss, divide_head, in_flat_order, join_dense
from dlrm_overlap.train.explain import capture_blockers
from dlrm_overlap.train.graphs.dense_step import dense_parameters
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.model import DLRM, TrainTask, build_model

log = logging.getLogger("dlrm_overlap")

MakeSharders = Callable[[EmbeddingConfig, str, int], Sharders]
"""Takes section `embedding`, the dense part's precision, and the number of columns to leave in front of the pooled
embeddings; returns sharders."""
ChangeModel = Callable[[DLRM], None]
"""changes the model before it is sharded and compiled; keeps the names of its parameters"""


def check_torchrec_maps(rows: Sequence[int], has_negative_ids: bool, device: torch.device) -> None:
    """Raise an InputError if TorchRec cannot train tables of any id, which have `rows`."""
    if device.type == "cpu":
        raise InputError(
            "embedding.backend: torchrec trains tables of any id on GPUs only, since FBGEMM's operator only evaluates "
            "on a CPU; take pgas"
        )
    buckets = [count // SEGMENT for count in rows]
    # TorchRec divides ids over ranks by the unsigned remainder, and over buckets by the signed one.
    if has_negative_ids and (uneven := [count for count in buckets if count & (count - 1)]):
        raise InputError(
            f"embedding.backend: torchrec looks up negative ids in buckets of other ranks, unless a table of any id "
            f"has a power of 2 of buckets of {SEGMENT} rows, and one has {uneven[0]}; take pgas, or set "
            f"embedding.id_tables.rows to {SEGMENT << (uneven[0] - 1).bit_length()}"
        )


class LearningRate:
    """MLPerf's schedule: linear warm-up, then constant, then quadratic decay to zero."""

    def __init__(self, optimizer: CombinedOptimizer, config: TrainConfig) -> None:
        self.config = config
        self.optimizer = optimizer
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.current: float | None = None

    def factor(self, step: int) -> float:
        """Return the factor of the learning rates at `step`, counted from 0."""
        config = self.config
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.decay_steps and step >= config.decay_start_step:
            done = min(step - config.decay_start_step, config.decay_steps) / config.decay_steps
            return (1.0 - done) ** 2
        return 1.0

    def set(self, step: int) -> None:
        factor = self.factor(step)
        if factor != self.current:
            for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = lr * factor  # type: ignore[index]
            self.current = factor


def assemble(
    config: Config,
    world: World,
    device: torch.device,
    train: Dataset,
    make_sharders: MakeSharders,
    change_model: ChangeModel | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer, TrainPipeline[Any, Any], ShardingPlan, EmbeddingConfig]:
    """Build the sharded model, its optimizer, pipeline and plan; return them and `config.embedding`; a collective.

    In the returned `config.embedding` the backend `auto` is replaced by the backend in use.

    Raises:
        InputError: if the ranks cannot run the configuration.
    """
    group = dist.group.WORLD
    assert group is not None, "the process group is made before the trainer"
    samples = config.train.samples_per_rank(world.world_size)
    rows = rows_of_tables(train.rows, config.embedding.id_tables, world.world_size)
    any_id = [number for number, count in enumerate(train.rows) if count is None]
    dlrm = build_model(config.model, config.embedding, rows, train.dense_features, config.train.seed, any_id)
    if change_model is not None:
        change_model(dlrm)
    task = TrainTask(dlrm, device.type, config.train.precision == "bf16", list(train.labels.values()))
    # Divide layers before they are sharded, compiled and captured.
    if config.model.top_parallel == "tensor":
        divide_head(dlrm.head, ParallelProducts(group, device, config.embedding.wait_timeout_s))
    # Choose the backend, and shard the tables.
    topology = build_topology(device, world.world_size, world.local_world_size)

    def plan_for(embedding: EmbeddingConfig) -> tuple[Sharders, ShardingPlan]:
        if any_id and embedding.backend == "torchrec":
            check_torchrec_maps([rows[number] for number in any_id], train.encoded is not None, device)
        sharders = make_sharders(embedding, config.train.precision, dlrm.front_columns)
        return sharders, make_plan(task, sharders, topology, embedding, train.pooling, samples, group)

    embedding, sharders, plan = plan_by_backend(config.embedding, plan_for, task, group, device)
    if config.model.sequence.history in any_id and not (
        BACKENDS[embedding.backend].stores_to_peers or embedding.backend == "torchrec"
    ):
        raise InputError(
            f"embedding.backend: {embedding.backend} leaves histories to TorchRec, whose map of ids has no rules of "
            f"embedding.id_tables; take pgas or fused"
        )
    model = DistributedModelParallel(
        module=task,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=plan,
        sharders=sharders,
        init_data_parallel=False,
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=True, params_to_ignore=list(shards_of(task))),
    )
    if world.rank == 0:
        _log_exchanged(model, embedding.backend)
    task.to(device)
    # Compile the dense part, and capture it or wrap it with DDP unless the whole step is captured.
    graph = takes_graph(config.train.pipeline, embedding.backend, model, device)
    casts_once = graph and config.train.flat_dense and config.train.precision == "bf16"
    if config.train.compile_dense:
        compile_loss(task)
        if not casts_once:
            compile_dense(task, samples, device, small=graph)
    if not graph:
        join_dense(model, task, device, samples if config.train.graph_dense else None)
    # The tables have their final storage now: give them values.
    initialise_tables(model, config.train.seed)
    optimizer = build_optimizer(model, config.train)
    pipeline: TrainPipeline[Any, Any]
    if graph:
        casts = None
        if casts_once:
            parameters = in_flat_order(task, dense_parameters(model))
            flat = FlatParameters(parameters, shards_of(model), torch.bfloat16)
            cross_kernel = config.train.cross_kernel
            casts = cast_once(task, flat, config.train.compile_dense, cross_kernel)
        # With histories, the first batch shows how many ids, and how many distinct ids, there are.
        bags = dict(zip(dlrm.keys, train.bag_sizes, strict=True))
        capacity = BatchCapacity(samples, bags) if dlrm.history_key is None else None
        pipeline = GraphTrainPipeline(
            model,
            optimizer,
            device,
            capacity=capacity,
            group=group,
            casts=casts,
            gradient_dtype=WIRE_DTYPES[config.train.gradient_dtype],
            dense_reduce=config.train.dense_reduce,
            dense_update=config.train.dense_update,
            capture=None if config.train.capture else False,
        )
    else:
        pipeline = _torchrec_pipeline(embedding.backend, model, optimizer, plan, device)
    return model, optimizer, pipeline, plan, embedding


def _log_exchanged(model: DistributedModelParallel, backend: str) -> None:
    """Log how many tables of all collections are exchanged; a single collection has logged it already."""
    counts = [module.table_counts for module in model.modules() if isinstance(module, ExchangingModule)]
    if len(counts) > 1:
        exchanged, every = map(sum, zip(*counts, strict=True))
        log.info("backend %s: %d of %d tables exchanged, in %d collections", backend, exchanged, every, len(counts))


def _torchrec_pipeline(
    backend: str,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    plan: ShardingPlan,
    device: torch.device,
) -> TrainPipeline[Any, Any]:
    tables = [each for params in plan.plan.values() for each in params.values()]  # type: ignore[attr-defined]
    cached = any(table.cache_params is not None for table in tables)
    # FBGEMM fills its row caches one step ahead.
    prefetches = cached and backend == "torchrec" and device.type == "cuda"
    kind = PrefetchTrainPipelineSparseDist if prefetches else TrainPipelineSparseDist
    return kind(model, optimizer, device, execute_all_batches=True)


def takes_graph(kind: str, backend: str, model: DistributedModelParallel, device: torch.device) -> bool:
    """Return whether `GraphTrainPipeline` trains a model, the same on every rank; log why not, if it was expected.

    `kind` is `train.pipeline`, and `backend` the backend in use.
    """
    if kind == "torchrec" or (kind == "auto" and device.type != "cuda"):
        return False
    reason = capture_blockers(model)
    is_due = kind == "graph" or BACKENDS[backend].stores_to_peers
    if reason is not None and is_due and dist.get_rank() == 0:
        log.warning("train.pipeline: torchrec, since the steps cannot be captured: %s", reason)
    return reason is None


def build_optimizer(model: DistributedModelParallel, config: TrainConfig) -> CombinedOptimizer:
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": partial(torch.optim.Adagrad, eps=config.eps),
        "adam": partial(torch.optim.Adam, eps=config.eps),
    }
    dense = KeyedOptimizerWrapper(
        dense_parameters(model), lambda params: makers[config.optimizer](params, lr=config.lr)
    )
    return CombinedOptimizer([model.fused_optimizer, ("dense", dense)])
