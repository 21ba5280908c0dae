"""`bench update` rehearsed on a CPU: our kernels are interpreted, without streams."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.bench.figures import update
from dlrm_overlap.bench.figures.update import Case, Contenders, Shape, check, make_batch, make_tables
from dlrm_overlap.embedding.fused_tables import FusedTables
from tests.conftest import refuses
from tests.distributed.interpreted import updating, without_streams
from tests.kernels.emulation import interpreted

CPU, SHAPE = torch.device("cpu"), Shape(tables=2, rows=30, samples=4, mean_ids=2)
pytestmark = interpreted


@pytest.fixture(autouse=True)
def on_cpu(world_of_one: dist.ProcessGroup) -> Iterator[None]:
    def make(*given: Any) -> FusedTables:
        return updating(make_tables(*given))

    with patch.object(update, "make_tables", make):
        make(Case("unpooled", "zipf", "sgd", 4), SHAPE, CPU)  # checks FBGEMM's operators, before one is replaced
        with without_streams():
            yield


@pytest.mark.parametrize(
    "case",
    [
        Case("weighted", "zipf", "adagrad", 8),
        Case("unpooled", "uniform", "rowwise_adagrad", 8),
        pytest.param(Case("weighted", "uniform", "sgd", 16), marks=pytest.mark.slow),
        pytest.param(Case("unpooled", "zipf", "adagrad", 4), marks=pytest.mark.slow),
    ],
)
def test_a_case_has_times_once_its_rows_agree(case: Case) -> None:
    row, fault = update.measure(case, SHAPE, CPU, hbm_gb_per_s=100.0, repetitions=1)
    assert fault is None
    assert row["max_difference"] <= row["tolerance"]
    assert set(update._SHOWN) <= row.keys()
    assert row["touched_rows"] <= row["ids"] <= SHAPE.tables * SHAPE.samples * 2 * SHAPE.mean_ids
    each = {"sgd": 0, "adagrad": 4 * case.dim, "rowwise_adagrad": 4}[case.optimizer]
    least = row["touched_rows"] * 2 * (4 * case.dim + each)
    assert least < row["floor_bytes"] < least + row["ids"] * (4 * case.dim + 20)
    assert row["floor_ms"] == pytest.approx(row["floor_bytes"] / 1e8)
    assert row["speedup"] == pytest.approx(row["fbgemm_ms"] / row["whole_ms"])
    assert row["beside_ms"] == pytest.approx(row["step_ms"] - row["forward_ms"])


@pytest.mark.parametrize(("error", "agrees"), [(0.0, True), (0.01, False), (float("nan"), False)])
def test_a_single_wrong_state_is_found_and_rows_are_restored(error: float, agrees: bool) -> None:
    case = Case("weighted", "uniform", "adagrad", 4)
    batch, tables = make_batch(case, SHAPE, CPU), update.make_tables(case, SHAPE, CPU)
    contenders, step = Contenders(tables, batch), Contenders.step
    row = int(batch.ids["t1"].values()[-1])

    def wrong(self: Contenders) -> None:
        step(self)
        tables.split_optimizer_states()[1][0][row, -1] += error

    before = [rows.clone() for rows in tables.split_embedding_weights()]
    with patch.object(Contenders, "step", wrong):
        assert check(tables, batch, contenders, case).agrees == agrees
    assert all(torch.equal(rows, was) for rows, was in zip(tables.split_embedding_weights(), before, strict=True))


def test_it_takes_one_rank() -> None:
    about: Any = SimpleNamespace(device=torch.device("cuda"), values=None, world=SimpleNamespace(world_size=2))
    with refuses("^bench update: 2 ranks, but nothing is exchanged; add --nproc 1$"):
        update.run("update", about)
