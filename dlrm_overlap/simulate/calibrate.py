"""Rates of a GPU from rows that `bench` has measured on one and two GPUs, and what they predict of rows on four.

Two numbers describe a lookup, a rate and a time a bag; the two shapes of `weak.csv` and `strong.csv` on one GPU give
both. What the exchange adds comes from the rows on two GPUs.
"""

import ast
import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm_overlap.config import ModelConfig
from dlrm_overlap.simulate.config import (
    ExchangeConfig,
    GpuConfig,
    HostConfig,
    LookupConfig,
    NetworkConfig,
    SimulateConfig,
    WorkConfig,
)
from dlrm_overlap.simulate.stage import build_cluster, forward
from dlrm_overlap.simulate.step import dense_seconds, simulate
from dlrm_overlap.simulate.workload import build_workload

Row = Mapping[str, str]

_LOOKUPS = {"baseline": "baseline", "pgas": "pgas", "fused": "fused"}
_STEPS_IN_A_ROW = 16  # half of them until the ranks are as far apart as they stay
_BACKENDS = {"torchrec": "torchrec", "pgas": "pgas", "fused": "fused"}


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


def fit(rows: Sequence[Row], base: GpuConfig) -> GpuConfig:
    """Return `base` with what rows of the embedding stage on one and on two GPUs tell; other rows are not looked at.

    Args:
        rows: of `bench weak` and `bench strong`.
        base: the rates that these rows do not tell.
    """
    one = [row for row in rows if row["world_size"] == "1"]
    two = [row for row in rows if row["world_size"] == "2"]
    assert one, "there are rows on one GPU"
    assert two, "there are rows on two GPUs"
    memory = float(np.mean([float(row["hbm_gb_per_s"]) for row in one]))
    link = float(np.mean([float(row["link_gb_per_s"]) for row in two]))
    lookups = {contender: _fit_lookup([row for row in one if row["contender"] == contender]) for contender in _LOOKUPS}
    baseline = [row for row in two if row["contender"] == "baseline"]
    slope, latency_ms = line_through(
        [float(row["link_bytes"]) for row in baseline], [float(row["all_to_all_ms"]) for row in baseline]
    )
    copied = sum(2 * _pooled_bytes(row) for row in baseline)
    unpack_ms = sum(float(row["unpack_ms"]) for row in baseline)
    gpu = replace(
        base,
        memory_gb_per_s=round_rate(memory),
        link_gb_per_s=round_rate(link),
        collective_gb_per_s=round_rate(1 / slope / 1e6),
        collective_us=round_rate(latency_ms * 1e3),
        copy_gb_per_s=round_rate(copied / unpack_ms / 1e6),
        **lookups,
    )
    fused = [row for row in two if row["contender"] == "fused"]
    more_ms = sum(float(row["median_ms"]) - stage_ms(row, gpu, put="in_place") for row in fused)
    staged = sum(float(row["link_bytes"]) for row in fused) / more_ms / 1e6
    return replace(gpu, staged_gb_per_s=round_rate(staged))


def round_rate(value: float) -> float:
    """Return four digits of a rate or a time."""
    return float(f"{value:.4g}")


def _fit_lookup(rows: Sequence[Row]) -> LookupConfig:
    table = np.array([[float(row["hbm_bytes"]), int(row["tables"]) * int(row["global_batch"])] for row in rows])
    seconds = np.array([float(row["lookup_ms"] or row["median_ms"]) / 1e3 for row in rows])
    per_byte, per_bag = np.linalg.lstsq(table, seconds, rcond=None)[0]
    return LookupConfig(round_rate(1 / per_byte / 1e9), round_rate(per_bag * 1e9))


