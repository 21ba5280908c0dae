"""Fits the simulator's rates of a GPU to rows that `bench` measured on one and two GPUs, and predicts other rows.

`python -m tests.calibration` prints the section `gpu` of `configs/simulate/h200.yaml`, and every prediction. A lookup
has four numbers: rates of the memory and of the cache, a time per bag and a fixed time. They are fitted to every other
shape of `sweep.csv` and to `weak_two_gpus.csv`. The exchange's rates come from rows on two GPUs.
"""

import ast
import csv
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from dlrm_overlap.config import DataConfig, EmbeddingConfig, ModelConfig, TablesConfig, TrainConfig
from dlrm_overlap.simulate.config import GpuConfig, LookupConfig, NetworkConfig, SimulateConfig, UpdateConfig
from dlrm_overlap.simulate.stage import has_few_bags, pooling_s
from dlrm_overlap.simulate.step import dense_seconds, simulate
from dlrm_overlap.simulate.workload import SimulatedWorkload, build_workload

Row = Mapping[str, str]
"""column -> value"""

_LOOKUPS = ("baseline", "pgas", "fused")
BACKENDS = {"baseline": "torchrec", "torchrec": "torchrec", "pgas": "pgas", "fused": "fused"}
_LINKED = 0.7  # if the links need more than this part of a time, it says nothing about the lookup
_FREE = 1e9  # GB/s, for work that takes no time
_MEMORY_GB_PER_S, _CACHE_GB_PER_S = np.geomspace(2800, 5200, 25), np.geomspace(3500, 16000, 40)  # candidates


class Prediction(NamedTuple):
    """A measured time and the simulated one."""

    name: str
    measured_ms: float
    simulated_ms: float

    @property
    def error(self) -> float:
        """Simulated over measured time, minus 1."""
        return self.simulated_ms / self.measured_ms - 1


class Measured(NamedTuple):
    """A simulation and its measured time."""

    config: SimulateConfig
    ms: float


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fit(rows: Sequence[Row], lookups: Sequence[Row], base: GpuConfig) -> GpuConfig:
    """Return `base` with rates fitted to rows of the stage.

    Args:
        rows: of weak and strong scaling; those on two GPUs give the rates of links and of the collective library.
        lookups: with today's lookups.
        base: all other rates.
    """
    two = [row for row in rows if row["world_size"] == "2"]
    assert two, "there are rows on two GPUs"
    baseline = [row for row in two if row["contender"] == "baseline"]
    slope, latency_ms = line_through(
        [float(row["link_bytes"]) for row in baseline], [float(row["all_to_all_ms"]) for row in baseline]
    )
    copied = sum(2 * _pooled_bytes(row) for row in baseline)
    unpack_ms = sum(float(row["unpack_ms"]) for row in baseline)
    gpu = replace(
        base,
        link_gb_per_s=round_rate(float(np.mean([float(row["link_gb_per_s"]) for row in two]))),
        collective_gb_per_s=round_rate(1 / slope / 1e6),
        collective_us=round_rate(latency_ms * 1e3),
        copy_gb_per_s=round_rate(copied / unpack_ms / 1e6),
    )
    return replace(gpu, **{name: _fit_lookup([r for r in lookups if r["contender"] == name], gpu) for name in _LOOKUPS})


