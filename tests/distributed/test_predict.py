"""Predictions from raw values by plain PyTorch are those of the trained model."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from dlrm_overlap import Scorer
from dlrm_overlap.checkpoint.manifest import locate_checkpoint
from dlrm_overlap.cli import main
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.lifetime import unwinding_on_sigterm
from dlrm_overlap.observe.metrics import evaluation_metrics
from dlrm_overlap.predict import command
from tests.conftest import ROOT, is_alive, run_cli, wait_until
from tests.warm import START_METHOD

SCHEMA = """
labels: {click: {}, buy: {weight: 0.5}}
dense: {price: {transform: log1p}, age: {}}
categorical:
  city: {min_count: 2}
  genres: {list: "|", min_count: 1}
  user: {type: int, rows: 40}
  seen: {list: true, type: int, rows: 60}
"""
N = 1200
MODELS = {
    "dot": [],
    "dcn": ["--model.arch", "dcn", "--model.cross_rank", "8", "--model.activation", "gelu"],
    "history": ["--model.sequence.history", "3", "--model.sequence.candidate", "2", "--model.sequence.positions", "3"],
    "folded": ["--data.tables.max_rows", "9", "--embedding.weight_dtype", "fp16"],
}


def make_table(n: int) -> pa.Table:
    rng = np.random.default_rng(3)
    cities = rng.choice(["Köln", "Bonn", "Aachen", "Ulm", "Mainz"], n, p=[0.5, 0.3, 0.1, 0.09, 0.01])
    genres = ["|".join(rng.choice(list("abcde"), rng.integers(0, 4))) for _ in range(n)]
    seen = [rng.integers(0, 500, rng.integers(0, 6)).tolist() for _ in range(n)]
    price = np.where(rng.random(n) < 0.1, np.nan, rng.gamma(2.0, 5.0, n))
    click = rng.random(n) < 1 / (1 + np.exp(1.5 - 1.0 * (cities == "Köln") - 0.1 * np.nan_to_num(price)))
    columns = {"id": range(n), "click": click.astype(int), "buy": (click & (rng.random(n) < 0.4)).astype(int)}
    columns |= {"price": price, "age": rng.integers(18, 90, n), "city": cities, "genres": genres}
    return pa.table({**columns, "user": rng.integers(0, 2**40, n), "seen": pa.array(seen, pa.list_(pa.int64()))})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    parquet.write_table(make_table(N), folder / "table.parquet")
    parquet.write_table(make_table(N).drop_columns(["click", "buy"]), folder / "unlabelled.parquet", row_group_size=500)
    (folder / "schema.yaml").write_text(SCHEMA)
    paths = [str(folder / "table.parquet"), str(folder / "days"), "--schema", str(folder / "schema.yaml")]
    assert main(["prepare", "table", *paths]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path, request: pytest.FixtureRequest) -> Path:
    """Return the run of the model that the test's parameter names."""
    run = ["--data.kind", "prepared", "--data.path", str(folder / "days"), "--model.top_mlp", "[16, 2]"]
    run += ["--train.batch_size", "32", "--train.device", "cpu", "--nproc", "2", "--data.workers", "0"]
    run += ["--embedding.backend", "pgas", "--log.dir", str(folder), "--log.name", request.param]
    done = run_cli("train", *run, *MODELS[request.param])
    assert done.returncode == 0, done.stderr
    return folder / request.param


def predict_command(folder: Path, trained: Path, target: Path) -> list[str]:
    table, output = folder / "unlabelled.parquet", target / "scores.parquet"
    return ["predict", str(table), "--checkpoint", str(trained), "--output", str(output)]


_OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "dot"]


