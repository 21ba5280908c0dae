import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from dlrm_overlap.bench.figures.stage import shapes_of
from dlrm_overlap.bench.harness.workload import shape_of
from dlrm_overlap.bench.options import FIGURES
from dlrm_overlap.cli import USER_ERROR, main
from dlrm_overlap.config import Config
from tests.conftest import configuration, refuses
from tests.unit.bench.conftest import values_of

SHAPES = Path("configs/bench")


def _config(shape: str, *options: str) -> Config:
    return configuration("--config", str(SHAPES / f"{shape}.yaml"), *options)


@pytest.mark.parametrize("kind", FIGURES)
def test_every_figure_has_a_file_that_measures_it(kind: str) -> None:
    assert callable(import_module(f"dlrm_overlap.bench.figures.{FIGURES[kind].module}").run)


def test_the_options_load_no_torch() -> None:
    script = "import sys, dlrm_overlap.bench.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shape_and_its_commands_fit_four_ranks(path: Path) -> None:
    commands = [line.split()[3:] for line in path.read_text().splitlines() if line.startswith("#   dlrm-overlap")]
    assert commands
    for kind, *options in commands:
        assert options[options.index("--config") + 1] == str(path)
        config = _config(path.stem)
        own = int(options[options.index("--tables_per_rank") + 1]) if "--tables_per_rank" in options else None
        words = [word for i, word in enumerate(options) if "--nproc" not in options[max(0, i - 1) : i + 1]]
        values = values_of(kind, *words[2:])
        assert kind in ("step", "drift") or shape_of(config, 4, values.tables_per_rank)
        assert own in (None, config.data.tables.count)
        alpha, history = config.data.tables.zipf_alpha, config.model.sequence.history
        pooled = {each for t, each in enumerate(alpha) if t != history} if isinstance(alpha, list) else {alpha}
        assert pooled == {1.05 if isinstance(config.data.tables.rows, list) or config.data.tables.drift else 0}


@pytest.mark.parametrize("shape", ["mlperf", "step_mlperf", "step_dot"])
def test_mlperf_has_the_tables_of_the_training_configuration(shape: str) -> None:
    trained = configuration("--config", "configs/mlperf_dcnv2.yaml")
    measured = _config(shape)
    assert measured.data.tables == replace(trained.data.tables, max_rows=4_000_000, zipf_alpha=1.05)
    assert (measured.model.dim, measured.embedding.lr) == (trained.model.dim, trained.embedding.lr)
    if shape == "step_mlperf":
        assert measured.model == trained.model
        assert measured.embedding == trained.embedding
        kept = ("optimizer", "lr", "eps", "precision")
        assert [getattr(measured.train, key) for key in kept] == [getattr(trained.train, key) for key in kept]


def test_a_sweep_has_all_values_of_its_axes_and_the_configurations_where_there_is_none() -> None:
    axes = "--tables_per_rank 2 --pooling_factors 1 4 --dims 8 32 --global_batches 64"
    points = shapes_of(values_of("sweep", *axes.split()), _config("sweep"), 4)
    found = [(each.model.dim, each.model.bottom_mlp, each.data.tables.multi_hot) for each in points]
    assert found == [(8, [8], "0..2"), (8, [8], "0..8"), (32, [32], "0..2"), (32, [32], "0..8")]
    assert {(each.data.tables.count, each.train.samples_per_rank(4)) for each in points} == {(8, 16)}
    criteo = configuration("--data.kind", "criteo_npy", "--data.path", "x")
    with refuses(r"data\.kind: criteo_npy, but bench sweep changes the shape of the data"):
        shapes_of(values_of("sweep", "--dims", "8"), criteo, 4)


def test_a_figure_that_needs_peers_refuses_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--config", "bench/tiny", "--train.device", "cpu"]) == USER_ERROR
    assert "bench collectives: one rank has no peer" in capsys.readouterr().err


def test_a_figure_that_needs_a_gpu_refuses_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "update", "--config", "bench/tiny", "--train.device", "cpu"]) == USER_ERROR
    line = "dlrm-overlap: bench update: it times a GPU's kernels, and this run is on a CPU; run it on a GPU\n"
    assert capsys.readouterr().err == line


def test_scaling_keeps_the_tables_of_a_rank_or_those_of_all() -> None:
    for shape, own, tables in (("weak", 64, [64, 256]), ("strong", None, [96, 96])):
        assert [shape_of(_config(shape), size, own).data.tables.count for size in (1, 4)] == tables


@pytest.mark.parametrize(
    ("own", "options", "message"),
    [
        (None, ["--data.tables.count", "1"], "each takes at least one"),
        (None, ["--train.global_batch_size", "127"], "train.global_batch_size"),
        (4, ["--data.tables.rows", "[1,2,3,4,5,6]"], "data.tables: count 8, lists of"),
    ],
)
def test_shapes_that_contradict_the_ranks_are_refused(own: int | None, options: list[str], message: str) -> None:
    with refuses(message):
        shape_of(_config("tiny", *options), 2, own)
