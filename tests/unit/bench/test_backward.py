import math

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.bench.figures import backward
from dlrm_overlap.bench.figures.backward import GradientBatch, Update, make_batches
from dlrm_overlap.bench.harness.agreement import check_rows, rows_of
from dlrm_overlap.bench.harness.workload import Workload, make_workload, read_ids
from dlrm_overlap.config import Config
from dlrm_overlap.embedding.options import ExchangeOptions
from tests.agreement import assert_same

CPU = torch.device("cpu")
BASELINE = ExchangeOptions("nccl", backward="collective")


class Off(Update):
    """The baseline, but each step adds `error` to one element of the rows or of their state."""

    def __init__(self, workload: Workload, batches: list[GradientBatch], what: str, error: float) -> None:
        super().__init__("off", workload, BASELINE, batches, exposed=True)
        self.error, self.tensor = error, rows_of(workload)[what == "state"][-1]

    def step(self, batch: GradientBatch) -> None:
        super().step(batch)
        self.tensor.view(-1)[-1] += self.error


@pytest.fixture
def workload(config: Config, world_of_one: dist.ProcessGroup, optimizer: str) -> Workload:
    return make_workload(config, read_ids(config, world_of_one), world_of_one, CPU, 1, optimizer=optimizer)


@pytest.fixture
def batches(workload: Workload) -> list[GradientBatch]:
    return make_batches(workload)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad"])
def test_all_contenders_agree_and_leave_the_rows_as_they_were(
    config: Config, workload: Workload, optimizer: str, batches: list[GradientBatch]
) -> None:
    contenders = backward.make_contenders(config, workload, batches)
    before = [rows.clone() for rows in rows_of(workload)[0]]
    agreements = check_rows(contenders, workload, batches, optimizer)
    assert [contender.name for contender in contenders] == ["baseline", "push", "push_exposed"]
    assert all(found.agrees for found in agreements)
    assert agreements[0].max_difference == 0
    for rows, expected in zip(rows_of(workload)[0], before, strict=True):
        assert_same(rows, expected, "rows")
    contenders[0].step(batches[0])
    assert not all(torch.equal(rows, was) for rows, was in zip(rows_of(workload)[0], before, strict=True))
    for contender in contenders:
        contender.close()


@pytest.mark.parametrize("error", [0.0, 1e-6, 0.01, math.nan])
@pytest.mark.parametrize(("optimizer", "what"), [("sgd", "rows"), ("rowwise_adagrad", "state"), ("adagrad", "state")])
def test_a_single_wrong_element_is_found(
    workload: Workload, batches: list[GradientBatch], optimizer: str, what: str, error: float
) -> None:
    baseline = Update("baseline", workload, BASELINE, batches, exposed=True)
    contenders = [baseline, Off(workload, batches, what, error)]
    right, wrong = check_rows(contenders, workload, batches, optimizer)
    assert right.agrees
    assert wrong.agrees == (error < right.tolerance)
    assert (wrong.max_difference == 0) == (error == 0)
