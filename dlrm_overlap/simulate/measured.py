"""The measured rows that the simulator is calibrated with, and those that it must predict without having seen them.

    gpu = calibrate_from(Path("docs/results"))
    predictions = predict_four(Path("docs/results"), gpu)

`python docs/results/simulator_check.py` prints both.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dlrm_overlap.config import ModelConfig
from dlrm_overlap.dense.gemm.plan import WHOLE
from dlrm_overlap.simulate.calibrate import (
    BACKENDS,
    Measured,
    Prediction,
    Row,
    fit,
    fit_step,
    measured_ms,
    read_rows,
    split_sweep,
    stage_ms,
)
from dlrm_overlap.simulate.calibrate_updates import (
    fit_backward,
    fit_shared_updates,
    fit_traced_sorts,
    fit_traced_updates,
    predict_backward,
)
from dlrm_overlap.simulate.config import ExchangeConfig, NetworkConfig, SimulateConfig, WorkConfig
from dlrm_overlap.simulate.gpu_config import GpuConfig, UpdateConfig
from dlrm_overlap.simulate.product import simulate_product, with_product_ms
from dlrm_overlap.simulate.product_config import ProductConfig
from dlrm_overlap.simulate.step import simulate

# The rows of `bench step` lack them: of configs/bench/step_mlperf.yaml and step_dot.yaml, and of the quickstart.
_LAYERS = {128: ([512, 256, 128], [1024, 1024, 512, 256, 1]), 16: ([64, 16], [64, 32, 1])}
_MULTIPROCESSORS, _SUM_SHARE = 132, 0.99  # of an H200; the kernel that sums runs when the product has ended
_FREE = 1e9  # GB/s: what takes no time
_PARTS = (WHOLE, 1, 2, 4, 8)  # that the way copies of our products can take
_HOST = 0.75  # part of a simulated time above which the host's, to issue it, is what was measured
_CONTENDERS = {"torchrec_strongest": "torchrec", "pgas_graph": "pgas", "fused_graph": "fused"}
_HEAD = re.compile(r"\| head with loss, forward and backward \| \d+ \| (\d+) \|")


def step_config(row: Row, gpu: GpuConfig) -> SimulateConfig:
    """Return the simulation of what a row of `bench step` has measured."""
    world_size, dim = int(row["world_size"]), int(row["dim"])
    bottom, top = _LAYERS[dim]
    return SimulateConfig(
        what="step",
        gpu=gpu,
        network=NetworkConfig(gpus_per_host=world_size),
        model=ModelConfig(row["arch"], dim, bottom, top),  # pyright: ignore[reportArgumentType]
        work=WorkConfig(
            tables=int(row["tables"]),
            rows=ast.literal_eval(row["rows"]),
            multi_hot=ast.literal_eval(row["multi_hot"]),
            zipf_alpha=float(row["zipf_alpha"]),
            global_batch=int(row["global_batch"]),
            id_bytes=4,
            wire_bytes=2 if row["precision"] == "bf16" else 4,
            optimizer=row["optimizer"],  # pyright: ignore[reportArgumentType]
        ),
        exchange=ExchangeConfig(
            backend=_CONTENDERS[row["contender"]],  # pyright: ignore[reportArgumentType]
        ),
    )


def product_config(row: Mapping[str, str], gpu: GpuConfig) -> SimulateConfig | None:
    """Return the simulation of what a row of `bench gemm` has measured, or None where there is no model of it.

    There are models of `reduce_scatter` by `serial` and by `copies`: parts are copied to their owners, who sum them at
    the memory's rate. The product [M, N / W] x [N / W, K] takes as long as it was measured alone, `gemm_ms`, on each
    rank; all that is simulated is what goes on beside and behind it, in as many parts as take the least time.
    """
    ways = {"serial": "serial", "copies": "software"}
    if row["operator"] != "reduce_scatter" or row["contender"] not in ways or row["device"] != "cuda":
        return None
    config = SimulateConfig(
        what="product",
        gpu=gpu,
        network=NetworkConfig(gpus_per_host=int(row["world_size"])),
        product=ProductConfig(
            name="measured",
            m=int(row["m"]),
            n=int(row["k"]),
            k=int(row["n"]),
            way=ways[row["contender"]],  # pyright: ignore[reportArgumentType]
            pattern="direct" if row["contender"] == "copies" else "ring",
            gather=False,
            programs=_MULTIPROCESSORS,
            tile_n=256,  # of cuBLAS's usual tile on this GPU
            cache_mb=50.0,
            trigger_us=gpu.kernel_us,
            sum_share=_SUM_SHARE,
            sum_gb_per_s=gpu.copy_gb_per_s,
        ),
    )
    config = with_product_ms(config, float(row["gemm_ms"]))
    if row["contender"] == "serial":
        return config
    cut = (replace(config, product=replace(config.product, parts=parts)) for parts in _PARTS)
    return min(cut, key=lambda config: simulate_product(config).ms)


def calibrate_from(folder: Path) -> GpuConfig:
    """Return the rates that rows on one and two GPUs tell; `folder` is docs/results.

    One time is on the page step.md alone, that of the head on one GPU.
    """
    lookups = [*split_sweep(read_rows(folder / "sweep.csv"))[0], *read_rows(folder / "weak_two_gpus.csv")]
    gpu = fit(read_rows(folder / "weak.csv") + read_rows(folder / "strong.csv"), lookups, GpuConfig())
    traced = read_rows(folder / "calibration" / "timeline.csv")
    sort_ns = fit_backward(read_rows(folder / "calibration" / "backward.csv"), gpu).update.sort_ns
    pgas = _traced_updates(traced, "pgas_graph", "update")
    # What a sort takes on top of its ids is the host's, which issues its kernels one by one; not so in a captured step.
    update = replace(fit_traced_updates(pgas), sort_ns=sort_ns)
    rows, sorts = (_traced_updates(traced, "torchrec_strongest", kind) for kind in ("update", "sort"))
    baseline_ns, baseline_us = fit_traced_sorts(sorts)
    baseline = replace(fit_traced_updates(rows), sort_ns=baseline_ns, sort_us=baseline_us)
    gpu = replace(gpu, update=update, baseline_update=baseline)
    quickstart = next(row for row in read_rows(folder / "step.csv") if row["world_size"] == "1" and _captured(row))
    shape = step_config(next(row for row in traced if row["arch"] == "dcn"), gpu)
    samples = 8192
    alone = replace(shape, network=NetworkConfig(gpus_per_host=1), work=replace(shape.work, global_batch=samples))
    head = _HEAD.search((folder / "step.md").read_text())
    assert head is not None, "step.md has the time of the head"
    gpu = fit_step(
        gpu,
        Measured(step_config(quickstart, gpu), float(quickstart["median_ms"])),
        Measured(alone, float(head[1]) / 1e3),
    )
    return replace(gpu, update=fit_shared_updates(pgas, gpu))


def _captured(row: Row) -> bool:
    return row["contender"] == "pgas_graph"


def _traced_updates(rows: Sequence[Row], contender: str, kind: str) -> list[Measured]:
    """Return the traced steps of `contender`, and the mean time of the ranks' kernels of `kind`."""
    chosen = [row for row in rows if row["contender"] == contender]
    steps = {(row["arch"], row["global_batch"]): row for row in chosen}
    traced = []
    for key, step in steps.items():
        ranks = [row for row in chosen if (row["arch"], row["global_batch"]) == key]
        ms = [float(row[f"{kind}_kernels_ms"]) for row in ranks]
        traced.append(Measured(step_config(step, GpuConfig()), sum(ms) / len(ms)))
    return traced


