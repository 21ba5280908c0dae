"""`dlrm-overlap simulate`: rows and mistakes."""

import csv
import re
from pathlib import Path

import pytest

from dlrm_overlap.cli import main
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.simulate.command import describe
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.step import simulate

CONFIGS = sorted(Path("configs/simulate").glob("*.yaml"))
SMALL = ["--config", "configs/simulate/mlperf_hosts.yaml", "--network.hosts", "2", "--network.gpus_per_host", "2"]


def _read(path: Path, *options: str) -> SimulateConfig:
    return parse_config(SimulateConfig, "simulate", "", ["--config", str(path), *options])[0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_are_read(path: Path) -> None:
    assert _read(path).network.world_size >= 4


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


def test_the_table_tells_what_varies(capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--vary", "work.multi_hot/exchange.slice_bags=1/8,2/32", "--vary", "exchange.backend=torchrec,fused"]
    assert main(["simulate", *SMALL, *vary]) == 0
    header, *lines = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert header[:4] == ["multi_hot", "slice_bags", "what", "backend"]
    assert [line[:4] for line in lines] == [
        [*both, "step", backend] for both in (["1", "8"], ["2", "32"]) for backend in ("torchrec", "fused")
    ]


def test_rows_are_written_and_marked_as_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.csv"
    assert main(["simulate", *SMALL, "--vary", "exchange.backend=torchrec,fused", "--output", str(rows)]) == 0
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["backend"] for row in found] == ["torchrec", "fused"]
    assert {row["kind"] for row in found} == {"simulated"}
    assert "simulated, not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network.host", "2"], "network.hosts"),
        (["--train", "configs/criteo_kaggle.yaml"], "data.tables.rows is null"),
        (["--model.sequence.history", "26"], "model.sequence.history: the simulator has no model"),
        (["--vary", "network.hosts=1,2", "--vary", "network.hosts/work.samples=1/2"], "key is there twice"),
        (["--network.hosts", "4096"], "4096 GPUs at most"),
        (["--work.multi_hot", "x"], "work.multi_hot"),
        (["--work.global_batch", "7"], "no multiple of 4"),
        (["--vary", "network.hosts"], "--vary network.hosts"),
        (["--vary", "network.hosts=1,x"], "network.hosts"),
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
