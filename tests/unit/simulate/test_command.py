"""`dlrm-overlap simulate`: rows, traces, mistakes; and the order of work, which is the kernels' own."""

import csv
import json
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from dlrm_overlap.cli import main
from dlrm_overlap.kernels.schedule import SCHEDULES, TaskGrid
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.rows import describe
from dlrm_overlap.simulate.stage import puts_to_host, waves
from dlrm_overlap.simulate.step import Simulated, simulate
from dlrm_overlap.simulate.workload import build_workload, misses

CONFIGS = sorted(Path("configs/simulate").glob("*.yaml"))
SMALL = ["--config", "configs/simulate/mlperf_hosts.yaml", "--network.hosts", "2", "--network.gpus_per_host", "2"]


def _read(path: Path, *options: str) -> SimulateConfig:
    return parse_config(SimulateConfig, "simulate", "", ["--config", str(path), *options])[0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_are_read(path: Path) -> None:
    assert _read(path).network.world_size >= 4


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 2])
def test_waves_are_the_tasks_in_the_order_of_the_kernels(schedule: str, rank: int) -> None:
    W, count = 3, 4
    grid = TaskGrid(rank, W, features=1, samples=count, task_bags=1, slice_bags=1)
    order = np.array([task.destination for task in grid.order(schedule)])
    expected = [np.bincount(part, minlength=W) / count for part in np.split(order, count)]
    assert np.allclose(waves(rank, W, schedule, count), expected)


@lru_cache
def _stage_config() -> SimulateConfig:
    return _read(Path("configs/simulate/slices.yaml"), "--network.hosts", "4", "--network.gpus_per_host", "2")


