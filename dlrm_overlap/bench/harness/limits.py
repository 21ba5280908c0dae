"""Lower limits of the time of stage and step, from counted bytes and measured rates of memory and links."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.communications import Payload, by_collective
from dlrm_overlap.bench.harness.timing import Timing, capture, max_over_ranks, time_alone
from dlrm_overlap.bench.harness.workload import Workload, exchange_options
from dlrm_overlap.embedding.traffic import ShardTraffic, count_dense, dense_layers, pooling_bytes, update_bytes
from dlrm_overlap.train.trainer import Trainer

_CALLS, _REPEATS = 8, 5  # back-to-back calls hide differences between the ranks' starts
_HBM_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_LINK_BYTES = {"cuda": 192 << 20, "cpu": 4 << 20}  # to each peer; containers may have little shared memory
_DENSE_TFLOP_PER_S = 790.0  # cuBLAS's best on an H200, bf16


class Limit(NamedTuple):
    """Greatest bytes of a step over the ranks, and rates of the slowest rank."""

    hbm_bytes: int
    """read from and written to GPU memory"""
    link_bytes: int
    hbm_gb_per_s: float
    link_gb_per_s: float
    """rate to all peers together; 0 without peers"""

    @property
    def hbm_ms(self) -> float:
        return self.hbm_bytes / self.hbm_gb_per_s / 1e6

    @property
    def link_ms(self) -> float:
        return self.link_bytes / self.link_gb_per_s / 1e6 if self.link_bytes else 0.0


def count_tables(bags: KeyedJaggedTensor, dim: int, element_bytes: int, ranks: int = 1) -> list[ShardTraffic]:
    """Return each table's traffic, divided by `ranks`; `bags` has one feature per table, with all samples' bags."""
    found = []
    for table in bags.to_dict().values():
        counts = table.values().numel(), table.values().unique().numel(), int((table.lengths() > 0).sum())
        ids, rows, filled = (count / ranks for count in counts)
        found.append(ShardTraffic(ids, rows, filled, dim, element_bytes))
    return found


def find_limit(workload: Workload, ceilings: tuple[float, float], optimizer: str | None = None) -> tuple[Limit, int]:
    """Return the limit of the forward or, given `optimizer`, of the backward, and the number of ids; a collective.

    Bytes and ids are the maximum over ranks. Rows and gradients count once per id, so caches can beat this limit.
    """
    layout, rank, bags = workload.layout, workload.rank, workload.batches[0].inputs[0]
    first = layout.by_owner[rank][0]
    sizes: dict[str, Any] = {
        "shards": count_tables(bags, first.dim, first.dtype.itemsize),
        "samples": sum(workload.batch_sizes),
        "own_samples": workload.batch_sizes[rank],
        "total_dim": layout.total_dim,
        "owner_dim": layout.owner_dims[rank],
        "wire_bytes": workload.wire_dtype.itemsize,
    }
    if optimizer is None:
        hbm_bytes, link_bytes = pooling_bytes(**sizes, id_bytes=bags.values().element_size())
        hbm_bytes += bags.offsets().nbytes
    else:
        hbm_bytes, _, link_bytes = update_bytes(**sizes, gradient_bytes=4, optimizer=optimizer)
    most = max_over_ranks([hbm_bytes, link_bytes, bags.values().numel()], workload.device)
    hbm_bytes, link_bytes, ids = map(int, most)
    return Limit(hbm_bytes, link_bytes, *ceilings), ids


def times(timing: Timing, baseline: Timing, limit: Limit) -> dict[str, Any]:
    limit_ms = max(limit.hbm_ms, limit.link_ms)
    return {
        **asdict(timing),
        **limit._asdict(),
        "limit_ms": limit_ms,
        "fraction_of_limit": limit_ms / timing.median_ms,
        "speedup": baseline.median_ms / timing.median_ms,
    }


def find_floor(trainer: Trainer, ceilings: tuple[float, float]) -> dict[str, Any]:
    """Return the columns of the first step's floor: the longest of products, memory and link traffic of the mean rank.

    Links carry ids, pooled embeddings, their gradients, and dense gradients by a ring all-reduce. Memory traffic counts
    each distinct row as read by the lookup, then as read and written, with its optimizer state, by the update. Ids,
    embeddings and gradients are counted too, dense weights and outputs once.
    """
    config, world_size, samples = trainer.config, trainer.world.world_size, trainer.samples_per_rank
    data, number_bytes = trainer.train_data, 2 if config.train.precision == "bf16" else 4
    gradient_bytes = 2 if config.train.gradient_dtype == "bf16" else 4
    ours = exchange_options(config, "pgas")
    every = data.read(0, trainer.global_batch).sparse
    element_bytes = 2 if config.embedding.weight_dtype == "fp16" else 4
    tables = count_tables(every, config.model.dim, element_bytes, world_size)
    pooled = [each for t, each in enumerate(tables) if t != config.model.sequence.history]
    total_dim = len(pooled) * config.model.dim
    # Tables: each touched row once.
    about: dict[str, Any] = {
        "samples": trainer.global_batch,
        "own_samples": samples,
        "total_dim": total_dim,
        "owner_dim": total_dim / world_size,
        "wire_bytes": ours.wire_dtype.itemsize,
    }
    once = [each._replace(ids=each.touched_rows) for each in pooled]
    read, sent = pooling_bytes(once, **about, id_bytes=0)
    update = update_bytes(
        pooled, **about, gradient_bytes=ours.output_dtype.itemsize, optimizer=config.embedding.optimizer
    )
    id_bytes = (every.values().nbytes + every.lengths().nbytes) / world_size
    # Dense part.
    dense = count_dense(config.model, len(data.rows), data.dense_features, samples)
    ring = 2 * (world_size - 1) / world_size * gradient_bytes * dense.parameters
    hbm_bytes = read + update.compulsory + id_bytes + 4 * dense.parameters + number_bytes * dense.outputs
    link_bytes = sent + update.link + id_bytes * (world_size - 1) / world_size + ring
    limit = Limit(int(hbm_bytes), int(link_bytes), *ceilings)
    each_ms = {"dense_ms": dense.flop / _DENSE_TFLOP_PER_S / 1e9, "hbm_ms": limit.hbm_ms, "link_ms": limit.link_ms}
    floors = {"floor_ms": max(each_ms.values()), "floor_sum_ms": sum(each_ms.values())}
    return {"dense_flop": dense.flop, **limit._asdict(), **each_ms, **floors}


def measure_products(trainer: Trainer) -> float | None:
    """Return the slowest rank's time, in ms, of a step's matrix products, back to back in a CUDA graph; None on a CPU.

    These are the products of the linear layers, forward and backward, by PyTorch's default library, in the dense
    part's precision.
    """
    config, data, device = trainer.config, trainer.train_data, trainer.device
    if device.type != "cuda":
        return None
    layers = dense_layers(config.model, len(data.rows), data.dense_features)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    multiply = products_of(layers, trainer.samples_per_rank, dtype, device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        (timing,) = time_alone([capture(multiply, device)], _REPEATS, device)
    return timing.median_ms


def products_of(
    layers: Sequence[tuple[int, int]], samples: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Return a function that computes the products of linear layers, each with its numbers of inputs and outputs.

    The first layer has no gradient of its input. Matrices of one shape are the same.
    """

    @cache
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device).to(dtype)

    products = []
    for number, (inputs, outputs) in enumerate(layers):
        x, weight, gradient = matrix(samples, inputs), matrix(outputs, inputs), matrix(samples, outputs)
        products += [(x, weight.t()), (gradient.t(), x)] + [(gradient, weight)] * (number > 0)

    def multiply() -> None:
        for first, second in products:
            torch.mm(first, second)

    return multiply


