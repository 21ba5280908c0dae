"""Rates of a GPU from rows that `bench` has measured on one and two GPUs, and what they predict of other rows.

Four numbers describe a lookup: rates of the memory and of the cache, a time a bag and one on top. Every other shape of
`sweep.csv`, and the shape of `weak_two_gpus.csv`, give them. What the exchange adds comes from rows on two GPUs.
"""

import ast
import csv
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm_overlap.config import ModelConfig
from dlrm_overlap.simulate.config import ExchangeConfig, NetworkConfig, SimulateConfig, WorkConfig
from dlrm_overlap.simulate.gpu_config import GpuConfig, LookupConfig
from dlrm_overlap.simulate.stage import build_cluster, forward, has_few_bags, pooling_s
from dlrm_overlap.simulate.step import dense_seconds, simulate
from dlrm_overlap.simulate.workload import Workload, build_workload

Row = Mapping[str, str]

_LOOKUPS = ("baseline", "pgas", "fused")
BACKENDS = {"baseline": "torchrec", "torchrec": "torchrec", "pgas": "pgas", "fused": "fused"}
_LINKED = 0.7  # part of a time that the links need, above which it tells nothing of a lookup
_MEMORY_GB_PER_S, _CACHE_GB_PER_S = np.geomspace(2800, 5200, 25), np.geomspace(3500, 16000, 40)  # that are tried


class Prediction(NamedTuple):
    """A measured time and the simulated one."""

    name: str
    measured_ms: float
    simulated_ms: float

    @property
    def error(self) -> float:
        """The simulated time over the measured one, less 1."""
        return self.simulated_ms / self.measured_ms - 1


class Measured(NamedTuple):
    """A simulation and the time that was measured of it."""

    config: SimulateConfig
    ms: float


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file of `bench`."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fit(rows: Sequence[Row], lookups: Sequence[Row], base: GpuConfig) -> GpuConfig:
    """Return `base` with what rows of the embedding stage on one and on two GPUs tell; other rows are not looked at.

    Args:
        rows: of `bench weak` and `bench strong`, which tell the rates of memory, links, and the collective library.
        lookups: rows of the stage with the lookups of today.
        base: the rates that these rows do not tell.
    """
    one = [row for row in rows if row["world_size"] == "1"]
    two = [row for row in rows if row["world_size"] == "2"]
    assert one, "there are rows on one GPU"
    assert two, "there are rows on two GPUs"
    baseline = [row for row in two if row["contender"] == "baseline"]
    slope, latency_ms = line_through(
        [float(row["link_bytes"]) for row in baseline], [float(row["all_to_all_ms"]) for row in baseline]
    )
    copied = sum(2 * _pooled_bytes(row) for row in baseline)
    unpack_ms = sum(float(row["unpack_ms"]) for row in baseline)
    gpu = replace(
        base,
        memory_gb_per_s=round_rate(float(np.mean([float(row["hbm_gb_per_s"]) for row in one]))),
        link_gb_per_s=round_rate(float(np.mean([float(row["link_gb_per_s"]) for row in two]))),
        collective_gb_per_s=round_rate(1 / slope / 1e6),
        collective_us=round_rate(latency_ms * 1e3),
        copy_gb_per_s=round_rate(copied / unpack_ms / 1e6),
    )
    return replace(gpu, **{name: _fit_lookup([r for r in lookups if r["contender"] == name], gpu) for name in _LOOKUPS})