def predict_four(folder: Path, gpu: GpuConfig) -> dict[str, list[Prediction]]:
    """Return the predictions of rows on four GPUs, of the stage, the backward and the step.

    Rows that the host bounds are left out, and those of `fused` alone: they put staged slices, as no exchange does by
    itself now. The backward's are those without skew, by the rates of updates without skew, which a step does not use.
    """
    stage, step = [], []
    for row in (row for name in ("weak", "strong", "stage", "schedule") for row in read_rows(folder / f"{name}.csv")):
        if row["world_size"] == "4" and row["contender"] in set(BACKENDS) - {"fused"}:
            name = f"{row['kind']} {row['contender']} {row['schedule']}, {row['multi_hot']} x {row['dim']}"
            stage.append((row, Prediction(name, measured_ms(row), stage_ms(row, gpu))))
    for row in read_rows(folder / "step.csv"):
        if row["world_size"] == "4" and row["contender"] in _CONTENDERS and row["pinned_host"] == "False":
            name = f"step {row['contender']} {row['arch']}, {int(row['global_batch']) // 4} samples"
            step.append((row, Prediction(name, measured_ms(row), simulate(step_config(row, gpu)).ms)))
    unskewed = fit_backward(read_rows(folder / "calibration" / "backward.csv"), gpu)
    backward = predict_backward(read_rows(folder / "backward.csv"), unskewed)
    kept = ([each for row, each in rows if float(row["host_ms"]) < _HOST * each.simulated_ms] for rows in (stage, step))
    return dict(zip(("stage", "step"), kept, strict=True)) | {"backward": backward}


def predict_held_out(folder: Path, gpu: GpuConfig) -> dict[str, list[Prediction]]:
    """Return the predictions of rows on one and two GPUs that nothing was fitted to, by the file that has them.

    The GPU's time alone is predicted where the rows tell it. Of the sweep they are the shapes that were held out.
    """
    found: dict[str, list[Prediction]] = {}
    for name in ("sweep", "grid", "strong_two_gpus", "calibration/cached", "calibration/skewed"):
        rows: Sequence[Row] = read_rows(folder / f"{name}.csv")
        if name == "sweep":
            rows = split_sweep(rows)[1]
        known = [row for row in rows if row["contender"] in BACKENDS]
        found[name] = [
            Prediction(
                f"{row['contender']}, {row['tables']} tables of {row['multi_hot']} x {row['dim']}, "
                f"{row['global_batch']} samples on {row['world_size']}",
                measured_ms(row),
                stage_ms(row, gpu),
            )
            for row in known
        ]
    return found


def predict_parts(rows: Sequence[Row], gpu: GpuConfig) -> list[Prediction]:
    """Return the measured and the simulated time of captured steps on two GPUs, whole and with a part left out.

    Args:
        rows: of the variants of `python -m tests.gpu.step_parts`, or of `bench timeline`, whose steps are whole; where
            they are a row a rank, the slowest counts.
        gpu: what does the work; these rows have not been looked at for it.
    """
    gpus = {
        "whole": gpu,
        "no_sort": replace(gpu, update=replace(gpu.update, sort_ns=0.0)),
        "no_update": replace(gpu, update=UpdateConfig(_FREE, _FREE, _FREE)),
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


def predict_products(rows: Sequence[Mapping[str, str]], gpu: GpuConfig) -> list[Prediction]:
    """Return the measured and the simulated time of each row of `bench gemm` that the simulator has a model of."""
    found: list[Prediction] = []
    for row in rows:
        config = product_config(row, gpu)
        if config is not None:
            name = f"{row['operator']} {row['contender']}, {row['m']} x {row['k']} x {row['n']}"
            found.append(Prediction(name, float(row["median_ms"]), simulate_product(config).ms))
    return found
