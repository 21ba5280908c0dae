"""The embedding stage, forward and backward, where tables are cut by rows, and where they are not pooled.

    torchrun --nproc-per-node 2 -m tests.gpu.stages --config configs/bench/dim128.yaml --output stages.csv

Under both sharders the stage begins with the ids and ends when rows are updated. `rows`: every table is cut by rows
over all ranks, and the ids are at their owners before a step begins, ours as captured steps send them. Where a kernel
can be issued ahead, `gpu_ms` is the GPU's own time; outputs and rows must agree first. `unpooled`: one table of
sequences, cut by rows, whose ids travel within the step, under TorchRec's with its index dedup, at several shares of
ids that repeat; `ms` is as it ran, and `busy_ms` the sum of its kernels' times, those of NCCL included, which wait for
peers.
"""

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.figures.backward import GradientBatch, make_batches
from dlrm_overlap.bench.harness.agreement import check_outputs, check_rows, disagreements
from dlrm_overlap.bench.harness.contenders import Contender, TorchRec, close_all
from dlrm_overlap.bench.harness.timing import Turns, greatest
from dlrm_overlap.bench.harness.workload import Ids, Workload, collect_garbage, make_workload, read_ids
from dlrm_overlap.bench.report.rows import append_rows, print_table
from dlrm_overlap.config import Config, PositiveInt
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.backends.ids import ArrivedIds
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingCollectionSharder
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.ranks import Ranks, run_on_ranks
from tests.gpu.one_gpu import torchrun_line

_OPTIMIZER, _REPETITIONS, _STEPS = "rowwise_adagrad", 30, 20
_BAGS, _REPEATED = (1, 8, 32), (0.0, 0.5, 0.98)
_SHAPE = {"sequence_rows": 4_000_000, "ids": 262_144}


class _WholeTorchRec(TorchRec):
    """TorchRec's own forward and backward."""

    def step(self, batch: GradientBatch) -> None:  # type: ignore[override]
        """Pool, and update the rows."""
        with torch.enable_grad():
            pooled = super().step(batch.ids)
            pooled.backward(batch.gradient.to(pooled.dtype))


class _Captured(Contender):
    """Our exchange as captured steps take it: the ids were published, so empty bags of shares travel neither way."""

    def __init__(self, workload: Workload, config: Config, backend: str, sparse: Sequence[KeyedJaggedTensor]) -> None:
        """Open the exchange and send the ids `sparse` of the workload's batches to their owners; a collective."""
        super().__init__(backend, workload)
        options = workload.exchange_options(config.embedding, backend)
        self._exchange = Exchange(workload.layout, workload.tables, options, workload.group, workload.device)
        keys, samples = sparse[0].keys(), sparse[0].stride()
        most = sparse[0].lengths().view(len(keys), samples).amax(1).tolist()
        sizes = {key: (size, size) for key, size in zip(keys, most, strict=True)}
        self._exchange.take_ids(keys, BatchBound(samples, sizes))
        self._arrived: dict[int, ArrivedIds] = {}
        """by the batch of the workload; copies, since later ids take their memory"""
        for batch, features in zip(workload.batches, sparse, strict=True):
            self._exchange.send_ids(features.to(workload.device))
            _, arrived = self._exchange._sent.pop()
            assert arrived.own_offsets is not None, "tables that are cut by rows"
            self._arrived[id(batch)] = arrived._replace(
                ids=_copied(arrived.ids), own_offsets=arrived.own_offsets.clone()
            )

    def step(self, batch: Ids) -> torch.Tensor:
        """Pool."""
        arrived = self._arrived[id(batch)]
        step = Step([arrived.ids], arrived.batch)
        step.own_offsets = arrived.own_offsets
        return self._exchange._start(step).wait()

    def close(self) -> None:
        """Free the windows."""
        self._exchange.close()


