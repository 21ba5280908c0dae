"""Predictions by a model with tables of any id, from a user's table to the command's output, and by deltas."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dlrm_overlap import Scorer
from dlrm_overlap.checkpoint import apply_deltas
from dlrm_overlap.checkpoint.delta_files import (
    DELTA_MANIFEST,
    EVICT,
    DeltaManifest,
    read_changes,
    read_delta,
)
from dlrm_overlap.checkpoint.manifest import locate_checkpoint, write_manifest
from dlrm_overlap.checkpoint.storage import read_weights
from dlrm_overlap.cli import main
from dlrm_overlap.kernels.ids.id_map import EMPTY, mix
from dlrm_overlap.observe.metrics import evaluation_metrics
from tests.conftest import ROOT, refuses, run_cli

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
    _train(folder, "any")
    return folder


def _train(folder: Path, name: str, *options: str) -> None:
    run = ["--data.kind", "prepared", "--data.path", str(folder / "days"), "--data.workers", "0", "--nproc", "2"]
    run += ["--train.batch_size", "32", "--train.device", "cpu", "--embedding.backend", "pgas", "--embedding.lr", "0.5"]
    run += ["--embedding.id_tables.rows", str(ROWS), "--log.dir", str(folder), "--log.name", name]
    run += ["--checkpoint.every", "6", "--checkpoint.keep", "9", "--checkpoint.delta_every", "3", "--train.steps", "12"]
    done = run_cli("train", *run, *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_predictions_have_the_metrics_of_eval(folder: Path, tmp_path: Path, processes: str) -> None:
    _assert_predicts_as_eval(folder, "any", tmp_path, processes)


@pytest.mark.slow
def test_histories_and_cached_tables_of_any_id(folder: Path, tmp_path: Path) -> None:
    graph = ["--train.pipeline", "graph"]
    _train(folder, "history", *graph, "--model.sequence.history", "2", "--model.sequence.candidate", "1")
    scorer = Scorer(folder / "history/checkpoints/step_6")
    for step in (9, 12):
        scorer.apply(folder / f"history/deltas/delta_{step}")
    _assert_same(scorer(make_table()), Scorer(folder / "history")(make_table()))
    _train(folder, "cached", *graph, "--embedding.memory", "cached", "--checkpoint.delta_every", "0")
    for name in ("history", "cached"):
        _assert_predicts_as_eval(folder, name, tmp_path)


def _assert_predicts_as_eval(folder: Path, name: str, tmp_path: Path, processes: str = "1") -> None:
    scores, result, checkpoint = tmp_path / "scores.parquet", tmp_path / "eval.json", str(folder / name)
    options = ["--checkpoint", checkpoint, "--output", str(scores), "--key", "id", "--nproc", processes]
    assert main(["predict", str(folder / "table.parquet"), *options]) == 0
    found, labels = parquet.read_table(scores), make_table()["click"].to_pylist()
    assert found["id"].to_pylist() == list(range(N))
    done = run_cli("eval", "--checkpoint", checkpoint, "--output", str(result), "--nproc", processes)
    assert done.returncode == 0, done.stderr
    expected = json.loads(result.read_text())
    held = expected["samples"]
    probabilities = torch.tensor(found["click"].to_pylist()[-held:]).double()
    metrics = evaluation_metrics(probabilities.logit(), torch.tensor(labels[-held:]), ["click"], [1.0])
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


def test_it_loads_neither_torchrec_nor_fbgemm(folder: Path, tmp_path: Path) -> None:
    table, output = folder / "table.parquet", tmp_path / "scores.csv"
    command = ["predict", str(table), "--checkpoint", str(folder / "any"), "--output", str(output)]
    code = (
        "import sys; sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = sys.modules['triton'] = None\n"
        "from dlrm_overlap import Scorer; import pyarrow.parquet as parquet\n"
        f"scorer = Scorer({str(folder / 'any/checkpoints/step_6')!r})\n"
        f"for delta in {[str(_delta(folder, step)) for step in (9, 12)]}: scorer.apply(delta)\n"
        f"print(scorer(parquet.read_table({str(table)!r}))['click'].mean())\n"
        f"from dlrm_overlap.cli import main; sys.exit(main({command}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    mean = Scorer(folder / "any")(make_table())["click"].mean()
    assert float(done.stdout.split()[0]) == pytest.approx(mean, rel=1e-6)
    assert len(output.read_text().splitlines()) == N + 1


def _delta(folder: Path, step: int) -> Path:
    return folder / f"any/deltas/delta_{step}"


def _at(folder: Path, step: int) -> Scorer:
    return Scorer(folder / f"any/checkpoints/step_{step}")


def _assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(found["click"], expected["click"])


def test_deltas_give_what_the_checkpoint_of_their_step_gives(folder: Path) -> None:
    table, scorer = make_table(), _at(folder, 0)
    gone = [
        change for step in (3, 6) for change in read_changes(_delta(folder, step), read_delta(_delta(folder, step)))
    ]
    assert sum(len(each.keys) for each in gone if each.source == EVICT) > 20, "ids have lost their rows"
    for steps in ((3, 6), (9, 12)):
        before = scorer(table)["click"]
        for step in steps:
            scorer.apply(_delta(folder, step))
            assert scorer.step == step
        expected = _at(folder, step)
        scorer.encoder.take_counts()
        _assert_same(scorer(table), expected(table))
        assert scorer.encoder.take_counts() == expected.encoder.take_counts()
        assert np.abs(scorer(table)["click"] - before).max() > 0.01


def test_a_request_reads_the_weights_of_one_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score after rows have been changed and before dense parameters are, and change all within a request."""
    table, scorer, read_dense = make_table(), _at(folder, 6), apply_deltas.read_dense
    old, within, during = scorer(table), [], list[dict[str, np.ndarray]]()

    def reading(*arguments: Any) -> dict[str, torch.Tensor]:
        within.append(scorer(table))
        return read_dense(*arguments)

    monkeypatch.setattr(apply_deltas, "read_dense", reading)
    features = scorer.encoder.features

    def applying(*block: Any) -> Any:
        monkeypatch.setattr(scorer.encoder, "features", features)
        scorer.apply(_delta(folder, 9))
        return features(*block)

    monkeypatch.setattr(scorer.encoder, "features", applying)
    during.append(scorer(table))
    for each in (*within, *during):
        _assert_same(each, old)
    assert (len(within), scorer.step) == (1, 9)
    assert not np.array_equal(scorer(table)["click"], old["click"])


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_delta_that_is_removed_or_replaced_meanwhile_is_applied_in_full_or_not_at_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    delta, read_dense, scorer = tmp_path / "delta_9", apply_deltas.read_dense, _at(folder, 6)

    def change() -> None:
        shutil.rmtree(delta)
        if is_replaced:
            shutil.copytree(_delta(folder, 6), delta)

    def after_the_rows(*arguments: Any) -> dict[str, torch.Tensor]:
        change()
        return read_dense(*arguments)

    def after_all(*arguments: Any) -> dict[str, torch.Tensor]:
        found = read_dense(*arguments)
        change()
        return found

    monkeypatch.setattr(apply_deltas, "read_dense", after_the_rows)
    shutil.copytree(_delta(folder, 9), delta)
    with refuses(rf"{delta}/\S+ (is damaged|cannot be read)"):
        scorer.apply(delta)
    assert scorer.step == 6
    monkeypatch.setattr(apply_deltas, "read_dense", after_all)
    shutil.rmtree(delta, ignore_errors=True)
    shutil.copytree(_delta(folder, 9), delta)
    scorer.apply(delta)
    monkeypatch.undo()
    scorer.apply(_delta(folder, 12))
    assert scorer.step == 12


