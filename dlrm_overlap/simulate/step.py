"""A training step as activities: the graph of docs/architecture/step.md, and the baseline's.

    ids of the next batch     | over the links, beside everything
    lookup, exchange          | the bottom MLP's forward beside it
    ids are sorted            | behind the lookup, beside the head's forward, which waits for their kernels
    head, forward             | when the embeddings and the bottom MLP's output are there
    head's backward           | up to the embeddings' gradient
    weights' gradients        | pgas, fused: of the cross network, behind the backward
    push of gradients         | behind the first of these products, or behind the head's backward
    bottom MLP's backward     | beside the push
    rows are updated          | part by part, when their gradients are there and the ids are sorted
    all-reduce, optimizer     | behind the products of all weights, and behind the push

That is the step of pgas and fused. Under torchrec, or with `exchange.backward: collective`, all weights' gradients are
part of the backward, gradients of embeddings are packed and sent by a collective, and dense gradients are summed in
buckets, the first of them while the head's backward goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dlrm_overlap.embedding.traffic import DenseCounts, count_dense
from dlrm_overlap.simulate import stage
from dlrm_overlap.simulate.backward import add_backward, collective_backward, sort_of
from dlrm_overlap.simulate.cluster import Cluster
from dlrm_overlap.simulate.collectives import hierarchical_all_reduce, ring_all_reduce
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.engine import Engine, Timeline
from dlrm_overlap.simulate.workload import Workload, build_workload

_OPTIMIZER_BYTES = 26  # a parameter: what an update under Adagrad with a bfloat16 shadow reads and writes
_BUCKETS = 4  # in which the collective backward sums dense gradients


class DenseSeconds(NamedTuple):
    """The products of the dense part's pieces, in seconds, and the kernels that each has one after the other."""

    bottom_forward: float
    head_forward: float
    head_backward: float
    weights: float
    """gradients of the cross network's weights, which pgas and fused take behind the backward; else 0"""
    bottom_backward: float
    bottom_forward_kernels: int
    bottom_backward_kernels: int
    head_forward_kernels: int
    head_backward_kernels: int
    counts: DenseCounts


def dense_seconds(config: SimulateConfig, work: Workload) -> DenseSeconds:
    """Return the dense part's times on one rank, from the operations that `traffic.count_dense` counts."""
    model = config.model
    tables = round(work.features * work.world_size)
    counts = count_dense(model, tables, config.work.dense_features, work.samples)
    rate = config.gpu.tflop_per_s * 1e12 * config.gpu.dense_efficiency
    layers = list(pairwise([config.work.dense_features, *model.bottom_mlp]))
    bottom = 2 * work.samples * sum(inputs * neurons for inputs, neurons in layers)
    bottom_backward = 2 * bottom - 2 * work.samples * layers[0][0] * layers[0][1]
    head = (counts.flop - bottom - bottom_backward) / 3
    cross = pairs_s = 0.0
    if model.arch == "dot" and config.gpu.pair_tflop_per_s:
        pairs = 2.0 * work.samples * (tables + 1) * tables // 2 * model.dim
        pairs_s, head = pairs / config.gpu.pair_tflop_per_s / 1e12, head - pairs
    if model.arch == "dcn" and not collective_backward(config):
        width = (tables + 1) * model.dim
        cross = 2.0 * work.samples * model.cross_layers * 2 * width * model.cross_rank
    kernels = config.gpu.kernels
    layers_of_head = len(model.top_mlp) + (model.cross_layers if model.arch == "dcn" else 1)
    return DenseSeconds(
        bottom_forward=bottom / rate,
        head_forward=head / rate + pairs_s,
        head_backward=(2 * head - cross) / rate + 2 * pairs_s,
        weights=cross / rate,
        bottom_backward=bottom_backward / rate,
        bottom_forward_kernels=kernels.forward * len(model.bottom_mlp),
        bottom_backward_kernels=kernels.backward * len(model.bottom_mlp),
        head_forward_kernels=kernels.forward * layers_of_head + kernels.loss,
        head_backward_kernels=kernels.backward * layers_of_head,
        counts=counts,
    )


@dataclass(frozen=True)
class Simulated:
    """One simulated stage or step."""

    config: SimulateConfig
    timeline: Timeline
    work: Workload
    gpu_ms: float
    """until the last rank has ended, the host aside"""

    @property
    def ms(self) -> float:
        """The time of the GPUs or of the host, whichever is longer."""
        torchrec = self.config.exchange.backend == "torchrec"
        host_ms = self.config.host.torchrec_ms if torchrec else self.config.host.captured_ms
        return max(self.gpu_ms, host_ms if self.config.what == "step" else self.config.host.stage_ms)


