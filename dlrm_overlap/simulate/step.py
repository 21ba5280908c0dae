"""A training step in closed form: the graph of docs/architecture/step.md, and the baseline's.

    ids of the next batch     | over the links, beside the forward
    lookup, exchange          | the bottom MLP's forward beside it
    ids are sorted            | after the lookup, beside the head, which waits for their kernels
    head, forward, backward   | when the embeddings and the bottom MLP's output are there
    weights' gradients        | pgas, fused: of the cross network, after the backward
    push of gradients         | after the first of these products, or after the head's backward
    bottom MLP's backward     | beside the push
    rows are updated          | part by part, when their gradients are there and the ids are sorted
    all-reduce, optimizer     | after the products of all weights, and after the push

That is the step of pgas and fused. Under torchrec, all weights' gradients are part of the backward, gradients of
embeddings are packed and sent by a collective, and dense gradients are summed in buckets, the first of them while the
head's backward goes on.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.traffic import DenseCounts, count_dense
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.stage import all_reduce_s, backward, forward, is_collective, sort_s
from dlrm_overlap.simulate.workload import Workload, build_workload

_OPTIMIZER_BYTES = 26  # a parameter, read and written by an update under Adagrad with a bfloat16 shadow
_BUCKETS = 4  # in which the collective backward sums dense gradients
# Kernels that wait for one another, as compiled and captured, counted in traced steps: of a layer, of which a cross
# layer is one, product and activation; in the backward two products, two that sum the bias' gradient, and the
# activation's; in all, those of the loss and of casts.
_FORWARD, _BACKWARD, _LOSS = 2, 5, 9


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
    if model.arch == "dcn" and not is_collective(config):
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
    work: Workload
    ms: float
    """until the last rank has ended"""
    updates_ms: float = 0.0
    """that the updates of the mean rank's rows run, with what is beside them"""


def simulate(config: SimulateConfig) -> Simulated:
    """Simulate a stage, a backward or a step.

    Raises:
        InputError: if a rate is so near to 0, or a size so great, that the time is no number.
    """
    network = config.network
    work = build_workload(config.model, config.work, network.world_size, network.gpus_per_host, is_collective(config))
    none, updates_s = np.zeros(work.world_size), 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        if config.what == "stage":
            seconds = forward(config, work, 0.0)
        elif config.what == "backward":
            seconds = float(backward(config, work, none, none, none).updated_s.max())
        else:
            seconds, updates_s = _step(config, work)
    if not np.isfinite(seconds):
        raise InputError(f"the {config.what} takes {seconds} s; some rate is too small, or some size too great")
    return Simulated(config, work, seconds * 1e3, updates_s * 1e3)


def _step(config: SimulateConfig, work: Workload) -> tuple[float, float]:
    """Return the seconds of a step, and those that the mean rank's updates of rows run."""
    gpu, dense, several = config.gpu, dense_seconds(config, work), work.world_size > 1
    kernel_s, begin_s, none = gpu.kernel_us / 1e6, gpu.step_us / 1e6, np.zeros(work.world_size)
    nbytes = 4.0 * dense.counts.parameters
    embeddings = forward(config, work, begin_s)
    bottom = begin_s + dense.bottom_forward_kernels * kernel_s + dense.bottom_forward
    head = max(embeddings, bottom) + dense.head_forward_kernels * kernel_s
    backward_s = dense.head_backward_kernels * kernel_s + dense.head_backward
    bottom_backward_s = dense.bottom_backward_kernels * kernel_s + dense.bottom_backward
    if is_collective(config):
        head += dense.head_forward
        bottom_back = head + backward_s + bottom_backward_s
        found = backward(config, work, none + head + backward_s, none, none)
        # The last bucket is that of the layers whose gradients come last.
        ready = [head + backward_s * bucket / _BUCKETS for bucket in range(1, _BUCKETS)]
        summed = 0.0
        for each in [*ready, bottom_back]:
            summed = max(each, summed) + several * (gpu.collective_us / 1e6 + all_reduce_s(config, nbytes / _BUCKETS))
    else:
        # The sort leaves the head half of the multiprocessors.
        busy_s, least_s = sort_s(config, work)
        products_s = dense.head_forward + dense.head_backward
        shared = np.clip(embeddings + busy_s - head, 0.0, products_s)
        back = head + products_s + dense.head_backward_kernels * kernel_s + shared
        kernels = 2 if dense.weights else 0  # of the first cross layer, and of the others
        first = back + (kernel_s + dense.weights / config.model.cross_layers if dense.weights else 0.0)
        products = back + dense.weights + max(kernels * kernel_s + dense.bottom_backward, bottom_backward_s)
        found = backward(config, work, first, embeddings + least_s + shared, products)
        summed = float(found.products_s.max())
        if several:
            summed = max(summed, found.arrived_s) + all_reduce_s(config, nbytes)
    # Updates of rows and of dense parameters share the memory.
    optimizer_s = _OPTIMIZER_BYTES * dense.counts.parameters / gpu.optimizer_gb_per_s / 1e9
    seconds = max(summed + kernel_s, float(found.updated_s.max())) + optimizer_s
    return seconds, float(found.updates_s.mean())