def measure_ceilings(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return GB/s of the slowest rank: of memory (reads plus writes), and of links to all peers together (0 without
    peers); a collective.

    Memory is measured by a copy, links by the faster of copy engines and stores, on CPUs by gloo.
    """

    def repeat(call: Callable[[], object]) -> None:
        for _ in range(_CALLS):
            call()

    def call_ms(calls: Sequence[Callable[[], object]]) -> float:
        pieces = [partial(repeat, call) for call in calls]
        return min(each.median_ms for each in time_alone(pieces, _REPEATS, device)) / _CALLS

    source = torch.zeros(_HBM_BYTES[device.type], dtype=torch.uint8, device=device)
    hbm_gb_per_s = 2 * source.numel() / call_ms([partial(torch.empty_like(source).copy_, source)]) / 1e6
    if group.size() == 1:
        return hbm_gb_per_s, 0.0
    payload = Payload(_LINK_BYTES[device.type] // 4, group, device)
    if device.type == "cpu":
        return hbm_gb_per_s, payload.link_bytes / call_ms([by_collective(payload).run]) / 1e6
    from dlrm_overlap.bench.harness.peer_memory import PeerMemory

    memory = PeerMemory(group, device, payload.part * group.size())
    ms = call_ms([memory.call(payload, way).run for way in memory.ways])
    memory.close()
    return hbm_gb_per_s, payload.link_bytes / ms / 1e6