@pytest.mark.parametrize("trained", ["dot", *_OTHERS], indirect=True)
def test_predictions_have_the_metrics_of_eval(folder: Path, trained: Path, tmp_path: Path) -> None:
    scores, result = tmp_path / "scores.parquet", tmp_path / "eval.json"
    options = ["--checkpoint", str(trained), "--output", str(scores), "--key", "id"]
    assert main(["predict", str(folder / "unlabelled.parquet"), *options]) == 0
    found = parquet.read_table(scores)
    assert found.column_names == ["id", "click", "buy"]
    assert found["id"].to_pylist() == list(range(N))
    assert run_cli("eval", "--checkpoint", str(trained), "--output", str(result)).returncode == 0
    expected = json.loads(result.read_text())
    held, table = expected["samples"], make_table(N)
    probabilities = torch.from_numpy(
        np.stack([found[name].to_numpy()[-held:] for name in ("click", "buy")], 1)
    ).double()
    labels = torch.from_numpy(np.stack([table[name].to_numpy()[-held:] for name in ("click", "buy")], 1))
    metrics = evaluation_metrics(probabilities.logit(), labels, ["click", "buy"], [1.0, 0.5])
    for key in ("loss", "auroc/click", "ne/buy", "calibration/click", "accuracy"):
        assert metrics[key] == pytest.approx(expected[key], rel=2e-5), key


