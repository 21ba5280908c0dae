"""A delta is complete or not there, and none has weights that are not finite."""

from pathlib import Path

import pytest
import torch

from dlrm_overlap.checkpoint.delta_files import deltas_in, read_delta
from dlrm_overlap.checkpoint.saving import NotFiniteError
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
