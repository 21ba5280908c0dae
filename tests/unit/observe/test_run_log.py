"""What ranks log: the warnings on standard error, and the wait for input."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.launching.launcher import World
from dlrm_overlap.observe.run_log import RunLog, log, start_logging
from tests.conftest import configuration


@pytest.fixture
def _unchanged() -> Iterator[None]:
    before = log.handlers, log.level, log.propagate
    with warnings.catch_warnings():
        yield
    log.handlers, log.propagate = before[0], before[2]
    log.setLevel(before[1])


@pytest.mark.usefixtures("_unchanged")
@pytest.mark.parametrize(("rank", "shown"), [(0, 2), (1, 1)])
def test_rank_0_alone_shows_the_warnings_of_libraries(rank: int, shown: int, recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    start_logging(rank)
    for module in ("torchrec.distributed.types", "dlrm_overlap.cli"):
        warnings.warn_explicit("of no interest", UserWarning, "file.py", 1, module=module)
    assert len(recwarn) == shown
    assert log.isEnabledFor(logging.INFO) == (rank == 0)


def test_the_input_wait_is_of_the_rank_that_waited_longest_since_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank waits 5 s before the first line, the other one 3 s before the second."""
    others, lines = iter([0.0, 3.0]), list[dict[str, float]]()

    def with_the_other_rank(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.MAX:
            tensor[0] = max(tensor[0].item(), next(others))

    monkeypatch.setattr(dist, "all_reduce", with_the_other_rank)
    monkeypatch.setattr(RunLog, "_write", lambda self, step, values: lines.append(values))
    world, config = World(1, 1, 2, 2, "127.0.0.1", 29500, "nproc"), configuration("--config", "quickstart")
    run_log = RunLog(config, world, torch.device("cpu"), tmp_path, 0, 20, Mock(), "torchrec")
    for step, waited_s in ((10, 5.0), (20, 5.0)):
        run_log.training(step, torch.zeros(()), [1000.0] * 10, waited_s, 1.0, {})
    assert [line["speed/input_wait_ms"] for line in lines] == [500.0, 300.0]
    assert run_log.waited_s == 8.0


def test_the_loss_of_a_line_is_the_mean_over_its_steps_and_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of a run, or one before an evaluation, may have fewer steps than log.every."""
    lines = list[dict[str, float]]()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op=None: tensor.mul_(2 if op is None else 1))
    monkeypatch.setattr(RunLog, "_write", lambda self, step, values: lines.append(values))
    config = configuration("--config", "quickstart", "--log.every", "10")
    world = World(1, 1, 2, 2, "127.0.0.1", 29500, "nproc")
    run_log = RunLog(config, world, torch.device("cpu"), tmp_path, 0, 13, Mock(), "torchrec")
    for step, steps, loss_sum in ((10, 10, 5.0), (13, 3, 0.75)):
        run_log.training(step, torch.tensor(loss_sum), [1000.0] * steps, 0.0, 1.0, {})
    assert [line["train/loss"] for line in lines] == [0.5, 0.25]
    assert run_log.loss == 0.25, "of the summary"
