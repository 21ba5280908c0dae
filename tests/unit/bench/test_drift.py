"""`bench drift`: its metrics against numpy, the ids of its streams, and what its designs give the tables."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_overlap.bench.drift_contenders import DRIFT_CONTENDERS
from dlrm_overlap.bench.figures.drift import Day, Stream, rows_of_days, run, summarise
from dlrm_overlap.bench.harness.workload import with_keys
from dlrm_overlap.config import Config, IdTablesConfig
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.observe.metrics import RunningMetrics
from tests.conftest import configuration, read_rows, refuses
from tests.distributed.models import CPU
from tests.distributed.workers import ranks_here

_SMALL = {
    "train.device": "cpu",
    "train.steps": 6,
    "train.global_batch_size": 64,
    "data.tables.count": 2,
    "data.tables.rows": 300,
    "data.tables.drift": 128,
    "data.eval_samples": 64,
    "embedding.id_tables.rows": 128,
}


def drifting(**keys: Any) -> Config:
    return with_keys(configuration("--config", "configs/bench/drift.yaml"), _SMALL | keys)


def bench(
    folder: Path, *contenders: str, resume: bool = False, days: int = 3, config: Config | None = None, code: int = 0
) -> Any:
    """Run the benchmark in this process with seed 1, check its exit code, and return its rows."""
    values = {"contenders": contenders, "days": days, "seeds": [1], "output": folder / "drift.csv", "resume": resume}
    assert run("drift", replace(ranks_here(config or drifting()), values=SimpleNamespace(**values))) == code
    return read_rows(folder / "drift.csv")


def auroc_of(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the AUROC of logits that are rounded down to 128ths, as the histograms on the device do."""
    positive, negative = (np.floor(128 * logits[labels == label]) for label in (1, 0))
    higher = np.sign(positive[:, None] - negative)
    return float((higher + 1).mean() / 2)


@pytest.mark.usefixtures("world_of_one")
def test_the_metrics_of_a_day_are_those_of_its_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[np.ndarray] = []
    add = RunningMetrics.add

    def noted(self: RunningMetrics, logits: torch.Tensor, labels: torch.Tensor) -> None:
        taken.append(np.stack([logits.detach().double().numpy(), labels.numpy()]))
        add(self, logits, labels)

    monkeypatch.setattr(RunningMetrics, "add", noted)
    rows = bench(tmp_path, "modulus")
    stream = open_datasets(drifting(**{"data.seed": 1}).data)[0]
    assert len(rows) == 3
    found = []
    for day, row in enumerate(rows):
        logits, labels = np.concatenate(taken[2 * day : 2 * day + 2], axis=1)
        assert labels.tolist() == stream.read(128 * day, 128).labels.tolist(), "the next samples of the stream"
        chance, rate = 1 / (1 + np.exp(-logits)), labels.mean()
        loss = -np.where(labels == 1, np.log(chance), np.log(1 - chance)).mean()
        found.append(loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)))
        assert float(row["ne"]) == pytest.approx(found[-1], abs=1e-5)
        assert float(row["mean_ne"]) == pytest.approx(np.mean(found), abs=1e-5)
        assert float(row["auroc"]) == pytest.approx(auroc_of(logits, labels), abs=1e-5)
        assert (int(row["day"]), int(row["samples"])) == (day + 1, 128 * (day + 1))


@pytest.mark.usefixtures("world_of_one")
def test_predictions_are_made_before_the_step_trains_on_their_samples(tmp_path: Path) -> None:
    rates = {"train.steps": 2, "train.lr": 0.001}, {"train.steps": 2, "train.lr": 0.5}
    (one, two), (other, last) = (
        bench(tmp_path / str(number), "modulus", days=2, config=drifting(**keys)) for number, keys in enumerate(rates)
    )
    assert one["ne"] == other["ne"], "no step has trained yet"
    assert two["ne"] != last["ne"]


@pytest.mark.usefixtures("world_of_one")
def test_a_run_that_diverges_keeps_its_days_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diverging = drifting(**{"train.lr": 1e38, "embedding.lr": 1e38})
    rows = bench(tmp_path, "modulus", "any", days=6, config=diverging, code=DISAGREEMENT)
    assert [row["contender"] for row in rows] == ["modulus"] * 2 + ["any"] * 2, "the second step is the last one"
    assert [math.isfinite(float(row["mean_ne"])) for row in rows] == [True, False] * 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dlrm-overlap: ")]
    assert ["modulus, seed 1: step 2" in told[0], "any, seed 1: step 2" in told[1], len(told)] == [True, True, 2], told
    (line,) = summarise(rows, ["any"])
    assert math.isnan(line["mean_ne"])
    again = bench(tmp_path, "modulus", "any", resume=True, days=6, config=diverging, code=DISAGREEMENT)
    assert again == rows, "nothing is trained twice"


@pytest.mark.usefixtures("world_of_one")
def test_a_resumed_command_adds_what_is_missing(tmp_path: Path) -> None:
    bench(tmp_path, "modulus")
    with refuses(r"--output: .* exists; give another file, or add --resume true"):
        bench(tmp_path, "modulus_twice")
    rows = bench(tmp_path, "modulus", "modulus_twice", resume=True)
    assert [row["contender"] for row in rows] == ["modulus"] * 3 + ["modulus_twice"] * 3
    assert [row["distinct_ids"] for row in rows[:3]] == [row["distinct_ids"] for row in rows[3:]]


