"""A checkpoint and the deltas after it give the weights of the trainer, to the last bit."""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.checkpoint.apply_deltas import apply_deltas, ids_of
from dlrm_overlap.checkpoint.delta_files import EVICT, deltas_in, read_changes, read_delta
from dlrm_overlap.checkpoint.manifest import check_fits, read_manifest, write_manifest
from dlrm_overlap.checkpoint.storage import read_weights
from dlrm_overlap.checkpoint.tools import verify
from dlrm_overlap.cli import main
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.ids.id_map import EMPTY, unmix
from tests.conftest import refuses
from tests.distributed.captured import captures
from tests.distributed.workers import make_trainer, quickstart, ran_on_ranks

SMALL = "--train.global_batch_size 64 --train.steps 12 --train.eval_every 0 --data.eval_samples 128 --log.every 4"
SMALL += " --data.tables.count 2 --data.tables.rows 2000 --data.tables.multi_hot 2"
SMALL += " --embedding.backend pgas --checkpoint.delta_every 3 --checkpoint.every 6 --checkpoint.keep 9"
ANY = "--data.tables.ids any --embedding.id_tables.rows 256"
RUNS = {
    "columns": "--embedding.plan column_wise --embedding.weight_dtype fp16 --checkpoint.asynchronous true",
    "any": f"{ANY} --checkpoint.asynchronous true",
}
SLOW_RUNS = {
    "int8": "--checkpoint.delta_dtype int8 --checkpoint.delta_keep 2",
    "history": "--data.tables.count 3 --model.sequence.history 2 --model.sequence.candidate 1 --train.pipeline graph",
    "resumed": f"{ANY} --train.steps 8 --checkpoint.delta_every 2 --checkpoint.last true",
    **({"captured": f"{ANY} --train.pipeline graph"} if INTERPRETED else {}),
}
_SCORES = ("_used_at", "_clock", "_hash_zch_metadata")


def _fit(folder: Path, name: str, options: str) -> int:
    """Train a run, and return the step at which it began."""
    trainer = make_trainer(quickstart(folder, name, *SMALL.split(), *options.split()))
    trainer.fit()
    trainer.close()
    return trainer.start


def _train(folder: Path) -> None:
    for name, options in RUNS.items():
        _fit(folder, name, options)


def _train_slow(folder: Path) -> None:
    for name, options in SLOW_RUNS.items():
        with captures() if name == "captured" else nullcontext() as taken:
            _fit(folder, name, options)
        assert taken is None or taken["replayed"] > 3, "steps are captured"
    # Continue one from step 6, and overtake what it wrote after that.
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "resumed/checkpoints/step_8")
        (folder / "resumed/summary.json").unlink()
    dist.barrier()
    assert _fit(folder, "resumed", SLOW_RUNS["resumed"].replace("--train.steps 8", "--train.steps 14")) == 6


runs = ran_on_ranks(2, _train)
slow_runs = ran_on_ranks(2, _train_slow)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Path:
    """The folder of the run that the test's parameter names."""
    return request.getfixturevalue("runs" if request.param in RUNS else "slow_runs") / request.param


def _params(*names: str) -> Any:
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in names if name in SLOW_RUNS]
    return pytest.mark.parametrize("run", [*(name for name in names if name in RUNS), *slow], indirect=True)


def _chain(run: Path, after: int = 0) -> list[Path]:
    return [path for step, path in deltas_in(run / "deltas").items() if step > after]


def _assert_same(applied: Path, trained: Path) -> None:
    """Compare all weights, and the ids of the rows."""
    found, expected = read_weights(applied), read_weights(trained)
    assert found.keys() == expected.keys()
    differing = {name for name in found if not torch.equal(found[name], expected[name])}
    assert {name for name in differing if not name.endswith(_SCORES)} == set()
    assert verify(applied) == []


@_params("columns", "any", "captured", "history")
def test_a_checkpoint_and_its_deltas_are_the_trained_weights(run: Path, tmp_path: Path) -> None:
    assert list(deltas_in(run / "deltas")) == [3, 6, 9, 12]
    for base, step in ((0, 12), (6, 12), (0, 6)):
        chain = [path for path in _chain(run, base) if int(path.name[6:]) <= step]
        apply_deltas(run / f"checkpoints/step_{base}", chain, tmp_path / f"{base}_{step}")
        if step == 6:
            _assert_same(tmp_path / f"{base}_{step}", run / "checkpoints/step_6")
    _assert_same(tmp_path / "0_12", tmp_path / "6_12")
    # In two steps, by the command.
    first, *others = map(str, _chain(run, 6))
    for base, deltas, output in ((tmp_path / "0_6", [first], "a"), (tmp_path / "a", others, "b")):
        assert main(["delta", "apply", str(base), *deltas, "--output", str(tmp_path / output)]) == 0
    _assert_same(tmp_path / "b", tmp_path / "0_12")


