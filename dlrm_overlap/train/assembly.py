"""One rank's model, optimizers and train pipeline, put together as a configuration says."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.config import Config, EmbeddingConfig
from dlrm_overlap.data.batch import Dataset
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.dense.tensor_parallel import products_of, shards_of
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.embedding.options import WIRE_DTYPES
from dlrm_overlap.embedding.plan import build_plan, build_topology
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import build_sharder
from dlrm_overlap.embedding.tables import fbgemms_bad_id
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.train.dense_part import cast_once, compile_dense, compile_loss, divide_head, join_dense
from dlrm_overlap.train.graphs.parts import dense_parameters
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.model import TrainTask, build_model
from dlrm_overlap.train.optimizers import LearningRate, build_optimizer
from dlrm_overlap.train.pipeline import build_pipeline, shard_model, takes_graph

log = logging.getLogger("dlrm_overlap")


@dataclass(frozen=True)
class Assembled:
    """What takes a rank's steps, and shares memory with its peers for them."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    """of dense parameters and tables"""
    learning_rate: LearningRate
    pipeline: TrainPipeline[Any, Any]
    """whose `progress` takes a step with the model and the optimizer"""
    plan: ShardingPlan

    def _sharers(self) -> "list[GraphTrainPipeline | ParallelProducts | Exchange]":
        """Return what has memory that peers see, in the order in which it is released: graphs before what they use."""
        pipelines = [self.pipeline] if isinstance(self.pipeline, GraphTrainPipeline) else []
        return [*pipelines, *products_of(self.model), *exchanges(self.model)]

    def check(self) -> None:
        """Raise what this rank's kernels have recorded, be it a wait that expired or an id outside its table."""
        for sharer in self._sharers():
            sharer.check()

    @contextmanager
    def raising_the_cause(self) -> Iterator[None]:
        """Raise what a kernel has recorded in place of the CUDA error that follows from it.

        A kernel that gives up on a peer, or finds an id outside its table, records that and stops the GPU. Whoever
        calls CUDA next, be it a step, a log line or a checkpoint, gets an error that says only that the GPU stopped.
        """
        try:
            yield
        except RuntimeError as error:
            self.check()
            if bad_id := fbgemms_bad_id(error):
                raise bad_id from error
            raise

    def close(self) -> None:
        """Release the memory that peers see, which outlives Python references. No rank may be in a step."""
        for sharer in self._sharers():
            sharer.close()


def assemble(
    config: Config, world: World, device: torch.device, train: Dataset, fused_params: Mapping[str, Any] | None = None
) -> Assembled:
    """Build the model of `config` on this rank's device, and what trains it; a collective.

    The order matters: layers are divided before the model is sharded, compiled and captured in their flat form, and
    tables get their first weights when they are where they stay.

    Args:
        config: of the run.
        world: this rank's place among all.
        device: of this rank.
        train: the samples to train on, whose bags bound those of a captured step.
        fused_params: tells TorchRec of the tables what no key says.

    Raises:
        InputError: if ranks cannot run what the configuration asks for.
    """
    group = dist.group.WORLD
    assert group is not None, "the process group is made before the trainer"
    samples = config.train.samples_per_rank(world.world_size)
    dlrm = build_model(config.model, config.embedding, list(train.rows), config.data.dense_features, config.train.seed)
    task = TrainTask(dlrm, device.type, bf16=config.train.precision == "bf16")
    divide_head(dlrm.head, group, config.model, config.train)
    sharder = build_sharder(with_overlap(config), config.train.precision, config.model.dim, fused_params)
    topology = build_topology(device, world.world_size, world.local_world_size)
    plan = build_plan(task, sharder, topology, config.embedding, config.model.dim, train.pooling, samples, group)
    model = shard_model(task, plan, sharder, group, device)
    for products in products_of(model):
        products.wait_timeout_s = config.embedding.wait_timeout_s
    graph = takes_graph(config, model, device)
    is_flat = graph and config.train.flat_dense
    casts_once = is_flat and config.train.precision == "bf16"
    if config.train.compile_dense:
        compile_loss(task, samples, device)
        if not casts_once:
            compile_dense(task, samples, device)
    flat = FlatParameters(dense_parameters(model), shards_of(model)) if is_flat else None
    if not graph:
        join_dense(model, task, device, samples if config.train.graph_dense else None)
    initialise_tables(model, config.train.seed)
    optimizer = build_optimizer(model, config.train, flat)
    learning_rate = LearningRate(optimizer, config.train)
    pipeline: TrainPipeline[Any, Any]
    if graph:
        bound = BatchBound(samples, dict(zip(dlrm.keys, train.bag_sizes, strict=True)))
        compiled, partitioned = config.train.compile_dense, config.train.overlap == "partition"
        casts = cast_once(task, flat, optimizer, compiled, partitioned) if flat and casts_once else None
        pipeline = GraphTrainPipeline(
            model,
            optimizer,
            device,
            bound,
            group,
            flat,
            casts,
            gradient_dtype=WIRE_DTYPES[config.train.gradient_dtype],
            dense_reduce=config.train.dense_reduce,
            capture=None if config.train.capture else False,
        )
    else:
        pipeline = build_pipeline(model, optimizer, device)
    return Assembled(model, optimizer, learning_rate, pipeline, plan)


def with_overlap(config: Config) -> EmbeddingConfig:
    """Return how embeddings run, with the way of the gradients that `train.overlap` names, unless they name their own.

    Stores are the rule: on MLPerf's step they and copy engines differ by 2%, either way (docs/results/step.md).
    """
    embedding = config.embedding
    if embedding.backward != "auto" or "dma" not in BACKENDS[embedding.backend].backwards:
        return embedding
    return replace(embedding, backward="dma" if config.train.overlap == "dma" else "push")
