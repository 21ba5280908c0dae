"""`dlrm-overlap simulate`: rows and mistakes."""

import csv
import re
from itertools import product
from pathlib import Path

import pytest

from dlrm_overlap.cli import main
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.simulate.command import describe
from dlrm_overlap.simulate.config import SimulateConfig
from tests.conftest import read_rows

MLPERF = ["--config", "mlperf_dcnv2", "--config", "simulate/mlperf_nodes", "--network.nodes", "2"]
SMALL = [*MLPERF, "--network.gpus_per_node", "2"]


@pytest.mark.parametrize("backend", ["torchrec", "fused"])
def test_the_shown_rows_are_what_is_simulated_now(backend: str) -> None:
    with Path("docs/results/simulated_weak.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        shown = [row for row in rows if (row["backend"], row["world_size"], row["plan"]) == (backend, "16", "auto")]
    now = describe(parse_config(SimulateConfig, "simulate", "", [*MLPERF, "--embedding.backend", backend])[0])
    assert {name: shown[0][name] for name in now} == {name: str(value) for name, value in now.items()}


@pytest.mark.parametrize("path", sorted(Path("docs/results").glob("simulated_*.csv")), ids=lambda path: path.stem)
def test_published_rows_name_the_commit_that_made_them(path: Path) -> None:
    with path.open(newline="") as file:
        commits = {row["commit"] for row in csv.DictReader(file)}
    assert all(re.fullmatch("[0-9a-f]{12}", each) for each in commits), commits


def test_rows_are_printed_written_and_marked_as_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.csv"
    varied = ("data.tables.max_rows=100,200", "what=stage,backward", "embedding.backend=torchrec,fused")
    vary = [word for each in varied for word in ("--vary", each)]
    slices = ["--config", "simulate/slices", "--network.nodes", "1"]
    assert main(["simulate", *slices, *vary, "--output", str(rows)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "simulated, not measured"
    assert [line.split()[:3] for line in lines] == [
        ["data.tables.max_rows", "what", "backend"],
        *map(list, product(("100", "200"), ("stage", "backward"), ("torchrec", "fused"))),
    ]
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["backend"] for row in found] == ["torchrec", "fused"] * 4
    assert [row["data.tables.max_rows"] for row in found] == ["100"] * 4 + ["200"] * 4
    assert {(row["kind"], row["world_size"], row["tables"]) for row in found} == {("simulated", "8", "208")}


def test_varied_keys_that_end_alike_have_columns_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vary = ["--vary", "gpu.pgas.us=1,2", "--vary", "gpu.update.us=3", "--vary", "network.gpus_per_machine=null,4"]
    slices = ["--config", "simulate/slices", "--network.nodes", "1"]
    assert main(["simulate", *slices, *vary, "--vary", "data.kind=synthetic", "--output", str(tmp_path / "rows")]) == 0
    _, names, *lines = capsys.readouterr().out.splitlines()
    assert names.split()[:4] == ["gpu.pgas.us", "gpu.update.us", "gpus_per_machine", "data.kind"]
    wanted = [[us, "3", machine, "synthetic"] for us in ("1", "2") for machine in ("null", "4")]
    assert [line.split()[:4] for line in lines] == wanted
    with (tmp_path / "rows").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [[row[name] for name in names.split()[:4]] for row in rows] == wanted
    assert {row["kind"] for row in rows} == {"simulated"}


def test_values_that_are_lists_are_varied(tmp_path: Path) -> None:
    argv = ["simulate", "--config", "mlperf_dcnv2", "--network.nodes", "1", "--output", str(rows := tmp_path / "rows")]
    assert main([*argv, "--vary", "model.bottom_mlp=[512,128],[256, 64, 128]", "--vary", "what=step"]) == 0
    assert [row["model.bottom_mlp"] for row in read_rows(rows)] == ["[512,128]", "[256, 64, 128]"]


def test_keys_of_earlier_versions_are_accepted_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, rows = tmp_path / "old.yaml", tmp_path / "rows.csv"
    file.write_text("network: {gpus_per_host: 2}\n")
    given = ["--config", "simulate/slices", "--config", str(file), "--data.tables.max_rows", "100"]
    assert main(["simulate", *given, "--vary", "network.hosts=1,2", "--output", str(rows)]) == 0
    with rows.open(newline="") as written:
        assert [(row["nodes"], row["gpus_per_node"]) for row in csv.DictReader(written)] == [("1", "2"), ("2", "2")]
    assert set(caplog.messages) == {
        "network.hosts is deprecated; use network.nodes",
        "network.gpus_per_host is deprecated; use network.gpus_per_node",
    }
    caplog.clear()
    assert main(["simulate", *given[:2], "--network.hosts", "1", "--vary", "network.nodes=1,2"]) == 2, "given twice"
    assert caplog.messages == ["network.hosts is deprecated; use network.nodes"]


def test_equal_tables_must_fit(capsys: pytest.CaptureFixture[str]) -> None:
    # Each of 8 ranks has 26 tables of 128 columns in fp32, with 4 bytes of optimizer state a row.
    rows = 112 * 10**9 // 26 // (128 * 4 + 4)
    for number, code in ((rows, 0), (rows + 1, 2)):
        slices = ["--config", "simulate/slices", "--network.nodes", "1", "--embedding.optimizer", "rowwise_adagrad"]
        assert main(["simulate", *slices, "--data.tables.rows", str(number)]) == code
    assert "data.tables: 896 GB on 8 ranks: they have no room; set data.tables.max_rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network.node", "2"], "network.nodes"),
        (["--data.tables.rows", "null"], "data.tables.rows: null"),
        (["--model.sequence.history", "25"], "model.sequence.history: the simulator has no model"),
        (["--data.tables.ids", "any"], "data.tables.ids: any, but the simulator has no model"),
        (["--train.precision", "tf32"], "train.precision: tf32, but the simulated rate of matrix products is bf16's"),
        (["--model.top_parallel", "tensor"], "model.top_parallel: tensor, but the simulator has no model"),
        (["--vary", "embedding.memory=gpu,cached"], "embedding.memory: cached, but the simulator has all tables in"),
        (["--what", "stage", "--embedding.memory", "auto"], "embedding.memory: auto, but the simulator has all tables"),
        (["--vary", "embedding.nodes=2,4"], "embedding.nodes: 2 splits a run's ranks, but a simulation has"),
        (["--train.global_batch_size", "7"], "do not divide by 4 ranks"),
        (["--vary", "network.nodes"], "network.nodes"),
        (["--vary", "network.nodes=1,2", "--vary", "network.nodes=4"], "--vary: network.nodes is given twice"),
        (["--vary", "network.nodes=1,2", "--network.nodes", "4"], "--vary: network.nodes is given twice"),
        (["--network.nodes=4", "--vary", "network.nodes=1,2"], "--vary: network.nodes is given twice"),
        (["--vary", "output=a,b"], "--vary: output is not a key"),
        (["--vary", "help="], "--vary: help is not a key"),
        (["--vary", "network.nodes=1,x"], "network.nodes"),
        (["--output", "docs"], "docs is a folder"),
    ],
)
def test_a_mistake_ends_in_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").symlink_to("/dev/full")
    assert main(["simulate", *SMALL, "--output", str(tmp_path / "rows.csv")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("rows.csv cannot be written (No space left on device); give another file")