def split_sweep(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of the shapes that lookups are fitted to, and those that are held out.

    They take turns like the fields of a chessboard, whose sides are the sweep's dims, bags and batches.
    """
    keys = ("dim", "pooling_factor", "global_batch")
    places = {key: sorted({float(row[key]) for row in rows}) for key in keys}
    fields: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        fields[sum(places[key].index(float(row[key])) for key in keys) % 2].append(row)
    return fields


def round_rate(value: float) -> float:
    """Return four digits of a rate or a time."""
    return float(f"{value:.4g}")


class _Lookup(NamedTuple):
    """A measured lookup with its exchange, in seconds."""

    work: Workload
    seconds: float
    links_s: float
    """that stores to peers need beside the lookup"""
    exchange_s: float
    """that the exchange takes besides"""


def _lookup_of(row: Row, gpu: GpuConfig) -> _Lookup:
    config = stage_config(row, GpuConfig())
    work = build_workload(config.model, config.work, config.network.world_size)
    seconds = measured_ms(row) / 1e3
    if work.world_size == 1:
        return _Lookup(work, seconds, 0.0, 0.0)
    if row["contender"] != "baseline":
        return _Lookup(work, seconds, float(row["link_bytes"]) / float(row["link_gb_per_s"]) / 1e9, gpu.peer_us / 1e6)
    collective_s = gpu.collective_us / 1e6 + work.link_bytes / gpu.collective_gb_per_s / 1e9
    return _Lookup(work, seconds, 0.0, collective_s + 2 * work.pooled_bytes / gpu.copy_gb_per_s / 1e9)


def _fit_lookup(rows: Sequence[Row], gpu: GpuConfig) -> LookupConfig:
    """Return the lookup of one contender with the least squares of relative errors, of rates in steps of 3 and 4%.

    Where the links take most of the time, it tells the time on top alone.
    """
    best = np.inf, LookupConfig()
    lookups = [_lookup_of(row, gpu) for row in rows]
    linked = np.array([each.links_s > _LINKED * each.seconds for each in lookups])
    bags = np.array([each.work.bags for each in lookups])
    few = bags * [
        row["contender"] == "fused" and has_few_bags(each.work) for row, each in zip(rows, lookups, strict=True)
    ]
    seconds, links_s, exchange_s = (np.array(column) for column in list(zip(*lookups, strict=True))[1:])
    unknown = np.stack([np.ones(len(bags)), bags, few], axis=1)
    equations = np.where(linked[:, None], unknown * [1, 0, 0], unknown) / seconds[:, None]
    scale = np.maximum(equations.max(axis=0), 1e-30)
    for memory, cache in itertools.product(_MEMORY_GB_PER_S, _CACHE_GB_PER_S):
        rates = LookupConfig(round_rate(float(memory)), 0.0, round_rate(float(cache)))
        pooled_s = np.array([pooling_s(rates, each.work).mean() for each in lookups])
        left = 1 - (np.where(linked, links_s, pooled_s) + exchange_s) / seconds
        found = np.maximum(np.linalg.lstsq(equations / scale, left, rcond=None)[0] / scale, 0.0)
        errors = (found[0] + np.maximum(pooled_s + unknown[:, 1:] @ found[1:], links_s) + exchange_s) / seconds - 1
        us, bag_ns, few_bag_ns = (round_rate(each) for each in found * [1e6, 1e9, 1e9])
        lookup = replace(rates, us=us, bag_ns=bag_ns, few_bag_ns=few_bag_ns)
        best = min(best, (float(np.square(errors).sum()), lookup), key=lambda each: each[0])
    return best[1]


def measured_ms(row: Row) -> float:
    """Return the GPU's time alone, where a row has it."""
    return float(row.get("gpu_ms") or row["median_ms"])


def line_through(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return slope and constant, which is not below 0, of the line that is nearest to some points."""
    slope, constant = np.polyfit(x, y, 1)
    return float(slope), max(float(constant), 0.0)


def _pooled_bytes(row: Row) -> float:
    return int(row["global_batch"]) / int(row["world_size"]) * int(row["tables"]) * int(row["dim"]) * 4


def _value(text: str) -> Any:
    """Return a number or a list of a row's column, or the text where it is neither, as of a range of ids."""
    return ast.literal_eval(text) if text[0] == "[" or text.isdigit() else text


def stage_config(row: Row, gpu: GpuConfig) -> SimulateConfig:
    """Return the simulation of what a row of the embedding stage has measured, over the links of its machine."""
    dim, world_size = int(row["dim"]), int(row["world_size"])
    link = float(row["link_gb_per_s"]) or gpu.link_gb_per_s  # 0 on one GPU
    return SimulateConfig(
        what="stage",
        gpu=replace(gpu, link_gb_per_s=link),
        network=NetworkConfig(gpus_per_host=world_size),
        model=ModelConfig(dim=dim, bottom_mlp=[dim]),
        work=WorkConfig(
            tables=int(row["tables"]),
            rows=_value(row["rows"]),
            multi_hot=_value(row["multi_hot"]),
            zipf_alpha=float(row["zipf_alpha"]),
            global_batch=int(row["global_batch"]),
        ),
        exchange=ExchangeConfig(
            backend=BACKENDS[row["contender"]],  # pyright: ignore[reportArgumentType]
            schedule=row.get("schedule") or "auto",  # pyright: ignore[reportArgumentType]
        ),
    )


def stage_ms(row: Row, gpu: GpuConfig) -> float:
    """Return the simulated time of what a row has measured."""
    config = stage_config(row, gpu)
    cluster = build_cluster(config)
    work = build_workload(config.model, config.work, cluster.world_size)
    engine = cluster.engine()
    copies = row["contender"] != "baseline"  # TorchRec copies its output into the send buffer; this one sends it as is
    forward(engine, cluster, config, work, [[]] * cluster.world_size, copies=copies)
    return engine.run().seconds * 1e3


def fit_step(gpu: GpuConfig, quickstart: Measured, head: Measured) -> GpuConfig:
    """Return `gpu` with what a step takes beside its bytes and its operations, from two times on one GPU.

    The quickstart's products are so small that its step is a chain of kernels, which share what else is left of its
    time. The head alone gives the rate of the dense part, less its kernels.

    Args:
        gpu: from `fit`.
        quickstart: a captured step on one GPU.
        head: a step on one GPU, and the time of its head with loss, forward and backward, alone.
    """

    def chain_ms(us: float) -> float:
        return simulate(replace(quickstart.config, gpu=replace(gpu, kernel_us=us))).ms

    us = 0.0
    for _ in range(4):  # branches side by side may change places as kernels get longer
        ms = chain_ms(us)
        us += (quickstart.ms - ms) / (chain_ms(us + 1.0) - ms)
    gpu = replace(gpu, kernel_us=round_rate(us))
    dense = dense_seconds(
        replace(head.config, gpu=replace(gpu, dense_efficiency=1.0)),
        build_workload(head.config.model, head.config.work, 1),
    )
    busy_ms = (dense.head_forward + dense.head_backward + dense.weights) * 1e3
    kernels = dense.head_forward_kernels + dense.head_backward_kernels + (2 if dense.weights else 0)
    return replace(gpu, dense_efficiency=round_rate(busy_ms / (head.ms - kernels * us / 1e3)))
