"""The simulator against what was measured: calibrated on one and two GPUs, it predicts rows on four."""

import csv
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrm_overlap.embedding.traffic import count_dense
from dlrm_overlap.simulate.config import GpuConfig
from dlrm_overlap.simulate.workload import build_workload
from tests.calibration import calibrate, read_rows, split_sweep, stage_config, step_config

RESULTS = Path("docs/results")


@pytest.fixture(scope="module")
def gpu() -> GpuConfig:
    return calibrate(RESULTS)


def test_the_file_of_rates_is_what_the_rows_give(gpu: GpuConfig) -> None:
    rates = dataclasses.asdict(gpu)
    assert yaml.safe_load(Path("configs/simulate/h200.yaml").read_text())["gpu"] == rates
    assert dataclasses.asdict(GpuConfig()) == rates


def test_held_out_rows_do_not_change_the_calibration(gpu: GpuConfig, tmp_path: Path) -> None:
    """Each time that is held out, and each on four GPUs, is doubled: the rates stay."""
    shutil.copytree(RESULTS / "calibration", tmp_path / "calibration")
    for name in (
        "calibration/weak",
        "calibration/strong",
        "calibration/step",
        "calibration/weak_two_gpus",
        "calibration/sweep",
    ):
        rows: list[Any] = read_rows(RESULTS / f"{name}.csv")
        held_out: list[Any] = (
            split_sweep(rows)[1] if name == "calibration/sweep" else [row for row in rows if row["world_size"] == "4"]
        )
        for row in held_out:
            for column in {"median_ms", "gpu_ms"} & set(row):
                row[column] = str(2 * float(row[column]))
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    assert calibrate(tmp_path) == gpu


@pytest.mark.parametrize("name", ["calibration/weak", "calibration/strong", "four_h200/stage_dim128"])
def test_the_mean_batch_has_the_bytes_of_the_measured_ones(name: str, gpu: GpuConfig) -> None:
    for row in read_rows(RESULTS / f"{name}.csv"):
        found = build_workload(stage_config({**row, "contender": "pgas"}, gpu))
        assert found.hbm_bytes == pytest.approx(float(row["hbm_bytes"]), rel=0.004)  # bags of random sizes
        assert found.link_bytes == int(row["link_bytes"])


def test_the_mean_step_has_the_bytes_of_the_measured_one(gpu: GpuConfig) -> None:
    """`uncached_hbm_bytes` of MLPerf's step: the ids are drawn in the same skew, hashed or not."""
    row = next(row for row in read_rows(RESULTS / "calibration/step.csv") if row["contender"] == "pgas_graph")
    config = step_config(row, gpu)
    found = build_workload(config)
    dense = count_dense(config.model, 26, 13, 8192)
    total = found.hbm_bytes + found.update_bytes + 4 * dense.parameters + 2 * dense.outputs
    assert dense.flop == int(row["dense_flop"])
    assert total == pytest.approx(float(row["uncached_hbm_bytes"]), rel=0.1)
