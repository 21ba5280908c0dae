"""A training step as activities: the graph of docs/architecture/step.md, and the baseline's.

    ids of the next batch     | over the links, beside everything; of a history its distinct ids are found before
    lookup, exchange          | the bottom MLP's forward beside it
    ids are sorted            | after the lookup, beside the head's forward, which waits for their kernels
    attention to a history    | when the embeddings and the bottom MLP's output are there, before the head
    head, forward             | when these are there
    head's backward           | up to the embeddings' gradient, the attention's after it
    weights' gradients        | pgas, fused: of the cross network, after the backward
    push of gradients         | after the first of these products, or after the head's backward
    bottom MLP's backward     | beside the push
    rows are updated          | part by part, when their gradients are there and the ids are sorted
    all-reduce, optimizer     | after the products of all weights, and after the push

That is the step of pgas and fused. Under torchrec, all weights' gradients are
part of the backward, gradients of embeddings are packed and sent by a collective, and dense gradients are summed in
buckets, the first of them while the head's backward goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dlrm_overlap.embedding.traffic import DenseCounts, count_dense
from dlrm_overlap.simulate.backward import add_backward, collective_backward, sort_s
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.engine import Timeline
from dlrm_overlap.simulate.network import hierarchical_all_reduce, ring_all_reduce
from dlrm_overlap.simulate.stage import Simulation, each_alone, forward, send_all
from dlrm_overlap.simulate.workload import Workload

_OPTIMIZER_BYTES = 26  # a parameter, read and written by an update under Adagrad with a bfloat16 shadow
_BUCKETS = 4  # in which the collective backward sums dense gradients
# Kernels that wait for one another, as compiled and captured, counted in traced steps: of a layer, of which a cross
# layer is one, product and activation; in the backward two products, two that sum the bias' gradient, and the
# activation's; in all, those of the loss and of casts.
_FORWARD, _BACKWARD, _LOSS = 2, 5, 9
# Of a history, counted in operators of PyTorch and the bytes that each reads and writes, not measured: those by which
# `DistinctIds` finds the distinct ids, for each id, the passes of a radix sort among them; those of `TargetAttention`,
# forward and backward, for each element of the rows that it is given, in bf16, or in TorchRec's float32 that it casts.
_FIND = (61, 592)
_ATTEND = {"bfloat16": ((71, 12), (45, 15)), "float32": ((73, 18), (47, 21))}


class DenseSeconds(NamedTuple):
    """The dense part's products, in seconds, and the kernels that each has one after the other."""

    bottom_forward: float
    head_forward: float
    head_backward: float
    weights: float
    """gradients of the cross network's weights, which pgas and fused take after the backward; else 0"""
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
    layers_of_head = len(model.top_mlp) + (model.cross_layers if model.arch == "dcn" else 1)
    return DenseSeconds(
        bottom_forward=bottom / rate,
        head_forward=head / rate + pairs_s,
        head_backward=(2 * head - cross) / rate + 2 * pairs_s,
        weights=cross / rate,
        bottom_backward=bottom_backward / rate,
        bottom_forward_kernels=_FORWARD * len(model.bottom_mlp),
        bottom_backward_kernels=_BACKWARD * len(model.bottom_mlp),
        head_forward_kernels=_FORWARD * layers_of_head + _LOSS,
        head_backward_kernels=_BACKWARD * layers_of_head,
        counts=counts,
    )


@dataclass(frozen=True)
class Simulated:
    """One simulated stage or step."""

    config: SimulateConfig
    timeline: Timeline
    work: Workload
    ms: float
    """until the last rank has ended"""


def simulate(config: SimulateConfig) -> Simulated:
    """Simulate a stage, a backward or a step."""
    sim = Simulation.of(config)
    none: list[list[int]] = [[] for _ in range(sim.cluster.world_size)]
    if config.what == "stage":
        forward(sim, none)
    elif config.what == "backward":
        add_backward(sim, none, none)
    else:
        _add_step(sim, none)
    timeline = sim.cluster.engine.run()
    return Simulated(config, timeline, sim.work, timeline.seconds * 1e3)


def _add_sorts(sim: Simulation, after: Sequence[int]) -> list[list[int]]:
    """Add the sort of each rank's ids and return it; none where sorts take no time.

    Its kernels are in the same queue of programs as the dense part's: while they have the multiprocessors, those wait.
    """
    config, cluster, work = sim
    busy_s, least_s = sort_s(config, work)
    if not least_s.any():
        return [[] for _ in after]
    numbers = cluster.add_each("sort", [cluster.products], busy_s, each_alone(after), lane="ids", least_s=least_s)
    return each_alone(numbers)


