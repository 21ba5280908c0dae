"""A training step in closed form: the captured step of docs/architecture/step.md, and TorchRec's step.

    next batch's ids             | sent during the forward
    lookup, exchange             | while the bottom MLP's forward runs
    sort of the ids              | after the lookup, during the head, which waits for the sort's kernels
    head's forward, backward     | once the embeddings and the bottom MLP's output are ready
    cross network's weight grads | after the head's backward
    push of gradients            | after the first of these products, or after the head's backward
    bottom MLP's backward        | during the push
    update of rows               | part by part, once the gradients have arrived and the ids are sorted
    all-reduce, optimizer        | after all products and the push

Under torchrec all weight gradients are part of the backward, and dense gradients are summed in buckets, the first of
them during the head's backward.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dlrm_overlap.embedding.traffic import count_dense
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.stage import all_reduce_s, backward, forward, sort_s
from dlrm_overlap.simulate.workload import SimulatedWorkload, build_workload

_OPTIMIZER_BYTES = 26  # read and written per parameter by Adagrad with a bfloat16 shadow
_BUCKETS = 4  # of dense gradients under torchrec
# Dependent kernels, counted in traced steps. A layer (or cross layer) has a product and an activation in the forward;
# two products, two sums of the bias' gradient and the activation's gradient in the backward. The loss and
# casts have a fixed number.
_FORWARD, _BACKWARD, _LOSS = 2, 5, 9


class DenseSeconds(NamedTuple):
    """One rank's times in the dense part, including the overhead of dependent kernels."""

    bottom_forward: float
    head_forward: float
    gaps: float
    """the part of `head_forward` between its kernels, which a concurrent sort can use"""
    head_backward: float
    weights: float
    """gradients of the cross network's weights, which pgas and fused compute after the backward; else 0"""
    bottom_backward: float
    parameters: int


def dense_seconds(config: SimulateConfig, work: SimulatedWorkload) -> DenseSeconds:
    model, gpu, tables, dense_features = config.model, config.gpu, work.tables, config.data.dense_features
    counts = count_dense(model, tables, dense_features, work.samples)
    rate, kernel_s = gpu.tflop_per_s * 1e12, gpu.kernel_us / 1e6
    layers = list(pairwise([dense_features, *model.bottom_mlp]))
    bottom = 2 * work.samples * sum(inputs * neurons for inputs, neurons in layers)
    bottom_backward = 2 * bottom - 2 * work.samples * layers[0][0] * layers[0][1]
    head = (counts.flop - bottom - bottom_backward) / 3
    cross = pairs_s = 0.0
    if model.arch == "dot":
        pairs = 2.0 * work.samples * (tables + 1) * tables // 2 * model.dim
        pairs_s, head = pairs / gpu.pair_tflop_per_s / 1e12, head - pairs
    elif not config.is_collective:
        cross = 2.0 * work.samples * model.cross_layers * 2 * (tables + 1) * model.dim * model.cross_rank
    of_bottom, of_head = len(layers), len(model.top_mlp) + (model.cross_layers if model.arch == "dcn" else 1)
    gaps = (_FORWARD * of_head + _LOSS) * kernel_s
    return DenseSeconds(
        bottom_forward=bottom / rate + _FORWARD * of_bottom * kernel_s,
        head_forward=head / rate + pairs_s + gaps,
        gaps=gaps,
        head_backward=(2 * head - cross) / rate + 2 * pairs_s + _BACKWARD * of_head * kernel_s,
        weights=cross / rate + 2 * kernel_s if cross else 0.0,  # the first layer's, then the others'
        bottom_backward=bottom_backward / rate + _BACKWARD * of_bottom * kernel_s,
        parameters=counts.parameters,
    )


class Simulated(NamedTuple):
    work: SimulatedWorkload
    ms: float
    updates_ms: float = 0.0
    """mean over the ranks of the time of row updates, while other kernels share the GPU"""


def simulate(config: SimulateConfig) -> Simulated:
    work = build_workload(config)
    if config.what == "stage":
        return Simulated(work, forward(config, work, 0.0) * 1e3)
    if config.what == "backward":
        none = np.zeros(work.world_size)
        return Simulated(work, float(backward(config, work, none, none, none).updated_s.max()) * 1e3)
    return _step(config, work)


def _step(config: SimulateConfig, work: SimulatedWorkload) -> Simulated:
    gpu, dense, several = config.gpu, dense_seconds(config, work), work.world_size > 1
    nbytes, none = 4.0 * dense.parameters, np.zeros(work.world_size)
    embeddings = forward(config, work, gpu.step_us / 1e6)
    head = max(embeddings, gpu.step_us / 1e6 + dense.bottom_forward)
    head_s = dense.head_forward + dense.head_backward
    if config.is_collective:
        back = head + head_s
        found = backward(config, work, none + back, none, none)
        # A bucket is summed once its gradients are there; the last one has the bottom MLP's.
        ready = [back - dense.head_backward * (1 - bucket / _BUCKETS) for bucket in range(1, _BUCKETS)]
        summed = 0.0
        for each in [*ready, back + dense.bottom_backward]:
            summed = max(each, summed) + several * (gpu.collective_us / 1e6 + all_reduce_s(config, nbytes / _BUCKETS))
    else:
        # The sort and the head each get half of the multiprocessors.
        busy_s = sort_s(gpu.update, work)
        shared = np.clip(embeddings + busy_s - head - dense.gaps, 0.0, head_s)
        back = head + head_s + shared
        first = back + dense.weights / config.model.cross_layers
        products = back + dense.weights + dense.bottom_backward
        found = backward(config, work, first, embeddings + busy_s + gpu.update.sort_us / 1e6 + shared, products)
        summed = float(found.products_s.max())
        if several:
            summed = max(summed, found.arrived_s) + all_reduce_s(config, nbytes)
    # The dense optimizer follows the update of rows, since both are limited by memory bandwidth.
    optimizer_s = _OPTIMIZER_BYTES * dense.parameters / gpu.optimizer_gb_per_s / 1e9
    seconds = max(summed + gpu.kernel_us / 1e6, float(found.updated_s.max())) + optimizer_s
    return Simulated(work, seconds * 1e3, float(found.updates_s.mean()) * 1e3)