def simulate(config: SimulateConfig, progress: Callable[[int, int], None] | None = None) -> Simulated:
    """Simulate what the configuration says."""
    cluster = stage.build_cluster(config)
    work = build_workload(config.model, config.work, cluster.world_size)
    engine = cluster.engine()
    if config.what == "stage":
        stage.forward(engine, cluster, config, work, [[]] * cluster.world_size)
    elif config.what == "backward":
        add_backward(engine, cluster, config, work, [[]] * cluster.world_size, [[]] * cluster.world_size)
    else:
        _add_step(engine, cluster, config, work)
    timeline = engine.run(progress)
    return Simulated(config, timeline, work, timeline.seconds * 1e3)


def _sorts(engine: Engine, cluster: Cluster, config: SimulateConfig, work: Workload, after: Sequence[int]) -> list[int]:
    """Add the sort of each rank's ids and return it; none where sorts take no time.

    Its kernels are in the same queue of programs as the dense part's: while they have the multiprocessors, those wait.
    """
    sorts = [sort_of(config, work, rank) for rank in range(cluster.world_size)]
    if not any(sort.least_s for sort in sorts):
        return []
    return [
        engine.add(
            "sort", {cluster.products(r): sort.busy_s}, max(sort.busy_s, 1e-12), [after[r]], rank=r, lane="ids",
            least_s=sort.least_s,
        )
        for r, sort in enumerate(sorts)
    ]  # fmt: skip


def _add_step(engine: Engine, cluster: Cluster, config: SimulateConfig, work: Workload) -> None:
    ranks, gpu, dense = range(cluster.world_size), config.gpu, dense_seconds(config, work)
    several, baseline = cluster.world_size > 1, config.exchange.backend == "torchrec"
    collective = collective_backward(config)

    def products(name: str, seconds: float, after: list[list[int]], kernels: float) -> list[int]:
        delay_s = kernels * gpu.kernel_us / 1e6
        return [
            engine.add(
                name, {cluster.products(r): seconds}, max(seconds, 1e-12), after[r], rank=r, lane="products",
                delay_s=delay_s,
            )
            for r in ranks
        ]  # fmt: skip

    def each(*numbers: list[int]) -> list[list[int]]:
        return [list(together) for together in zip(*numbers, strict=True)]

    none: list[list[int]] = [[] for _ in ranks]
    begun = [engine.add("step begins", {}, rank=r, delay_s=gpu.step_us / 1e6) for r in ranks]
    if several:
        received = work.id_bytes / (cluster.world_size - 1) * work.shares.ids
        stage.send_all(
            engine, cluster, config, received, none, "ids", collective=baseline,
            priority=-1 if config.exchange.ids == "behind" else 0,
        )  # fmt: skip
    embeddings = stage.forward(engine, cluster, config, work, each(begun))
    bottom = products("bottom MLP", dense.bottom_forward, each(begun), dense.bottom_forward_kernels)
    head = products("head", dense.head_forward, each(embeddings, bottom), dense.head_forward_kernels)
    buckets = _BUCKETS if collective else 1
    back, pieces = head, []
    for _ in range(buckets):
        back = products(
            "head's backward", dense.head_backward / buckets, each(back), dense.head_backward_kernels / buckets
        )
        pieces.append(back)
    first, weights = back, back
    if dense.weights:
        layers = config.model.cross_layers
        first = products("weights' gradients, first", dense.weights / layers, each(back), 1)
        weights = products("weights' gradients", dense.weights * (layers - 1) / layers, each(first), 1)
    bottom_back = products("bottom MLP's backward", dense.bottom_backward, each(back), dense.bottom_backward_kernels)
    ids = [] if collective else _sorts(engine, cluster, config, work, embeddings)
    gradients = each(back if collective else first)
    arrived, _ = add_backward(engine, cluster, config, work, gradients, each(ids) if ids else none)
    parameters = dense.counts.parameters
    summed = bottom_back
    if several:
        way = ring_all_reduce if config.network.hosts == 1 else hierarchical_all_reduce
        latency_s = stage.collective_s(gpu) if collective else 0.0
        # A bucket is summed behind the one before; the last is that of the layers whose gradients come last.
        parts = [each(piece) for piece in pieces[:-1]] + [
            each(bottom_back) if collective else each(bottom_back, weights, arrived)
        ]
        summed = None
        for part in parts:
            begins = part if summed is None else [[*ends, before] for ends, before in zip(part, summed, strict=True)]
            numbers = [
                engine.add("all-reduce begins", {}, after=after, rank=r, delay_s=latency_s)
                for r, after in enumerate(begins)
            ]
            summed = way(engine, cluster, 4.0 * parameters / len(parts), each(numbers))
        assert summed is not None
    seconds = _OPTIMIZER_BYTES * parameters / gpu.optimizer_gb_per_s / 1e9
    for r in ranks:
        engine.add(
            "optimizer", {cluster.memory(r): seconds}, seconds, [summed[r]], rank=r, lane="memory",
            delay_s=gpu.kernel_us / 1e6,
        )  # fmt: skip
