"""The figures that can be asked for, their options, and the shapes in configs/bench."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_overlap.bench.request import (
    FIGURES,
    ShapeRequest,
    StepRequest,
    SweepRequest,
)
from dlrm_overlap.config import Config, InputError
from tests.conftest import configuration

SHAPES = Path("configs/bench")
OUTPUT = Path("unused.csv")


def _config(shape: str, *options: str) -> Config:
    return configuration("--config", str(SHAPES / f"{shape}.yaml"), *options)


def _request(kind: str, tables_per_rank: int | None = None) -> ShapeRequest:
    request = FIGURES[kind]
    assert issubclass(request, ShapeRequest)
    return request(kind, OUTPUT, tables_per_rank=tables_per_rank)


@pytest.mark.parametrize("kind", FIGURES)
def test_every_figure_has_a_file_that_measures_it(kind: str) -> None:
    assert callable(FIGURES[kind].load(kind))


def test_the_options_load_no_torch() -> None:
    script = "import sys, dlrm_overlap.bench.request; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shape_and_its_commands_fit_four_ranks(path: Path) -> None:
    commands = [line.split()[3:] for line in path.read_text().splitlines() if line.startswith("#   dlrm-overlap")]
    assert commands
    for kind, *options in commands:
        assert options[options.index("--config") + 1] == str(path)
        own = int(options[options.index("--tables_per_rank") + 1]) if "--tables_per_rank" in options else None
        config = _config(path.stem)
        request = _request(kind, own) if kind != "step" else StepRequest(kind, OUTPUT)
        request.check_ranks(config, 4, "cuda")
        assert own in (None, config.data.tables.count)
        alpha, history = config.data.tables.zipf_alpha, config.model.sequence.history
        pooled = {each for t, each in enumerate(alpha) if t != history} if isinstance(alpha, list) else {alpha}
        assert pooled == {1.05 if isinstance(config.data.tables.rows, list) else 0}


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
    sweep = SweepRequest("sweep", OUTPUT, tables_per_rank=2, pooling_factors=(1, 4), dims=(8, 32), global_batches=(64,))
    points = sweep.shapes(_config("sweep"), 4)
    found = [(each.model.dim, each.model.bottom_mlp, each.data.tables.multi_hot) for each in points]
    assert found == [(8, [8], "0..2"), (8, [8], "0..8"), (32, [32], "0..2"), (32, [32], "0..8")]
    assert {(each.data.tables.count, each.train.samples_per_rank(4)) for each in points} == {(8, 16)}
    asked = SweepRequest("sweep", OUTPUT, tables=(1, 2)).shapes(points[0], 4)
    assert [(each.data.tables.count, each.model.dim) for each in asked] == [(4, 8), (8, 8)]
    criteo = configuration("--data.kind", "criteo_npy", "--data.path", "x")
    with pytest.raises(InputError, match=r"data\.kind: criteo_npy, but bench sweep takes shapes that no file has"):
        sweep.check_ranks(criteo, 4, "cuda")


def test_a_figure_has_the_ranks_that_it_needs() -> None:
    with pytest.raises(InputError, match="bench collectives: one rank has nobody"):
        FIGURES["collectives"]("collectives", OUTPUT).check_ranks(_config("tiny"), 1, "cuda")


def test_worlds_and_tables() -> None:
    weak, strong = _request("weak", 64), _request("strong")
    assert weak.worlds(4) == strong.worlds(6) == [1, 2, 4]
    assert _request("stage").worlds(3) == [3]
    assert [weak.shape(_config("weak"), size).data.tables.count for size in (1, 4)] == [64, 256]
    assert [strong.shape(_config("strong"), size).data.tables.count for size in (1, 4)] == [96, 96]


@pytest.mark.parametrize(
    ("kind", "per_rank", "options", "message"),
    [
        ("weak", None, [], "--tables_per_rank"),
        ("strong", 2, [], "data.tables.count"),
        ("stage", None, ["--data.tables.count", "1"], "each takes at least one"),
        ("stage", None, ["--train.global_batch_size", "127"], "train.global_batch_size"),
        ("stage", 4, ["--data.tables.rows", "[1,2,3,4,5,6]"], "data.tables: count 8, lists of"),
    ],
)
def test_what_does_not_go_together_is_refused(
    kind: str, per_rank: int | None, options: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        _request(kind, per_rank).check_ranks(_config("tiny", *options), 2, "cpu")


def test_emulated_hosts_are_measured_only_where_rows_say_so() -> None:
    emulated = _config("tiny", "--embedding.hosts", "2")
    _request("stage").check_ranks(emulated, 2, "cpu")
    _request("backward").check_ranks(_config("tiny", "--embedding.hosts", "1"), 2, "cpu")
    with pytest.raises(InputError, match=r"embedding\.hosts: 2 emulated hosts, but the rows of bench backward would"):
        _request("backward").check_ranks(emulated, 2, "cpu")