def test_deltas_have_what_changed_alone(runs: Path) -> None:
    """Rows that are in no delta are those that are the same in both checkpoints."""
    run = runs / "columns"
    before, after = (read_weights(run / f"checkpoints/step_{step}") for step in (0, 6))
    named: dict[str, set[int]] = {}
    columns = set()
    for path in _chain(run)[:2]:
        for changes in read_changes(path, read_delta(path)):
            named.setdefault(changes.table, set()).update(changes.rows.tolist())
            columns.add(changes.column)
            assert torch.equal(changes.keys, changes.rows)
    assert len(columns) > 1, "tables are cut by columns"
    assert len(named) == 2
    for table, rows in named.items():
        differs = (before[table] != after[table]).any(1).nonzero().flatten().tolist()
        assert set(differs) <= rows
        assert len(rows) < len(differs) + 0.1 * len(before[table]) + 5, "few rows changed by less than half precision"


@_params("any", "captured")
def test_tombstones_are_the_ids_that_lost_their_rows(run: Path) -> None:
    evicted = Counter[str]()
    known = _ids(run / "checkpoints/step_0")
    for path in _chain(run):
        updated, gone = dict[str, set[int]](), dict[str, set[int]]()
        for changes in read_changes(path, read_delta(path)):
            into = gone if changes.source == EVICT else updated
            into.setdefault(changes.table, set()).update(changes.keys.tolist())
            evicted[changes.source] += len(changes.keys)
        for table, ids in known.items():
            assert gone.get(table, set()) <= ids
            assert not gone.get(table, set()) & updated[table]
            known[table] = ids - gone.get(table, set()) | updated[table]
        if path.name == "delta_6":
            assert known == _ids(run / "checkpoints/step_6")
    assert evicted[EVICT] > 100


def _ids(checkpoint: Path) -> dict[str, set[int]]:
    weights, found = read_weights(checkpoint), {}
    for name in weights:
        if name.endswith(".weight") and name.count(".") > 2 and (ids := ids_of(name, weights)) is not None:
            found[name] = set(unmix(ids[ids != EMPTY]).tolist())
    assert len(found) == 2
    return found


@_params("int8")
def test_rows_in_bytes_differ_by_half_a_step_at_most(run: Path, tmp_path: Path) -> None:
    assert list(deltas_in(run / "deltas")) == [9, 12], "delta_keep"
    apply_deltas(run / "checkpoints/step_6", _chain(run), tmp_path / "applied")
    found, expected = read_weights(tmp_path / "applied"), read_weights(run / "checkpoints/step_12")
    differing = 0
    for path in _chain(run):
        assert str(pq.read_schema(path / "tables_rank0.parquet").field("embedding").type) == "list<element: uint8>"
    for changes in read_changes(path, read_delta(path)):
        ours, theirs = (weights[changes.table][changes.rows] for weights in (found, expected))
        steps = (theirs.amax(1) - theirs.amin(1)) / 255
        assert ((ours - theirs).abs() <= 0.501 * steps[:, None] + 1e-7).all()
        differing += int((ours != theirs).sum())
    assert differing > 100


@_params("resumed")
def test_a_resumed_runs_deltas_follow_its_checkpoint(run: Path, tmp_path: Path) -> None:
    assert list(deltas_in(run / "deltas")) == [2, 4, 6, 8, 10, 12, 14]
    apply_deltas(run / "checkpoints/step_0", _chain(run), tmp_path / "chain")
    _assert_same(tmp_path / "chain", run / "checkpoints/step_14")
    apply_deltas(run / "checkpoints/step_12", _chain(run, 12), tmp_path / "last")
    _assert_same(tmp_path / "last", run / "checkpoints/step_14")