@pytest.mark.parametrize("start_method", [START_METHOD, pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("trained", ["dot"], indirect=True)
def test_every_kind_of_rows_and_file_gives_the_same(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    start_method: str,
) -> None:
    """`predict` starts its processes by `spawn`; by `START_METHOD` they start sooner."""
    monkeypatch.setattr(command, "get_context", lambda _: multiprocessing.get_context(start_method))
    table, scorer = make_table(N), Scorer(trained)
    cities = [*table["city"].to_pylist()[:-3], *["Trier"] * 3]  # unknown
    table = table.set_column(table.column_names.index("city"), "city", pa.array(cities))
    expected = scorer(table)
    assert expected["click"].dtype == np.float32
    assert [each.shape for each in expected.values()] == [(N,), (N,)]
    assert len(np.unique(expected["click"])) > N // 2
    columns: dict[str, Any] = {name: table[name].to_pylist() for name in scorer.columns}
    columns["age"] = np.array(columns["age"])
    for rows in (columns, table.to_batches()[0], table.select(scorer.columns)):
        for name, each in scorer(rows).items():
            np.testing.assert_array_equal(each, expected[name])
    for first, end in ((0, 1), (7, 39), (N, N)):
        part = scorer({name: column[first:end] for name, column in columns.items()})
        np.testing.assert_allclose(part["click"], expected["click"][first:end], rtol=1e-6)
    parquet.write_table(table, tmp_path / "table.parquet", row_group_size=100)
    for name, options in (("one.parquet", []), ("two.CSV", ["--nproc", "2", "--key", "city"])):
        output = tmp_path / name
        argv = ["predict", "--checkpoint", str(trained), str(tmp_path / "table.parquet"), "--output", str(output)]
        assert main([*argv, *options]) == 0
        counts = f"{output}: 1200 rows\ncity: 3 of 1200 values (0.2%) not in the vocabulary\n"
        assert capsys.readouterr().out == counts
        found = parquet.read_table(output) if name.endswith("parquet") else csv.read_csv(output)
        np.testing.assert_allclose(found["buy"].to_numpy(), expected["buy"], rtol=1e-6)
        assert not options or found["city"].to_pylist() == columns["city"]


@pytest.mark.parametrize("trained", ["dot"], indirect=True)
def test_python_values_mean_what_the_columns_of_a_file_mean(folder: Path, trained: Path) -> None:
    scorer, large = Scorer(trained), [2**63 + 5, 3, None, 2**64 - 1]
    table = make_table(4).drop_columns(["user", "seen", "age"])
    table = table.append_column("user", pa.array(large, pa.uint64())).append_column("age", pa.array([30, 40, None, 50]))
    table = table.append_column("seen", pa.array([[2**63 + 1, 1], [], None, [7]], pa.list_(pa.uint64())))
    expected, columns = scorer(table), table.to_pydict()
    assert scorer(columns | {"user": [3, 3, None, 3]})["click"][0] != expected["click"][0]
    mixed = {"user": [str(2**63 + 5), np.int64(3), float("nan"), 2**64 - 1], "age": ["30", 40, None, 50.0]}
    for changed in ({}, mixed, {"seen": [[2**63 + 1, "1"], (), None, np.array([7])]}):
        for name, each in scorer(columns | changed).items():
            np.testing.assert_array_equal(each, expected[name])
    whole = scorer(columns | {"user": [1, 7, 7, None]})["click"]
    np.testing.assert_array_equal(scorer(columns | {"user": [True, 7.0, "7", None]})["click"], whole)
    assert whole[0] != scorer(columns | {"user": [7, 7, 7, None]})["click"][0]


@pytest.mark.slow  # test_predict_any_ids has the same of tables of any id
@pytest.mark.parametrize("trained", ["dot"], indirect=True)
def test_it_loads_neither_torchrec_nor_fbgemm(folder: Path, trained: Path) -> None:
    code = (
        "import sys; sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
        "from dlrm_overlap import Scorer; import pyarrow.parquet as parquet\n"
        f"print(Scorer({str(trained)!r})(parquet.read_table({str(folder / 'unlabelled.parquet')!r}))['click'].mean())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(Scorer(trained)(make_table(N))["click"].mean(), rel=1e-6)


class Frame(dict[str, Any]):
    """Has two columns `age`, as a DataFrame of pandas may."""

    def __iter__(self) -> Iterator[str]:
        return iter([*super().__iter__(), "age"])


@pytest.mark.parametrize("trained", ["dot"], indirect=True)
def test_mistakes_are_named(folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scorer, columns = Scorer(trained), {name: [None] for name in Scorer(trained).columns}
    assert 0 < scorer(columns)["click"][0] < 1, "all values are missing"
    for changed, rule in (
        ({"city": None}, "column city: missing; the model needs price, age, city, genres, user, seen"),
        ({"age": ["old"]}, r"row 1, column age: 'old' is not a finite number"),
        ({"age": 3}, "column age: no column of values"),
        ({"seen": [3]}, "row 1, column seen: int64, but the schema asks for lists"),
        ({"age": "30"}, r"column age: no column of values \(a str\); give a list"),
        ({"age": {30}}, r"column age: no column of values \(a set\); give a list"),
        ({"age": [np.datetime64("2026-01-01"), np.int64(3)]}, r"column age: .*\(datetime64, int64 in one column\)"),
        ({"seen": [[np.datetime64("2026-01-01")], [np.float32(3)]]}, r"column seen: .*\(datetime64, float32 in one"),
        ({"city": [{"name": "Ulm"}, 3]}, r"column city: no column of values \(dict is not a number or a text\)"),
        ({"user": [2**64]}, "row 1, column user: '18446744073709551616' is not a whole number from"),
        ({"seen": [[1, 2**64]]}, "row 1, column seen: '18446744073709551616' is not a whole number from"),
        ({"age": [10**400]}, r"row 1, column age: '10+ is not a finite number of 32 bits"),
        ({"user": [1, 2]}, r"rows: columns differ in length \(price 1, user 2\); give each"),
    ):
        rows = {name: value for name, value in (columns | changed).items() if value is not None}
        with pytest.raises(InputError, match=rule):
            scorer(rows)
    with pytest.raises(InputError, match="rows: a list, not columns; give a dict that maps names to lists of values"):
        scorer([dict.fromkeys(scorer.columns)])  # type: ignore[arg-type]
    twice = make_table(3).append_column("age", pa.array([1, 2, 3]))
    for rows in (twice, twice.to_batches()[0], Frame(make_table(3).to_pydict())):
        with pytest.raises(InputError, match="column age: twice; leave one out"):
            scorer(rows)
    assert len(scorer(make_table(3).append_column("id", pa.array([1, 2, 3])))["click"]) == 3, "one that is not read"
    bad = make_table(3).set_column(4, "age", pa.array(["1", "2", "x"]))
    parquet.write_table(bad, tmp_path / "bad.parquet")
    parquet.write_table(make_table(3).slice(0, 0), tmp_path / "empty.parquet")
    (tmp_path / "empty.csv").write_text(",".join(make_table(1).column_names) + "\n")
    command = ["predict", "--checkpoint", str(trained), "--output", str(tmp_path / "out.parquet")]
    for options, rule in (
        ([str(tmp_path / "bad.parquet")], "bad.parquet: row 3, column age: 'x' is not a finite number"),
        ([str(tmp_path / "none.parquet")], "none.parquet: no such file"),
        ([str(tmp_path / "empty.parquet")], "empty.parquet: no rows; name a file"),
        ([str(tmp_path / "empty.csv")], "empty.csv: no rows; name a file"),
        (
            [str(folder / "table.parquet"), "--key", "click"],
            "--key click: the output has a column of that name",
        ),
        ([str(folder / "table.parquet"), "--key", "nr"], "column nr: missing among the file's 9 columns (id, click"),
        ([str(folder / "table.parquet"), "--key", "idd"], "(did you mean id?); correct the file, or --key\n"),
        (
            [str(folder / "table.parquet"), "--key", "seen", "--output", str(tmp_path / "out.csv")],
            "--key seen: cannot be written to",
        ),
        ([str(folder / "table.parquet"), "--output", "out.txt"], "--output: out.txt is not one of .parquet, .csv"),
    ):
        assert main([*command, *options]) == 2
        assert rule in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == {"bad.parquet", "empty.parquet", "empty.csv"}
    linked, good = tmp_path / "linked", tmp_path / "good.parquet"
    linked.mkdir()
    parquet.write_table(make_table(3), good)
    (linked / "day.parquet").symlink_to(good)
    for table, output in ((good, good), (tmp_path, tmp_path / "x.csv"), (linked, good), (linked / "day.parquet", good)):
        assert main([*command[:3], str(table), "--output", str(output)]) == 2
        assert f"--output: {output} is a file of {table}, or in its folder" in capsys.readouterr().err
    assert parquet.read_table(good).equals(make_table(3))


@pytest.mark.parametrize("trained", ["dot"], indirect=True)
def test_keys_stay_what_they_are_where_files_have_other_types(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ids_of(*parts: pa.Array) -> list[Any] | str:
        for i, part in enumerate(parts):
            parquet.write_table(make_table(len(part)).set_column(0, "id", part), tmp_path / "parts" / f"{i}.parquet")
        output = tmp_path / "out.parquet"
        argv = ["predict", str(tmp_path / "parts"), "--checkpoint", str(trained), "--output", str(output)]
        code = main([*argv, "--key", "id"])
        return capsys.readouterr().err if code else parquet.read_table(output)["id"].to_pylist()

    (tmp_path / "parts").mkdir()
    assert ids_of(pa.array([7]), pa.array([8.0, None]), pa.array([None])) == [7, 8, None, None]
    assert ids_of(pa.array(["007"]), pa.array([7]), pa.array(["a"]).dictionary_encode()) == ["007", "7", "a"]
    for first, then, rule in (
        (pa.array([7]), pa.array(["007"]), "string, but int64"),
        (pa.array([7.5]), pa.array([2**53 + 1]), "int64, but double"),
        (pa.array([0.5], pa.float32()), pa.array([0.1]), "double, but float"),
        (pa.array(["Ulm"]), pa.array([b"\xff"]), "bytes that are not UTF-8, but string"),
    ):
        cure = "give the column one type in all files, or leave it out"
        assert ids_of(first, then, first) == f"dlrm-overlap: --key id: {rule} in earlier rows; {cure}\n"


@pytest.mark.parametrize("trained", ["dot"], indirect=True)
def test_sigterm_leaves_no_file(
    folder: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def score(*arguments: Any) -> Any:
        assert len(list(tmp_path.iterdir())) == 1, "the incomplete output"
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command, "_score", score)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(predict_command(folder, trained, tmp_path))
    assert ended.value.code == 143
    assert "dlrm-overlap: interrupted by SIGTERM\n" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_ends_a_process_at_once() -> None:
    with unwinding_on_sigterm():
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("trained", ["dot"], indirect=True)
def test_a_killed_process_is_said_in_one_line(
    folder: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(*block: Any) -> Any:
        for process in multiprocessing.active_children():
            process.kill()
        return block

    monkeypatch.setattr(command, "get_context", lambda _: multiprocessing.get_context(START_METHOD))
    monkeypatch.setattr(command, "_as_block", kill)
    assert main([*predict_command(folder, trained, tmp_path), "--nproc", "2"]) == 2
    rule = "dlrm-overlap: --nproc: 2, but one of these processes was killed, most often by .* lower --nproc\n"
    assert re.fullmatch(rule, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trained", ["dot"], indirect=True)
def test_a_checkpoint_that_is_removed_before_the_processes_load_it_is_named(
    folder: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint, output = tmp_path / "step_1", tmp_path / "out"
    shutil.copytree(locate_checkpoint(trained, "run"), checkpoint)
    output.mkdir()

    def remove(*block: Any) -> Any:
        shutil.rmtree(checkpoint, ignore_errors=True)
        return block

    monkeypatch.setattr(command, "get_context", lambda _: multiprocessing.get_context(START_METHOD))
    monkeypatch.setattr(command, "_as_block", remove)
    assert main([*predict_command(folder, checkpoint, output), "--nproc", "2"]) == 2
    rule = f"dlrm-overlap: checkpoint: '{checkpoint}' is neither a checkpoint nor the folder of a run with one; give"
    found = capfd.readouterr().err
    assert found.startswith(rule)
    assert found.count("\n") == 1
    assert list(output.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("trained", ["dot"], indirect=True)
def test_no_process_is_left(folder: Path, trained: Path, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "out").mkdir()
    for part in range(3000):
        os.link(folder / "unlabelled.parquet", tmp_path / "parts" / f"{part}.parquet")
    argv = ["predict", str(tmp_path / "parts"), "--checkpoint", str(trained), "--nproc", "2"]
    argv += ["--output", str(tmp_path / "out" / "scores.parquet")]
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen([sys.executable, "-m", "dlrm_overlap", *argv], cwd=ROOT, stderr=errors)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: len(children.read_text().split()) == 3, 60, "two, and multiprocessing's resource tracker")
        pids = [int(pid) for pid in children.read_text().split()]
        process.send_signal(number)
        assert process.wait(20) == {signal.SIGKILL: -9, signal.SIGTERM: 143}[number]
        wait_until(lambda: not any(map(is_alive, pids)), 60, "a process is left")
    finally:
        process.kill()
        process.wait()
    if number == signal.SIGTERM:
        assert list((tmp_path / "out").iterdir()) == []
        assert "dlrm-overlap: interrupted by SIGTERM\n" in (tmp_path / "stderr").read_text()


def test_a_run_on_other_samples_is_refused(tmp_path: Path) -> None:
    options = ["--config", "quickstart", "--train.steps", "1", "--train.device", "cpu", "--nproc", "1"]
    done = run_cli("train", *options, "--log.dir", str(tmp_path), "--log.name", "run", "--data.eval_samples", "64")
    assert done.returncode == 0, done.stderr
    with pytest.raises(InputError, match="step_1 has no encoding, since its training samples were not made by"):
        Scorer(tmp_path / "run")
