"""Tables of any id load under another number of rows, and grow, and the losses stay as they were."""

import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dlrm_overlap.checkpoint import loading
from dlrm_overlap.checkpoint.checkpoint import extents_to_store
from dlrm_overlap.checkpoint.manifest import read_manifest
from dlrm_overlap.checkpoint.storage import read_pieces, read_unsharded
from dlrm_overlap.kernels.ids import fill_rows, map_ids
from dlrm_overlap.kernels.ids.id_map import EMPTY, halve, unsigned_remainder
from tests.conftest import PYTHON_PATH, ROOT, read_metrics, run_cli
from tests.distributed.captured import captures
from tests.distributed.workers import logged_messages, make_trainer, quickstart, ranks_here, run_ranks

ROUNDING = 2e-6
"""relative difference of losses whose sums are in another order"""
ROWS, HALF, LONG = 1024, 6, 20
_TABLES = ("--data.tables.multi_hot", "[3, 1]", "--data.tables.ids", "any", "--embedding.backend", "pgas")
_SMALL = (*_TABLES, "--data.eval_samples", "128", "--train.eval_every", "0", "--train.steps", str(2 * HALF))
_SAVES = ("--checkpoint.every", str(HALF), "--checkpoint.keep", "9")
_FEW = ("--data.tables.rows", "[60, 40]", "--train.global_batch_size", "256")
"""all ids are seen in the first steps"""
_MANY = ("--data.tables.rows", "[900, 500]", "--train.global_batch_size", "32")
"""new ids come in every step"""
_GROWS = ("--checkpoint.last", "true", "--embedding.id_tables.grow_at", "0.1")
_COUNTED = (
    "--data.tables.rows",
    "[900, 500]",
    "--train.global_batch_size",
    "128",
    "--embedding.id_tables.eviction",
    "lfu",
    "--embedding.id_tables.admit_after",
    "2",
)


def _fit(folder: Path, name: str, rows: int, *options: str, start: Path | None = None) -> Any:
    options = (*_SMALL, "--embedding.id_tables.rows", str(rows), *options)
    options += ("--checkpoint.resume", str(start)) if start else ()
    trainer = ranks_here(quickstart(folder, name, *options)).trainer(resumes=True)
    trainer.fit()
    trainer.close()
    return trainer


def _use_twins() -> None:
    """Log everything, and map ids by the kernels' numpy twins: the interpreter takes many times as long."""
    logging.getLogger("dlrm_overlap").setLevel(logging.INFO)
    for module in (map_ids, fill_rows):
        patch.object(module, "INTERPRETED", False).start()


def _checkpoint(folder: Path, name: str, step: int = HALF) -> Path:
    return folder / name / "checkpoints" / f"step_{step}"