def line_through(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return slope and constant, which is not below 0, of the line that is nearest to some points."""
    slope, constant = np.polyfit(x, y, 1)
    return float(slope), max(float(constant), 0.0)


def _pooled_bytes(row: Row) -> float:
    return int(row["global_batch"]) / int(row["world_size"]) * int(row["tables"]) * int(row["dim"]) * 4


def _value(text: str) -> Any:
    """Return a number or a list of a row's column, or the text where it is neither, as of a range of ids."""
    return ast.literal_eval(text) if text[0] == "[" or text.isdigit() else text


def stage_config(row: Row, gpu: GpuConfig, backend: str, put: str) -> SimulateConfig:
    """Return the simulation of what a row of `bench weak`, `strong`, `stage`, `schedule` or `slice` has measured."""
    dim, world_size = int(row["dim"]), int(row["world_size"])
    return SimulateConfig(
        what="stage",
        gpu=gpu,
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
            backend=backend,  # pyright: ignore[reportArgumentType]
            schedule=row["schedule"] or "auto",  # pyright: ignore[reportArgumentType]
            put=put,  # pyright: ignore[reportArgumentType]
        ),
        host=HostConfig(),
    )


def stage_ms(row: Row, gpu: GpuConfig, put: str = "stores") -> float:
    """Return the simulated time of what a row has measured."""
    backend = row["contender"]
    if backend == "baseline":  # TorchRec copies its output into the send buffer; this one sends it as it is
        config = stage_config(row, gpu, "torchrec", put)
        return simulate_stage_ms(config, copies=False)
    config = stage_config(row, gpu, backend, put)
    return simulate_stage_ms(config, steps=_STEPS_IN_A_ROW if backend == "fused" and put == "stores" else 1)


def simulate_stage_ms(config: SimulateConfig, copies: bool = True, steps: int = 1) -> float:
    """Return the simulated time of the stage's forward, of many in a row the time of one.

    In a row ranks need not keep step: where each slice has a flag of its own, a rank that has got all of its slices
    begins the next step, whatever the others still send to each other.
    """
    cluster = build_cluster(config)
    work = build_workload(config.model, config.work, cluster.world_size)
    engine = cluster.engine()
    ends = [forward(engine, cluster, config, work, [[]] * cluster.world_size, copies=copies)]
    for _ in range(steps - 1):
        ends.append(forward(engine, cluster, config, work, [[end] for end in ends[-1]], copies=copies))
    timeline = engine.run()
    last_s = [float(timeline.end_s[numbers].max()) for numbers in ends]
    warm = len(ends) // 2  # the first ones begin together
    return (last_s[-1] - (last_s[warm - 1] if warm else 0.0)) / (len(ends) - warm) * 1e3


def fit_loop(rows: Sequence[Row]) -> dict[str, float]:
    """Return how long a step of each contender takes over the host's time to issue it, where the host bounds it.

    It is more than 1, since what times the steps takes the host's time as well. Rows on one and on two GPUs tell it.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["world_size"] in ("1", "2"):
            found.setdefault(row["contender"], []).append(float(row["median_ms"]) / float(row["host_ms"]))
    return {contender: float(np.mean(ratios)) for contender, ratios in found.items()}


def fit_host(rows: Sequence[Row]) -> dict[str, float]:
    """Return the host's time in ms to issue each contender's stage, from rows on two GPUs which it bounds.

    It is the 10th percentile: what else the machine does only adds to it. The same calls are made on two ranks and on
    more, so that it holds for any number of ranks of this machine; and for none of another machine.
    """
    return {row["contender"]: float(row["p10_ms"]) for row in rows if row["world_size"] == "2"}


def predict(
    rows: Sequence[Row],
    gpu: GpuConfig,
    host_ms: Callable[[Row], float],
    chosen: Callable[[Row], bool],
    column: str = "median_ms",
    mark: str = "",
) -> list[Prediction]:
    """Return what the simulator says to those rows that are `chosen`, of contenders that it knows.

    Args:
        rows: of a figure of the stage.
        gpu: what does the work.
        host_ms: of a row, how long a step takes if only the host is waited for.
        chosen: tells which rows to look at.
        column: of the measured time.
        mark: put behind the name of a row that `host_ms` bounds.
    """
    found = []
    for row in rows:
        if row["contender"] in (*_LOOKUPS, *_BACKENDS) and chosen(row):
            schedule = f" {row['schedule']}" if row["kind"] == "schedule" else ""
            name = f"{row['kind']} {row['contender']}{schedule}, {row['multi_hot']} x {row['dim']}"
            on_gpus_ms, on_host_ms = stage_ms(row, gpu), host_ms(row)
            name += mark if on_host_ms > on_gpus_ms else ""
            found.append(Prediction(name, float(row[column]), max(on_gpus_ms, on_host_ms)))
    return found


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
