"""Predictions by a model with tables of any id, from a user's table to the command's output."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dlrm_overlap import Scorer
from dlrm_overlap.checkpoint.manifest import locate_checkpoint
from dlrm_overlap.checkpoint.storage import read_weights
from dlrm_overlap.cli import main
from dlrm_overlap.kernels.ids.id_map import EMPTY, mix
from dlrm_overlap.observe.metrics import evaluation_metrics
from tests.conftest import ROOT, run_cli

SCHEMA = """
labels: {click: {}}
dense: {price: {transform: log1p}}
categorical:
  city: {min_count: 2}
  user: {type: int, any: true}
  seen: {list: true, type: int, any: true}
  site: {any: true}
"""
N, ROWS, NEW = 1600, 256, 2**40  # ids from NEW on are not in the training table


def make_table() -> pa.Table:
    """Return a table whose users and visited ids are more than `ROWS`."""
    rng = np.random.default_rng(3)
    known = rng.integers(-(2**62), 2**62, 400)
    users, missing = rng.choice(known, N), rng.random(N) < 0.05
    seen = [rng.choice(known, rng.integers(0, 5)).tolist() for _ in range(N)]
    click = rng.random(N) < np.where(users > 0, 0.7, 0.3)
    return pa.table(
        {
            "id": range(N),
            "click": click.astype(int),
            "price": rng.gamma(2.0, 5.0, N),
            "city": rng.choice(["Köln", "Bonn", "Ulm"], N),
            "user": pa.array(users, pa.int64(), mask=missing),
            "seen": pa.array(seen, pa.list_(pa.int64())),
            "site": rng.choice([f"{i}.org" for i in range(300)], N),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a table, its samples, and the run `any` of two ranks on them."""
    folder = tmp_path_factory.mktemp("any")
    parquet.write_table(make_table(), folder / "table.parquet", row_group_size=500)
    (folder / "schema.yaml").write_text(SCHEMA)
    paths = [str(folder / "table.parquet"), str(folder / "days"), "--schema", str(folder / "schema.yaml")]
    assert main(["prepare", "table", *paths]) == 0
    run = ["--data.kind", "prepared", "--data.path", str(folder / "days"), "--data.workers", "0", "--nproc", "2"]
    run += ["--train.batch_size", "32", "--train.device", "cpu", "--embedding.backend", "pgas", "--embedding.lr", "0.5"]
    run += ["--embedding.id_tables.rows", str(ROWS), "--log.dir", str(folder), "--log.name", "any"]
    done = run_cli("train", *run)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_predictions_have_the_metrics_of_eval(folder: Path, tmp_path: Path, processes: str) -> None:
    scores, result, checkpoint = tmp_path / "scores.parquet", tmp_path / "eval.json", str(folder / "any")
    options = ["--checkpoint", checkpoint, "--output", str(scores), "--key", "id", "--nproc", processes]
    assert main(["predict", str(folder / "table.parquet"), *options]) == 0
    found, labels = parquet.read_table(scores), make_table()["click"].to_numpy()
    assert found["id"].to_pylist() == list(range(N))
    done = run_cli("eval", "--checkpoint", checkpoint, "--output", str(result), "--nproc", processes)
    assert done.returncode == 0, done.stderr
    expected = json.loads(result.read_text())
    held = expected["samples"]
    probabilities = torch.from_numpy(found["click"].to_numpy()[-held:]).double()
    metrics = evaluation_metrics(probabilities.logit(), torch.from_numpy(labels[-held:]), ["click"], [1.0])
    for key in ("loss", "auroc", "accuracy"):
        assert metrics[key] == pytest.approx(expected[key], abs=1e-6), key


def test_ids_without_a_row_read_the_first_row_of_their_bucket(folder: Path) -> None:
    """Counted with Python's integers, from what the checkpoint has stored."""
    scorer, table = Scorer(folder / "any"), make_table()
    weights = read_weights(locate_checkpoint(folder / "any", "checkpoint"))
    (name,) = (name for name in weights if name.endswith("t_01._hash_zch_identities"))
    stored, users = weights[name].flatten().tolist(), table["user"].to_pylist()
    hashed = [None if user is None else int(mix(torch.tensor(user))) for user in users]
    unknown = sum(user is not None and (user == EMPTY or user not in stored) for user in hashed)
    assert 10 < unknown < N - 100, "some users have a row, and some lost it, or never had one"
    scorer(table)
    values, counted = scorer.encoder.take_counts()
    assert (values["user"], counted["user"]) == (N - users.count(None), unknown)
    weights_of = next(each for name, each in weights.items() if name.endswith("t_01.weight"))
    new = np.arange(NEW, NEW + 1000)
    rows, has_row = scorer.rows_of("user", new)
    assert not has_row.any()
    expected = [(int(mix(torch.tensor(int(each)))) % 2**64 % (ROWS // 128)) * 128 + 127 for each in new]
    assert rows.tolist() == expected
    assert len({tuple(weights_of[row].tolist()) for row in rows}) == ROWS // 128
    missing = scorer.rows_of("user", np.array([-(2**63)]))
    assert missing[1].all(), "missing values have a row of their own"


def test_it_prints_ids_without_a_row(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = make_table().slice(0, 8)
    new = new.set_column(new.column_names.index("user"), "user", pa.array([*range(NEW, NEW + 7), None], pa.int64()))
    parquet.write_table(new, tmp_path / "new.parquet")
    output = str(tmp_path / "scores.csv")
    assert (
        main(["predict", str(tmp_path / "new.parquet"), "--checkpoint", str(folder / "any"), "--output", output]) == 0
    )
    assert "user: 7 of 7 values (100.0%) not in the table of ids\n" in capsys.readouterr().out


def test_it_loads_neither_torchrec_nor_fbgemm(folder: Path) -> None:
    code = (
        "import sys; sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = sys.modules['triton'] = None\n"
        "from dlrm_overlap import Scorer; import pyarrow.parquet as parquet\n"
        f"print(Scorer({str(folder / 'any')!r})(parquet.read_table({str(folder / 'table.parquet')!r}))['click'].mean())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(Scorer(folder / "any")(make_table())["click"].mean(), rel=1e-6)