def _load_more_and_less(folder: Path, ranks: int) -> None:
    for name, rows in (("twice", 2), ("four", 4)):
        more = _fit(folder, f"{name}_{ranks}", ROWS * rows, *_MANY, start=_checkpoint(folder, "many"))
        assert set(more.id_rows.values()) == {ROWS * rows}, "not those of the checkpoint"
    less = _fit(folder, f"half_{ranks}", ROWS // 2, *_FEW, start=_checkpoint(folder, "few"))
    assert set(less.id_rows.values()) == {ROWS // 2}
    # What is loaded, before a step is taken: also where ids are dropped, and with rows that are no multiple.
    for rows in (2 * ROWS, ROWS // 4, ROWS + 512):
        given = (*_SMALL, *_COUNTED, "--embedding.id_tables.rows", str(rows))
        trainer = make_trainer(quickstart(folder, f"stored_{rows}_{ranks}", *given))
        trainer.checkpointer.load(_checkpoint(folder, "counted", 2 * HALF), trainer.model, trainer.optimizer)
        trainer.checkpointer.make_shared_folder()
        trainer.checkpointer.write(HALF, extents_to_store(trainer.model, trainer.optimizer))
        trainer.close()


def _on_two(folder: Path) -> None:
    _use_twins()
    for name, given in (("many", _MANY), ("few", _FEW), ("counted", _COUNTED)):
        _fit(folder, name, ROWS, *given, *_SAVES)
    _load_more_and_less(folder, 2)
    messages = logged_messages()
    grown = _fit(folder, "grown", ROWS, *_MANY, *_GROWS)
    assert grown.id_rows["t_00"] == 4 * ROWS
    assert read_manifest(_checkpoint(folder, "grown", 2 * HALF)).about["id_table_rows"] == grown.id_rows
    told = [message for message in messages if message.startswith("growth: ")]
    assert len(told) == 2, told
    assert f"table t_00 {ROWS} rows, now {2 * ROWS}" in told[0]


def _read_in_reverse(path: Path, rows: Any, take: Any, tick: Any) -> None:
    """The order of a checkpoint's pieces depends on the ranks that wrote them."""
    pieces = list[Any]()
    read_pieces(path, rows, lambda *piece: pieces.append(piece), tick)
    for piece in reversed(pieces):
        take(*piece)


def _on_one(folder: Path) -> None:
    _use_twins()
    messages = logged_messages()
    with patch.object(loading, "read_pieces", _read_in_reverse):
        _load_more_and_less(folder, 1)
    assert any(f"ids lost their rows, since {ROWS} stored rows became {ROWS // 4} and" in each for each in messages)
    assert any(f"neither of {ROWS} stored rows and {ROWS + 512} rows is a multiple" in each for each in messages)


def _grow_in_other_ways(folder: Path) -> None:
    _use_twins()
    messages, longer = logged_messages(), ("--train.steps", str(LONG))
    _fit(folder, "plain", ROWS, *_MANY, *longer)
    at_most = ("--embedding.id_tables.max_rows", str(2 * ROWS))
    capped = _fit(folder, "capped", ROWS, *_MANY, *_GROWS, *at_most)
    assert capped.id_rows["t_00"] == 2 * ROWS
    assert any(f"are more than embedding.id_tables.max_rows {2 * ROWS}" in message for message in messages)
    later = (*longer, *at_most, "--embedding.id_tables.grow_at", "0.2", "--train.pipeline", "graph")
    for name in ("graph", "captured"):
        with captures() if name == "captured" else nullcontext() as taken:
            _fit(folder, name, ROWS, *_MANY, *_GROWS, *later)
        assert taken is None or (taken["captured"] == 4 and taken["replayed"] > 5), f"captured twice: {taken}"
    # A run that goes on from a checkpoint after the growth has its rows, although they are not in its configuration.
    most = ("--embedding.id_tables.max_rows", str(4 * ROWS))
    _fit(folder, "grown", ROWS, *_MANY, *_GROWS, *most)
    start = _checkpoint(folder, "grown", 2 * HALF)
    again = _fit(folder, "again", ROWS, *_MANY, *_GROWS, *most, *longer, start=start)
    assert again.id_rows["t_00"] == read_manifest(start).about["id_table_rows"]["t_00"] == 4 * ROWS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(_on_two, 2, folder)
    run_ranks(_on_one, 1, folder)
    return folder


def _losses(folder: Path, name: str, after: int = HALF) -> list[float]:
    return [loss for step, loss in read_metrics(folder / name, "train/loss").items() if step > after]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("name", "reference"), [("twice", "many"), ("four", "many"), ("half", "few")])
def test_a_run_goes_on_under_other_rows(folder: Path, name: str, reference: str, ranks: int) -> None:
    found = _losses(folder, f"{name}_{ranks}")
    assert found == pytest.approx(_losses(folder, reference), rel=ROUNDING)
    assert len(found) == HALF


@pytest.mark.parametrize("rows", [2 * ROWS, ROWS // 4, ROWS + 512])
def test_what_is_loaded_does_not_depend_on_the_ranks(folder: Path, rows: int) -> None:
    one, two = (read_unsharded(_checkpoint(folder, f"stored_{rows}_{ranks}")) for ranks in (1, 2))
    for part in ("model", "optimizer"):
        _assert_same(one[part], two[part])


def _assert_same(one: Any, two: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            _assert_same(one[key], two[key])
    else:
        assert torch.equal(one, two)


def _table(folder: Path, name: str, step: int = HALF, table: str = "t_00") -> dict[str, torch.Tensor]:
    state = read_unsharded(_checkpoint(folder, name, step))
    prefix = f"dlrm.embedding._managed_collision_collection._managed_collision_modules.{table}._"
    columns = {key.removeprefix(prefix): each.flatten() for key, each in state["model"].items() if prefix in key}
    weight = f"dlrm.embedding._embedding_module.embedding_bags.{table}.weight"
    (momentum,) = state["optimizer"]["state"][weight].values()
    return columns | {"weight": state["model"][weight], "momentum": momentum}


@pytest.mark.parametrize("rows", [2 * ROWS, ROWS // 4, ROWS + 512])
def test_everything_is_loaded_by_id(folder: Path, rows: int) -> None:
    """Rows, states, times and counts are those of the id; the ids of full buckets that stay were seen most often."""
    before, after = _table(folder, "counted", 2 * HALF), _table(folder, f"stored_{rows}_2")
    had = {int(id): slot for slot, id in enumerate(before["hash_zch_identities"]) if id != EMPTY}
    has = {int(id): slot for slot, id in enumerate(after["hash_zch_identities"]) if id != EMPTY}
    buckets = unsigned_remainder(torch.tensor(list(had)), rows // 128)
    assert len(has) == sum(min(127, int(number)) for number in buckets.bincount())
    assert (len(has) < len(had)) == (rows < ROWS)
    for id, slot in has.items():
        for name in ("used_at", "counts", "weight", "momentum"):
            assert torch.equal(after[name][slot], before[name][had[id]])
    initial = torch.arange(rows // 128)
    assert torch.equal(after["weight"][initial * 128 + 127], before["weight"][initial % (ROWS // 128) * 128 + 127])
    sketch, stored = after["sketch"].view(-1, 128), before["sketch"].view(-1, 128)
    folded = {2 * ROWS: stored.repeat(2, 1), ROWS // 4: stored.view(4, 2, 128).amax(0)}
    assert stored.any()
    expected = folded.get(rows, torch.zeros_like(sketch))
    halve(expected.view(-1), 128)
    assert torch.equal(sketch, expected)


def test_a_run_that_grows_has_the_losses_of_one_that_never_does(folder: Path) -> None:
    """Its initial rows are those of the rows that it began with, and nothing is evicted in either run."""
    assert _losses(folder, "grown", after=0) == pytest.approx(_losses(folder, "many", after=0), rel=ROUNDING)


def test_the_rows_in_use_are_logged_by_table(folder: Path) -> None:
    """A table's share is that of the rank where it is greatest; 1 row of 128 is for ids without a row."""
    for name in ("many", "counted"):
        together = 0.0
        for table in ("t_00", "t_01"):
            ids = _table(folder, name, 2 * HALF, table)["hash_zch_identities"]
            shares = (ids != EMPTY).view(2, -1).sum(1) / (ROWS // 2 * 127 / 128)
            logged = read_metrics(folder / name, f"train/ids_rows_used/{table}")[2 * HALF]
            assert logged == pytest.approx(shares.max().item(), rel=1e-5)
            assert 0 < logged < 1
            together += shares.mean().item() / 2
        assert read_metrics(folder / name, "train/ids_rows_used")[2 * HALF] == pytest.approx(together, rel=1e-5)


@pytest.mark.slow
def test_every_pipeline_grows(tmp_path: Path) -> None:
    """Runs grow up to a limit, in eager and captured steps, and go on with the grown rows."""
    run_ranks(_grow_in_other_ways, 2, tmp_path)
    expected = _losses(tmp_path, "plain", after=0)
    for name in ("capped", "graph", "captured"):
        found = _losses(tmp_path, name, after=0)
        assert found == pytest.approx(expected[: len(found)], rel=ROUNDING)
    assert _losses(tmp_path, "again", after=2 * HALF) == pytest.approx(expected[2 * HALF :], rel=ROUNDING)


@pytest.mark.slow
def test_a_run_that_is_killed_after_it_has_grown_resumes(tmp_path: Path) -> None:
    """It has the losses of a run that was not killed, and both are evaluated with the grown rows."""
    keys = ("train", "--config", "quickstart", "--data.tables.ids", "any", "--embedding.backend", "pgas")
    keys += ("--embedding.id_tables.rows", "2048", "--embedding.id_tables.grow_at", "0.3", "--log.dir", str(tmp_path))
    keys += ("--train.global_batch_size", "512", "--train.steps", "60", "--train.eval_every", "0", "--log.every", "1")
    keys += ("--checkpoint.every", "10", "--nproc", "2")
    assert (whole := run_cli(*keys, "--log.name", "whole")).returncode == 0, whole.stderr
    command = [sys.executable, "-m", "dlrm_overlap", *keys, "--log.name", "killed"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as killed:
        assert killed.stderr is not None
        grown = next(line for line in killed.stderr if "growth: table t_00" in line)
        next(line for line in killed.stderr if "/step_20," in line)
        os.killpg(killed.pid, signal.SIGKILL)
    assert "2048 rows, now 4096" in grown
    again = run_cli(*keys, "--log.name", "killed")
    assert again.returncode == 0, again.stderr
    assert "resume: " in again.stderr
    losses, expected = (read_metrics(tmp_path / name, "train/loss") for name in ("killed", "whole"))
    assert losses == pytest.approx(expected, rel=1e-4)
    found = run_cli("eval", "--checkpoint", str(tmp_path / "killed"), "--nproc", "1")
    assert found.returncode == 0, found.stderr
    assert "ids lost their rows" not in found.stderr
    (auroc,) = {*re.findall(r"held out AUROC (\S+),", again.stderr), *re.findall(r"AUROC (\S+),", found.stdout)}
    assert float(auroc) > 0.7
