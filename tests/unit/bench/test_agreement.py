import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dlrm_overlap import cli
from dlrm_overlap.bench.figures import stage
from dlrm_overlap.bench.harness.agreement import TOLERANCE, check_outputs
from dlrm_overlap.bench.harness.contenders import Baseline
from dlrm_overlap.bench.harness.workload import Ids, Workload
from dlrm_overlap.config import Config
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from tests.distributed.workers import ranks_here
from tests.unit.bench.conftest import values_of


class Wrong(Baseline):
    """The baseline with an error in one element of one batch."""

    def __init__(self, workload: Workload, error: float) -> None:
        super().__init__(workload)
        self.name, self.error = "wrong", error

    def step(self, batch: Ids, *_: object) -> torch.Tensor:
        pooled = super().step(batch)
        if batch is self.workload.batches[-1]:
            pooled[-1, -1] += self.error
        return pooled


@pytest.mark.parametrize("error", [0.0, 1e-8, 0.1, math.nan, math.inf])
def test_a_single_wrong_element_is_found(workload: Workload, error: float) -> None:
    right, wrong = check_outputs([Baseline(workload), Wrong(workload, error)], workload)
    assert (right.agrees, right.max_difference) == (True, 0)
    assert 0 < right.tolerance < TOLERANCE[torch.float32]  # rows are within +-1000**-0.5, bags hold up to 4
    assert wrong.agrees == (error < right.tolerance)
    assert (wrong.max_difference == 0) == (error == 0)


def test_no_time_is_reported_where_outputs_disagree(
    workload: Workload, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(stage, "make_workload", lambda *_, **__: workload)
    monkeypatch.setattr(stage, "make_contenders", lambda *_: [Baseline(workload), Wrong(workload, 0.1)])
    output = tmp_path / "rows.csv"
    values = values_of("stage", "--iterations", "1", "--output", str(output))
    assert stage.run("stage", replace(ranks_here(config), values=values)) == DISAGREEMENT
    out, err = capsys.readouterr()
    assert "wrong: outputs differ from the baseline's by 1.0e-01" in err
    assert out == ""
    assert not output.exists()


@pytest.mark.parametrize(("rank", "code"), [(0, DISAGREEMENT), (1, 0)])
def test_other_ranks_succeed_so_that_no_launcher_kills_rank_0(
    rank: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, values = SimpleNamespace(rank=rank, world_size=2), SimpleNamespace(output="no_such.csv")
    ranks = SimpleNamespace(device=torch.device("cpu"), world=world, values=values)
    monkeypatch.setattr(cli, "run_on_ranks", lambda words, meaning, argv, work, *_: work(ranks))
    monkeypatch.setattr(stage, "run", lambda *_: DISAGREEMENT)
    assert cli.main(["bench", "stage"]) == code