def test_threads_score_while_deltas_are_applied(folder: Path) -> None:
    table = make_table().slice(0, 64)
    scorer, ended = _at(folder, 0), Event()

    def score() -> list[bytes]:
        found = list[bytes]()
        while not ended.is_set():
            found.append(scorer(table)["click"].tobytes())
        return found

    expected = [scorer(table)["click"].tobytes()]
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(score) for _ in range(3)]
        for step in (3, 6, 9, 12):
            scorer.apply(_delta(folder, step))
            expected.append(scorer(table)["click"].tobytes())
        ended.set()
        found = [each.result() for each in running]
    for each in found:
        steps = [expected.index(one) for one in each]
        assert steps == sorted(steps), "a thread never goes back"
    assert len(set(expected)) == 5


class _SleptError(Exception):
    pass


def test_the_loop_of_the_page_follows_a_run(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    page = (ROOT / "docs/serving.md").read_text().partition("## Update a server\n")[2].partition("```python\n")[2]
    names: dict[str, Any] = {}
    exec(page.partition("```")[0], names)

    def sleep(seconds: float) -> None:
        raise _SleptError

    names["time"] = SimpleNamespace(sleep=sleep)
    scorer, damaged = _at(folder, 0), tmp_path / "deltas"
    shutil.copytree(folder / "any/deltas", damaged)
    _damage(damaged / "delta_9")
    with pytest.raises(_SleptError):
        names["follow"](scorer, damaged)
    assert scorer.step == 6
    assert "the weights stay at step 6" in caplog.text
    assert "delta_9/tables_rank1.parquet is damaged" in caplog.text
    (damaged / "delta_9" / DELTA_MANIFEST).unlink()  # as while it is copied
    with pytest.raises(_SleptError):
        names["follow"](scorer, damaged)
    assert f"{DELTA_MANIFEST} is missing" in caplog.text
    shutil.rmtree(damaged / "delta_9")
    shutil.copytree(_delta(folder, 9), damaged / "delta_9")
    with pytest.raises(_SleptError):
        names["follow"](scorer, damaged)
    assert scorer.step == 12


def _damage(delta: Path) -> None:
    file = delta / "tables_rank1.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _rewrite(delta: Path, change: Callable[[DeltaManifest], DeltaManifest]) -> None:
    write_manifest(delta, change(read_delta(delta)), DELTA_MANIFEST)


def _of_another_save(found: DeltaManifest) -> DeltaManifest:
    return replace(found, base=found.base | {"digest": "0" * 32, "same": []})


WRONG = [
    (12, None, r"delta_12 follows step 9, but the weights are those of step 6; give the deltas from step 6 to 9"),
    (6, None, r"delta_6 follows step 3, but the weights are those of step 6; leave it out"),
    (9, _damage, r"delta_9\S* is damaged: the checksum of bytes"),
    (9, lambda delta: (delta / "__0_0.distcp").unlink(), r"delta_9/__0_0\.distcp cannot be read"),
    (9, lambda delta: _rewrite(delta, _of_another_save), r"delta_9 follows another save of step 6 than"),
    (
        9,
        lambda delta: _rewrite(delta, lambda found: replace(found, shape=found.shape | {"model.dim": 8})),
        r"delta_9 is of another model: it has model\.dim 8, the base has 16",
    ),
    (9, shutil.rmtree, r"delta_9 is not a delta; give a folder delta_<N>"),
]


@pytest.mark.parametrize(("step", "change", "rule"), WRONG)
def test_what_cannot_be_applied_is_named_and_changes_nothing(
    folder: Path, tmp_path: Path, step: int, change: Callable[[Path], None] | None, rule: str
) -> None:
    table, scorer, delta = make_table().slice(0, 99), _at(folder, 6), tmp_path / f"delta_{step}"
    expected = scorer(table)
    shutil.copytree(_delta(folder, step), delta)
    if change is not None:
        change(delta)
    with refuses(rule):
        scorer.apply(delta)
    assert scorer.step == 6
    _assert_same(scorer(table), expected)
    scorer.apply(_delta(folder, 9))
    assert scorer.step == 9
