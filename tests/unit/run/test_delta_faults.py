"""A delta is complete or not there, and none has weights that are not finite."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_overlap.checkpoint.apply_deltas import apply_deltas
from dlrm_overlap.checkpoint.delta_files import deltas_in, read_delta, write_changes
from dlrm_overlap.checkpoint.manifest import Manifest, read_manifest
from dlrm_overlap.checkpoint.saving import NotFiniteError
from dlrm_overlap.checkpoint.storage import read_weights
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.train.trainer import Trainer
from tests.conftest import file_limit, refuses
from tests.distributed.workers import make_trainer, quickstart
from tests.unit.run.test_trainer import SMALL

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
EVERY = ["--embedding.backend", "pgas", "--checkpoint.delta_every", "1", "--checkpoint.last", "true"]
WIDE = ["--model.top_mlp", "[256, 256, 1]"]  # its parameters need more room than the ranks' shared memory


def _trainer(folder: Path, *options: str) -> Trainer:
    return make_trainer(quickstart(folder, "run", *SMALL, *EVERY, *options))


def test_one_that_finds_no_room_ends_the_run_by_name_and_the_next_run_writes_it(tmp_path: Path) -> None:
    _trainer(tmp_path, *WIDE, "--train.steps", "2").fit()
    deltas = tmp_path / "run/deltas"
    with file_limit(200_000), refuses(r"delta_3 cannot be written \(File too large"):
        _trainer(tmp_path, *WIDE, "--train.steps", "4").fit()
    assert sorted(path.name for path in deltas.iterdir()) == ["delta_1", "delta_2"]
    (deltas / ".partial_delta_3").mkdir()  # as a killed run leaves it
    _trainer(tmp_path, *WIDE, "--train.steps", "4").fit()
    assert sorted(path.name for path in deltas.iterdir()) == ["delta_1", "delta_2", "delta_3", "delta_4"]
    assert [read_delta(path).base["step"] for path in deltas_in(deltas).values()] == [0, 1, 2, 3]
    assert _followed(deltas / "delta_3") == ["step_2", "delta_2"], "the run that resumed follows both"


def _followed(delta: Path) -> list[str]:
    """Return the checkpoint and the delta of the run that `delta` follows."""
    run, base = delta.parents[1], read_delta(delta).base
    followed, manifests = {base["digest"], *base["same"]}, dict[str, Manifest]()
    with suppress(InputError):
        manifests[f"step_{base['step']}"] = read_manifest(run / f"checkpoints/step_{base['step']}")
        manifests[f"delta_{base['step']}"] = read_delta(run / f"deltas/delta_{base['step']}")
    return [name for name, manifest in manifests.items() if manifest.digest in followed]


@pytest.mark.parametrize(
    ("branch", "saved_first"),
    [
        ("--checkpoint.every 0 --checkpoint.last false", True),  # ends before it saves
        ("--checkpoint.delta_every 0 --checkpoint.every 4", False),  # overtakes the deltas of the first run
    ],
)
def test_a_delta_of_another_branch_is_not_taken_for_the_checkpoint_of_its_step(
    tmp_path: Path, branch: str, saved_first: bool
) -> None:
    run, saves = tmp_path / "run", ["--checkpoint.every", "2", "--checkpoint.keep", "9"]
    _trainer(tmp_path, *saves, "--train.steps", "4").fit()
    first = (run / "checkpoints/step_4/checkpoint.json").read_bytes()
    back = ["--checkpoint.resume", str(run / "checkpoints/step_2"), "--embedding.lr", "1.0", "--train.lr", "0.2"]
    _trainer(tmp_path, *saves, *back, *branch.split(), "--train.steps", "4").fit()
    assert ((run / "checkpoints/step_4/checkpoint.json").read_bytes() == first) == saved_first
    _trainer(tmp_path, *saves, "--train.steps", "6").fit()
    assert 4 not in deltas_in(run / "deltas")
    assert _followed(run / "deltas/delta_5") == ["step_4"]
    apply_deltas(run / "checkpoints/step_4", [run / f"deltas/delta_{step}" for step in (5, 6)], tmp_path / "applied")
    found, expected = read_weights(tmp_path / "applied"), read_weights(run / "checkpoints/step_6")
    assert {name for name in expected if not torch.equal(found[name], expected[name])} == set()


def test_a_run_that_resumes_before_its_first_save_keeps_its_first_weights(tmp_path: Path) -> None:
    """A server that has loaded them can take the deltas of the run that resumed."""
    run, saves = tmp_path / "run", ["--checkpoint.last", "false"]
    _trainer(tmp_path, *saves, "--train.steps", "2").fit()
    before = (run / "checkpoints/step_0/checkpoint.json").read_bytes()
    trainer = _trainer(tmp_path, *saves, "--train.steps", "3")
    trainer.fit()
    assert (trainer.start, list(deltas_in(run / "deltas"))) == (0, [1, 2, 3])
    assert (run / "checkpoints/step_0/checkpoint.json").read_bytes() == before
    assert _followed(run / "deltas/delta_1") == ["step_0"]


def test_one_is_written_though_its_checkpoint_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: Path, changes: Any, step: int, *others: Any) -> Any:
        if step == 4:
            deadline = time.monotonic() + 60
            while (tmp_path / "run/checkpoints/step_2").exists():
                assert time.monotonic() < deadline, "the save of step 4 removes it"
                time.sleep(0.01)
        return write_changes(file, changes, step, *others)

    monkeypatch.setattr("dlrm_overlap.checkpoint.deltas.write_changes", write)
    saves = ["--checkpoint.asynchronous", "true", "--checkpoint.every", "2", "--checkpoint.keep", "1"]
    _trainer(tmp_path, *saves, "--checkpoint.delta_every", "2", "--train.steps", "6").fit()
    found = [read_delta(path).base for path in deltas_in(tmp_path / "run/deltas").values()]
    assert [(base["step"], len(base["same"])) for base in found] == [(0, 0), (2, 1), (4, 1)]


def test_a_weight_that_is_not_finite_is_in_no_delta(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    (exchange,) = exchanges(trainer.model)
    _, rows = next(iter(exchange.tables.shards()))
    deltas = trainer.deltas
    assert deltas is not None
    write = deltas.write

    def spoilt(step: int) -> None:
        if step == 2:
            assert exchange.tables.marks is not None
            with torch.no_grad():
                rows[exchange.tables.marks.marked((0, 0))[0]] = torch.nan
        write(step)

    deltas.write = spoilt  # type: ignore[method-assign]
    with pytest.raises(NotFiniteError, match="step 2: a weight is nan or infinite"):
        trainer.fit()
    assert list(deltas_in(tmp_path / "run/deltas")) == [1]


def test_without_deltas_no_update_is_marked(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "--checkpoint.delta_every", "0")
    assert trainer.deltas is None
    assert [exchange.tables.marks for exchange in exchanges(trainer.model)] == [None]
