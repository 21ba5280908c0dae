"""`bench learning`: its runs differ in what their contenders' keys say, and the table of their results."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlrm_overlap.bench.figures.learning import learning_config, summarise, train_and_evaluate
from dlrm_overlap.bench.learning_contenders import LEARNING_CONTENDERS
from dlrm_overlap.checkpoint.saving import NotFiniteError
from dlrm_overlap.config import Config, DataConfig
from tests.conftest import configuration

# contender -> seed -> NE and AUROC of three evaluations, after 100, 200 and 300 samples
_CURVES = {
    "torchrec": {0: ([0.9, 0.8, 0.7], [0.6, 0.7, 0.8]), 1: ([0.95, 0.85, 0.73], [0.6, 0.65, 0.79])},
    "pgas": {0: ([0.9, 0.8, 0.71], [0.6, 0.75, 0.79]), 1: ([0.95, 0.85, 0.72], [0.72, 0.7, 0.8])},
    "fused": {0: ([0.99, 0.98, 0.97], [0.5, 0.51, 0.52])},
}


def _rows() -> list[dict[str, str]]:
    return [
        {
            "contender": name, "seed": str(seed), "samples": str(100 * (number + 1)), "seconds": str(number + 1.5),
            "ne": str(ne), "auroc": str(auroc), "loss": "0.5",
        }
        for name, curves in _CURVES.items()
        for seed, curve in curves.items()
        for number, (ne, auroc) in enumerate(zip(*curve, strict=True))
    ]  # fmt: skip


def test_the_table_has_spreads_differences_by_seed_and_first_crossings() -> None:
    torchrec, pgas, fused = summarise(_rows(), ["torchrec", "pgas", "fused"], 0.7)
    assert (torchrec["seeds"], torchrec["ne"]) == (2, pytest.approx(0.715))
    assert torchrec["ne_std"] == pytest.approx(np.std([0.7, 0.73], ddof=1))
    assert "ne_difference" not in torchrec
    assert pgas["ne_difference"] == pytest.approx(0)
    assert pgas["ne_difference_std"] == pytest.approx(np.std([0.01, -0.01], ddof=1))
    assert (torchrec["samples_to_target"], torchrec["reached"]) == (250, "2 of 2"), "after 200 and 300 samples"
    assert torchrec["samples_cv"] == pytest.approx(np.std([200, 300], ddof=1) / 250)
    assert pgas["samples_to_target"] == 150, "after 200 and 100: a later fall below the target does not matter"
    assert pgas["seconds_to_target"] == pytest.approx((2.5 + 1.5) / 2)
    assert (fused["samples_to_target"], fused["samples_cv"], fused["reached"]) == (None, None, "0 of 1")
    assert (fused["auroc"], fused["auroc_std"]) == (0.52, None)


def test_without_a_target_nothing_is_said_about_it() -> None:
    (line,) = summarise(_rows(), ["fused"], None)
    assert set(line) == {"contender", "seeds", "auroc", "auroc_std", "ne", "ne_std"}


@pytest.mark.parametrize("name", LEARNING_CONTENDERS)
def test_runs_of_a_seed_take_the_same_samples_and_save_nothing(name: str, tmp_path: Path) -> None:
    config = configuration("--config", "configs/quickstart.yaml", "--checkpoint.delta_every", "5")
    found = learning_config(config, name, 3, tmp_path)
    assert (found.train.seed, found.data.seed) == (3, config.data.seed), "labels stay the same"
    assert (found.checkpoint.resume, found.checkpoint.every, found.checkpoint.last) == ("never", 0, False)
    assert found.checkpoint.delta_every == 0
    assert found.folder == tmp_path / f"{name}_3"


def test_tables_of_any_id_have_rows_for_all_ids_unless_the_rows_are_given(tmp_path: Path) -> None:
    config = configuration("--config", "configs/bench/tiny.yaml")  # tables of 1000 rows
    assert learning_config(config, "pgas_any_id", 0, tmp_path).embedding.id_tables.rows == [2000] * 6
    assert learning_config(config, "pgas", 0, tmp_path).embedding.id_tables.rows is None
    given = configuration(
        *["--config", "configs/bench/tiny.yaml", "--data.tables.ids", "any", "--embedding.id_tables.rows", "512"]
    )
    assert learning_config(given, "pgas_any_id", 0, tmp_path).embedding.id_tables.rows == 512


def test_a_seed_shuffles_samples_of_files(tmp_path: Path) -> None:
    files = Config(data=DataConfig(kind="prepared", path=str(tmp_path)))
    assert learning_config(files, "pgas", 3, tmp_path).data.seed == 3


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("found_by", ["training", "evaluation"])
def test_a_run_whose_loss_is_not_finite_has_a_row_of_that_step(found_by: str, loss: float) -> None:
    losses = iter([0.6, 0.5, loss])
    trainer: Any = SimpleNamespace(progress=SimpleNamespace(step=0), global_batch=4)
    trainer.evaluate = lambda ends: {"auroc": 0.7, "ne": 0.8, "loss": next(losses)}

    def fit() -> None:
        for trainer.progress.step in (10, 20, 30):
            last = trainer.progress.step == 30
            if last and found_by == "training":
                raise NotFiniteError("step 30: the training loss is nan")
            trainer.evaluate(lambda: False)
            if last:
                raise NotFiniteError("step 30: the held-out loss is nan")

    trainer.fit = fit
    points, fault = train_and_evaluate(trainer)
    assert "step 30" in fault
    assert [(point["step"], point["samples"]) for point in points] == [(10, 40), (20, 80), (30, 120)]
    assert [math.isfinite(float(point["loss"])) for point in points] == [True, True, False]
    rows = [point | {"contender": "pgas", "seed": "0"} for point in points]
    (line,) = summarise(rows + [row | {"seed": "1"} for row in rows[:2]], ["pgas"], 0.65)
    assert line["reached"] == "2 of 2", "the target was reached before"
    assert math.isnan(line["auroc"]) == (found_by == "training")
