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
    UpdateConfig,
    WorkConfig,
)
from dlrm_overlap.simulate.stage import build_cluster, forward
from dlrm_overlap.simulate.step import dense_seconds, simulate
from dlrm_overlap.simulate.workload import build_workload

Row = Mapping[str, str]

_LOOKUPS = {"baseline": "baseline", "pgas": "pgas", "fused": "fused"}
_STEPS_IN_A_ROW = 16  # half of them until the ranks are as far apart as they stay
_FREE = 1e9  # GB/s: what takes no time
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
    slope, latency_ms = _line(
        [float(row["link_bytes"]) for row in baseline], [float(row["all_to_all_ms"]) for row in baseline]
    )
    copied = sum(2 * _pooled_bytes(row) for row in baseline)
    unpack_ms = sum(float(row["unpack_ms"]) for row in baseline)
    gpu = replace(
        base,
        memory_gb_per_s=_round(memory),
        link_gb_per_s=_round(link),
        collective_gb_per_s=_round(1 / slope / 1e6),
        collective_us=_round(latency_ms * 1e3),
        copy_gb_per_s=_round(copied / unpack_ms / 1e6),
        **lookups,
    )
    fused = [row for row in two if row["contender"] == "fused"]
    more_ms = sum(float(row["median_ms"]) - stage_ms(row, gpu, put="in_place") for row in fused)
    staged = sum(float(row["link_bytes"]) for row in fused) / more_ms / 1e6
    return replace(gpu, staged_gb_per_s=_round(staged))


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _fit_lookup(rows: Sequence[Row]) -> LookupConfig:
    table = np.array([[float(row["hbm_bytes"]), int(row["tables"]) * int(row["global_batch"])] for row in rows])
    seconds = np.array([float(row["lookup_ms"] or row["median_ms"]) / 1e3 for row in rows])
    per_byte, per_bag = np.linalg.lstsq(table, seconds, rcond=None)[0]
    return LookupConfig(_round(1 / per_byte / 1e9), _round(per_bag * 1e9))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
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


def backward_config(row: Row, gpu: GpuConfig) -> SimulateConfig:
    """Return the simulation of what a row of `bench backward` has measured, of the contenders baseline and push."""
    found = stage_config(row, gpu, "torchrec" if row["contender"] == "baseline" else "pgas", "in_place")
    work = replace(found.work, optimizer=row["optimizer"])  # pyright: ignore[reportArgumentType]
    return replace(found, what="backward", work=work)


def fit_backward(rows: Sequence[Row], gpu: GpuConfig) -> GpuConfig:
    """Return `gpu` with the rates of updates under ids without skew, from rows of `bench backward` on two GPUs.

    A sort takes what the line of push's `prepare_ms` over the number of ids tells, an id and on top. The time of the
    rows is that with which the simulated backward takes as long as the measured one; over the bytes that remain with a
    cache without bounds it gives a rate for each optimizer. Those that the baseline's packing and collective move are
    theirs, not its update's. Gradients that are read again come from the cache and take no time. Rows with skewed ids
    would tell what they take, and what the longest runs of one row do.
    """
    push, baseline = ([row for row in rows if row["contender"] == name] for name in ("push", "baseline"))
    slope, constant_ms = _line([float(row["ids"]) for row in push], [float(row["prepare_ms"]) for row in push])
    gpu = replace(gpu, sort_ns=_round(slope * 1e6), sort_us=_round(constant_ms * 1e3))
    return replace(gpu, update=_fit_update(push, gpu, None), baseline_update=_fit_update(baseline, gpu, _FREE))


def _fit_update(rows: Sequence[Row], gpu: GpuConfig, exchanged_gb_per_s: float | None) -> UpdateConfig:
    rates: dict[str, list[float]] = {}
    for row in rows:
        config = backward_config(row, gpu)
        update = build_workload(config.model, config.work, int(row["world_size"])).update
        nbytes = update.compulsory - (update.exchanged if exchanged_gb_per_s else 0.0)
        rates.setdefault(row["optimizer"], []).append(nbytes / _rows_s(config, float(row["median_ms"])) / 1e9)
    sgd, adagrad = (_round(float(np.mean(rates[name]))) for name in ("sgd", "rowwise_adagrad"))
    return UpdateConfig(sgd, adagrad, repeated_gb_per_s=_FREE, exchanged_gb_per_s=exchanged_gb_per_s)


def _rows_s(config: SimulateConfig, measured_ms: float) -> float:
    """Return the time that the update of a rank's rows takes if the whole backward takes `measured_ms`."""

    def with_rows(seconds: float) -> float:
        update = UpdateConfig(_FREE, _FREE, _FREE, us=seconds * 1e6)
        return simulate(replace(config, gpu=replace(config.gpu, update=update, baseline_update=update))).ms

    seconds = measured_ms / 1e3
    for _ in range(8):  # the less is hidden behind the links, the sooner it is found
        seconds = max(seconds + (measured_ms - with_rows(seconds)) / 1e3, 1e-6)
    return seconds


def predict_backward(rows: Sequence[Row], gpu: GpuConfig) -> list[Prediction]:
    """Return what the simulator says to rows of `bench backward` without skew, of contenders that it knows."""
    found = []
    for row in rows:
        if row["contender"] in ("baseline", "push") and not float(row["zipf_alpha"]):
            name = f"backward {row['contender']} {row['optimizer']}, {row['multi_hot']} x {row['dim']}"
            found.append(Prediction(name, float(row["median_ms"]), simulate(backward_config(row, gpu)).ms))
    return found


def fit_step(gpu: GpuConfig, quickstart: Measured, head: Measured, pair: Measured) -> GpuConfig:
    """Return `gpu` with what a step takes beside its bytes and its operations, from three times on one and two GPUs.

    The quickstart's products are so small that its step is a chain of kernels and what is around it; the head alone
    gives the rate of the dense part, less its kernels; the step on two GPUs tells the kernels from what is around them.

    Args:
        gpu: from `fit`.
        quickstart: a captured step on one GPU.
        head: a step on one GPU, and the time of its head with loss, forward and backward, alone.
        pair: a captured step on two GPUs.
    """

    def with_kernels(us: float) -> GpuConfig:
        chain = replace(gpu, kernel_us=us, step_us=0.0)
        around_ms = quickstart.ms - simulate(replace(quickstart.config, gpu=chain)).ms
        dense = dense_seconds(
            replace(head.config, gpu=replace(chain, dense_efficiency=1.0)),
            build_workload(head.config.model, head.config.work, 1),
        )
        busy_ms = (dense.head_forward + dense.head_backward + dense.weights) * 1e3
        kernels = 2 * dense.head_kernels + (2 if dense.weights else 0)
        efficiency = busy_ms / (head.ms - kernels * us / 1e3)
        return replace(
            chain, kernel_us=_round(us), step_us=_round(max(around_ms, 0.0) * 1e3), dense_efficiency=_round(efficiency)
        )

    few, many = 0.0, 50.0  # the more of the quickstart's time its kernels take, the less is around a step
    for _ in range(24):
        middle = (few + many) / 2
        if simulate(replace(pair.config, gpu=with_kernels(middle))).ms > pair.ms:
            few = middle
        else:
            many = middle
    return with_kernels(few)