def _add_passes(
    sim: Simulation,
    name: str,
    each: tuple[int, int],
    count: float,
    after: Sequence[Sequence[int]],
    lane: str = "products",
) -> list[int]:
    """Add kernels of each rank, one after the other, that read and write memory.

    Args:
        each: kernels, and the bytes of all of them for each of `count` elements.
    """
    kernels, nbytes = each
    gpu, cluster = sim.config.gpu, sim.cluster
    resources = [cluster.memory, cluster.products]  # they leave products no multiprocessor
    seconds, delay_s = count * nbytes / gpu.memory_gb_per_s / 1e9, kernels * gpu.kernel_us / 1e6
    return cluster.add_each(name, resources, seconds, after, lane=lane, delay_s=delay_s)


def _add_step(sim: Simulation, none: list[list[int]]) -> None:
    config, cluster, work = sim
    gpu, dense, engine = config.gpu, dense_seconds(config, work), cluster.engine
    several, collective = cluster.world_size > 1, collective_backward(config)

    def products(name: str, seconds: float, after: list[list[int]], kernels: float) -> list[int]:
        delay_s = kernels * gpu.kernel_us / 1e6
        return cluster.add_each(name, [cluster.products], seconds, after, lane="products", delay_s=delay_s)

    def each(*numbers: list[int]) -> list[list[int]]:
        return [list(together) for together in zip(*numbers, strict=True)]

    attend, attend_back = _ATTEND["float32" if collective else "bfloat16"]
    begun = each_alone([engine.add("step begins", {}, rank=r, delay_s=gpu.step_us / 1e6) for r in range(len(none))])
    found = none
    if work.history_ids and config.work.dedup:
        found = each_alone(_add_passes(sim, "distinct ids", _FIND, work.history_ids, none, "ids"))
    if several:
        received = work.id_bytes / (cluster.world_size - 1) * work.shares.ids
        send_all(sim, received, found, "ids", collective)
    embeddings = forward(sim, begun)
    bottom = products("bottom MLP", dense.bottom_forward, begun, dense.bottom_forward_kernels)
    rows, front = work.history_ids * config.model.dim, each(embeddings, bottom)
    if work.history_ids:
        front = each_alone(_add_passes(sim, "attention", attend, rows, front))
    head = products("head", dense.head_forward, front, dense.head_forward_kernels)
    buckets = _BUCKETS if collective else 1
    back, ready = head, []
    for _ in range(buckets):
        kernels = dense.head_backward_kernels / buckets
        back = products("head's backward", dense.head_backward / buckets, each(back), kernels)
        ready.append(each(back))
    if work.history_ids:
        back = _add_passes(sim, "attention's backward", attend_back, rows, each(back))
    first, weights = back, back
    if dense.weights:
        layers = config.model.cross_layers
        first = products("weights' gradients, first", dense.weights / layers, each(back), 1)
        weights = products("weights' gradients", dense.weights * (layers - 1) / layers, each(first), 1)
    bottom_back = products("bottom MLP's backward", dense.bottom_backward, each(back), dense.bottom_backward_kernels)
    ids = none if collective else _add_sorts(sim, embeddings)
    arrived, _ = add_backward(sim, each(back if collective else first), ids)
    summed = bottom_back
    if several:
        # The last bucket is that of the layers whose gradients come last.
        ready[-1] = each(bottom_back)
        if not collective:
            ready[-1] = [[*a, *b] for a, b in zip(each(bottom_back, weights), arrived, strict=True)]
        summed = _add_all_reduces(sim, ready, 4.0 * dense.counts.parameters)
    seconds = _OPTIMIZER_BYTES * dense.counts.parameters / gpu.optimizer_gb_per_s / 1e9
    cluster.add_each(
        "optimizer", [cluster.memory], seconds, each_alone(summed), lane="memory", delay_s=gpu.kernel_us / 1e6
    )


def _add_all_reduces(sim: Simulation, ready: Sequence[list[list[int]]], nbytes: float) -> list[int]:
    """Add the sums of all buckets, one after the other; each begins when its gradients are `ready`."""
    config, cluster, _ = sim
    all_reduce = ring_all_reduce if config.network.hosts == 1 else hierarchical_all_reduce
    delay_s = config.gpu.collective_us / 1e6 if collective_backward(config) else 0.0
    summed: list[int] = []
    for bucket in ready:
        begins = [
            cluster.engine.add("all-reduce begins", {}, after=[*after, *summed[r : r + 1]], rank=r, delay_s=delay_s)
            for r, after in enumerate(bucket)
        ]
        summed = all_reduce(cluster, nbytes / len(ready), each_alone(begins))
    return summed
