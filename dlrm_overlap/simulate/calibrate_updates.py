"""Rates of updates, from rows that `bench backward` and `bench timeline` have measured on two GPUs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dlrm_overlap.embedding.traffic import UpdateBytes
from dlrm_overlap.simulate.calibrate import Measured, Prediction, Row, line_through, round_rate, stage_config
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.gpu_config import GpuConfig, UpdateConfig
from dlrm_overlap.simulate.step import simulate
from dlrm_overlap.simulate.workload import build_workload

_OPTIMIZERS = ("sgd", "rowwise_adagrad")
_FREE = 1e9  # GB/s: what takes no time


def backward_config(row: Row, gpu: GpuConfig) -> SimulateConfig:
    """Return the simulation of what a row of `bench backward` has measured, of the contenders baseline and push."""
    found = stage_config({**row, "contender": "baseline" if row["contender"] == "baseline" else "pgas"}, gpu)
    work = replace(found.work, optimizer=row["optimizer"])  # pyright: ignore[reportArgumentType]
    return replace(found, what="backward", work=work)


def fit_backward(rows: Sequence[Row], gpu: GpuConfig) -> GpuConfig:
    """Return `gpu` with the rates of updates under ids without skew, from rows of `bench backward` on two GPUs.

    A sort takes what the line of push's `prepare_ms` over the number of ids tells, an id and on top. The time of an
    update is that with which the simulated backward takes as long as the measured one. Over the bytes that remain with
    a cache without bounds it gives push a rate for each optimizer; where links take more than half of the time they
    hide the update, so such rows do not count. What the baseline's packing and collective move is theirs, not its
    update's, whose gradients have a rate of their own. Gradients that are read again come from the cache and take no
    time. Rows with skewed ids would tell what they take, and what the longest runs of one row do.
    """
    push, baseline = ([row for row in rows if row["contender"] == name] for name in ("push", "baseline"))
    slope, constant_ms = line_through([float(row["ids"]) for row in push], [float(row["prepare_ms"]) for row in push])
    sort_ns, sort_us = round_rate(slope * 1e6), round_rate(constant_ms * 1e3)
    gpu = replace(gpu, **{
        name: replace(getattr(gpu, name), sort_ns=sort_ns, sort_us=sort_us) for name in ("update", "baseline_update")
    })  # fmt: skip
    return replace(gpu, update=_fit_push(push, gpu), baseline_update=_fit_baseline(baseline, gpu))


def _update_of(config: SimulateConfig) -> UpdateBytes:
    return build_workload(config.model, config.work, config.network.world_size).update


def _fit_push(rows: Sequence[Row], gpu: GpuConfig) -> UpdateConfig:
    taken: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        config, measured_ms = backward_config(row, gpu), float(row["median_ms"])
        if 2 * float(row["link_bytes"]) / gpu.link_gb_per_s / 1e6 < measured_ms:
            taken.setdefault(row["optimizer"], []).append((_update_of(config).compulsory, _rows_s(config, measured_ms)))
    sgd, adagrad = (
        round_rate(float(np.mean([nbytes / seconds for nbytes, seconds in taken[name]])) / 1e9) for name in _OPTIMIZERS
    )
    return replace(gpu.update, sgd_gb_per_s=sgd, adagrad_gb_per_s=adagrad, repeated_gb_per_s=_FREE, us=0.0)


def _fit_baseline(rows: Sequence[Row], gpu: GpuConfig) -> UpdateConfig:
    """Solve for a rate of each optimizer's rows and one of gradients, by least squares of relative errors."""
    equations = []
    for row in rows:
        config = backward_config(row, gpu)
        update, seconds = _update_of(config), _rows_s(config, float(row["median_ms"]))
        own = update.compulsory - update.exchanged - update.gradients
        each = [own if row["optimizer"] == name else 0.0 for name in _OPTIMIZERS]
        equations.append([nbytes / seconds for nbytes in (*each, update.gradients)])
    inverse = np.linalg.lstsq(np.array(equations), np.ones(len(equations)), rcond=None)[0]
    sgd, adagrad, gradients = (round_rate(1 / each / 1e9) if each > 0 else _FREE for each in inverse)
    return UpdateConfig(
        sgd, adagrad, repeated_gb_per_s=_FREE, gradients_gb_per_s=gradients, exchanged_gb_per_s=_FREE,
        sort_ns=gpu.baseline_update.sort_ns, sort_us=gpu.baseline_update.sort_us,
    )  # fmt: skip


