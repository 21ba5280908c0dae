"""A user's table with several labels, from its file to an evaluated model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dlrm_overlap.checkpoint.manifest import read_manifest, write_manifest
from dlrm_overlap.cli import main
from dlrm_overlap.data.times import time_of
from examples import own_data
from tests.conftest import read_metrics, run_cli


def train(folder: Path, name: str, steps: int, *options: str) -> dict[str, Any]:
    source = ["--data.kind", "prepared", "--data.path", str(folder / "days"), "--model.top_mlp", "[64, 32, 2]"]
    run = ["--log.dir", str(folder), "--log.name", name, "--log.every", "4", "--train.steps", str(steps)]
    ranks = ["--nproc", "2", "--train.device", "cpu", "--train.batch_size", "64", "--data.workers", "1"]
    done = run_cli("train", *source, *run, *ranks, *options)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / name / "summary.json").read_text())
    assert _label_table(done.stdout) == _metrics_of(summary)
    return summary


def _label_table(output: str) -> dict[str, list[str]]:
    """Return the rows of the table of labels in `output`, without its header."""
    _, header, rows = re.split(r"^(label +AUROC +NE +calibration)\n", output, flags=re.MULTILINE)
    assert [len(row) for row in rows.splitlines()[:2]] == [len(header)] * 2, "aligned"
    return {label: values for label, *values in map(str.split, rows.splitlines()[:2])}


def _metrics_of(summary: dict[str, Any]) -> dict[str, list[str]]:
    metrics = "auroc", "ne", "calibration"
    return {label: [f"{summary[f'eval_{key}/{label}']:.4f}" for key in metrics] for label in ("click", "purchase")}


def _timed_table(rows: int) -> pa.Table:
    """Return a table with a sample a minute."""
    minutes, table = [time_of("2026-11-19") // 10**6 + 60 * minute for minute in range(rows)], own_data.make_table(rows)
    return table.set_column(table.column_names.index("at"), "at", pa.array(minutes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    own_data.parquet.write_table(_timed_table(3000), folder / "samples.parquet")
    (folder / "schema.yaml").write_text(own_data.SCHEMA)
    paths = [str(folder / "samples.parquet"), str(folder / "days"), "--schema", str(folder / "schema.yaml")]
    prepared = run_cli("prepare", "table", *paths)
    assert prepared.returncode == 0, prepared.stderr
    assert ": 3000 samples, " in prepared.stdout
    train(folder, "torchrec", 16, "--embedding.backend", "torchrec")
    return folder


def test_other_backends_and_stopped_runs_log_the_same(folder: Path) -> None:
    options = ["--embedding.backend", "pgas", "--train.pipeline", "graph"]
    train(folder, "graph", 8, *options)
    summary = train(folder, "graph", 16, *options)  # goes on after step 8
    whole = json.loads((folder / "torchrec" / "summary.json").read_text())
    for key in ("loss", "auroc", "ne/click", "calibration/purchase", "lifetime_auroc/purchase", "lifetime_ne"):
        expected, found = (read_metrics(folder / name, f"train/{key}") for name in ("torchrec", "graph"))
        assert list(found) == [4, 8, 12, 16]
        assert found == pytest.approx(expected, rel=2e-3), key
    for key in ("train_ne", "train_auroc/click", "eval_loss", "eval_calibration", "eval_auroc/purchase"):
        assert summary[key] == pytest.approx(whole[key], rel=2e-3), key


def test_a_checkpoint_is_evaluated_with_all_labels(folder: Path) -> None:
    summary = json.loads((folder / "torchrec" / "summary.json").read_text())
    checkpoint = str(folder / "torchrec" / "checkpoints" / "step_16")
    done = run_cli("eval", "--checkpoint", checkpoint, "--output", str(folder / "eval.json"))
    assert done.returncode == 0, done.stderr
    means = f"AUROC {summary['eval_auroc']:.4f}, NE {summary['eval_ne']:.4f}"
    assert re.search(rf"^step 16: {means}, calibration .* \(means of 2 labels\), loss", done.stdout)
    assert _label_table(done.stdout) == _metrics_of(summary)
    found = json.loads((folder / "eval.json").read_text())
    for key in ("loss", "auroc", "ne/click", "calibration/purchase"):
        assert found[key] == pytest.approx(summary[f"eval_{key}"], rel=1e-5)


def test_metrics_by_window_of_time(folder: Path, tmp_path: Path) -> None:
    """The last 620 minutes of 50 hours are 10 hours and 20 minutes."""
    options = ["--checkpoint", str(folder / "torchrec"), "--train.device", "cpu", "--nproc", "2"]
    options += ["--data.eval_from", "2026-11-20 15:40", "--data.eval_window", "hour"]
    done = run_cli("eval", *options, "--output", str(tmp_path / "eval.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "eval.json").read_text())
    windows = found["windows"]
    assert [each["samples"] for each in windows.values()] == [20, *[60] * 10]
    assert list(windows)[:2] == ["2026-11-20 15:00:00", "2026-11-20 16:00:00"]
    assert re.search(r"\nfrom +samples +AUROC +NE +calibration\n2026-11-20 15:00:00 +20 ", done.stdout)
    for key in ("loss", "accuracy", "loss/purchase"):
        total = sum(each["samples"] * each[key] for each in windows.values()) / 620
        assert total == pytest.approx(found[key], rel=1e-6), key
    assert len({each["auroc/click"] for each in windows.values()}) > 9


def test_a_day_that_was_prepared_separately_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_data.parquet.write_table(_timed_table(1500), folder / "later.parquet")
    paths = [str(folder / "later.parquet"), str(folder / "later"), "--schema", str(folder / "schema.yaml")]
    assert main(["prepare", "table", *paths]) == 0
    rows = json.loads((folder / "days" / "meta.json").read_text())["rows"]  # which were the cure once
    capsys.readouterr()
    differs = r"later has the encoding [0-9a-f]{16}, not [0-9a-f]{16} as the samples "
    cure = "so one value has different ids; .*: dlrm-overlap prepare table TABLE OUT --like "
    trained = rf"--checkpoint: \S+{differs}that \S+step_16 was trained with, {cure}\S+step_16$"
    rows_set = r"data\.tables\.rows: .*later were made for"
    later = str(folder / "later")
    for options, rule in (
        (["--data.path", later, "--data.eval_path", later], trained),
        (["--data.path", later], trained),
        (["--data.eval_path", later], trained),
        (["--data.path", later, "--data.tables.rows", json.dumps(rows)], rows_set),
        (["--data.eval_path", later, "--data.tables.rows", json.dumps(rows)], rows_set),
    ):
        assert main(["eval", "--checkpoint", str(folder / "torchrec"), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(f"dlrm-overlap: {rule}", line), line
        assert "set data.tables.rows" not in line


def test_a_later_day_is_encoded_by_the_checkpoint_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = _timed_table(3000)
    own_data.parquet.write_table(table.slice(2000), tmp_path / "later.parquet")
    checkpoint = tmp_path / "step_16"
    shutil.copytree(folder / "torchrec" / "checkpoints" / "step_16", checkpoint)
    manifest = read_manifest(checkpoint)
    manifest.about["config"]["data"]["eval_from"] = "2026-11-19 10:00"  # which the options of eval replace
    write_manifest(checkpoint, manifest)
    later = str(tmp_path / "later")
    assert main(["prepare", "table", str(tmp_path / "later.parquet"), later, "--like", str(checkpoint)]) == 0
    assert " not in the vocabulary" in capsys.readouterr().out
    evaluate = ["eval", "--checkpoint", str(checkpoint), "--train.device", "cpu"]
    same = run_cli(*evaluate, "--data.eval_path", later, "--data.path", "the training samples are not needed")
    assert same.returncode == 0, same.stderr
    assert "1000 samples" in same.stdout
    whole = run_cli(*evaluate, "--data.eval_fraction", "0.3333334")
    assert same.stdout == whole.stdout, "the last 1000 of all samples"


def test_a_run_does_not_resume_on_samples_of_another_encoding(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two columns are in the other order, so the tables have the same sizes."""
    own_data.parquet.write_table(own_data.make_table(3000), tmp_path / "samples.parquet")
    first, second = (f"  {name}: {{rows: 200}}" for name in own_data.TEXTS[14:16])
    (tmp_path / "schema.yaml").write_text(own_data.SCHEMA.replace(f"{first}\n{second}", f"{second}\n{first}"))
    paths = [str(tmp_path / "samples.parquet"), str(tmp_path / "days"), "--schema", str(tmp_path / "schema.yaml")]
    assert main(["prepare", "table", *paths]) == 0
    capsys.readouterr()
    options = ["--data.kind", "prepared", "--data.path", str(tmp_path / "days"), "--model.top_mlp", "[64, 32, 2]"]
    options += ["--log.dir", str(folder), "--log.name", "torchrec", "--train.steps", "20", "--train.device", "cpu"]
    assert main(["train", *options, "--train.batch_size", "128", "--checkpoint.allow_config_mismatch", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"checkpoint\.resume: \S+days has the encoding [0-9a-f]{16}, not [0-9a-f]{16} as the samples that \S+step_16 "
        r"was trained with, so one value has different ids; .* --like \S+step_16$",
        line,
    ), line


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ([], "model.top_mlp: [64, 32, 1] ends in 1, but a sample has 2 labels; end it in 2, a logit for each label"),
        (["--model.sequence.history", "99"], "model.sequence.history: 99 is no table; the "),
    ],
)
def test_a_model_that_does_not_fit_the_samples_is_refused_before_the_ranks_meet(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], rule: str
) -> None:
    monkeypatch.setattr("dlrm_overlap.launching.process_group.init_process_group", None)
    source = ["--data.kind", "prepared", "--data.path", str(folder / "days"), "--train.device", "cpu"]
    argv = ["train", *source, "--log.dir", str(folder), "--log.name", "refused", "--train.steps", "1", *options]
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert rule in line