def _stage(**exchange: object) -> Simulated:
    config = _stage_config()
    return simulate(replace(config, exchange=replace(config.exchange, **exchange)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("backend", ["torchrec", "pgas", "fused"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pooled_embedding_leaves_once(backend: str, schedule: str) -> None:
    simulated = _stage(backend=backend, schedule=schedule)
    W, work = 8, simulated.work
    links = simulated.timeline.carried[3 * W :]
    nics_out, nics_in = links[2 * W : 3 * W], links[3 * W : 4 * W]
    assert nics_out == pytest.approx(6 * work.pair_bytes)
    assert nics_in == pytest.approx(6 * work.pair_bytes)
    config = simulated.config
    factor = config.gpu.link_gb_per_s / config.gpu.collective_gb_per_s if backend == "torchrec" else 1.0
    assert links[:W] == pytest.approx(factor * work.pair_bytes)  # to the other GPU of the host
    assert 6 * work.pair_bytes + work.pair_bytes == pytest.approx(work.link_bytes)


def test_the_stage_is_never_faster_than_its_fullest_resource() -> None:
    for backend in ("torchrec", "pgas", "fused"):
        timeline = _stage(backend=backend).timeline
        assert timeline.seconds >= (timeline.carried / timeline.capacities).max()


def test_gathering_small_puts_helps_where_their_number_limits() -> None:
    small = _stage(slice_bags=1).ms
    assert _stage(slice_bags=64).ms < 0.7 * small
    assert _stage(slice_bags=1, aggregate_bytes=65536).ms < 0.7 * small


def test_puts_are_gathered_by_the_rule_of_the_exchange() -> None:
    options = ["--exchange.backend", "fused", "--exchange.slice_bags", "16"]  # 4 KB of bf16
    config = _read(Path("configs/simulate/mlperf_hosts.yaml"), *options)
    work = build_workload(config.model, config.work, config.network.world_size)
    for aggregate_bytes, put_bytes, wait_us in ((0, 4096, 0.0), (65536, 65536, 15.0), (5000, 8192, 1.0)):
        exchange = replace(config.exchange, aggregate_bytes=aggregate_bytes)
        puts = puts_to_host(replace(config, exchange=exchange), work, 4096 / 1e-6)  # a slice a microsecond
        assert puts.bytes == pytest.approx(put_bytes)
        assert puts.wait_s == pytest.approx(wait_us / 1e6)


@pytest.mark.parametrize("backend", ["torchrec", "fused"])
def test_the_shown_rows_are_what_is_simulated_now(backend: str) -> None:
    with Path("docs/results/simulated_weak.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        shown = [row for row in rows if (row["backend"], row["world_size"], row["plan"]) == (backend, "16", "auto")]
    config = _read(Path("configs/simulate/mlperf_hosts.yaml"), "--network.hosts", "2", "--exchange.backend", backend)
    now = describe(simulate(config))
    assert {name: shown[0][name] for name in now} == {name: str(value) for name, value in now.items()}


@pytest.mark.parametrize("path", sorted(Path("docs/results").glob("simulated_*.csv")), ids=lambda path: path.stem)
def test_published_rows_name_the_commit_that_made_them(path: Path) -> None:
    with path.open(newline="") as file:
        commits = {row["commit"] for row in csv.DictReader(file)}
    assert all(re.fullmatch("[0-9a-f]{12}", each) for each in commits), commits


@pytest.mark.parametrize(("rows", "alpha", "cached"), [(1000, 0.0, 100), (1000, 0.0, 1000), (5000, 1.05, 500)])
def test_a_cache_misses_as_often_as_one_that_keeps_the_last_used_rows(rows: int, alpha: float, cached: int) -> None:
    weights = np.arange(1.0, rows + 1) ** -alpha
    ids = np.random.default_rng(0).choice(rows, 30_000, p=weights / weights.sum())
    kept: dict[int, None] = {}
    missed = 0
    for each in ids.tolist():
        missed += each not in kept
        kept.pop(each, None)
        kept[each] = None
        if len(kept) > cached:
            del kept[next(iter(kept))]
    assert misses(rows, alpha, float(len(ids)), float(cached)) == pytest.approx(missed, rel=0.02)


def test_the_table_tells_what_varies(capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--vary", "work.multi_hot/exchange.slice_bags=1/8,2/32", "--vary", "exchange.backend=torchrec,fused"]
    assert main(["simulate", *SMALL, *vary]) == 0
    header, *lines = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert header[:4] == ["multi_hot", "slice_bags", "what", "backend"]
    assert [line[:4] for line in lines] == [
        [*both, "step", backend] for both in (["1", "8"], ["2", "32"]) for backend in ("torchrec", "fused")
    ]


def test_rows_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, trace = tmp_path / "rows.csv", tmp_path / "trace.json"
    assert main(["simulate", *SMALL, "--vary", "exchange.backend=torchrec,fused", "--output", str(rows)]) == 0
    assert main(["simulate", *SMALL, "--trace", str(trace)]) == 0
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["backend"] for row in found] == ["torchrec", "fused"]
    assert {row["kind"] for row in found} == {"simulated"}
    assert "simulated, not measured" in capsys.readouterr().out
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    head = next(event for event in events if event["name"] == "head")
    back = next(event for event in events if event["name"] == "head's backward" and event["pid"] == head["pid"])
    assert back["ts"] >= head["ts"] + head["dur"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network.host", "2"], "network.hosts"),
        (["--train", "configs/criteo_kaggle.yaml"], "data.tables.rows is null"),
        (["--model.sequence.history", "26"], "model.sequence.history: 26 is no table; the 26 count from 0"),
        (["--vary", "network.hosts=1,2", "--vary", "network.hosts/work.samples=1/2"], "key is there twice"),
        (["--network.hosts", "4096"], "4096 GPUs at most"),
        (["--work.multi_hot", "x"], "work.multi_hot"),
        (["--work.global_batch", "7"], "no multiple of 4"),
        (["--vary", "network.hosts"], "--vary network.hosts"),
        (["--vary", "network.hosts=1,x"], "network.hosts"),
        (["--vary", "network.hosts=1,2", "--trace", "trace.json"], "--trace"),
        (["--vary", "network.hosts/work.samples=1,2"], "as many values as keys"),
        (["--output", "no/folder/rows.csv"], "no folder"),
        (["--output", "/dev/full"], "No space left"),
        (["--gpu.fused.gb_per_s", "1e-300"], "some rate is too small"),
    ],
)
def test_a_mistake_ends_in_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_training_configuration_is_told_whether_it_pays(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--train", "configs/mlperf_dcnv2.yaml", "--network.hosts", "2", "--network.gpus_per_host", "4"]
    assert main(["simulate", *options, "--work.global_batch", "8192"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[2:4]]
    assert [row[:5] for row in rows] == [["step", name, "8", "2", "1024"] for name in ("torchrec", "pgas")]
    over = float(rows[0][5]) / float(rows[1][5])
    verb = "pays" if over > 1 else "does not pay"
    expected = f"simulated, on 8 GPUs: pgas {verb}, {over:.2f} times as fast as torchrec's exchange in a captured step"
    assert lines[-1] == expected