def _copied(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(ids.keys(), ids.values().clone(), offsets=ids.offsets().clone(), stride=ids.stride())


class _WholeCaptured(_Captured):
    """The same, forward and backward."""

    def step(self, batch: GradientBatch) -> None:  # type: ignore[override]
        """Pool, and update the rows."""
        with torch.enable_grad():
            pooled = super().step(batch.ids)
            pooled.backward(batch.gradient.to(pooled.dtype))


def _measure_rows(config: Config, ranks: Ranks, group: dist.ProcessGroup, ids_a_bag: int) -> list[dict[str, Any]]:
    config = replace(config, data=replace(config.data, tables=replace(config.data.tables, multi_hot=ids_a_bag)))
    sparse, size = read_ids(config, group, ranks.device), ranks.world.local_world_size
    workload = make_workload(config, sparse, group, ranks.device, size, optimizer=_OPTIMIZER, cut_rows=True)
    batches = make_batches(workload)
    pooling: list[Contender] = [TorchRec(workload)]
    pooling += [_Captured(workload, config, name, sparse) for name in ("pgas", "fused")]
    whole: list[Contender] = [_WholeTorchRec(workload)]
    whole += [_WholeCaptured(workload, config, name, sparse) for name in ("pgas", "fused")]
    faults = disagreements(pooling, check_outputs(pooling, workload))
    faults += disagreements(whole, check_rows(whole, workload, batches, _OPTIMIZER), "rows or states")
    rows = []
    if not faults:
        for what, contenders, each in (("forward", pooling, workload.batches), ("both", whole, batches)):
            found = Turns(group, ranks.device).time([_cycle(c.step, each) for c in contenders], _REPETITIONS)
            rows += [
                {"stage": "rows", "ids_a_bag": ids_a_bag, "part": what, "contender": contender.name}
                | {"gpu_ms": timing.median_ms, "host_ms": timing.host_ms}
                | {"speedup": found[0].median_ms / timing.median_ms}
                for contender, timing in zip(contenders, found, strict=True)
            ]
    elif ranks.world.rank == 0:
        print("\n".join(faults), flush=True)
    close_all([*pooling, *whole], workload)
    return rows


def _cycle(step: Callable[[Any], object], batches: Sequence[Any]) -> Callable[[], object]:
    following = itertools.cycle(batches)
    return lambda: step(next(following))


class _Sequences(nn.Module):
    """A collection of one table, and the least that makes a loss of it."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        config = EmbeddingConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
        self.sequences = EmbeddingCollection([config], device=torch.device("meta"))
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss twice."""
        loss = (self.sequences(batch.sparse)["f"].values() * self.scale).sum()
        return loss, loss.detach()


def _sequence_batches(ranks: Ranks, shape: Mapping[str, int], repeated: float) -> list[Batch]:
    """Return batches of samples with 128 ids each, of which the share `repeated` is in the batch before."""
    generator, device = torch.Generator().manual_seed(ranks.world.rank), ranks.device
    samples = max(1, shape["ids"] // 128)
    ids, found = samples * 128, []
    for _ in range(4):
        distinct = torch.randperm(shape["sequence_rows"], generator=generator)[: max(1, round((1 - repeated) * ids))]
        again = distinct[torch.randint(len(distinct), (ids - len(distinct),), generator=generator)]
        values = torch.cat([distinct, again])[torch.randperm(ids, generator=generator)]
        lengths = torch.full((samples,), 128, dtype=torch.int32)
        sparse = KeyedJaggedTensor(["f"], values.to(device), lengths=lengths.to(device))
        zeros = torch.zeros(samples, 1, device=device)
        found.append(Batch(zeros, sparse, zeros[:, 0]))
    return found


def _pipeline(ranks: Ranks, group: dist.ProcessGroup, shape: Mapping[str, int], sharder: Any) -> tuple[Any, Any]:
    """Return the sharded model; and TorchRec's pipeline with its own sharder, the captured one with ours."""
    model, device, world = _Sequences(shape["sequence_rows"], shape["dim"]), ranks.device, ranks.world
    cut = construct_module_sharding_plan(
        model.sequences, {"t": row_wise(compute_kernel="fused")}, sharder, world.local_world_size, None, device.type
    )
    sharded = DistributedModelParallel(
        model, ShardingEnv.from_process_group(group), device, ShardingPlan({"sequences": cut}), [sharder]
    )
    initialise_tables(sharded, seed=0)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    keyed = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=1e-6))
    optimizer = CombinedOptimizer([sharded.fused_optimizer, ("dense", keyed)])
    ours = isinstance(sharder, OverlapEmbeddingCollectionSharder)
    return sharded, (GraphTrainPipeline if ours else TrainPipelineSparseDist)(sharded, optimizer, device)