@pytest.mark.usefixtures("world_of_one")
def test_rows_of_other_work_are_not_continued(tmp_path: Path) -> None:
    bench(tmp_path, "modulus")
    for keys, fault in [
        ({"train.steps": 12}, "steps 6.* 12"),
        ({"train.global_batch_size": 32}, "global_batch 64.* 32"),
        ({"data.tables.drift": 64}, "config [0-9a-f]{12}, and this run has [0-9a-f]{12}"),
        ({"train.lr": 0.01}, "config [0-9a-f]{12}, and this run has [0-9a-f]{12}"),
    ]:
        with refuses(rf"--output: .* has rows with {fault}; give another file"):
            bench(tmp_path, "modulus", "any", resume=True, config=drifting(**keys))
    with refuses(r"days 3, and this run has 6; give another file"):
        bench(tmp_path, "modulus", "any", resume=True, days=6)


def test_ids_of_a_stream_are_counted_day_by_day() -> None:
    config = drifting(**{"data.tables.multi_hot": "0..2", "data.tables.ids": ["rows", "any"]})
    stream = Stream.of(config, 1, 3)
    days = list(stream.count(CPU, {1, 2}))
    seen: set[int] = set()
    data = open_datasets(config.data)[0]
    for day, found in enumerate(days):
        for step in range(2):
            seen |= set(list(data.read(128 * day + 64 * step, 64).sparse.to_dict().values())[1].values().tolist())
        rows = {
            n: {1 + (x ^ x >> 32) % (128 * n - 1) for x in (i * 0x9E3779B97F4A7C15 % 2**64 for i in seen)}
            for n in (1, 2)
        }
        assert found == Day([len(seen)], {n: len(each) for n, each in rows.items()})


def test_designs_give_the_same_tables_their_rows() -> None:
    stream = Stream.of(drifting(**{"data.tables.ids": ["any", "rows"]}), 2, 3)
    assert (stream.rows, stream.about()) == ([256], {"days": 3, "half_life_days": 1.0, "ids_in_use": 300})
    found = {name: stream.design(design, [700]) for name, design in DRIFT_CONTENDERS.items()}
    unused = {"embedding.id_tables": IdTablesConfig()}
    hashed = {"embedding.backend": "pgas", "data.tables.ids": ["hashed", "rows"], **unused}
    assert found["modulus"] == ({**hashed, "data.tables.hashed_rows": [256, 1]}, 256)
    assert found["modulus_twice"] == ({**hashed, "data.tables.hashed_rows": [512, 1]}, 512)
    assert found["unlimited"][0]["embedding.id_tables.rows"] == [1536], "twice as many as ids, rounded up"
    assert found["mpzch"][0]["embedding.backend"] == "torchrec"
    for name in ("mpzch", "any", "any_lfu", "any_distance_lfu", "any_admit_2", "any_admit_2_forever"):
        assert (found[name][0]["embedding.id_tables.rows"], found[name][1]) == ([256], 256)
    for keys, _ in found.values():
        assert with_keys(stream.config, keys).data.tables.drift == 128


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("keys", "contender", "rule"),
    [
        ({}, "mpzch", "torchrec trains tables of any id on GPUs only, since FBGEMM's operator only evaluates on a CPU"),
        ({"data.tables.drift": 0}, "any", r"data\.tables\.drift 0; it needs synthetic tables with ids any that drift"),
        ({"train.steps": 5}, "any", r"train\.steps: 5, which is not a multiple of --days 3; set one that is"),
        ({"embedding.id_tables.rows": None}, "any", r"id_tables\.rows: null, but 2 tables take any id"),
        ({"embedding.id_tables.grow_at": 0.8}, "any", r"grow_at: 0\.8, but bench drift saves no .*; leave out grow_at"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_run(
    keys: dict[str, Any], contender: str, rule: str, tmp_path: Path
) -> None:
    with refuses(rule):
        bench(tmp_path, "any", contender, config=drifting(**keys))
    assert not (tmp_path / "drift.csv").exists()


def test_rows_of_a_design_without_a_map_have_no_counts_of_it() -> None:
    record = {"train/loss": 0.5, "train/ne": 0.8, "train/auroc": 0.7}
    day = Day([10, 5], {1: 8})
    (hashed,) = rows_of_days([record], [day], DRIFT_CONTENDERS["modulus"], 16, 64)
    assert (hashed["rows_used"], hashed["no_row"], hashed["ids_evicted"]) == (0.5, 0.0, None)
    (mpzch,) = rows_of_days([record], [day], DRIFT_CONTENDERS["mpzch"], 16, 64)
    assert (mpzch["rows_used"], mpzch["no_row"], mpzch["distinct_ids"]) == (None, None, 15)


def test_the_table_has_means_over_seeds_and_differences_by_seed() -> None:
    def row(name: str, seed: int, mean_ne: float) -> dict[str, str]:
        values = {"contender": name, "seed": seed, "ne": mean_ne - 0.1, "mean_ne": mean_ne, "mean_auroc": 0.8}
        values |= {"table_rows": 256, "distinct_ids": 700 + seed, "rows_used": "", "no_row": 0.25}
        return {key: str(value) for key, value in values.items()}

    rows = [row("a", 0, 0.99), row("a", 0, 0.8), row("b", 0, 0.7), row("a", 1, 0.9), row("b", 1, 0.6)]
    first, second = summarise(rows, ["a", "b"])
    assert (first["seeds"], first["mean_ne"]) == (2, pytest.approx(0.85)), "of the last rows"
    assert "difference" not in first
    assert second["difference"] == pytest.approx(-0.2)
    assert second["difference_std"] == pytest.approx(np.std([-0.1, -0.3], ddof=1))
    assert (second["last_ne"], second["distinct_ids"]) == (pytest.approx(0.55), 700)
    assert (second["rows_used"], second["no_row"]) == (None, 0.25)