def split_sweep(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows that lookups are fitted to, and those that are held out: a chessboard of dims, bags, batches."""
    keys = ("dim", "pooling_factor", "global_batch")
    values = {key: sorted({float(row[key]) for row in rows}) for key in keys}
    colors: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        colors[sum(values[key].index(float(row[key])) for key in keys) % 2].append(row)
    return colors


def round_rate(value: float) -> float:
    return float(f"{value:.4g}")


class _Lookup(NamedTuple):
    work: SimulatedWorkload
    seconds: float
    """measured, of lookup and exchange"""
    links_s: float
    """that stores to peers take during the lookup"""
    exchange_s: float
    """that the exchange takes after the lookup"""


def _lookup_of(row: Row, gpu: GpuConfig) -> _Lookup:
    work = build_workload(stage_config(row, GpuConfig()))
    seconds = measured_ms(row) / 1e3
    if work.world_size == 1:
        return _Lookup(work, seconds, 0.0, 0.0)
    if row["contender"] != "baseline":
        return _Lookup(work, seconds, float(row["link_bytes"]) / float(row["link_gb_per_s"]) / 1e9, gpu.peer_us / 1e6)
    collective_s = gpu.collective_us / 1e6 + work.link_bytes / gpu.collective_gb_per_s / 1e9
    return _Lookup(work, seconds, 0.0, collective_s + 2 * work.pooled_bytes / gpu.copy_gb_per_s / 1e9)


def _fit_lookup(rows: Sequence[Row], gpu: GpuConfig) -> LookupConfig:
    """Return the rates of one contender's lookup with the least squares of relative errors.

    A time that is mostly the links' fits the fixed time only.
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
    """Return the GPU's own time if the row has it, else the median by the clock."""
    return float(row.get("gpu_ms") or row["median_ms"])


def line_through(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return slope and constant, at least 0, of the least-squares line through points."""
    slope, constant = np.polyfit(x, y, 1)
    return float(slope), max(float(constant), 0.0)


def _pooled_bytes(row: Row) -> float:
    return int(row["global_batch"]) / int(row["world_size"]) * int(row["tables"]) * int(row["dim"]) * 4


def _value(text: str) -> Any:
    return ast.literal_eval(text) if text[0] == "[" or text.isdigit() else text


def _config(row: Row, what: Any, gpu: GpuConfig, model: ModelConfig, embedding: EmbeddingConfig) -> SimulateConfig:
    keys = {name: _value(row[name]) for name in ("rows", "multi_hot")}
    return SimulateConfig(
        model,
        DataConfig(tables=TablesConfig(int(row["tables"]), zipf_alpha=float(row["zipf_alpha"]), **keys)),
        embedding,
        TrainConfig(global_batch_size=int(row["global_batch"])),
        what=what,
        network=NetworkConfig(gpus_per_node=int(row["world_size"])),
        gpu=gpu,
    )


def stage_config(row: Row, gpu: GpuConfig) -> SimulateConfig:
    """Return the simulation of a measured row of the embedding stage, over the links of its machine."""
    dim = int(row["dim"])
    link = float(row["link_gb_per_s"]) or gpu.link_gb_per_s  # 0 on one GPU
    gpu, model = replace(gpu, link_gb_per_s=link), ModelConfig(dim=dim, bottom_mlp=[dim])
    return _config(row, "stage", gpu, model, EmbeddingConfig(BACKENDS[row["contender"]], optimizer="sgd"))


def stage_ms(row: Row, gpu: GpuConfig) -> float:
    """Return the simulated time of a measured row of the embedding stage."""
    work, ms, _ = simulate(stage_config(row, gpu))
    if row["contender"] == "baseline" and work.world_size > 1:  # sends its output without TorchRec's copy
        ms -= 2 * work.pooled_bytes / gpu.copy_gb_per_s / 1e6
    return ms


def fit_step(gpu: GpuConfig, quickstart: Measured, head: Measured) -> GpuConfig:
    """Return `gpu` with the overhead of kernels and the rate of the dense part, from two times on one GPU.

    The quickstart's products are so small that the overhead of its kernels accounts for the rest of its time. The
    head, without the overhead of its kernels, gives the rate of the dense part.

    Args:
        gpu: from `fit`.
        quickstart: a captured step on one GPU.
        head: a step on one GPU, with the time of its head, forward, loss and backward, alone.
    """

    def chain_ms(us: float) -> float:
        return simulate(replace(quickstart.config, gpu=replace(gpu, kernel_us=us))).ms

    us = 0.0
    for _ in range(4):  # the longest of concurrent branches may change as kernels get longer
        ms = chain_ms(us)
        us += (quickstart.ms - ms) / (chain_ms(us + 1.0) - ms)
    gpu = replace(gpu, kernel_us=round_rate(us))
    work = build_workload(head.config)

    def head_ms(us: float) -> float:
        found = dense_seconds(replace(head.config, gpu=replace(gpu, tflop_per_s=1.0, kernel_us=us)), work)
        return (found.head_forward + found.head_backward + found.weights) * 1e3

    busy_ms = head_ms(0.0)
    return replace(gpu, tflop_per_s=round_rate(busy_ms / (head.ms - (head_ms(us) - busy_ms))))


def backward_config(row: Row, gpu: GpuConfig) -> SimulateConfig:
    """Return the simulation of a measured row of `bench backward`, contender baseline or push."""
    found = stage_config({**row, "contender": "baseline" if row["contender"] == "baseline" else "pgas"}, gpu)
    return replace(found, what="backward", embedding=replace(found.embedding, optimizer=row["optimizer"]))


def fit_sort(rows: Sequence[Row]) -> float:
    """Return the ns per id of a sort: the slope of push's `prepare_ms` over the number of ids.

    The constant is dropped: it is the host's time to issue the kernels, which a captured step does not have.
    """
    push = [row for row in rows if row["contender"] == "push"]
    slope, _ = line_through([float(row["ids"]) for row in push], [float(row["prepare_ms"]) for row in push])
    return round_rate(slope * 1e6)


def predict_backward(rows: Sequence[Row], gpu: GpuConfig) -> list[Prediction]:
    """Return the predictions of rows of `bench backward` without skew, of simulated contenders."""
    found = []
    for row in rows:
        if row["contender"] in ("baseline", "push") and not float(row["zipf_alpha"]):
            name = f"backward {row['contender']} {row['optimizer']}, {row['multi_hot']} x {row['dim']}"
            found.append(Prediction(name, float(row["median_ms"]), simulate(backward_config(row, gpu)).ms))
    return found


def fit_traced_updates(traced: Sequence[Measured]) -> UpdateConfig:
    """Return the rate of updates in steps: their bytes over the time of their kernels.

    It includes the effect of other work on the GPU and of the ids' skew, and is used for every optimizer of rows.

    Args:
        traced: steps on two GPUs, with the mean time of the ranks' kernels that update rows.
    """
    nbytes = sum(build_workload(each.config).update_bytes for each in traced)
    return UpdateConfig(round_rate(nbytes / sum(each.ms for each in traced) / 1e6))


def fit_traced_sorts(traced: Sequence[Measured]) -> tuple[float, float]:
    """Return the ns per id and the fixed us of traced sorts: the line of their time over a rank's ids."""
    works = [build_workload(each.config) for each in traced]
    ids = [work.ids * float(work.shares.ids.mean()) for work in works]
    slope, constant_ms = line_through(ids, [each.ms for each in traced])
    return round_rate(slope * 1e6), round_rate(constant_ms * 1e3)


def fit_shared_updates(traced: Sequence[Measured], gpu: GpuConfig) -> UpdateConfig:
    """Return the rate and the fixed time of an update that runs alone, from traced ones that share the GPU.

    Least squares of the differences between simulated and traced updates; the simulation includes the other work.

    Args:
        traced: as above, of steps of several sizes whose backward is push.
        gpu: all other rates, and the initial rates of its update.
    """
    update, nbytes = gpu.update, [build_workload(each.config).update_bytes for each in traced]
    for _ in range(12):
        alone = [each / update.gb_per_s / 1e6 + update.us / 1e3 for each in nbytes]
        shared = [simulate(replace(each.config, gpu=replace(gpu, update=update))).updates_ms for each in traced]
        longer = [ms / own for ms, own in zip(shared, alone, strict=True)]
        equations = [[k * b, k] for k, b in zip(longer, nbytes, strict=True)]
        per_byte, on_top = np.linalg.lstsq(np.array(equations), np.array([each.ms for each in traced]), rcond=None)[0]
        update = replace(update, gb_per_s=1 / per_byte / 1e6, us=max(on_top, 0.0) * 1e3)
    return replace(update, gb_per_s=round_rate(update.gb_per_s), us=round_rate(update.us))


# Layers, which rows of `bench step` do not have, of configs/bench/step_mlperf.yaml and step_dot.yaml, and quickstart.
_LAYERS = {128: ([512, 256, 128], [1024, 1024, 512, 256, 1]), 16: ([64, 16], [64, 32, 1])}
_HOST = 0.75  # if the host's time exceeds this part of the simulated time, the host limits the measured one
_CONTENDERS = {"torchrec_strongest": "torchrec", "pgas_graph": "pgas", "fused_graph": "fused"}
_HEAD_MS = 1.848  # of MLPerf's step, 8192 samples, alone on one H200: `python -m tests.gpu.cross`, docs/results/step.md


def step_config(row: Row, gpu: GpuConfig) -> SimulateConfig:
    """Return the simulation of a measured row of `bench step`."""
    dim = int(row["dim"])
    model = ModelConfig(row["arch"], dim, *_LAYERS[dim])  # pyright: ignore[reportArgumentType]
    wire: Any = "bf16" if row["precision"] == "bf16" else "fp32"
    optimizer: Any = row["optimizer"]
    backend = _CONTENDERS[row["contender"]]
    return _config(row, "step", gpu, model, EmbeddingConfig(backend, optimizer=optimizer, wire_dtype=wire))


def calibrate(folder: Path) -> GpuConfig:
    """Return the rates fitted to rows on one and two GPUs; `folder` is docs/results."""
    own = folder / "calibration"
    lookups = [*split_sweep(read_rows(own / "sweep.csv"))[0], *read_rows(own / "weak_two_gpus.csv")]
    gpu = fit(read_rows(own / "weak.csv") + read_rows(own / "strong.csv"), lookups, GpuConfig())
    traced = read_rows(own / "timeline.csv")
    sort_ns = fit_sort(read_rows(own / "backward.csv"))
    pgas = _traced_updates(traced, "pgas_graph", "update")
    update = replace(fit_traced_updates(pgas), sort_ns=sort_ns)
    rows, sorts = (_traced_updates(traced, "torchrec_strongest", kind) for kind in ("update", "sort"))
    baseline_ns, baseline_us = fit_traced_sorts(sorts)
    baseline = replace(fit_traced_updates(rows), sort_ns=baseline_ns, sort_us=baseline_us)
    gpu = replace(gpu, update=update, baseline_update=baseline)
    quickstart = next(
        row for row in read_rows(own / "step.csv") if row["world_size"] == "1" and row["contender"] == "pgas_graph"
    )
    shape = step_config(next(row for row in traced if row["arch"] == "dcn"), gpu)
    alone = replace(shape, network=NetworkConfig(gpus_per_node=1), train=TrainConfig(global_batch_size=8192))
    gpu = fit_step(
        gpu, Measured(step_config(quickstart, gpu), float(quickstart["median_ms"])), Measured(alone, _HEAD_MS)
    )
    return replace(gpu, update=fit_shared_updates(pgas, gpu))


def _traced_updates(rows: Sequence[Row], contender: str, kind: str) -> list[Measured]:
    """Return the traced steps of `contender` with the mean time of the ranks' kernels of `kind`."""
    chosen = [row for row in rows if row["contender"] == contender]
    steps = {(row["arch"], row["global_batch"]): row for row in chosen}
    traced = []
    for key, step in steps.items():
        ranks = [row for row in chosen if (row["arch"], row["global_batch"]) == key]
        ms = [float(row[f"{kind}_kernels_ms"]) for row in ranks]
        traced.append(Measured(step_config(step, GpuConfig()), sum(ms) / len(ms)))
    return traced


def predict_four(folder: Path, gpu: GpuConfig) -> dict[str, list[Prediction]]:
    """Return the predictions of rows on four GPUs: stage, its sweep, step and backward.

    Rows that the host limits are left out, and captured steps are compared by the GPU's own time. Backward rows have
    ids without skew, although the rates are fitted to MLPerf's skew.
    """
    rows = folder / "four_h200"
    found: dict[str, list[Prediction]] = {kind: [] for kind in ("stage", "sweep", "step", "backward")}
    for row in (row for file in [*sorted(rows.glob("stage_*.csv")), rows / "sweep.csv"] for row in read_rows(file)):
        if row["contender"] in BACKENDS:
            name = f"{row['kind']} {row['contender']}, {row['multi_hot']} x {row['dim']}"
            prediction = Prediction(name, measured_ms(row), stage_ms(row, gpu))
            found[row["kind"]] += [] if _is_host_bound(row, prediction) else [prediction]
    for model in ("mlperf", "dot"):
        row = read_rows(rows / f"step_{model}.csv")[-1]  # pgas_graph
        name = f"step {row['contender']} {row['arch']}, {int(row['global_batch']) // 4} samples"
        found["step"].append(Prediction(name, float(row["busy_ms"]), simulate(step_config(row, gpu)).ms))
    for file in sorted(rows.glob("backward_*.csv")):
        found["backward"] += predict_backward(read_rows(file), gpu)
    return {f"four GPUs: {kind}": predictions for kind, predictions in found.items()}


def _is_host_bound(row: Row, prediction: Prediction) -> bool:
    return float(row["host_ms"]) >= _HOST * prediction.simulated_ms


def predict_held_out(folder: Path, gpu: GpuConfig) -> dict[str, list[Prediction]]:
    """Return the predictions of held-out rows on one and two GPUs, by file and contender."""
    found: dict[str, list[Prediction]] = {}
    for file in ("sweep", "grid", "strong_two_gpus", "cached", "skewed"):
        rows: Sequence[Row] = read_rows(folder / f"calibration/{file}.csv")
        for row in split_sweep(rows)[1] if file == "sweep" else rows:
            contender = row["contender"]
            if contender in BACKENDS:
                shape = f"{row['tables']} tables of {row['multi_hot']} x {row['dim']}, {row['global_batch']} samples"
                name = f"{contender}, {shape} on {row['world_size']}"
                prediction = Prediction(name, measured_ms(row), stage_ms(row, gpu))
                found.setdefault(f"held out: {file}.csv, {contender}", []).append(prediction)
    return found


def predict_parts(rows: Sequence[Row], gpu: GpuConfig) -> list[Prediction]:
    """Return the predictions of captured steps on two GPUs, whole and with a part left out.

    Args:
        rows: of the variants of `python -m tests.gpu.step_parts`, or of traced whole steps; of a row per rank the
            slowest counts.
        gpu: rates, not fitted to these rows.
    """
    gpus = {
        "whole": gpu,
        "no_sort": replace(gpu, update=replace(gpu.update, sort_ns=0.0)),
        "no_update": replace(gpu, update=UpdateConfig(_FREE)),
    }
    steps: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        steps.setdefault((row.get("variant", "whole"), row["global_batch"], row["multi_hot"]), []).append(row)
    found: list[Prediction] = []
    for (variant, batch, hot), ranks in steps.items():
        ids = [int(each) for each in ast.literal_eval(hot)]
        name = f"{variant}, {int(batch) // 2} samples, {max(ids)} of {sum(ids)} ids in one table"
        slowest_ms = max(float(row.get("median_ms") or row["untraced_ms"]) for row in ranks)
        simulated = simulate(step_config({**ranks[0], "contender": "pgas_graph"}, gpus[variant]))
        found.append(Prediction(name, slowest_ms, simulated.ms))
    return found


def predictions(folder: Path, gpu: GpuConfig) -> dict[str, list[Prediction]]:
    """Return all predictions, by the name of their rows."""
    found = predict_held_out(folder, gpu) | predict_four(folder, gpu)
    for name in ("cut", "parts", "clock"):
        rows = read_rows(folder / "calibration" / f"{name}.csv")
        found[f"two GPUs: step, {name}.csv"] = predict_parts(rows, gpu)
    return found


def main() -> None:
    folder = Path("docs/results")
    gpu = calibrate(folder)
    print(yaml.safe_dump({"gpu": dataclasses.asdict(gpu)}, sort_keys=False))
    for name, rows in predictions(folder, gpu).items():
        print(f"\n{name}")
        for each in rows:
            simulated = f"{each.simulated_ms:.3f} simulated, {100 * each.error:+.1f}%"
            print(f"{each.name}: {each.measured_ms:.3f} ms, {simulated}")


if __name__ == "__main__":
    main()