def _measure_unpooled(
    ranks: Ranks, group: dist.ProcessGroup, shape: Mapping[str, int], repeated: float
) -> list[dict[str, Any]]:
    params: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    on_gpu = ranks.device.type == "cuda"  # on a CPU TorchRec has no dedup
    sharders = {
        "torchrec_dedup": lambda: EmbeddingCollectionSharder(dict(params), use_index_dedup=on_gpu),
        "torchrec": lambda: EmbeddingCollectionSharder(dict(params)),
        "graph_dedup": lambda: OverlapEmbeddingCollectionSharder(dict(params), dedup=True),
        "graph_auto": lambda: OverlapEmbeddingCollectionSharder(dict(params), dedup="auto"),
    }
    batches, rows, losses = _sequence_batches(ranks, shape, repeated), [], dict[str, list[float]]()
    for name, make in sharders.items():
        (sharded, pipeline), following = _pipeline(ranks, group, shape, make()), itertools.cycle(batches)
        losses[name] = [float(pipeline.progress(following)) for _ in range(12)]  # eager ones, and the capture
        taken = _time(partial(pipeline.progress, following), ranks.device, group)
        rows.append({"stage": "unpooled", "repeated": repeated, "contender": name, **taken})
        rows[-1]["speedup"] = rows[0]["ms"] / taken["ms"]
        rows[-1]["max_difference"] = max(
            abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses[name], losses["torchrec_dedup"], strict=True)
        )
        if isinstance(pipeline, GraphTrainPipeline):
            rows[-1]["captured"] = pipeline._fallback is None
            pipeline.close()
        dist.barrier(group)
        for exchange in exchanges(sharded):
            exchange.close()
        del sharded, pipeline
        collect_garbage(ranks.device)
    return rows


def _time(step: Callable[[], object], device: torch.device, group: dist.ProcessGroup) -> dict[str, float]:
    """Return the median time of a step as it ran, and the mean of its kernels' times; of the slowest rank."""
    taken = []
    dist.barrier(group)
    for _ in range(4):
        _wait(device)
        began = time.perf_counter()
        for _ in range(_STEPS):
            step()
        _wait(device)
        taken.append((time.perf_counter() - began) * 1e3 / _STEPS)
    busy = math.nan
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            for _ in range(_STEPS):
                step()
            _wait(device)
        busy = sum(each.self_device_time_total for each in traced.key_averages()) / 1e3 / _STEPS
    ms, busy_ms = greatest([statistics.median(taken), busy], device, group)
    return {"ms": ms, "busy_ms": busy_ms}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def work(ranks: Ranks) -> int:
    """Measure both stages; rank 0 prints and appends the rows."""
    group, values = ranks.connect(), ranks.values
    shape = {name: getattr(values, name) for name in _SHAPE} | {"dim": ranks.config.model.dim}
    config = replace(ranks.config, train=replace(ranks.config.train, precision="bf16"))
    found: list[dict[str, Any]] = []
    for ids_a_bag in _BAGS:
        found += _measure_rows(config, ranks, group, ids_a_bag)
        collect_garbage(ranks.device)
    for repeated in _REPEATED:
        found += _measure_unpooled(ranks, group, shape, repeated)
    if ranks.world.rank == 0:
        for stage in ("rows", "unpooled"):
            rows = [row for row in found if row["stage"] == stage]
            print_table(rows, list(rows[0]) if rows else ())
        columns = dict.fromkeys(name for row in found for name in row)
        about = shape | {"world_size": ranks.world.world_size}
        append_rows(Path(values.output), [columns | row | about for row in found], torchrun_line("tests.gpu.stages"))
    return 0


def add_options(parser: Parser) -> None:
    """Add this command's options to a parser."""
    parser.add_argument("--output", default="stages.csv", help="CSV file to append the rows to")
    for name, value in _SHAPE.items():
        parser.add_argument(f"--{name}", type=PositiveInt, default=value, help=f"default {value}")


if __name__ == "__main__":
    sys.exit(run_on_ranks(["train"], str(__doc__), sys.argv[1:], work, add_options))