def _rows_s(config: SimulateConfig, measured_ms: float) -> float:
    """Return the time that the update of a rank's rows takes if the whole backward takes `measured_ms`."""

    def with_rows(seconds: float) -> float:
        gpu, rows = config.gpu, UpdateConfig(_FREE, _FREE, _FREE, us=seconds * 1e6)
        # The sort is known, and not part of the rows' time.
        update = replace(rows, sort_ns=gpu.update.sort_ns, sort_us=gpu.update.sort_us)
        return simulate(replace(config, gpu=replace(gpu, update=update, baseline_update=update))).ms

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


def fit_traced_updates(traced: Sequence[Measured]) -> UpdateConfig:
    """Return the rate of updates in a step, from traced ones: the bytes of all of them over the time of their kernels.

    It is that beside what else runs then, with the skew of the ids, and one for all bytes. Other optimizers of rows
    than those of the traced steps have it as well.

    Args:
        traced: steps on two GPUs, and the mean time of the ranks' kernels that update rows.
    """
    nbytes = sum(_update_of(each.config).hbm for each in traced)
    rate = round_rate(nbytes / sum(each.ms for each in traced) / 1e6)
    return UpdateConfig(rate, rate, rate)


def fit_traced_sorts(traced: Sequence[Measured]) -> tuple[float, float]:
    """Return the ns that a traced sort takes an id, and the us on top: the line of its time over a rank's ids."""
    works = [build_workload(each.config.model, each.config.work, each.config.network.world_size) for each in traced]
    ids = [work.ids * float(work.shares.ids.mean()) for work in works]
    slope, constant_ms = line_through(ids, [each.ms for each in traced])
    return round_rate(slope * 1e6), round_rate(constant_ms * 1e3)


def fit_shared_updates(traced: Sequence[Measured], gpu: GpuConfig) -> UpdateConfig:
    """Return the same, and a time on top, for an update that shares the GPU with what is simulated beside it.

    Simulated updates take about as long as the traced ones, by least squares of their differences. What shares the
    memory and the multiprocessors with them is simulated, too; the rate and the time are what the update has alone.

    Args:
        traced: as above, of steps of several sizes whose backward is push.
        gpu: all other rates; those of its update are where the search begins.
    """
    update, nbytes = gpu.update, [_update_of(each.config).hbm for each in traced]
    for _ in range(12):
        alone = [each / update.adagrad_gb_per_s / 1e6 + update.us / 1e3 for each in nbytes]
        shared = [_rows_ms(replace(each.config, gpu=replace(gpu, update=update))) for each in traced]
        longer = [ms / own for ms, own in zip(shared, alone, strict=True)]
        equations = [[k * b, k] for k, b in zip(longer, nbytes, strict=True)]
        per_byte, on_top = np.linalg.lstsq(np.array(equations), np.array([each.ms for each in traced]), rcond=None)[0]
        rate = 1 / per_byte / 1e6
        update = replace(
            update, sgd_gb_per_s=rate, adagrad_gb_per_s=rate, repeated_gb_per_s=rate, us=max(on_top, 0.0) * 1e3
        )
    rate = round_rate(update.adagrad_gb_per_s)
    return replace(update, sgd_gb_per_s=rate, adagrad_gb_per_s=rate, repeated_gb_per_s=rate, us=round_rate(update.us))


def _rows_ms(config: SimulateConfig) -> float:
    """Return how long the simulated updates of a rank's rows take, on the mean rank."""
    timeline = simulate(config).timeline
    rows = [number for number, each in enumerate(timeline.activities) if each.name == "rows"]
    return float((timeline.end_s[rows] - timeline.start_s[rows]).sum()) * 1e3 / config.network.world_size