def _refused(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    assert main(["delta", "apply", *map(str, argv)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_does_not_follow_is_refused_by_name(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = runs / "any", ("--output", tmp_path / "x")
    d3, d6, d9, d12 = _chain(run)
    step_0, step_6 = (run / f"checkpoints/step_{step}" for step in (0, 6))
    line = _refused(capsys, step_0, d3, d9, *output)
    assert f"{d9} follows step 6, but the weights are those of step 3; give the deltas from step 3 to 6" in line
    assert f"{d3} follows step 0, but the weights are those of step 6; leave it out" in _refused(
        capsys, step_6, d3, *output
    )
    assert f"{d6} follows step 3" in _refused(capsys, step_0, d6, d3, *output)
    for each in (tmp_path / "none", run / "deltas", step_6):
        assert f"{each} is not a delta; give a folder delta_<N>" in _refused(capsys, step_6, each, *output)
    assert f"{d9} is of another model: it has" in _refused(capsys, runs / "columns/checkpoints/step_6", d9, *output)
    other = tmp_path / "delta_9"
    shutil.copytree(d9, other)
    base = {"step": 6, "digest": "0" * 32, "same": []}
    write_manifest(other, replace(read_delta(d9), base=base), "manifest.json")
    assert f"{other} follows another save of step 6" in _refused(capsys, step_6, other, *output)
    assert "exists; name a new folder" in _refused(capsys, step_6, d9, "--output", tmp_path)
    assert not (tmp_path / "x").exists()
    assert d12.exists()


@pytest.mark.parametrize("file", ["manifest.json", "tables_rank1.parquet", "__0_0.distcp", ".metadata"])
def test_a_damaged_delta_is_refused_by_name(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    delta, base = tmp_path / "delta_9", runs / "any/checkpoints/step_6"
    shutil.copytree(runs / "any/deltas/delta_9", delta)
    content = (delta / file).read_bytes()
    size = len(content)
    for position in (size // 3, size // 2, size - 2):
        changed = bytearray(content)
        changed[position] ^= 4
        (delta / file).write_bytes(changed)
        assert str(delta) in _refused(capsys, base, delta, "--output", tmp_path / "x")
    (delta / file).write_bytes(content[:-1])
    assert str(delta / file) in _refused(capsys, base, delta, "--output", tmp_path / "x")
    (delta / file).unlink()
    assert str(delta / file) in _refused(capsys, base, delta, "--output", tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["delta_9"]


def test_sigterm_leaves_nothing_of_the_result(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(folder: Path, *_: Any) -> None:
        assert (folder / "__0_0.distcp").exists()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("dlrm_overlap.checkpoint.apply_deltas.write_manifest", end)
    delta, *_ = _chain(runs / "any", 6)
    with pytest.raises(SystemExit) as ended:
        main(["delta", "apply", str(runs / "any/checkpoints/step_6"), str(delta), "--output", str(tmp_path / "x")])
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_result_evaluates_as_the_trained_weights_and_is_not_resumed_from(runs: Path, tmp_path: Path) -> None:
    applied, run = tmp_path / "applied", runs / "any"
    apply_deltas(run / "checkpoints/step_0", _chain(run)[:2], applied)
    results = []
    for path in (applied, run / "checkpoints/step_6"):
        output = tmp_path / f"{path.name}.json"
        assert main(["eval", "--checkpoint", str(path), "--output", str(output)]) == 0
        results.append({key: value for key, value in json.loads(output.read_text()).items() if key != "checkpoint"})
    assert results[0] == results[1]
    with refuses("applied has no optimizer states, since `delta apply` wrote it; resume from a checkpoint that"):
        check_fits(applied, read_manifest(applied), {}, {})


def test_what_cannot_mark_its_updates_is_refused_before_training(
    world_of_one: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for backend in ("torchrec", "nccl"):
        with refuses(f"checkpoint.delta_every: backend {backend} updates rows by FBGEMM"):
            make_trainer(quickstart(tmp_path, "run", *SMALL.split(), "--embedding.backend", backend))
    with refuses("checkpoint.delta_every: 2 tables are in host memory behind a cache"):
        cached = ["--embedding.memory", "cached", "--train.pipeline", "graph"]
        make_trainer(quickstart(tmp_path, "run", *SMALL.split(), *cached))
    with refuses("checkpoint.delta_every: train.pipeline torchrec updates histories by FBGEMM"):
        make_trainer(quickstart(tmp_path, "run", *SMALL.split(), "--model.sequence.history", "1"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["train", "--config", "quickstart", "--log.dir", str(tmp_path), "--checkpoint.delta_every", "3"]) == 2
    assert "checkpoint.delta_every: deltas need pyarrow; pyarrow: not installed; pip" in capsys.readouterr().err
